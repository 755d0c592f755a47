"""Top Hessian eigenvalues at the minima of a table, by the way in which they are measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from wsam._utils.plot_style import (
    FIGURE_WIDTH,
    GRID_COLOR,
    METHOD_STYLES,
    MUTED_COLOR,
    new_figure,
    set_title,
)
from wsam.paper.comparison import Entry
from wsam.paper.table import Measure

PANELS = {
    Measure.TOP_EIGENVALUE: "training images,\neval-mode BatchNorm",
    Measure.EIGENVALUE_BY_BATCHES: "training images,\ntrain-mode BatchNorm",
    Measure.EIGENVALUE_ON_TEST: "test images,\neval-mode BatchNorm",
}
BASE = "SGDM"
MESSAGE = """\
Whether SAM and WSAM are flatter than SGD
depends on how sharpness is measured"""
_BEHIND: Any = {"facecolor": "white", "edgecolor": "none", "pad": 1}
"""Behind a label that would cross the line of SGD."""
_SEVERAL = 2
"""Runs behind a figure of the paper, which does not state them: its markers are full."""
_TICKS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)

Point = tuple[float, float | None, int]
"""An eigenvalue relative to that of SGD, its deviation, and the number of runs."""


def draw_eigenvalues(entries: Sequence[Entry]) -> Figure:
    """Draw the eigenvalues relative to SGD's, in a row for each way of measuring and the paper."""
    figure = new_figure(FIGURE_WIDTH, 4.4)
    axes = figure.subplots()
    rows = {title: _ours(entries, measure) for measure, title in PANELS.items()}
    for at, points in enumerate(rows.values()):
        _draw_row(axes, at, points)
    rows["the paper's figures,\nmode not stated"] = _paper(entries)
    _draw_row(axes, len(PANELS), _paper(entries), marker="D")
    axes.axvline(1, color=METHOD_STYLES["sgd"].light, lw=1.4, zorder=1)
    name: Any = {"ha": "center", "color": METHOD_STYLES["sgd"].light, "bbox": _BEHIND}
    axes.text(1, -0.55, "SGD", **name)
    axes.set(xscale="log", xlim=(0.24, 9), ylim=(len(rows) - 0.5, -0.75))
    axes.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
    axes.minorticks_off()
    axes.set_yticks(range(len(rows)), list(rows))
    axes.tick_params(axis="y", length=0)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color=GRID_COLOR)
    axes.set_xlabel("top Hessian eigenvalue, relative to SGD's  (left: flatter)")
    note = "circles: ours, mean and deviation, or open: one run"
    axes.set_title(note, loc="left", fontsize=10, color=MUTED_COLOR)
    set_title(figure, MESSAGE)
    return figure


def _ours(entries: Sequence[Entry], measure: Measure) -> dict[str, Point]:
    found = {e.cell.row[0]: e for e in entries if e.cell.measure is measure and e.ours.n}
    values = {
        name: (e.ours.mean or 0.0, e.ours.deviation, e.ours.n, e.cell.runs[0].method)
        for name, e in found.items()
    }
    return _relative(values)


def _paper(entries: Sequence[Entry]) -> dict[str, Point]:
    values = {}
    for entry in entries:
        quoted = entry.cell.paper
        if entry.cell.measure is Measure.TOP_EIGENVALUE and quoted is not None:
            method = entry.cell.runs[0].method
            values[entry.cell.row[0]] = (quoted.mean, quoted.deviation, _SEVERAL, method)
    return _relative(values)


def _relative(values: Mapping[str, tuple[float, float | None, int, str]]) -> dict[str, Point]:
    """Return the points of all methods but SGD, by their names in `METHOD_STYLES`."""
    if BASE not in values:
        return {}
    base = values[BASE][0]
    return {
        method: (mean / base, None if std is None else std / base, n)
        for name, (mean, std, n, method) in values.items()
        if name != BASE
    }


def _draw_row(axes: Axes, at: float, points: Mapping[str, Point], marker: str = "o") -> None:
    for offset, (method, (value, std, n)) in zip((-0.14, 0.14), points.items(), strict=False):
        style = METHOD_STYLES[method]
        face = style.light if n > 1 else "white"
        shape: Any = {"fmt": marker, "ms": 7, "mew": 1.8, "mfc": face, "color": style.light}
        axes.errorbar(value, at + offset, xerr=std, capsize=3, zorder=3, **shape)
        label = f"{style.title} {value:.{1 if value > 1 else 2}f}"
        text: Any = {"textcoords": "offset points", "va": "center", "color": style.light}
        end = (value + (std or 0.0), at + offset)
        axes.annotate(label, end, (10, 0), bbox=_BEHIND, zorder=2, **text)
