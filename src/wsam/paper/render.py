"""A table with our results next to the paper's: as Markdown, CSV, JSON, or on a terminal."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wsam.paper.comparison import Entry
from wsam.paper.table import Table

if TYPE_CHECKING:
    from rich.table import Table as RichTable

DIFFERS, CANNOT_JUDGE = "†", "‡"
_MARKS = {
    DIFFERS: "Ours differs from the paper's by more than every known deviation, which with few seeds "
    "is often chance.",
    CANNOT_JUDGE: "n = 1, and the paper prints no deviation: the difference cannot be judged.",
}
_NO_BREAK_SPACE = "\u00a0"


@dataclass(frozen=True)
class Footnote:
    """A line below a table, and its sub-items if it is a list."""

    text: str
    items: tuple[str, ...] = ()


def footnotes(table: Table, entries: Sequence[Entry]) -> list[Footnote]:
    """Return the lines below a table: differences from the paper, then the table's notes."""
    lines = _differences(entries) if table.comparable else []
    lines += map(Footnote, table.notes)
    lines += _choices(entries)
    if table.conclude is not None:
        lines += [Footnote(sentence) for sentence in table.conclude(entries)]
    visible = visible_columns(table, entries)
    missing = [column for column in table.columns if column not in visible]
    if missing:
        lines.append(
            Footnote(f"Columns without any figure, ours or the paper's: {', '.join(missing)}.")
        )
    return lines


def _choices(entries: Sequence[Entry]) -> list[Footnote]:
    """List the hyperparameters that were chosen on a validation split, for cells that were run."""
    chosen: dict[str, list[tuple[str, str]]] = {}
    for entry in entries:
        cell = entry.cell
        if entry.ours.n and cell.has_choice and not cell.measure.is_cost:
            text = cell.chosen or f"{cell.candidates[0].text} (not searched)"
            chosen.setdefault(", ".join(cell.row), []).append((cell.column, text))
    several = len({column for values in chosen.values() for column, _ in values}) > 1
    items = []
    for row, values in chosen.items():
        texts = [f"{column}: {text}" if several else text for column, text in values]
        items.append(f"{row}: {'; '.join(texts)}")
    text = "Chosen on a validation split of the training data:"
    return [Footnote(text, tuple(items))] if items else []


def _differences(entries: Sequence[Entry]) -> list[Footnote]:
    """Explain the marks that the table shows."""
    everything = [*entries, *(entry.best for entry in entries if entry.best is not None)]
    shown = {_mark(entry).strip() for entry in everything}
    return [Footnote(f"{mark} {text}") for mark, text in _MARKS.items() if mark in shown]


def _mark(entry: Entry) -> str:
    """Return the mark after our result: it differs from the paper's, or cannot be judged."""
    if entry.differs:
        return f" {DIFFERS}"
    has_both = entry.cell.paper is not None and entry.ours.mean is not None
    return f" {CANNOT_JUDGE}" if has_both and entry.differs is None else ""


def was_run(entry: Entry) -> bool:
    """Return whether a run of the cell has a value, or failed."""
    return bool(entry.ours.n or entry.ours.failed)


def visible_columns(table: Table, entries: Sequence[Entry]) -> list[str]:
    """Return the columns with a result, a failed run or a figure of the paper; all if none has."""
    filled = {
        entry.cell.column for entry in entries if was_run(entry) or entry.cell.paper is not None
    }
    return [column for column in table.columns if column in filled or not filled]


@dataclass(frozen=True)
class _Column:
    """A column as printed: its header, the table's column, and the text of an entry."""

    header: str
    column: str
    text: Callable[[Entry], str]


def _printed_columns(table: Table, entries: Sequence[Entry]) -> list[_Column]:
    """Return for each column: ours, the best epoch if any, and the paper's figures if any."""

    def ours(entry: Entry) -> str:
        return entry.text + (_mark(entry) if table.comparable else "")

    def best(entry: Entry) -> str:
        return ours(entry.best) if entry.best else ""

    quoted = {entry.cell.column for entry in entries if entry.cell.paper is not None}
    with_best = {entry.cell.column for entry in entries if entry.best and entry.best.ours.n}
    printed = []
    for column in visible_columns(table, entries):
        if column in with_best:
            printed.append(_Column(f"{column}, last epoch", column, ours))
            printed.append(_Column(f"{column}, best epoch", column, best))
        else:
            header = f"{column}, ours" if column in quoted else column
            printed.append(_Column(header, column, ours))
        if column in quoted:
            printed.append(_Column(f"{column}, paper", column, lambda entry: entry.paper_text))
    return printed


def header(table: Table, entries: Sequence[Entry]) -> list[str]:
    """Return the headers of all printed columns."""
    return [*table.heads, *(column.header for column in _printed_columns(table, entries))]


def body(table: Table, entries: Sequence[Entry]) -> list[list[str]]:
    """Return the texts of all rows."""
    by_place = {(entry.cell.row, entry.cell.column): entry for entry in entries}
    columns = _printed_columns(table, entries)
    rows = []
    for row in table.rows:
        found = [by_place.get((row, column.column)) for column in columns]
        texts = [c.text(e) if e else "" for c, e in zip(columns, found, strict=True)]
        rows.append([*row, *texts])
    return rows


def markdown(table: Table, entries: Sequence[Entry]) -> str:
    """Return the whole table in Markdown, with its footnotes."""
    lines = [f"{table.title}:", "", *markdown_table(header(table, entries), body(table, entries))]
    return "\n".join([*lines, *_markdown_footnotes(table, entries)]) + "\n"


