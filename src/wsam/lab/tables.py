"""Tables with a target column: CSV and Parquet files.

Numbers are standardised by the mean and standard deviation of the training rows. Texts are
categories: they are numbered from 1, and 0 is a category that the training rows do not have. An
input of the model is one vector, first the numbers, then the categories.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wsam.lab.data_feed import TensorFeed, add_label_noise, fixed_order, hold_out
from wsam.lab.metrics import ERROR, MSE, cross_entropy, squared_error
from wsam.lab.models import Task
from wsam.lab.named_files import table_files
from wsam.lab.run import Run
from wsam.lab.settings import TEST, TRAIN
from wsam.lab.values import join_names

Columns = dict[str, list[Any]]
_MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
_MOSTLY = 0.9
"""A column of texts of which at least this share are numbers is one of numbers with a mistake."""
_MAX_CLASSES = 20
"""Whole numbers with more different values are a quantity to predict, not classes."""
_MAX_CATEGORIES = 0.5
"""More different texts per row are not categories, but texts or names."""
_TEST_SHARE = 5  # one row of five


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


# Reading files ----------------------------------------------------------------------------------


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
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Parquet files need pyarrow: pip install 'wsam[data]'", name=error.name
        ) from error
    try:
        columns: Columns = parquet.read_table(path).to_pydict()
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from error
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
    if not columns or not next(iter(columns.values())):
        raise ValueError(f"{name} is empty")
    for column, values in columns.items():
        places = [f"row {row}" for row in range(1, len(values) + 1)]
        check_values(f"column {column!r} of {name}", values, places)
        kinds = {str if isinstance(value, str) else type(value) for value in values}
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


# The data of a run ------------------------------------------------------------------------------


def table_feed(table: Table, run: Run, device: torch.device) -> TensorFeed:
    """Return the rows of a table as batches.

    Raises:
        ValueError: The target column is missing, or is the only one.
    """
    target = run.target
    names = [*table.numbers, *table.texts]
    if target is None or target not in names:
        given = "no target column is given" if target is None else f"it has no column {target!r}"
        raise ValueError(f"{table.name}: {given}; give --target, one of {join_names(names)}")
    if len(names) == 1:
        raise ValueError(f"{table.name} has no column besides the target {target!r}")
    parts = split_rows(run, table.rows, table.test_rows)
    inputs, categories = _encode(table, target, parts[TRAIN])
    values: Sequence[Any] = table.numbers.get(target, table.texts.get(target, ()))
    classify = run.task == "classification" or (run.task is None and are_classes(values))
    if classify:
        classes = sorted(set(values))
        if target in table.texts:
            _check_categories(f"the target {target!r} of {table.name}", "classes", values)
        index = {value: number for number, value in enumerate(classes)}
        targets = torch.tensor([index[value] for value in values])
        outputs, units = len(classes), None
    else:
        if target in table.texts:
            raise ValueError(f"the target {target!r} of {table.name} is a text: use classification")
        targets, mean, std = _standardise(values, parts[TRAIN])
        outputs, units = 1, (mean, std)
    splits = {split: (inputs[rows], targets[rows]) for split, rows in parts.items()}
    if run.noise and not classify:
        raise ValueError(f"--noise needs classes, the target {target!r} is a number")
    rows, labels = splits[TRAIN]
    if classify:
        splits[TRAIN] = (rows, add_label_noise(labels, outputs, run.noise, run.noise_seed))
    return TensorFeed(
        splits,
        Task((inputs.shape[1],), outputs, table.name, categories=categories),
        cross_entropy if classify else squared_error,
        ERROR if classify else MSE,
        run,
        device,
        units,
    )


def are_classes(values: Sequence[Any]) -> bool:
    """Return whether target values are classes: texts, booleans, or few whole numbers."""
    if isinstance(values[0], str | bool):
        return True
    return len(set(values)) <= _MAX_CLASSES and all(value == int(value) for value in values)


def split_rows(run: Run, rows: int, test_rows: int | None) -> dict[str, Tensor]:
    """Return the rows of each split.

    Args:
        run: Has the limits and the validation split.
        rows: Number of rows.
        test_rows: How many of the last rows are the test set; None to choose a fifth at random.

    Raises:
        ValueError: A split is empty.
    """
    order = torch.arange(rows)
    if test_rows is None:
        order = fixed_order(rows)
        test_rows = rows // _TEST_SHARE
    if not 0 < test_rows < rows:
        raise ValueError(f"{run.data} has {rows} rows, too few for a training and a test set")
    train, test = order[:-test_rows][: run.train_limit], order[-test_rows:][: run.test_limit]
    parts = hold_out(run, len(train))
    return {**{split: train[index] for split, index in parts.items()}, TEST: test}


def _encode(table: Table, target: str, train: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the inputs of all rows, and the number of categories of each column of texts."""
    parts = [
        _standardise(values, train)[0] for name, values in table.numbers.items() if name != target
    ]
    sizes = []
    for name, texts in table.texts.items():
        if name == target:
            continue
        _check_categories(f"column {name!r} of {table.name}", "categories", texts)
        known = sorted({texts[row] for row in train.tolist()})
        index = {text: number for number, text in enumerate(known, 1)}
        parts.append(torch.tensor([float(index.get(text, 0)) for text in texts]))
        sizes.append(len(known) + 1)
    return torch.stack(parts, 1), tuple(sizes)


def _check_categories(what: str, kind: str, texts: Sequence[str]) -> None:
    """Raise an error if texts are not categories, because most of them occur only once.

    Args:
        what: Names the column, for messages.
        kind: What the texts would be used as.
        texts: All texts of the column.
    """
    different = len(set(texts))
    if different > max(_MAX_CLASSES, _MAX_CATEGORIES * len(texts)):
        raise ValueError(
            f"{what} has {different} different texts in {len(texts)} rows, too many for {kind}: "
            "remove or group them, or use a data function of your own"
        )


def _standardise(values: Sequence[float], train: Tensor) -> tuple[Tensor, float, float]:
    """Return values with the mean and deviation of the training rows removed, and both of them."""
    column = torch.tensor(values, dtype=torch.float64)
    mean, std = float(column[train].mean()), float(column[train].std(correction=0))
    std = std or 1.0  # a constant column
    return ((column - mean) / std).float(), mean, std
