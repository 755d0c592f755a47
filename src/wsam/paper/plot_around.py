"""Slices of the loss around minima, drawn over each other; planes side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wsam.paper import around, minimum
from wsam.paper.table import Measure, Table
from wsam.plot_style import COLORS, MUTED_COLOR

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from wsam.curvature import Landscape

NOT_MEASURED = "not measured"
_LEVELS = 14


@dataclass(frozen=True)
class Seen:
    """What lies around the minimum of a run: slices that were taken.

    Attributes:
        label: The row's label: SGDM, SAM, WSAM.
        method: Of the run.
        line: The loss along one direction; None if not taken.
        plane: The loss along two.
    """

    label: str
    method: str
    line: Landscape | None
    plane: Landscape | None


def gather(table: Table, results: Path) -> list[Seen] | None:
    """Read the slices of a table's minima; None for a table that is not about minima.

    Raises:
        ValueError: A measurement is damaged.
    """
    sharp = [cell for cell in table.cells if cell.measure is Measure.TOP_EIGENVALUE]
    if not sharp:
        return None
    found = []
    for cell in sharp:
        for run in cell.runs:
            measured = minimum.read(results, run)
            if measured is not None:
                parts = (around.read(measured, part) for part in (around.SLICE, around.PLANE))
                found.append(Seen(" ".join(cell.row), run.method, *parts))
    return found


def draw_lines(panel: Axes, seen: Sequence[Seen]) -> None:
    """Draw one line per run: the same colour for all runs of a method."""
    named: set[str] = set()
    for one in seen:
        if one.line is None:
            continue
        losses = [loss if math.isfinite(loss) else math.nan for loss in one.line.losses]
        label = None if one.label in named else one.label
        named.add(one.label)
        color = COLORS.get(one.method, MUTED_COLOR)
        panel.plot(one.line.coordinates[0], losses, color=color, lw=1.3, alpha=0.8, label=label)
    panel.set_title("loss around the minimum", loc="left")
    panel.set_xlabel("filter-normalised direction")
    if not named:
        panel.text(
            0.5, 0.5, NOT_MEASURED, transform=panel.transAxes, ha="center", color=MUTED_COLOR
        )
        panel.set(xticks=[], yticks=[])
        return
    panel.set_yscale("log")
    panel.grid(color="#eceef1", zorder=0)
    panel.legend(fontsize=8)


def first_planes(seen: Sequence[Seen]) -> list[Seen]:
    """Return the first run of each row that has a plane."""
    by_label: dict[str, Seen] = {}
    for one in seen:
        if one.plane is not None:
            by_label.setdefault(one.label, one)
    return list(by_label.values())


def draw_planes(panels: Sequence[Any], seen: Sequence[Seen]) -> None:
    """Draw one panel per plane, all with the same levels of the loss."""
    from matplotlib.colors import LogNorm

    values = [
        loss
        for one in seen
        for row in (one.plane.losses if one.plane else ())
        for loss in row
        if math.isfinite(loss) and loss > 0
    ]
    if not values:
        return
    low, high = min(values), max(values)
    high = high if high > low else low * 1.001
    levels = [low * (high / low) ** (number / _LEVELS) for number in range(_LEVELS + 1)]
    for panel, one in zip(panels, seen, strict=True):
        assert one.plane is not None
        # Rows are values of the first coordinate, which runs to the right: columns for matplotlib.
        turned = [
            [loss if math.isfinite(loss) else math.nan for loss in column]
            for column in zip(*one.plane.losses, strict=True)
        ]
        axes = one.plane.coordinates
        drawn = panel.contourf(*axes, turned, levels=levels, norm=LogNorm(low, high))
        panel.plot(0, 0, marker="+", color="white")
        panel.set_title(f"{one.label}: loss in a plane", loc="left")
        panel.set_aspect("equal")
    panels[-1].figure.colorbar(drawn, ax=list(panels), label="loss", format="%.3g")
