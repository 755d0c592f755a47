"""Test error over training time: the methods of the study ``cheap`` on CIFAR-10."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wsam._format import format_mean_std, mean_and_std
from wsam.lab import records
from wsam.lab.records import Record
from wsam.lab.run import Run
from wsam.paper.cheap import MODEL, SGD, TWICE, cheap
from wsam.paper.study import choose
from wsam.plot_style import (
    FIGURE_WIDTH,
    GRID_COLOR,
    METHOD_STYLES,
    MUTED_COLOR,
    label_points,
    new_figure,
    set_title,
    variant_name,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DATA = "CIFAR-10"
_EQUAL = 1.1
"""Largest ratio of training times that count as equal."""
_MOST_SEEDS = 5
_SHAPES = "osD^vP*X"
_MOST_LABELS = 8
"""Up to so many points have labels; more have a legend."""


@dataclass(frozen=True)
class TimedResult:
    """Errors and training times of a method's runs.

    Attributes:
        method: Name of the method in `METHOD_STYLES`.
        title: Row of the study.
        epochs: Epochs of each run.
        errors: Test errors of the last epoch in percent, one per seed.
        minutes: Training times, one per seed, without evaluation and compilation.
        keys: Keys of the runs.
    """

    method: str
    title: str
    epochs: int
    errors: tuple[float, ...]
    minutes: tuple[float, ...]
    keys: tuple[str, ...]

    @property
    def label(self) -> str:
        """Name, error and number of runs: ``WSAM 3.63 ± 0.02 (n = 3)``."""
        error = format_mean_std(*_known(self.errors), "{:.2f}".format)
        return f"{self.title} {error} (n = {len(self.errors)})"


def _known(values: Sequence[float]) -> tuple[float, float | None]:
    mean, deviation = mean_and_std(values)
    assert mean is not None
    return mean, deviation


def read_times(results: Path) -> list[TimedResult]:
    """Read the rows of the study ``cheap`` on CIFAR-10 that have records, in its order."""
    table = choose(cheap().select(f"*/{DATA}"), results)
    # With all seeds that have a record, as the main table has five.
    table = table.seeded(range(_MOST_SEEDS))
    found = []
    for cell in table.cells:
        read = [(run, records.read(results, run)) for run in cell.runs]
        finished = [(run, one) for run, one in read if one is not None and records.is_finished(one)]
        if finished:
            found.append(_result(cell.row[0], finished))
    alone = SGD not in {one.title for one in found}
    return [replace(one, title=SGD) if alone and one.title == TWICE else one for one in found]


def _result(title: str, group: list[tuple[Run, Record]]) -> TimedResult:
    run = group[0][0]
    return TimedResult(
        variant_name(run.method, run.options),
        title,
        run.epochs,
        tuple(record["curve"][-1]["test_error"] for _, record in group),
        tuple(records.training_seconds(record) / 60 for _, record in group),
        tuple(run.key for run, _ in group),
    )


def front(results: Sequence[TimedResult]) -> list[TimedResult]:
    """Return the results that no other one beats both in time and in mean error, fastest first."""
    best: list[TimedResult] = []
    for one in sorted(results, key=lambda one: (_known(one.minutes)[0], _known(one.errors)[0])):
        if not best or _known(one.errors)[0] < _known(best[-1].errors)[0]:
            best.append(one)
    return best


def draw_times(results: Sequence[TimedResult]) -> Figure:
    """Draw error over time: means, with deviations for several runs; a single run is open.

    Many points have a legend instead of labels, and a line connects those on the front.
    """
    many = len(results) > _MOST_LABELS
    figure = new_figure(FIGURE_WIDTH, 4.0 + 0.09 * len(results) * many)
    axes = figure.subplots()
    labels = []
    for number, one in enumerate(results):
        (minutes, time_std), (error, std) = _known(one.minutes), _known(one.errors)
        color = METHOD_STYLES[one.method].light if one.method in METHOD_STYLES else MUTED_COLOR
        face = color if len(one.errors) > 1 else "white"
        shape = _SHAPES[number % len(_SHAPES)] if many else "o"
        style: Any = {"fmt": shape, "ms": 8, "mew": 1.8, "mfc": face, "color": color, "capsize": 3}
        axes.errorbar(minutes, error, std, time_std, zorder=3, label=one.label, **style)
        labels.append((minutes, error, one.label, color))
    times = [_known(one.minutes)[0] for one in results]
    axes.set(xlim=(0.9 * min(times) * many, 1.08 * max(times)), ylabel="test error (%)")
    axes.set_xlabel("training time (minutes)")
    axes.grid(color=GRID_COLOR, zorder=0)
    kinds = "full: mean and deviation, open: one run; line: the front"
    note = f"{MODEL}, {DATA}; " + (kinds if many else "dots: mean and deviation, circles: one run")
    axes.set_title(note, loc="left", fontsize=10, color=MUTED_COLOR)
    lowest = min(results, key=lambda one: _known(one.errors)[0])
    equal = max(times) < _EQUAL * min(times)
    message = f"{lowest.title} has the lowest mean error"
    set_title(figure, f"At equal training time, {message}" if equal else message)
    if not many:
        label_points(axes, labels, right=12)
        return figure
    points = [(_known(one.minutes)[0], _known(one.errors)[0]) for one in front(results)]
    axes.plot(*zip(*points, strict=True), color=MUTED_COLOR, lw=1, ls="--", zorder=1)
    style = {"fontsize": 7, "handletextpad": 0.2, "columnspacing": 0.6, "borderaxespad": 0.1}
    figure.legend(loc="outside lower left", ncols=2, **style)
    return figure
