"""The figures of the demonstration, read from its records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wsam._format import format_mean_std, mean_and_std
from wsam.demo.config import WSAM, Contender, contenders
from wsam.demo.jobs import check_measurements, read_sharpness
from wsam.lab import records
from wsam.lab.run import Run
from wsam.report.results import Folder, Group, Result, gather, group_key

Figure = tuple[float, float | None]
"""A mean and, for two or more runs, a sample standard deviation."""
ONE_SEED = "one seed has no deviation, so the difference cannot be judged"


@dataclass(frozen=True)
class Row:
    """The results of one contender."""

    contender: Contender
    group: Group
    sharpness: tuple[float, ...]

    @property
    def figures(self) -> dict[str, Figure]:
        """All figures, each as mean and standard deviation over the seeds."""
        values = {
            "test_error": self.group.values("test_error"),
            "train_loss": self.group.values("train_loss"),
            "sharpness": list(self.sharpness),
            "top_eigenvalue": self.group.eigenvalues,
            "seconds": self.group.seconds,
        }
        figures: dict[str, Figure] = {}
        for name, numbers in values.items():
            mean, std = mean_and_std(numbers)
            assert mean is not None
            figures[name] = (mean, std)
        return figures


@dataclass(frozen=True)
class Summary:
    """All rows, and the folder they were read from."""

    folder: Folder
    rows: dict[str, Row]
    seeds: tuple[int, ...]

    def error_gap(self, name: str, other: str) -> tuple[float, float | None]:
        """Return by how much the mean error of a row is below another's, and the sum of deviations.

        The sum is None for a single seed, which has no deviation.
        """
        ours, theirs = (self.rows[n].figures["test_error"] for n in (name, other))
        gap = theirs[0] - ours[0]
        return gap, None if ours[1] is None or theirs[1] is None else ours[1] + theirs[1]

    @property
    def comparisons(self) -> list[str]:
        """One sentence for each other row that compares it with WSAM."""
        return [self._comparison(other) for other in self.rows if other != WSAM]

    def _comparison(self, other: str) -> str:
        gap, spread = self.error_gap(WSAM, other)
        ours, theirs = (error_text(self.rows[n]) for n in (WSAM, other))
        start = f"WSAM against {other}: test error {ours}% and {theirs}%"
        if spread is None:
            return f"{start}; {ONE_SEED}."
        if abs(gap) <= spread:
            return f"{start}; no difference beyond the sum of their deviations."
        word = "lower" if gap > 0 else "higher"
        return f"{start}; {word} by {abs(gap):.1f}, more than the sum of their deviations."

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON data."""
        return {
            "seeds": list(self.seeds),
            "rows": {
                name: {
                    "settings": row.contender.run.replace(seed=0, noise_seed=0).to_dict(),
                    "keys": [result.run.key for result in row.group.results],
                    **{k: {"mean": m, "deviation": d} for k, (m, d) in row.figures.items()},
                }
                for name, row in self.rows.items()
            },
            "claims": self.comparisons,
        }


def error_text(row: Row) -> str:
    """Return the test error of a row for a sentence: ``4.3 ± 0.2``."""
    return format_mean_std(*row.figures["test_error"], "{:.1f}".format)


def summarise(out: Path, seeds: Sequence[int]) -> Summary:
    """Read the records of the demonstration for the given seeds.

    Raises:
        ValueError: The record or a measurement of a seed is missing or damaged, or its run failed.
    """
    folder = gather(out)
    found = {result.run.key: result for result in folder.results}
    rows, groups = {}, []
    for name, contender in contenders().items():
        runs = contender.runs(seeds)
        for run in runs:
            _check_complete(out, run, found.get(run.key))
        group = Group(runs[0], tuple(found[run.key] for run in runs))
        values = tuple(read_sharpness(out, run)["value"] for run in runs)
        rows[name] = Row(contender, group, values)
        groups.append(group)
    return Summary(Folder(out, groups, folder.troubles), rows, tuple(seeds))


def _check_complete(out: Path, run: Run, result: Result | None) -> None:
    """Raise if a run is not finished and measured: no mean may silently exclude a seed."""
    path = records.record_path(out, run)
    if result is None:
        raise ValueError(f"{path} is missing or damaged: call `wsam demo` again to create it")
    if not result.finished:
        raise ValueError(f"{path} is of a run that failed: call `wsam demo` again")
    check_measurements(out, run)


def names() -> dict[str, str]:
    """Return the names of the rows by `group_key`, for the report."""
    return {group_key(contender.run): name for name, contender in contenders().items()}
