"""Pieces of a page: every text that comes from a record passes through `escape` here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Section", "cell", "escape", "figure", "paragraph", "table"]


@dataclass(frozen=True)
class Section:
    """A part of the page: its heading and what stands below it, as HTML."""

    title: str
    body: str

    @property
    def html(self) -> str:
        """The section as HTML."""
        return f"<section><h2>{escape(self.title)}</h2>{self.body}</section>"


@dataclass(frozen=True)
class Cell:
    """A cell of a table: HTML that is known to be safe."""

    html: str


def cell(text: object, mark: str = "") -> Cell:
    """Return a cell that begins with a mark (HTML) and goes on with any text."""
    return Cell(f"{mark}{escape(str(text))}")


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], words: int = 1) -> str:
    """Return a table that scrolls by itself where it is too wide for the page.

    Args:
        heads: Texts of the head.
        rows: Texts, or `Cell`s.
        words: How many of the first columns hold words; the others, numbers, are set to the right.
    """
    top = "".join(
        f'<th scope="col"{_side(number < words)}>{escape(head)}</th>'
        for number, head in enumerate(heads)
    )
    body = []
    for first, *rest in rows:
        cells = "".join(
            f"<td{_side(number < words)}>{_inside(item)}</td>"
            for number, item in enumerate(rest, 1)
        )
        body.append(f'<tr><th scope="row">{_inside(first)}</th>{cells}</tr>')
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _side(words: bool) -> str:
    return ' class="words"' if words else ' class="number"'


def _inside(item: object) -> str:
    return item.html if isinstance(item, Cell) else escape(str(item))


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph of plain text."""
    attribute = f' class="{kind}"' if kind else ""
    return f"<p{attribute}>{escape(text)}</p>"


def figure(chart: str, caption: str) -> str:
    """Return a chart with a line below it."""
    return f"<figure>{chart}<figcaption>{escape(caption)}</figcaption></figure>"
