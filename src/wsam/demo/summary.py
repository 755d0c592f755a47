"""The figures of the demonstration, read from its records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wsam._format import format_mean_std, mean_and_std
from wsam.demo.setting import WSAM, Contender, contenders
from wsam.demo.work import check_measured, read_sharpness
from wsam.lab import records
from wsam.lab.run import Run
from wsam.report.gather import Folder, Group, Result, gather, group_key

Figure = tuple[float, float | None]
"""A mean and, from two runs on, a sample deviation."""
ONE_SEED = "one seed has no deviation, so nothing can be said of the difference"


@dataclass(frozen=True)
class Row:
    """What came of one contender."""

    contender: Contender
    group: Group
    sharpness: tuple[float, ...]

    @property
    def figures(self) -> dict[str, Figure]:
        """Return all figures, each a mean and a deviation over the seeds."""
        values = {
            "test_error": self.group.values("test_error"),
            "train_loss": self.group.values("train_loss"),
            "sharpness": list(self.sharpness),
            "top_eigenvalue": self.group.eigenvalues,
            "seconds": self.group.seconds,
        }
        made: dict[str, Figure] = {}
        for name, numbers in values.items():
            mean, deviation = mean_and_std(numbers)
            assert mean is not None
            made[name] = (mean, deviation)
        return made


@dataclass(frozen=True)
class Summary:
    """All rows, and the folder they were read from."""

    folder: Folder
    rows: dict[str, Row]
    seeds: tuple[int, ...]

    def lower(self, name: str, than: str) -> tuple[float, float | None]:
        """Return by how much a row's mean error is below another's, and the sum of deviations.

        The sum is None where there is one seed: then there is no deviation to compare with.
        """
        ours, theirs = (self.rows[n].figures["test_error"] for n in (name, than))
        gap = theirs[0] - ours[0]
        return gap, None if ours[1] is None or theirs[1] is None else ours[1] + theirs[1]

    @property
    def claims(self) -> list[str]:
        """Say in a sentence each how WSAM compares with every other row, whatever came out."""
        return [self._sentence(other) for other in self.rows if other != WSAM]

    def _sentence(self, other: str) -> str:
        gap, spread = self.lower(WSAM, other)
        ours, theirs = (error_text(self.rows[n]) for n in (WSAM, other))
        start = f"WSAM against {other}: test error {ours}% and {theirs}%"
        if spread is None:
            return f"{start}; {ONE_SEED}."
        if abs(gap) <= spread:
            return f"{start}; no difference beyond the sum of their deviations."
        word = "lower" if gap > 0 else "higher"
        return f"{start}; {word} by {abs(gap):.1f}, more than the sum of their deviations."

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain data."""
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
            "claims": self.claims,
        }


def error_text(row: Row) -> str:
    """Return a row's test error for a sentence: ``4.3 ± 0.2``."""
    return format_mean_std(*row.figures["test_error"], "{:.1f}".format)


def summarise(out: Path, seeds: Sequence[int]) -> Summary:
    """Read the demonstration's records, those of the given seeds alone.

    Raises:
        ValueError: A seed's record or measurement is missing, damaged, or of a run that failed.
    """
    folder = gather(out)
    found = {result.run.key: result for result in folder.results}
    rows, kept = {}, []
    for name, contender in contenders().items():
        runs = contender.runs(seeds)
        for run in runs:
            _check_whole(out, run, found.get(run.key))
        group = Group(runs[0], tuple(found[run.key] for run in runs))
        values = tuple(read_sharpness(out, run)["value"] for run in runs)
        rows[name] = Row(contender, group, values)
        kept.append(group)
    return Summary(Folder(out, kept, folder.troubles), rows, tuple(seeds))


def _check_whole(out: Path, run: Run, result: Result | None) -> None:
    """Raise where a run is not finished and measured: a mean without it would not be what it says."""
    path = records.record_path(out, run)
    if result is None:
        raise ValueError(f"{path} is missing or damaged: call `wsam demo` again to make it")
    if not result.finished:
        raise ValueError(f"{path} is of a run that failed: call `wsam demo` again")
    check_measured(out, run)


def names() -> dict[str, str]:
    """Return the rows' names by their groups, for the report."""
    return {group_key(contender.run): name for name, contender in contenders().items()}
