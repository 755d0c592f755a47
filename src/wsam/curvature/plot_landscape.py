"""Figure, page and file of a landscape."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wsam._utils.plot_style import MUTED_COLOR, TEXT_COLOR
from wsam.curvature import plotting

if TYPE_CHECKING:
    from wsam.curvature.loss_landscape import Landscape

_NO_LOSS = "no finite loss"


def save_landscape(
    found: Landscape, path: str | Path, log: bool | None = None, ends: bool = False
) -> None:
    """Write a landscape as a figure, an interactive page (`.html`) or its numbers (`.json`).

    Args:
        found: A line or a surface.
        path: Its suffix selects the format: .png, .svg, .pdf, .html or .json. The folder is created.
        log: Logarithmic loss, if all are positive. Default: if they span more than a factor of 30.
        ends: Mark both ends of a line between two checkpoints, 0 and 1, instead of the origin.

    Raises:
        ValueError: If no loss is finite.
    """
    path = Path(path)
    if path.suffix.lower() == ".json":
        plotting.write_json(path, found.as_dict())
        return
    values = [value for value in _flat_losses(found) if math.isfinite(value)]
    if not values:
        raise ValueError("no loss of this landscape is finite: nothing can be drawn")
    log = max(values) > 30 * min(values) if log is None else log
    logarithmic = log and min(values) > 0
    title = "Loss along " + " and ".join(found.labels)
    note = "\n".join(filter(None, (plotting.data_note(found.info), found.note)))
    marks, marks_label = ([0.0, 1.0], "the two checkpoints") if ends else ([0.0], "origin")
    if path.suffix.lower() == ".html":
        page = {
            "surface": found.dimensions == 2,
            "x": found.coordinates[0],
            "x2": found.coordinates[-1],
            "y": found.as_dict()["losses"],
            "labels": found.labels,
            "value": "loss",
            "log": logarithmic,
            "marks": marks,
            "legend": f"Dotted: {marks_label}."
            + (f" A cross: {_NO_LOSS}." if _has_gaps(found) else ""),
        }
        plotting.write_page(path, title, note, page)
        return
    with plotting.saved_figure(path, title, note) as (figure, axes):
        if found.dimensions == 1:
            _draw_line(axes, found, logarithmic, marks, marks_label)
        else:
            _draw_surface(figure, axes, found, values, logarithmic)


def _flat_losses(found: Landscape) -> list[float]:
    rows = found.losses if found.dimensions == 2 else [found.losses]
    return [value for row in rows for value in row]


def _has_gaps(found: Landscape) -> bool:
    return not all(map(math.isfinite, _flat_losses(found)))


def _draw_line(
    axes: Any, found: Landscape, logarithmic: bool, marks: list[float], marks_label: str
) -> None:
    xs = found.coordinates[0]
    plotting.draw_marks(axes, marks, marks_label)
    axes.plot(xs, found.losses, color=plotting.CURVE_COLOR, linewidth=1.8)
    gaps = [x for x, loss in zip(xs, found.losses, strict=True) if not math.isfinite(loss)]
    if gaps:
        bottom = axes.get_xaxis_transform()
        axes.plot(
            gaps, [0.02] * len(gaps), "x", color=MUTED_COLOR, transform=bottom, label=_NO_LOSS
        )
    axes.set(xlabel=found.labels[0], ylabel="loss")
    if logarithmic:
        axes.set_yscale("log")


def _draw_surface(
    figure: Any, axes: Any, found: Landscape, values: list[float], logarithmic: bool
) -> None:
    from matplotlib.colors import LogNorm, Normalize

    low, high = min(values), max(values)
    high = high if high > low else low + (abs(low) or 1.0) * 1e-6
    levels = 24
    if logarithmic:
        edges = [low * (high / low) ** (i / levels) for i in range(levels + 1)]
    else:
        edges = [low + (high - low) * i / levels for i in range(levels + 1)]
    # matplotlib's rows run upwards; ours belong to the first coordinate, which runs to the right.
    columns = list(zip(*found.losses, strict=True))
    norm = LogNorm(low, high) if logarithmic else Normalize(low, high)
    filled = axes.contourf(*found.coordinates, columns, levels=edges, norm=norm)
    axes.contour(*found.coordinates, columns, levels=edges[::2], colors="white", linewidths=0.4)
    axes.plot(0, 0, "P", mfc="white", mec=TEXT_COLOR, ms=8, label="origin")
    if _has_gaps(found):
        axes.set_facecolor(plotting.GAP_COLOR)
        axes.plot([], [], "s", color=plotting.GAP_COLOR, ms=9, label=_NO_LOSS)
    axes.set(xlabel=found.labels[0], ylabel=found.labels[1])
    figure.colorbar(filled, ax=axes, label="loss", format="%.3g")
