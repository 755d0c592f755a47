"""What a results folder holds for a cell, and whether it differs from what the paper says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from wsam._format import mean_and_std
from wsam.lab import records
from wsam.lab.records import Record
from wsam.lab.run import Run
from wsam.paper import minimum
from wsam.paper.table import Cell, Measure, Table, number, with_deviation

NOT_RUN = "not run"


@dataclass(frozen=True)
class Ours:
    """Our figure for a cell: one value per finished run, and how many runs failed.

    Attributes:
        values: Of the finished runs.
        failed: How many ended because the loss was no longer finite.
        unmeasured: How many are finished but lack what the cell tells.
        planned: How many runs the cell has.
    """

    values: tuple[float, ...]
    failed: int = 0
    unmeasured: int = 0
    planned: int = 0

    @property
    def n(self) -> int:
        """How many values there are."""
        return len(self.values)

    @property
    def mean(self) -> float | None:
        """Their mean."""
        return mean_and_std(self.values)[0]

    @property
    def deviation(self) -> float | None:
        """Their sample deviation, from two on."""
        return mean_and_std(self.values)[1]

    def text(self, decimals: int) -> str:
        """Return ``3.61 ± 0.05 (n = 3)``, or why there is nothing."""
        if self.mean is None:
            reasons = [(self.failed, "failed"), (self.unmeasured, "not measured")]
            said = ", ".join(f"{count} {what}" for count, what in reasons if count)
            return said or NOT_RUN
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{with_deviation(self.mean, self.deviation, decimals)} (n = {self.n}{failed})"


class Yardstick(StrEnum):
    """The deviations that there are to hold a difference from the paper against."""

    BOTH = "both deviations"
    OURS = "our deviation; the paper prints none"
    PAPER = "the paper's deviation; ours, n = 1, has none"
    NONE = "n = 1, and the paper prints no deviation: there is none to compare with"


@dataclass(frozen=True)
class Entry:
    """A cell with our figure."""

    cell: Cell
    ours: Ours

    @property
    def text(self) -> str:
        """Our figure as text."""
        return self.ours.text(self.cell.measure.decimals)

    @property
    def paper_text(self) -> str:
        """The paper's figure as text; empty where it prints none."""
        paper = self.cell.paper
        if paper is None:
            return ""
        return with_deviation(paper.mean, paper.deviation, self.cell.measure.decimals)

    @property
    def yardstick(self) -> Yardstick | None:
        """What a difference is held against; None where a figure is missing."""
        paper = self.cell.paper
        if paper is None or self.ours.mean is None:
            return None
        if paper.deviation is None:
            return Yardstick.NONE if self.ours.deviation is None else Yardstick.OURS
        return Yardstick.PAPER if self.ours.deviation is None else Yardstick.BOTH

    @property
    def differs(self) -> bool | None:
        """Whether ours differs from the paper's by more than each deviation that is known.

        Figures that read alike do not differ: the paper's is rounded to what is read. None where it
        cannot be said: a figure is missing, or neither has a deviation.
        """
        paper, mean, decimals = self.cell.paper, self.ours.mean, self.cell.measure.decimals
        if paper is None or mean is None:
            return None
        if number(mean, decimals) == number(paper.mean, decimals):
            return False
        deviations = [d for d in (paper.deviation, self.ours.deviation) if d is not None]
        if not deviations:
            return None
        return abs(mean - paper.mean) > max(deviations) + 1e-9  # exactly a deviation is within it

    @property
    def difference(self) -> str:
        """A sentence that puts our figure beside the paper's."""
        paper, mean = self.cell.paper, self.ours.mean
        assert paper is not None
        assert mean is not None
        word = "above" if mean > paper.mean else "below"
        return f"{self.cell.name}: ours, {self.text}, is {word} the paper's, {self.paper_text}"


def _accuracy(record: Record) -> float | None:
    error = records.final_error(record)
    return None if error is None else 1 - error / 100


def _percent(record: Record) -> float | None:
    error = records.final_error(record)
    return None if error is None else 100 - error


def _best_percent(record: Record) -> float | None:
    found = [epoch["test_error"] for epoch in record["curve"]]
    errors = [error for error in found if error is not None]  # null: this epoch was not tested
    return 100 - float(min(errors)) if errors else None


_READ: dict[Measure, Callable[[Record], float | None]] = {
    Measure.TEST_ERROR: records.final_error,
    Measure.TEST_ACCURACY: _percent,
    Measure.BEST_ACCURACY: _best_percent,
    Measure.ACCURACY: _accuracy,
    Measure.TRAIN_LOSS: lambda record: record["curve"][-1]["train_loss"],
}


_READINGS = {
    Measure.TOP_EIGENVALUE: None,
    Measure.EIGENVALUE_BY_BATCHES: minimum.BY_BATCHES,
    Measure.EIGENVALUE_ON_TEST: minimum.ON_TEST,
}


class Source(Protocol):
    """Where the records of runs, and what was measured at their minima, come from."""

    def record(self, run: Run) -> Record | None:
        """Return the record of a run; None if there is none."""

    def minimum(self, run: Run) -> Mapping[str, Any] | None:
        """Return what was measured at a run's minimum; None if nothing was."""


@dataclass(frozen=True)
class FromFolder:
    """Records as they lie in a folder; what is damaged there is a ValueError.

    Args:
        path: The folder.
        without: Keys of runs not to be looked for, as their files are known to be damaged.
    """

    path: Path
    without: frozenset[str] = frozenset()

    def record(self, run: Run) -> Record | None:
        """Read the record of a run."""
        return None if run.key in self.without else records.read(self.path, run)

    def minimum(self, run: Run) -> Mapping[str, Any] | None:
        """Read what was measured at a run's minimum."""
        return minimum.read(self.path, run)


def value_of(measure: Measure, run: Run, record: Record, source: Source) -> float | None:
    """Return what a measure tells of a finished run; None if it was not measured."""
    if measure in _READINGS:
        found = source.minimum(run)
        return None if found is None else minimum.value_of(found, _READINGS[measure])
    return _READ[measure](record)


def gather(table: Table, results: Path | Source) -> list[Entry]:
    """Read the records of a table's runs.

    Args:
        table: The table.
        results: The folder of the records, which may be empty or missing; or another source, such
            as what was read from a folder before.

    Raises:
        ValueError: A file of the folder is damaged.
    """
    source = FromFolder(results) if isinstance(results, Path) else results
    found: dict[str, Record | None] = {}
    entries = []
    for cell in table.cells:
        values, failed, unmeasured = [], 0, 0
        for run in cell.runs:
            if run.key not in found:
                found[run.key] = source.record(run)
            record = found[run.key]
            if record is None:
                continue
            if not records.is_finished(record):
                failed += 1
                continue
            value = value_of(cell.measure, run, record, source)
            if value is None:
                unmeasured += 1
            else:
                values.append(value)
        entries.append(Entry(cell, Ours(tuple(values), failed, unmeasured, len(cell.runs))))
    return entries
