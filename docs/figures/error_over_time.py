"""Test error over training time: the methods of the study ``cheap`` on CIFAR-10."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from wsam._utils.plot_style import (
    FIGURE_WIDTH,
    GRID_COLOR,
    MUTED_COLOR,
    method_color,
    method_title,
    new_figure,
    set_title,
    variant_name,
)
from wsam._utils.significance import welch_p
from wsam._utils.text import format_mean_std, mean_and_std
from wsam.lab import records
from wsam.lab.records import Record
from wsam.lab.run import Run
from wsam.paper.cheap import (
    COST,
    IN_BUDGET,
    LATE,
    LATE_SGD,
    MODEL,
    RISING,
    SHORTER,
    SHORTER_SAM,
    SHORTER_WSAM,
    TWICE,
    cheap,
)
from wsam.paper.comparison import gather
from wsam.paper.study import choose
from wsam.paper.table import PAPER_SEEDS

DATA = "CIFAR-10"
NAMES = {
    TWICE: "SGD, twice the epochs",
    "WSAM reuse 2, last quarter": "WSAM in the last quarter, every second step, gamma 0.7",
    "WSAM reuse 2, last quarter, paper's gamma": "WSAM in the last quarter, every second step",
    "WSAM reuse 4, last half, paper's gamma": "WSAM in the last half, every fourth step",
    RISING: "WSAM in the last 3/4, every eighth step, rising gamma",
    LATE: "WSAM in the last 30%, every second step, late decay",
    SHORTER: "WSAM on every second step, 0.72 times the epochs",
    IN_BUDGET: "WSAM on every second step, 0.76 times the epochs",
    "WSAM reuse 2, last 3/4, 0.82x epochs": "WSAM in the last 3/4, every second step, "
    "0.82 times the epochs",
    "WSAM reuse 2, last half, 0.91x epochs": "WSAM in the last half, every second step, "
    "0.91 times the epochs",
    "WSAM reuse 5": "WSAM on every fifth step",
    "WSAM reuse 8, smaller gamma": "WSAM on every eighth step, smaller gamma",
    "SGD, 1.15x epochs": "SGD, 1.15 times the epochs",
    SHORTER_SAM: "SAM, 0.58 times the epochs",
    SHORTER_WSAM: "WSAM, 0.58 times the epochs",
    "LookSAM 5": "LookSAM, two passes on every fifth step",
    "SAM, 1/4-batch ascent, last 3/8": "SAM in the last 3/8, ascent on a quarter of the batch",
}
"""Rows of the study whose names need its notes, in words."""
TRIED = {
    "WSAM reuse 2, last quarter",
    "WSAM reuse 2, last quarter, paper's gamma",
    "SAM, 1/4-batch ascent, last 3/8",
    LATE,
    RISING,
    "WSAM reuse 5",
    "MSAM, rho 1",
}
"""Rows that only the table names: settings of one run that others with as much time beat."""
_EQUAL = 1.1
"""Largest ratio of training times that count as equal."""
_SIGNIFICANT = 0.05
_TITLE = 60
"""Most characters of a line in the title."""
MARKERS = "osD^vp><"
"""Shapes whose inside is visible, so that a single run looks open."""


@dataclass(frozen=True)
class TimedResult:
    """Errors and training times of a method's runs.

    Attributes:
        method: Name of the method in `METHOD_STYLES`.
        title: Row of the study, in words.
        cost: Mean training time, relative to 200 epochs of SGD on the same hardware.
        errors: Test errors of the last epoch in percent, one per seed.
        minutes: Training times without evaluation and compilation, of runs that did not share a GPU.
        keys: Keys of the runs.
        tried: Whether the picture shows it without its name.
    """

    method: str
    title: str
    cost: float
    errors: tuple[float, ...]
    minutes: tuple[float, ...]
    keys: tuple[str, ...]
    tried: bool

    @property
    def mean_error(self) -> float:
        """Mean of the errors."""
        return _known(self.errors)[0]

    @property
    def mean_minutes(self) -> float:
        """Mean of the training times."""
        return _known(self.minutes)[0]

    @property
    def error(self) -> str:
        """Mean and deviation of the errors: ``3.63 ± 0.02``."""
        return format_mean_std(*_known(self.errors), "{:.2f}".format)

    @property
    def label(self) -> str:
        """Name, error and number of runs: ``WSAM: 3.63 ± 0.02 (n = 3)``."""
        return f"{self.title}: {self.error} (n = {len(self.errors)})"


def _known(values: Sequence[float]) -> tuple[float, float | None]:
    mean, deviation = mean_and_std(values)
    assert mean is not None
    return mean, deviation


def read_times(results: Path) -> list[TimedResult]:
    """Read the rows of the study ``cheap`` on CIFAR-10 whose training time is known, in its order.

    Rows whose runs all shared a GPU have none. SGD with a late decay, a control of WSAM's row, is left
    out.
    """
    study = choose(cheap(), results)
    costs = gather(study.select(f"*/{DATA}, {COST}"), results)
    cost = {entry.cell.row[0]: entry.ours.mean for entry in costs}
    table = study.select(f"*/{DATA}")
    # The main table, which shares some of the runs, has more seeds than the study.
    table = table.seeded(PAPER_SEEDS)
    found = []
    for cell in table.cells:
        read = [(run, records.read(results, run)) for run in cell.runs]
        finished = [(run, one) for run, one in read if one and records.is_finished(one)]
        row_cost = cost[cell.row[0]]
        if row_cost is not None and cell.row[0] != LATE_SGD:
            found.append(_result(cell.row[0], row_cost, finished))
    return found


def _result(row: str, cost: float, group: list[tuple[Run, Record]]) -> TimedResult:
    run = group[0][0]
    return TimedResult(
        variant_name(run.method, run.options),
        NAMES.get(row, row),
        cost,
        tuple(record["curve"][-1]["test_error"] for _, record in group),
        tuple(
            records.training_seconds(record) / 60
            for _, record in group
            if records.has_own_device(record)
        ),
        tuple(run.key for run, _ in group),
        row in TRIED,
    )


def front(results: Sequence[TimedResult]) -> list[TimedResult]:
    """Return the results that no other one beats both in time and in mean error, fastest first."""
    best: list[TimedResult] = []
    for one in sorted(results, key=_point):
        if not best or one.mean_error < best[-1].mean_error:
            best.append(one)
    return best


def message(results: Sequence[TimedResult]) -> str:
    """Return which methods have lower errors than SGD with as much time (Welch's test, p < 0.05).

    Without such a method: which one has the lowest mean error.
    """
    bases = [one for one in results if one.method == "vanilla"]
    longest = max(bases, key=lambda one: one.mean_minutes, default=None)
    better = [] if longest is None else [one for one in results if _beats(one, longest)]
    if better:
        *first, last = dict.fromkeys(method_title(one.method) for one in better)
        names = f"{', '.join(first)} and {last}" if first else last
        verb = "have lower errors" if first else "has a lower error"
        return f"{names} {verb} than SGD at equal time"
    lowest = min(results, key=lambda one: one.mean_error)
    return f"{lowest.title} has the lowest mean error"


def _beats(one: TimedResult, base: TimedResult) -> bool:
    """Return whether a method has a significantly lower error in no more than base's time."""
    p = welch_p(one.errors, base.errors)
    in_time = one.mean_minutes < _EQUAL * base.mean_minutes
    lower = one.mean_error < base.mean_error
    return p is not None and p < _SIGNIFICANT and in_time and lower


def draw_times(results: Sequence[TimedResult]) -> Figure:
    """Draw error over time: means, with deviations for several runs; a single run is open.

    A line connects SGD's points, a dashed one those on the front. The legend is in the order of time.
    """
    named = sorted((one for one in results if not one.tried), key=_point)
    tried = [_point(one) for one in results if one.tried]
    figure = new_figure(FIGURE_WIDTH, 4.2 + 0.19 * (len(named) + bool(tried)))
    axes, markers = figure.subplots(), []
    for number, one in enumerate(named):
        (minutes, time_std), (error, std) = _known(one.minutes), _known(one.errors)
        color = method_color(one.method)
        face = color if len(one.errors) > 1 else "none"  # which shows markers behind it
        shape = MARKERS[number % len(MARKERS)]
        style: Any = {"fmt": shape, "ms": 8, "mew": 1.8, "mfc": face, "color": color}
        depth = 3 if len(one.errors) == 1 else 4  # a single run does not cover a mean
        bars = axes.errorbar(minutes, error, std, time_std, capsize=3, zorder=depth, **style)
        markers.append(bars[0])
    bases = sorted(_point(one) for one in results if one.method == "vanilla")
    if bases:
        axes.plot(*zip(*bases, strict=True), color=method_color("vanilla"), lw=1.4, zorder=1)
    times = [one.mean_minutes for one in results]
    axes.set(xlim=(0.8 * min(times), 1.08 * max(times)), ylabel="test error (%)")
    axes.set_xlabel("training time (minutes)")
    axes.grid(color=GRID_COLOR, zorder=0)
    note = f"{MODEL}, {DATA}; full: mean and deviation, open: one run; dashed: the front"
    axes.set_title(note, loc="left", fontsize=9, color=MUTED_COLOR)
    set_title(figure, textwrap.fill(message(results), _TITLE))
    points = [_point(one) for one in front(results)]
    axes.plot(*zip(*points, strict=True), color=MUTED_COLOR, lw=1, ls="--", zorder=1)
    labels = [one.label for one in named]
    if tried:
        small: Any = {"ls": "none", "marker": "o", "ms": 4, "mfc": "none", "color": MUTED_COLOR}
        markers += axes.plot(*zip(*tried, strict=True), **small, zorder=2)
        labels.append("other settings of these methods (n = 1 each)")
    figure.legend(
        markers,
        labels,
        loc="outside lower left",
        fontsize=9,
        labelspacing=0.35,
        borderaxespad=0.1,
    )
    return figure


def _point(one: TimedResult) -> tuple[float, float]:
    return one.mean_minutes, one.mean_error