def page_markdown(table: Table, entries: Sequence[Entry]) -> str:
    """Return a table in Markdown for a page: cells that were not run, and lists, are folded away.

    Rows and columns that we have not run are in a ``<details>`` block with the paper's figures.
    Numbers do not break across lines.
    """
    run = [entry for entry in entries if was_run(entry)]
    rows, columns = {e.cell.row for e in run}, {e.cell.column for e in run}
    main: list[Entry] = []
    rest: list[Entry] = []
    for entry in entries:
        shown = entry.cell.row in rows and entry.cell.column in columns
        (main if shown else rest).append(entry)
    lines = [f"{table.title}{':' if run else '. Not run.'}"]
    if run:
        table_run = table.with_cells([entry.cell for entry in main])
        labels = len(table.heads)
        texts = [[*row[:labels], *map(no_break, row[labels:])] for row in body(table_run, main)]
        lines += ["", *markdown_table(header(table_run, main), texts)]
        lines += _markdown_footnotes(table_run, main, fold_lists=True)
    else:
        lines += _markdown_footnotes(table, entries)
    return "\n".join([*lines, *_folded(table, rest, len(entries) - len(run))]) + "\n"


def _folded(table: Table, entries: Sequence[Entry], not_run: int) -> list[str]:
    """Return the paper's figures for cells that were not run, as a block that can be unfolded."""
    quoted = [entry for entry in entries if entry.cell.paper is not None]
    if not quoted:
        return []
    figures = {(e.cell.row, e.cell.column): no_break(e.paper_text) for e in quoted}
    rows = dict.fromkeys(row for row, _ in figures)
    columns = [c for c in table.columns if any(c == column for _, column in figures)]
    texts = [[*row, *(figures.get((row, column), "") for column in columns)] for row in rows]
    summary = f"Not run: {not_run} of {len(table.cells)} cells; the paper's figures"
    heads = [*table.heads, *(f"{column}, paper" for column in columns)]
    lines = ["", f"<details><summary>{summary}</summary>", "", *markdown_table(heads, texts)]
    return [*lines, "", "</details>"]


def no_break(text: str) -> str:
    """Use no-break spaces within a figure; a line may still end before its ``(n = 3)``."""
    return text.replace(" ", _NO_BREAK_SPACE).replace(f"{_NO_BREAK_SPACE}(", " (")


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""

    def line(texts: Sequence[str]) -> str:
        return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"

    return [line(heads), line(["---"] * len(heads)), *map(line, rows)]


def _markdown_footnotes(
    table: Table, entries: Sequence[Entry], fold_lists: bool = False
) -> list[str]:
    notes = footnotes(table, entries)
    folded = [note for note in notes if note.items and fold_lists]
    lines = []
    for note in notes:
        if note not in folded:
            lines += [f"- {note.text}", *(f"  - {item}" for item in note.items)]
    for note in folded:
        summary = note.text.removesuffix(":")
        items = [f"- {item}" for item in note.items]
        lines += ["", f"<details><summary>{summary}</summary>", "", *items, "", "</details>"]
    return ["", *lines] if lines else []


def cell_dicts(table: Table, entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return one dictionary per cell, for JSON and CSV."""
    return [
        {
            "table": table.name,
            **dict(zip(table.heads, entry.cell.row, strict=True)),
            "column": entry.cell.column,
            "measure": str(entry.cell.measure),
            "mean": entry.ours.mean,
            "deviation": entry.ours.deviation,
            "n": entry.ours.n,
            "failed": entry.ours.failed,
            "planned": entry.ours.planned,
            **({"best_mean": entry.best.ours.mean} if entry.best else {}),
            **({"best_deviation": entry.best.ours.deviation} if entry.best else {}),
            "paper_mean": entry.cell.paper.mean if entry.cell.paper else None,
            "paper_deviation": entry.cell.paper.deviation if entry.cell.paper else None,
            "differs": entry.differs if table.comparable else None,
            "keys": list(entry.ours.keys),
        }
        for entry in entries
    ]


def csv_text(table: Table, entries: Sequence[Entry]) -> str:
    """Return CSV with one line per cell."""
    rows = cell_dicts(table, entries)
    text = io.StringIO()
    names = [name for name in rows[0] if name != "keys"]
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def rich_table(table: Table, entries: Sequence[Entry]) -> RichTable:
    """Return the table for a terminal; to save width, n is in brackets without its name."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    result = RichTable(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), show_edge=False)
    for number, head in enumerate(header(table, entries)):
        ours = f"{head.removesuffix(', ours')} (n)" if number >= len(table.heads) else head
        result.add_column(Text("paper" if head.endswith(", paper") else ours))
    rows = body(table, entries)
    grouped = len(table.heads) > 1
    for number, row in enumerate(rows):
        repeated = grouped and number > 0 and rows[number - 1][0] == row[0]
        ends = grouped and number + 1 < len(rows) and rows[number + 1][0] != row[0]
        texts = [text.replace("(n = ", "(") for text in ["" if repeated else row[0], *row[1:]]]
        result.add_row(*map(Text, texts), end_section=ends)
    return result


def print_table(table: Table, entries: Sequence[Entry]) -> None:
    """Print the table on the terminal, with its footnotes."""
    from rich.console import Console

    # Without a terminal rich assumes 80 columns, which would truncate the table.
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table.title, markup=False, highlight=False, style="bold", soft_wrap=True)
    console.print(rich_table(table, entries))
    for note in footnotes(table, entries):
        for line in (note.text, *(f"  {item}" for item in note.items)):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
