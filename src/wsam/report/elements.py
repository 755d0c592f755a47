"""A page and its elements: sections, tables and figures. Templates turn them into HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from wsam._utils.html import render, to_unicode

if TYPE_CHECKING:
    from markupsafe import Markup

    from wsam.report.charts import HeatMap, LineStyle


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading.

    Args:
        title: The heading, as text.
        body: The content, as safe HTML.
    """

    title: str
    body: Markup


@dataclass(frozen=True)
class Table:
    """A table.

    Args:
        heads: The headings of the columns.
        rows: The texts of the cells.
        text_columns: The number of leading columns that hold text; the others hold numbers.
        styles: Line styles to show at the start of each row.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[object]]
    text_columns: int = 1
    styles: Sequence[LineStyle] | None = None


@dataclass(frozen=True)
class Figure:
    """A chart with its caption and, optionally, its values as a table."""

    svg: Markup
    caption: str
    table: Table | None = None


def render_page(title: str, lead: str, sections: Iterable[Section | None]) -> str:
    """Return a page as HTML. Plain text is escaped; a section that is None is left out."""
    text = render(
        "report/templates/page.html",
        title=title,
        lead=lead,
        sections=[section for section in sections if section is not None],
        created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    return to_unicode(text)


def heat_table(heat_map: HeatMap) -> Table:
    """Return the values of a heat map as a table, for screen readers."""
    x_name, y_name = heat_map.names
    rows = [
        [f"{y_name} {y:g}", *(heat_map.text(x, y) for x in heat_map.xs)]
        for y in reversed(heat_map.ys)
    ]
    return Table([f"{y_name} ↓ {x_name} →", *(f"{x_name} {x:g}" for x in heat_map.xs)], rows)
