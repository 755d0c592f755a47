"""A table as a plot: our figures beside the paper's, with deviations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wsam.paper import plot_around
from wsam.paper.outcome import Entry
from wsam.paper.table import Table
from wsam.plot_style import COLORS, MUTED_COLOR, RC_PARAMS, TEXT_COLOR, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANELS = 4
_WIDE = 20.0
"""Numbers that span more than this are drawn on a logarithmic scale."""
_LONG = 36
"""Letters of a label that fill the width of a panel."""
_SUFFIXES = (".png", ".svg", ".pdf")


Seen = Sequence[plot_around.Seen] | None


def save(table: Table, entries: Sequence[Entry], path: Path, seen: Seen = None) -> None:
    """Draw a table and write it as PNG, SVG or PDF.

    Args:
        table: The table.
        entries: Our figures for it.
        path: The file; its ending says which kind.
        seen: Slices around minima, drawn too; see `plot_around.gather`.

    Raises:
        ValueError: Another kind of file, or matplotlib is not installed.
    """
    if path.is_dir():  # its name may be one that its user never gave
        raise ValueError(f"a plot is a file, {', '.join(_SUFFIXES)}, and not a folder")
    if path.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"a plot is written as {', '.join(_SUFFIXES)}, not as {path.name!r}")
    try:
        from matplotlib import rc_context
    except ModuleNotFoundError as error:
        raise ValueError("a plot needs matplotlib: pip install 'wsam[plots]'") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    dated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with rc_context(RC_PARAMS):
        draw(table, entries, seen).savefig(path, dpi=160, metadata=dated.get(path.suffix.lower()))


def draw(table: Table, entries: Sequence[Entry], seen: Seen = None) -> Figure:
    """Draw one panel per column: lines over a number where rows are numbers, else one dot per row."""
    columns = table.columns
    down = -(-len(columns) // _PANELS)
    across = -(-len(columns) // down)
    numeric = _numeric(table)
    height = (2.9 if numeric else 0.34 * len(table.rows) + 1.1) * down
    planes = plot_around.first_planes(seen or ())
    if seen is not None:
        height = max(height, 2.6)  # a curve needs room that three dots do not
    wide = 3.1 * (across + (seen is not None)) + (0.4 if numeric else 1.4)
    drawn = new_figure(wide, height + (2.9 if planes else 0) + 0.7)
    places = drawn.add_gridspec(
        2 if planes else 1, 1, height_ratios=[height, 2.9][: 1 + bool(planes)]
    )
    inside = places[0].subgridspec(1, across + (seen is not None))
    panels = inside[:across].subgridspec(down, across).subplots(squeeze=False, sharey=not numeric)
    for panel, column in zip(panels.flat, columns, strict=False):
        mine = [entry for entry in entries if entry.cell.column == column]
        (_lines if numeric else _dots)(panel, table, mine)
        panel.set_title(column, loc="left")
        label = table.heads[0] if numeric else str(mine[0].cell.measure)
        panel.set_xlabel(label, fontsize=8 if len(label) > _LONG else None)
    for panel in panels.flat[len(columns) :]:
        panel.remove()
    if numeric:
        panels[0][0].set_ylabel(str(entries[0].cell.measure))
    if seen is not None:
        plot_around.draw_lines(drawn.add_subplot(inside[across]), seen)
    if planes:
        lower = places[1].subgridspec(1, len(planes)).subplots(squeeze=False)
        plot_around.draw_planes(list(lower[0]), planes)
    drawn.suptitle(table.title, x=0.01, ha="left", fontsize=12, color=TEXT_COLOR)
    handles, labels = _legend(entries)
    drawn.legend(handles, labels, loc="outside lower left", ncols=2, fontsize=9)
    return drawn


def _numeric(table: Table) -> bool:
    """Tell whether the rows are points on one axis."""
    return len(table.heads) == 1 and len(table.rows) > 1 and all(map(_is_number, table.rows))


def _is_number(row: Sequence[str]) -> bool:
    try:
        return bool([float(label) for label in row])
    except ValueError:
        return False


def _label(table: Table, row: Sequence[str]) -> str:
    """Return a row's labels as one; numbers are told what they are."""
    if not _is_number(row):
        return " ".join(row)
    return ", ".join(f"{head} {label}" for head, label in zip(table.heads, row, strict=True))


