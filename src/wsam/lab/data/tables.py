"""Tables as columns of numbers or texts, read from CSV and Parquet files."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wsam.lab.named_files import table_files
from wsam.lab.values import join_names

Columns = dict[str, list[Any]]
_MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
_MOSTLY = 0.9
"""A column of texts of which at least this share are numbers is one of numbers with a mistake."""


@dataclass(frozen=True)
class Table:
    """Columns of numbers or of texts, of the same length.

    Args:
        name: Name of the table, for messages.
        numbers: Columns of finite numbers.
        texts: Columns of texts.
        test_rows: How many of the last rows are the test set; None to choose a fifth at random.
    """

    name: str
    numbers: Mapping[str, list[float]]
    texts: Mapping[str, list[str]]
    test_rows: int | None = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        columns: Mapping[str, Sequence[Any]] = {**self.numbers, **self.texts}
        return len(next(iter(columns.values())))


def read_table(path: Path, name: str) -> Table:
    """Read a file, or a folder that contains ``train`` and ``test`` files.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, or a value is missing.
    """
    train, *test = table_files(path)
    columns = read_columns(train)
    if not test:
        return make_table(columns, name)
    others = read_columns(test[0])
    if set(others) != set(columns):
        different = sorted(set(others) ^ set(columns))
        raise ValueError(f"{train} and {test[0]} have different columns: {join_names(different)}")
    test_rows = len(next(iter(others.values())))
    return make_table({c: columns[c] + others[c] for c in columns}, name, test_rows)


def read_columns(path: Path) -> Columns:
    """Read the columns of a file; one of a CSV file is numbers if all its values are, else texts."""
    if path.suffix.lower() == ".parquet":
        return _read_parquet(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            lines = [(reader.line_num, row) for row in reader if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a CSV file in UTF-8: {error}") from error
    if len(lines) < 2:
        raise ValueError(f"{path} needs a line of column names and at least one row")
    (_, header), *body = lines
    if len(header) == 1 and (separator := next((s for s in ";\t|" if s in header[0]), None)):
        raise ValueError(
            f"the columns of {path} are separated by {separator!r}: separate them by commas, with "
            "decimal points in numbers"
        )
    if len(set(header)) < len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise ValueError(f"{path} has two columns {twice!r}")
    for number, row in body:
        if len(row) != len(header):
            raise ValueError(
                f"line {number} of {path} has {len(row)} values, expected {len(header)}"
            )
    numbers, rows = zip(*body, strict=True)
    values = zip(*rows, strict=True)
    return {
        name: _parse(f"column {name!r} of {path}", column, numbers)
        for name, column in zip(header, values, strict=True)
    }


def _read_parquet(path: Path) -> Columns:
    from pyarrow import parquet

    columns: Columns = parquet.read_table(path).to_pydict()
    return columns


def _parse(column: str, values: Sequence[str], lines: Sequence[int]) -> list[Any]:
    """Convert texts to numbers if all of them are.

    Args:
        column: Names the column, for messages.
        values: Its texts.
        lines: Their lines in the file.
    """
    texts = [value.strip() for value in values]
    missing = [text.lower() in _MISSING for text in texts]
    found = [None if gap else _number(text) for text, gap in zip(texts, missing, strict=True)]
    numbers = sum(value is not None for value in found)
    others = len(texts) - numbers - sum(missing)
    kept: list[Any] = list(found)
    if others or not numbers:
        if numbers >= _MOSTLY * len(texts):
            row = next(n for n, value in enumerate(found) if value is None and not missing[n])
            raise ValueError(
                f"{column} has the text {texts[row]!r} in line {lines[row]}, the others are numbers; "
                "correct it"
            )
        kept = [text or None for text in texts]
    check_values(column, kept, [f"line {line}" for line in lines])
    return kept


def check_values(column: str, values: Sequence[Any], places: Sequence[str]) -> None:
    """Raise an error if a value is missing or not finite.

    Args:
        column: Names the column, for messages.
        values: Its values.
        places: Where each of them is.
    """
    for value, place in zip(values, places, strict=True):
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            what = "no value" if value is None else f"the value {value}"
            raise ValueError(f"{column} has {what} in {place}: fill in or remove such rows")


def _number(text: str) -> float | int | None:
    if "_" in text:  # Python reads 1_2 as 12
        return None
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return None


def make_table(columns: Columns, name: str, test_rows: int | None = None) -> Table:
    """Return columns as a table of numbers and texts.

    Raises:
        ValueError: A value is missing, not finite, or neither a number nor a text.
    """
    numbers: dict[str, list[float]] = {}
    texts: dict[str, list[str]] = {}
    for column, values in columns.items():
        places = [f"row {row}" for row in range(1, len(values) + 1)]
        check_values(f"column {column!r} of {name}", values, places)
        kinds = {type(value) for value in values}
        if kinds == {str}:
            texts[column] = list(values)
        elif kinds <= {int, float, bool}:
            numbers[column] = list(values)
        else:
            types = join_names(sorted(kind.__name__ for kind in kinds))
            raise ValueError(
                f"column {column!r} of {name} has values of type {types}: numbers or texts are "
                "needed; convert or remove it, or use a data function of your own"
            )
    return Table(name, numbers, texts, test_rows)
