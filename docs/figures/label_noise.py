"""Test accuracy over the share of noisy labels: ResNet18 on CIFAR-10."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from wsam._utils.plot_style import (
    FIGURE_WIDTH,
    GRID_COLOR,
    METHOD_STYLES,
    MUTED_COLOR,
    label_points,
    method_title,
    new_figure,
    set_title,
)
from wsam.lab import records
from wsam.lab.run import Run
from wsam.paper.cifar import cifar
from wsam.paper.comparison import Ours, gather
from wsam.paper.noise import noise
from wsam.paper.table import Measure

_HALF = 0.6
"""Training times up to this share of the longest are labeled as half of it."""


@dataclass(frozen=True)
class NoiseResult:
    """Test accuracies of a method in percent, by the share of noisy labels in percent.

    Attributes:
        method: Name of the method in `METHOD_STYLES`.
        by_level: The accuracies of its runs.
        seconds: Training time of a run at the highest level.
        keys: Keys of the runs.
    """

    method: str
    by_level: dict[int, Ours]
    seconds: float
    keys: tuple[str, ...]


def read_noise(results: Path) -> list[NoiseResult]:
    """Read the methods with a record at one level of noise or more; level 0 is the main table."""
    clean = cifar().select("ResNet18/*/CIFAR-10")
    accuracy: dict[str, dict[int, Ours]] = {}
    runs: dict[str, list[Run]] = {}
    entries = [(0, entry) for entry in gather(clean, results)]
    entries += [(int(e.cell.column.rstrip("%")), e) for e in gather(noise(), results)]
    for level, entry in entries:
        ours, method = entry.ours, entry.cell.runs[0].method
        if not ours.n:
            continue
        if entry.cell.measure is Measure.TEST_ERROR:
            ours = Ours(tuple(100 - error for error in ours.values))
        accuracy.setdefault(method, {})[level] = ours
        mine = runs.setdefault(method, [])
        mine += [r for r in entry.cell.runs if records.record_path(results, r).exists()]
    return [
        NoiseResult(
            method,
            levels,
            _seconds(runs[method], results),
            tuple(run.key for run in runs[method]),
        )
        for method, levels in accuracy.items()
        if max(levels) > 0
    ]


def _seconds(runs: list[Run], results: Path) -> float:
    """Return the training time of the first run with the most noise."""
    record = records.read(results, max(runs, key=lambda run: run.noise))
    assert record is not None
    return records.training_seconds(record)


def draw_noise(results: list[NoiseResult]) -> Figure:
    """Draw accuracy over noise: means, with deviations for several runs; a single run is open."""
    figure = new_figure(FIGURE_WIDTH, 4.0)
    axes = figure.subplots()
    labels = []
    for one in results:
        color = METHOD_STYLES[one.method].light
        points = [(level, ours.mean or 0.0) for level, ours in sorted(one.by_level.items())]
        axes.plot(*zip(*points, strict=True), color=color, lw=1.6, zorder=2)
        for level, ours in one.by_level.items():
            face = color if ours.n > 1 else "white"
            style: Any = {"fmt": "o", "ms": 8, "mew": 1.8, "mfc": face, "color": color}
            axes.errorbar(level, ours.mean or 0.0, ours.deviation, capsize=3, zorder=3, **style)
        label = f"{method_title(one.method)} {points[-1][1]:.1f}%"
        if one.seconds < _HALF * max(other.seconds for other in results):
            label += "\n(half the time)"
        labels.append((*points[-1], label, color))
    levels = sorted({level for one in results for level in one.by_level})
    axes.set(xlabel="noisy training labels (%)", ylabel="test accuracy (%)", ylim=(0, 100))
    axes.set_xticks(levels)
    axes.grid(color=GRID_COLOR, zorder=0)
    note = "ResNet18, CIFAR-10; full: mean and deviation, open: one run"
    axes.set_title(note, loc="left", fontsize=10, color=MUTED_COLOR)
    last = [one for one in results if levels[-1] in one.by_level]
    best = max(last, key=lambda one: one.by_level[levels[-1]].mean or 0.0)
    single = min(one.by_level[levels[-1]].n for one in last) == 1
    message = f"With {levels[-1]}% noisy labels, {method_title(best.method)} is the most accurate"
    message += "\nafter the same number of epochs"
    set_title(figure, f"{message} (one run each)" if single else message)
    label_points(axes, labels, right=9)
    return figure