def _color(entry: Entry) -> str:
    return COLORS.get(entry.cell.runs[0].method, MUTED_COLOR)


def _ours(panel: Axes, x: Any, y: Any, spread: dict[str, Any], color: str) -> None:
    panel.errorbar(x, y, fmt="o", color=color, ms=6, capsize=3, lw=1.4, zorder=3, **spread)


def _papers(panel: Axes, x: Any, y: Any, spread: dict[str, Any], size: float = 6) -> None:
    style: dict[str, Any] = {"mfc": "white", "mec": MUTED_COLOR, "ecolor": "#b6bcc6", "lw": 1.2}
    panel.errorbar(x, y, fmt="D", ms=size, capsize=3, zorder=2, **style, **spread)


def _dots(panel: Axes, table: Table, entries: Sequence[Entry]) -> None:
    """Draw one row per line of the table: ours a little above the paper's."""
    places = {row: number for number, row in enumerate(table.rows)}
    for entry in entries:
        at = places[entry.cell.row]
        ours, paper = entry.ours, entry.cell.paper
        if ours.mean is not None:
            _ours(panel, ours.mean, at - 0.13, {"xerr": ours.deviation}, _color(entry))
        if paper is not None:
            _papers(panel, paper.mean, at + 0.13, {"xerr": paper.deviation})
    panel.set_yticks(list(places.values()), [_label(table, row) for row in places])
    panel.set_ylim(len(places) - 0.5, -0.5)
    panel.locator_params(axis="x", nbins=5)  # or long numbers would touch
    panel.grid(axis="y", color="#eceef1", zorder=0)
    panel.tick_params(axis="y", length=0)
    for row, number in places.items():
        above = table.rows[number - 1] if number else row
        if len(row) > 1 and row[0] != above[0]:
            panel.axhline(number - 0.5, color="#9aa1ab", lw=0.8)


def _lines(panel: Axes, table: Table, entries: Sequence[Entry]) -> None:
    """Draw our means over the rows' numbers, joined by a line."""
    made = [(float(e.cell.row[0]), e.ours.mean) for e in entries if e.ours.mean is not None]
    made.sort()  # a grid of one's own may name its values in any order
    if made:
        x, y = zip(*made, strict=True)
        panel.plot(x, y, color=_color(entries[0]), lw=1, alpha=0.5)
    for entry in entries:
        at = float(entry.cell.row[0])
        ours, paper = entry.ours, entry.cell.paper
        if ours.mean is not None:
            _ours(panel, at, ours.mean, {"yerr": ours.deviation}, _color(entry))
        if paper is not None:
            _papers(panel, at, paper.mean, {"yerr": paper.deviation}, size=10)  # ours may cover it
    numbers = [float(row[0]) for row in table.rows]
    low, high = min(numbers), max(numbers)
    if low > 0 and high / low >= _WIDE:
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter("{x:g}")
        panel.set_xlim(low / 1.3, high * 1.3)
    else:
        margin = 0.05 * (high - low)
        panel.set_xlim(low - margin, high + margin)
    panel.grid(color="#eceef1", zorder=0)


def _legend(entries: Sequence[Entry]) -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D

    counts = sorted({entry.ours.n for entry in entries if entry.ours.n})
    times = f" (n = {'–'.join(map(str, (counts[0], counts[-1])[: len(counts)]))})" if counts else ""
    colors = {_color(entry) for entry in entries}
    ours = Line2D(
        [], [], marker="o", ls="", color=colors.pop() if len(colors) == 1 else TEXT_COLOR, ms=6
    )
    paper = Line2D([], [], marker="D", ls="", mfc="white", mec=MUTED_COLOR, ms=6)
    label = f"ours{times}" if counts else "ours: not run"
    if all(entry.cell.paper is None for entry in entries):
        return [ours], [label]
    return [ours, paper], [label, "the paper's"]
