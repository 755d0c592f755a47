"""Test loss during training over AdamW: a GPT on text, with and without dropout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from wsam._utils.plot_style import (
    FIGURE_WIDTH,
    GRID_COLOR,
    MUTED_COLOR,
    label_points,
    method_color,
    new_figure,
    set_title,
)
from wsam.lab import records
from wsam.lab.passes import passes_per_step
from wsam.paper.adam import ADAMW, TWICE, adam
from wsam.paper.study import choose

_PATTERN = "GPT, dropout *"
_RANGE = 0.25
"""Least height of a panel: enough to show how the losses fall."""


@dataclass(frozen=True)
class LossCurves:
    """Test losses of one method after each epoch, one list for each seed.

    Attributes:
        setting: Name of the model.
        label: Name of the row.
        method: Name of the method in `METHOD_STYLES`.
        passes: Passes over the data in an epoch.
        by_seed: The losses.
        keys: Keys of the runs.
    """

    setting: str
    label: str
    method: str
    passes: float
    by_seed: list[list[float]]
    keys: tuple[str, ...]

    @property
    def mean(self) -> list[float]:
        """Mean over seeds after each epoch."""
        return [fmean(losses) for losses in zip(*self.by_seed, strict=True)]


def read_curves(results: Path) -> list[LossCurves]:
    """Read the finished runs of the GPT."""
    found = []
    for cell in choose(adam().select(_PATTERN), results).cells:
        read = {run.key: records.read(results, run) for run in cell.runs}
        finished = {key: one for key, one in read.items() if one and records.is_finished(one)}
        if not finished:
            continue
        method = cell.runs[0].method
        by_seed = [[row["test_loss"] for row in one["curve"]] for one in finished.values()]
        passes = passes_per_step(cell.runs[0]) or 0.0
        setting, label = cell.row
        found.append(LossCurves(setting, label, method, passes, by_seed, tuple(finished)))
    return found


def draw_curves(curves: list[LossCurves]) -> Figure:
    """Draw the mean test loss over passes through the data, one panel for each model."""
    settings = list(dict.fromkeys(one.setting for one in curves))
    figure = new_figure(FIGURE_WIDTH, 2.7 * len(settings))
    panels = figure.subplots(len(settings), 1, squeeze=False, sharex=True)[:, 0]
    for axes, setting in zip(panels, settings, strict=True):
        _draw_panel(axes, setting, [one for one in curves if one.setting == setting])
    panels[-1].set_xlabel("passes over the training data")
    set_title(
        figure,
        "With dropout, SAM ends with a lower loss than AdamW\n"
        "after the same number of passes; WSAM does not",
    )
    return figure


def _draw_panel(axes: Axes, setting: str, curves: list[LossCurves]) -> None:
    lowest = min(min(one.mean) for one in curves)
    highest = max(one.mean[-1] for one in curves)
    axes.set_ylim(lowest - 0.02, max(highest, lowest + _RANGE) + 0.02)
    last = max(one.passes * len(one.mean) for one in curves)
    labels = []
    for one in curves:
        passes = [one.passes * (epoch + 1) for epoch in range(len(one.mean))]
        color, style = method_color(one.method), "--" if one.label == ADAMW else "-"
        axes.plot(passes, one.mean, color=color, ls=style, lw=1.6)
        axes.plot(passes[-1], one.mean[-1], "o", color=color, ms=5)
        text = one.label.replace(TWICE, "AdamW, 2x epochs").replace(", preconditioned", "")
        if passes[-1] < last:
            text += f", {passes[-1]:g} passes"
        labels.append((last, one.mean[-1], f"{text}: {one.mean[-1]:.2f}", color))
    axes.set_ylabel("test loss")
    axes.grid(color=GRID_COLOR)
    note = f"{setting}, Shakespeare, mean of {len(curves[0].by_seed)} seeds"
    axes.set_title(note, loc="left", fontsize=10, color=MUTED_COLOR)
    label_points(axes, labels)
