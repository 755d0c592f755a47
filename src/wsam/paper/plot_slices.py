"""Plots of the loss around minima: slices in one panel, planes in a panel each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wsam._utils.plot_style import GRID_COLOR, MUTED_COLOR, method_color
from wsam.paper import minima
from wsam.paper.table import Measure, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from wsam.curvature import Landscape

NOT_MEASURED = "not measured"
_LEVELS = 14


@dataclass(frozen=True)
class RunSlices:
    """The loss around the minimum of a run.

    Attributes:
        label: Label of the row: SGDM, SAM, WSAM.
        method: Method of the run.
        line: The loss along one direction; None if not measured.
        plane: The loss along two directions; None if not measured.
    """

    label: str
    method: str
    line: Landscape | None
    plane: Landscape | None


def read_slices(table: Table, results: Path) -> list[RunSlices] | None:
    """Read the slices of a table's runs; None for a table without Hessian eigenvalues.

    Raises:
        ValueError: A measurement is damaged.
    """
    cells = [cell for cell in table.cells if cell.measure is Measure.TOP_EIGENVALUE]
    if not cells:
        return None
    slices = []
    for cell in cells:
        for run in cell.runs:
            measurement = minima.read_measurement(results, run)
            if measurement is not None:
                parts = (minima.read_slice(measurement, p) for p in (minima.SLICE, minima.PLANE))
                slices.append(RunSlices(" ".join(cell.row), run.method, *parts))
    return slices


def draw_lines(panel: Axes, slices: Sequence[RunSlices]) -> None:
    """Draw one line per run; all runs of a method have the same color."""
    labeled: set[str] = set()
    for one in slices:
        if one.line is None:
            continue
        label = None if one.label in labeled else one.label
        labeled.add(one.label)
        style: Any = {"color": method_color(one.method), "lw": 1.3, "alpha": 0.8}
        panel.plot(one.line.coordinates[0], one.line.losses, label=label, **style)
    panel.set_title("loss around the minimum", loc="left")
    panel.set(xlabel="filter-normalized direction", ylabel="training loss")
    if not labeled:
        panel.text(
            0.5, 0.5, NOT_MEASURED, transform=panel.transAxes, ha="center", color=MUTED_COLOR
        )
        panel.set(xticks=[], yticks=[])
        return
    panel.set_yscale("log")
    panel.grid(color=GRID_COLOR, zorder=0)
    panel.legend()


def first_planes(slices: Sequence[RunSlices]) -> dict[str, Landscape]:
    """Return for the label of each row the plane of the first run that has one."""
    planes: dict[str, Landscape] = {}
    for one in slices:
        if one.plane is not None:
            planes.setdefault(one.label, one.plane)
    return planes


def draw_planes(panels: Sequence[Any], planes: Mapping[str, Landscape]) -> None:
    """Draw one panel per plane, all with the same contour levels."""
    from matplotlib.colors import LogNorm

    losses = [loss for plane in planes.values() for row in plane.losses for loss in row]
    values = [loss for loss in losses if math.isfinite(loss) and loss > 0]
    if not values:
        return
    low, high = min(values), max(values)
    high = high if high > low else low * 1.001
    levels = [low * (high / low) ** (number / _LEVELS) for number in range(_LEVELS + 1)]
    for panel, (label, plane) in zip(panels, planes.items(), strict=True):
        # Rows hold the first coordinate, which is on the x axis: contourf wants them as columns.
        columns = list(zip(*plane.losses, strict=True))
        axes = plane.coordinates
        contours = panel.contourf(*axes, columns, levels=levels, norm=LogNorm(low, high))
        panel.plot(0, 0, marker="+", color="white")
        panel.set_title(f"{label}: loss in a plane", loc="left", fontsize=10)
        panel.set_aspect("equal")
    panels[-1].figure.colorbar(contours, ax=list(panels), label="loss", format="%.3g")
