"""Plots of a table: our results and the paper's, with standard deviations."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wsam._utils.plot_style import (
    FIGURE_WIDTH,
    GRID_COLOR,
    RC_PARAMS,
    TEXT_COLOR,
    method_color,
    new_figure,
    set_title,
)
from wsam.paper import plot_slices
from wsam.paper.comparison import Entry
from wsam.paper.plot_slices import RunSlices
from wsam.paper.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANELS_PER_ROW = 2
_LOG_RATIO = 20.0
"""An axis that spans at least this ratio is logarithmic."""
_LABEL_WIDTH, _PANEL_WIDTH, _TITLE_WIDTH = 26, 20, 54
"""Most characters in a line of a label, of the texts of a narrow panel, and of the title."""
_PAPER_COLOR = "#8d95a1"
_SUFFIXES = (".png", ".svg", ".pdf")


def save(
    table: Table, entries: Sequence[Entry], path: Path, slices: Sequence[RunSlices] | None = None
) -> None:
    """Draw a table and write it as PNG, SVG or PDF.

    Args:
        table: The table.
        entries: Our results.
        path: The file; its suffix selects the format.
        slices: The loss around minima, drawn as well; see `plot_slices.read_slices`.

    Raises:
        ValueError: Unknown suffix, or matplotlib is not installed.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"a plot is written as {', '.join(_SUFFIXES)}, not as {path.name!r}")
    try:
        from matplotlib import rc_context
    except ModuleNotFoundError as error:
        raise ValueError("a plot needs matplotlib: pip install 'wsam[plots]'") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    no_date = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}  # for reproducible files
    with rc_context(RC_PARAMS):
        drawing = draw(table, entries, slices)
        drawing.savefig(path, dpi=160, metadata=no_date.get(path.suffix.lower()))


