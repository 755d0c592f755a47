"""Test error over training time: ResNet18 on CIFAR-10 in the paper's setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wsam._format import format_mean_std, mean_and_std
from wsam.lab import records
from wsam.lab.records import Record
from wsam.lab.run import Run
from wsam.paper.cifar import EPOCHS, METHODS, base_run, cifar
from wsam.plot_style import (
    FIGURE_WIDTH,
    GRID_COLOR,
    METHOD_STYLES,
    MUTED_COLOR,
    label_points,
    method_title,
    new_figure,
    set_title,
    variant_name,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODEL, DATA = "ResNet18", "CIFAR-10"
_EQUAL = 1.1
"""Largest ratio of training times that count as equal."""


@dataclass(frozen=True)
class TimedResult:
    """Errors and training times of a method's runs.

    Attributes:
        method: Name of the method.
        epochs: Epochs of each run.
        errors: Test errors of the last epoch in percent, one per seed.
        minutes: Training times, one per seed: epochs times the median time of an epoch, without
            evaluation and compilation.
        keys: Keys of the runs.
    """

    method: str
    epochs: int
    errors: tuple[float, ...]
    minutes: tuple[float, ...]
    keys: tuple[str, ...]

    @property
    def label(self) -> str:
        """Name, error and number of runs: ``WSAM 3.63 ± 0.02 (n = 3)``."""
        error = format_mean_std(*_known(self.errors), "{:.2f}".format)
        return f"{method_title(self.method)} {error} (n = {len(self.errors)})"


def _known(values: Sequence[float]) -> tuple[float, float | None]:
    mean, deviation = mean_and_std(values)
    assert mean is not None
    return mean, deviation


def read_times(results: Path) -> list[TimedResult]:
    """Read the methods that were trained in the paper's setting from a folder of records.

    A method of the paper's table has the hyperparameters of the table. Of any other method, there is
    one result for each choice of hyperparameters.
    """
    planned = {run.key for run in cifar().select(f"{MODEL}/*/{DATA}").runs}
    groups: dict[Run, list[tuple[Run, Record]]] = {}
    for path in sorted(results.glob("*.json")):
        if not records.is_named_by_key(path):
            continue
        record = records.read_named(path)
        run = Run.from_dict(record["settings"])
        if not records.is_finished(record) or not _is_setting_of_paper(run):
            continue
        if run.key in planned or _method_name(run) not in METHODS.values():
            groups.setdefault(run.replace(seed=0), []).append((run, record))
    order = list(METHOD_STYLES)
    found = [_result(group) for group in groups.values()]
    return sorted(found, key=lambda one: order.index(one.method) if one.method in order else -1)


def _is_setting_of_paper(run: Run) -> bool:
    """Return whether only the method and its hyperparameters differ from the paper's runs."""
    method = "SGDM" if run.epochs == 2 * EPOCHS else "SAM"
    paper = base_run(MODEL, DATA, method)
    own = ("method", "hyper", "geometry", "options", "seed")
    return run == paper.replace(**{name: getattr(run, name) for name in own})


def _method_name(run: Run) -> str:
    return variant_name(run.method, run.options)


def _result(group: list[tuple[Run, Record]]) -> TimedResult:
    run = group[0][0]
    return TimedResult(
        _method_name(run),
        run.epochs,
        tuple(record["curve"][-1]["test_error"] for _, record in group),
        tuple(run.epochs * record["epoch_seconds"] / 60 for _, record in group),
        tuple(run.key for run, _ in group),
    )


def draw_times(results: Sequence[TimedResult]) -> Figure:
    """Draw error over time: means, with deviations for several runs; a single run is open."""
    figure = new_figure(FIGURE_WIDTH, 4.0)
    axes = figure.subplots()
    labels = []
    for one in results:
        (minutes, time_std), (error, std) = _known(one.minutes), _known(one.errors)
        color = METHOD_STYLES[one.method].light if one.method in METHOD_STYLES else MUTED_COLOR
        face = color if len(one.errors) > 1 else "white"
        style: Any = {"fmt": "o", "ms": 8, "mew": 1.8, "mfc": face, "color": color, "capsize": 3}
        axes.errorbar(minutes, error, std, time_std, zorder=3, **style)
        labels.append((minutes, error, one.label, color))
    times = [minutes for minutes, *_ in labels]
    axes.set(xlim=(0, 1.08 * max(times)), ylabel="test error (%)")
    axes.set_xlabel("training time (minutes)")
    axes.grid(color=GRID_COLOR, zorder=0)
    note = f"{MODEL}, {DATA}; dots: mean and deviation, circles: one run"
    axes.set_title(note, loc="left", fontsize=10, color=MUTED_COLOR)
    best = method_title(min(results, key=lambda one: _known(one.errors)[0]).method)
    equal = max(times) < _EQUAL * min(times)
    message = f"{best} has the lowest mean error"
    set_title(figure, f"At equal training time, {message}" if equal else message)
    label_points(axes, labels, right=12)
    return figure
