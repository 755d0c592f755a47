"""A table with our figures beside the paper's: as Markdown, CSV, JSON, or on a terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wsam.paper.cifar import METHODS
from wsam.paper.outcome import Entry, Yardstick
from wsam.paper.table import Table

if TYPE_CHECKING:
    from rich.table import Table as RichTable

MARK, UNJUDGED = "†", "‡"
IGNORES_N = f"{MARK} ignores n: with few seeds it appears by chance rather often."
FORMATS = ("markdown", "csv", "rich")


@dataclass(frozen=True)
class Remark:
    """Something that is said below a table, and what it is made of where it is a list."""

    text: str
    parts: tuple[str, ...] = ()


def remarks(table: Table, entries: Sequence[Entry]) -> list[Remark]:
    """Return what is to be said below a table: where ours differs, and the table's notes."""
    said = _differences(entries) if table.comparable else []
    said += [Remark(note) for note in table.notes if _concerns(note, table)]
    shown = columns(table, entries)
    missing = [column for column in table.columns if column not in shown]
    if missing:
        said.append(
            Remark(
                f"Left out, for neither we nor the paper have a figure there: {', '.join(missing)}."
            )
        )
    return said


def _differences(entries: Sequence[Entry]) -> list[Remark]:
    """Say where ours differs and by more than what, and where nothing can be said of it."""
    said = []
    for yardstick in (Yardstick.BOTH, Yardstick.OURS, Yardstick.PAPER):
        found = [e for e in entries if e.differs and e.yardstick is yardstick]
        if found:
            head = f"{MARK} Ours differs from the paper's by more than {yardstick}:"
            said.append(Remark(head, _sentences(found)))
    said += [Remark(IGNORES_N)] if said else []
    unjudged = [e for e in entries if _is_unjudged(e)]
    if unjudged:
        said.append(Remark(f"{UNJUDGED} {Yardstick.NONE}:", _sentences(unjudged)))
    return said


def _sentences(entries: Sequence[Entry]) -> tuple[str, ...]:
    return tuple(f"{entry.difference}." for entry in entries)


def _mark(entry: Entry) -> str:
    """Return what stands behind our figure: whether it differs, or that this cannot be said."""
    if entry.differs:
        return f" {MARK}"
    return f" {UNJUDGED}" if _is_unjudged(entry) else ""


def _is_unjudged(entry: Entry) -> bool:
    return entry.differs is None and entry.yardstick is Yardstick.NONE


def _concerns(note: str, table: Table) -> bool:
    """Tell whether a note is about this table: one that begins with a method needs its row."""
    subject = note.partition(" ")[0].removesuffix("'s")
    return subject not in METHODS or any(subject in row for row in table.rows)


def columns(table: Table, entries: Sequence[Entry]) -> list[str]:
    """Return the columns worth showing: all but those where neither we nor the paper have anything.

    A failed run is something. Where no column has anything, all are shown.
    """
    told = {
        entry.cell.column
        for entry in entries
        if entry.ours.n or entry.ours.failed or entry.cell.paper is not None
    }
    return [column for column in table.columns if column in told or not told]


def header(table: Table, entries: Sequence[Entry]) -> list[str]:
    """Return the heads of the columns: ours and, where the paper prints any figure, the paper's."""
    quoted = _quoted_columns(entries)
    heads = [*table.heads]
    for column in columns(table, entries):
        heads += [f"{column}, ours", f"{column}, paper"] if column in quoted else [column]
    return heads


def lines(table: Table, entries: Sequence[Entry]) -> list[list[str]]:
    """Return the texts of all rows."""
    by_place = {(entry.cell.row, entry.cell.column): entry for entry in entries}
    quoted = _quoted_columns(entries)
    shown = columns(table, entries)
    texts = []
    for row in table.rows:
        line = [*row]
        for column in shown:
            entry = by_place.get((row, column))
            mark = _mark(entry) if entry and table.comparable else ""
            line.append(f"{entry.text}{mark}" if entry else "")
            if column in quoted:
                line.append(entry.paper_text if entry else "")
        texts.append(line)
    return texts


def _quoted_columns(entries: Sequence[Entry]) -> set[str]:
    return {entry.cell.column for entry in entries if entry.cell.paper is not None}


def markdown(table: Table, entries: Sequence[Entry]) -> str:
    """Return the table in Markdown, with remarks below it."""

    def line(texts: Sequence[str]) -> str:
        return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"

    heads = header(table, entries)
    text = [f"{table.title}:", "", line(heads), line(["---"] * len(heads))]
    text += map(line, lines(table, entries))
    said = remarks(table, entries)
    text += [""] if said else []
    for remark in said:
        text += [f"- {remark.text}", *(f"  - {part}" for part in remark.parts)]
    return "\n".join(text) + "\n"


def data(table: Table, entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return one plain record per cell, for JSON and CSV."""
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
            "paper_mean": entry.cell.paper.mean if entry.cell.paper else None,
            "paper_deviation": entry.cell.paper.deviation if entry.cell.paper else None,
            "differs": entry.differs if table.comparable else None,
            "keys": [run.key for run in entry.cell.runs],
        }
        for entry in entries
    ]


def comma_separated(table: Table, entries: Sequence[Entry]) -> str:
    """Return one line per cell, for spreadsheets and data frames."""
    rows = data(table, entries)
    text = io.StringIO()
    writer = csv.DictWriter(text, [name for name in rows[0] if name != "keys"], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        del row["keys"]
        writer.writerow(row)
    return text.getvalue()


def rich_table(table: Table, entries: Sequence[Entry]) -> RichTable:
    """Return the table for a terminal, as narrow as can be; n stands in brackets."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), show_edge=False)
    for number, head in enumerate(header(table, entries)):
        ours = f"{head.removesuffix(', ours')} (n)" if number >= len(table.heads) else head
        shown.add_column(Text("paper" if head.endswith(", paper") else ours))
    rows = lines(table, entries)
    grouped = len(table.heads) > 1
    for number, row in enumerate(rows):
        again = grouped and number > 0 and rows[number - 1][0] == row[0]
        ends = grouped and number + 1 < len(rows) and rows[number + 1][0] != row[0]
        texts = [text.replace("(n = ", "(") for text in ["" if again else row[0], *row[1:]]]
        shown.add_row(*map(Text, texts), end_section=ends)
    return shown


def show(table: Table, entries: Sequence[Entry]) -> None:
    """Print the table on the terminal, with remarks below it."""
    import sys

    from rich.console import Console

    # A file or a pipe has no width: rich would take it for a narrow terminal.
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table.title, markup=False, highlight=False, style="bold", soft_wrap=True)
    console.print(rich_table(table, entries))
    for remark in remarks(table, entries):
        for line in (remark.text, *(f"  {part}" for part in remark.parts)):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
