"""The results of a sweep: one row per setting, the best first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wsam._utils.text import format_mean_std, mean_and_std
from wsam.lab import records
from wsam.lab.records import Record
from wsam.lab.run import Run, with_seed
from wsam.lab.titles import figure_name, figure_splits, metric_label, run_titles
from wsam.sweep.settings import SEEDS


@dataclass(frozen=True)
class Row:
    """Runs with the same settings and different seeds.

    Args:
        name: What differs from the other rows.
        run: One of the runs.
        objective: The mean over seeds of `records.objective`; None if no run finished.
        figures: Mean and deviation of the metric as text, by split.
        finished: Number of finished runs.
        failed: Number of runs whose loss was not finite.
        seconds: Mean training time.
    """

    name: str
    run: Run
    objective: float | None
    figures: dict[str, str]
    finished: int
    failed: int
    seconds: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return the row as JSON-compatible data."""
        settings = self.run.to_dict()
        return {
            "name": self.name,
            "settings": {k: v for k, v in settings.items() if k not in SEEDS},
            "objective": self.objective,
            "figures": self.figures,
            "finished": self.finished,
            "failed": self.failed,
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class Summary:
    """The rows of a sweep.

    Args:
        rows: The best first. Rows with failed runs come last: their means cover the others only.
        metric: Entry ``metric`` of the records.
    """

    rows: tuple[Row, ...]
    metric: dict[str, Any]

    @property
    def objective_name(self) -> str:
        """The figure that decides: ``validation error``."""
        return figure_name(self.metric)

    @property
    def best(self) -> Row | None:
        """The best row; None if no run finished."""
        return next((row for row in self.rows if row.objective is not None), None)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the heads and rows of a table."""
        splits = figure_splits(self.metric)
        labels = (metric_label(self.metric, split) for split in splits)
        heads = ["run", *labels, "runs", "seconds"]
        rows = []
        for row in self.rows:
            runs = str(row.finished) + (f", {row.failed} failed" if row.failed else "")
            seconds = "-" if row.seconds is None else f"{row.seconds:.1f}"
            figures = [row.figures.get(split, "-") for split in splits]
            rows.append([row.name, *figures, runs, seconds])
        return heads, rows

    def conclusion(self) -> list[str]:
        """Return which row is best and by which figure, in sentences of one line."""
        if self.best is None:
            return ["no run finished"]
        metric, split = self.metric, self.metric["split"]
        direction = "lowest" if metric["lower_is_better"] else "highest"
        figure = f"{self.best.figures[split]}{metric['unit']}"
        lines = [f"{direction} {self.objective_name}: {self.best.name}, {figure}"]
        if split == "test" and len(self.rows) > 1:
            lines.append(
                "The test set made this choice. To choose by validation: --grid validation=0.1"
            )
        return lines


def summarize(runs: Iterable[Run], out: Path) -> Summary:
    """Read the records of a sweep. Runs without a readable record are left out.

    Args:
        runs: The runs.
        out: The results folder.
    """
    by_setting: dict[Run, list[Record]] = {}
    metric = dict(records.METRIC)
    for run in runs:
        found = by_setting.setdefault(with_seed(run, 0), [])
        try:
            record = records.read(out, run)
        except (OSError, ValueError):
            continue
        if record is not None:
            found.append(record)
            if records.is_finished(record):
                metric = records.metric(record)
    titles = run_titles(by_setting)
    rows = [_row(titles[run.key], run, found, metric) for run, found in by_setting.items()]
    rows.sort(key=lambda row: (row.objective is None, row.failed > 0, row.objective or 0.0))
    return Summary(tuple(rows), metric)


def _row(name: str, run: Run, found: list[Record], metric: dict[str, Any]) -> Row:
    """Return the results of the runs with the same settings."""
    finished = [record for record in found if records.is_finished(record)]
    objectives = [value for value in map(records.objective, finished) if value is not None]
    figures = {}
    for split in figure_splits(metric):
        values = (records.final_figure(record, split) for record in finished)
        mean, std = mean_and_std([value for value in values if value is not None])
        if mean is not None:
            figures[split] = format_mean_std(mean, std, lambda v: _number(v, metric["unit"]))
    return Row(
        name,
        run,
        mean_and_std(objectives)[0],
        figures,
        len(finished),
        len(found) - len(finished),
        mean_and_std([float(record["seconds"]) for record in finished])[0],
    )


def _number(value: float, unit: str) -> str:
    return f"{value:.2f}" if unit == "%" else f"{value:.4g}"