def draw(
    table: Table, entries: Sequence[Entry], slices: Sequence[RunSlices] | None = None
) -> Figure:
    """Draw one panel per column: a line if the rows are numbers, otherwise one marker per row."""
    columns = table.columns
    across = min(len(columns), _PANELS_PER_ROW)
    down = -(-len(columns) // across)
    numeric = _has_numeric_rows(table)
    planes = plot_slices.first_planes(slices or ())
    lines = max(_label(table, row).count("\n") + 1 for row in table.rows)
    heights = [(2.9 if numeric else (0.12 + 0.18 * lines) * len(table.rows) + 1.0) * down]
    heights += [2.6] if slices is not None else []
    heights += [2.2] if planes else []
    drawing = new_figure(FIGURE_WIDTH, sum(heights) + 0.9)
    areas = drawing.add_gridspec(len(heights), 1, height_ratios=heights)
    panels = areas[0].subgridspec(down, across).subplots(squeeze=False, sharey=not numeric)
    for panel, column in zip(panels.flat, columns, strict=False):
        of_column = [entry for entry in entries if entry.cell.column == column]
        (_draw_line if numeric else draw_markers)(panel, table, of_column)
        panel.set_title(textwrap.fill(column, _PANEL_WIDTH), loc="left")
        label = table.heads[0] if numeric else str(of_column[0].cell.measure)
        panel.set_xlabel(textwrap.fill(label, _PANEL_WIDTH))
    for panel in panels.flat[len(columns) :]:
        panel.remove()
    if numeric:
        panels[0][0].set_ylabel(str(entries[0].cell.measure))
    if slices is not None:
        plot_slices.draw_lines(drawing.add_subplot(areas[1]), slices)
    if planes:
        lower = areas[-1].subgridspec(1, len(planes)).subplots(squeeze=False)
        plot_slices.draw_planes(list(lower[0]), planes)
    set_title(drawing, textwrap.fill(table.title, _TITLE_WIDTH))
    handles, labels = legend(entries)
    drawing.legend(handles, labels, loc="outside lower left", ncols=3)
    return drawing


def _has_numeric_rows(table: Table) -> bool:
    return len(table.heads) == 1 and len(table.rows) > 1 and all(map(_is_number, table.rows))


def _is_number(row: Sequence[str]) -> bool:
    try:
        return bool([float(label) for label in row])
    except ValueError:
        return False


def _label(table: Table, row: Sequence[str]) -> str:
    """Join a row's labels, in several lines if necessary; numbers are preceded by their header."""
    text = " ".join(row)
    if _is_number(row):
        named = zip(table.heads, row, strict=True)
        text = ", ".join(f"{head} {label}" for head, label in named)
    return textwrap.fill(text, _LABEL_WIDTH)


def _color(entry: Entry) -> str:
    return method_color(entry.cell.runs[0].method)


def _marker(n: int, color: str) -> dict[str, Any]:
    """Return the style of our result: a full circle, or an open one for a single run."""
    return {"marker": "o", "ms": 7, "mec": color, "mfc": color if n > 1 else "white", "mew": 1.8}


def _plot_ours(panel: Axes, x: Any, y: Any, deviation: dict[str, Any], entry: Entry) -> None:
    color = _color(entry)
    style = _marker(entry.ours.n, color)
    panel.errorbar(x, y, ls="", ecolor=color, capsize=3, lw=1.4, zorder=3, **style, **deviation)


def _plot_paper(panel: Axes, x: Any, y: Any, deviation: dict[str, Any], size: float = 6) -> None:
    style: dict[str, Any] = {"mfc": _PAPER_COLOR, "mec": _PAPER_COLOR, "ecolor": _PAPER_COLOR}
    panel.errorbar(x, y, fmt="D", ms=size, capsize=3, zorder=2, **style, **deviation)


def draw_markers(panel: Axes, table: Table, entries: Sequence[Entry]) -> None:
    """Draw one line per row of the table: ours slightly above the paper's."""
    positions = {row: number for number, row in enumerate(table.rows)}
    for entry in entries:
        y = positions[entry.cell.row]
        ours, paper = entry.ours, entry.cell.paper
        if ours.mean is not None:
            _plot_ours(panel, ours.mean, y - 0.13, {"xerr": ours.deviation}, entry)
        if paper is not None:
            _plot_paper(panel, paper.mean, y + 0.13, {"xerr": paper.deviation})
    panel.set_yticks(list(positions.values()), [_label(table, row) for row in positions])
    panel.set_ylim(len(positions) - 0.5, -0.5)
    panel.locator_params(axis="x", nbins=4)  # avoids overlapping tick labels
    panel.grid(axis="y", color=GRID_COLOR, zorder=0)
    panel.tick_params(axis="y", length=0)
    for row, number in positions.items():
        above = table.rows[number - 1] if number else row
        if len(row) > 1 and row[0] != above[0]:
            panel.axhline(number - 0.5, color="#9aa1ab", lw=0.8)


def _draw_line(panel: Axes, table: Table, entries: Sequence[Entry]) -> None:
    """Draw our means over the rows' numbers, connected by a line."""
    points = [(float(e.cell.row[0]), e.ours.mean) for e in entries if e.ours.mean is not None]
    points.sort()  # a user's grid may list its values in any order
    if points:
        x, y = zip(*points, strict=True)
        panel.plot(x, y, color=_color(entries[0]), lw=1, alpha=0.5)
    for entry in entries:
        at = float(entry.cell.row[0])
        ours, paper = entry.ours, entry.cell.paper
        if ours.mean is not None:
            _plot_ours(panel, at, ours.mean, {"yerr": ours.deviation}, entry)
        if paper is not None:
            # Larger than ours, which may be drawn on top of it.
            _plot_paper(panel, at, paper.mean, {"yerr": paper.deviation}, size=10)
    numbers = [float(row[0]) for row in table.rows]
    low, high = min(numbers), max(numbers)
    if low > 0 and high / low >= _LOG_RATIO:
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter("{x:g}")
        panel.set_xlim(low / 1.3, high * 1.3)
    else:
        margin = 0.05 * (high - low)
        panel.set_xlim(low - margin, high + margin)
    panel.grid(color=GRID_COLOR, zorder=0)


def legend(entries: Sequence[Entry]) -> tuple[list[Any], list[str]]:
    """Return handles and labels: ours with several runs, ours with a single run, the paper's."""
    from matplotlib.lines import Line2D

    colors = {_color(entry) for entry in entries}
    color = colors.pop() if len(colors) == 1 else TEXT_COLOR
    counts = sorted({entry.ours.n for entry in entries if entry.ours.n})
    several = [n for n in counts if n > 1]
    handles, labels = [], []
    if several or not counts:
        handles.append(Line2D([], [], ls="", **_marker(2, color)))
        ends = dict.fromkeys((several[0], several[-1])) if several else ()
        labels.append(f"ours (n = {'–'.join(map(str, ends))})" if several else "ours: not run")
    if 1 in counts:
        handles.append(Line2D([], [], ls="", **_marker(1, color)))
        labels.append("ours (n = 1)")
    if any(entry.cell.paper is not None for entry in entries):
        handles.append(Line2D([], [], marker="D", ls="", mfc=_PAPER_COLOR, mec=_PAPER_COLOR, ms=6))
        labels.append("the paper's")
    return handles, labels
