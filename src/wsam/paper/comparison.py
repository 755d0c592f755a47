"""Our results next to the paper's: values read from records, and whether they differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from wsam._utils.text import mean_and_std
from wsam.lab import records
from wsam.lab.passes import passes_per_step
from wsam.lab.records import Record
from wsam.lab.run import Run
from wsam.paper import minima
from wsam.paper.table import Cell, Measure, Table, format_mean, format_number

NOT_RUN = "not run"


@dataclass(frozen=True)
class Ours:
    """Our values for a cell, one per finished run.

    Attributes:
        values: Of the finished runs.
        failed: Number of runs that stopped because the loss was not finite.
        unmeasured: Number of finished runs without the cell's quantity.
        planned: Number of runs of the cell.
        keys: Keys of the runs with a record: finished, failed and unmeasured ones.
    """

    values: tuple[float, ...]
    failed: int = 0
    unmeasured: int = 0
    planned: int = 0
    keys: tuple[str, ...] = ()

    @property
    def n(self) -> int:
        """Number of values."""
        return len(self.values)

    @property
    def mean(self) -> float | None:
        """Mean of the values; None without values."""
        return mean_and_std(self.values)[0]

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation; None for fewer than two values."""
        return mean_and_std(self.values)[1]

    def text(self, decimals: int) -> str:
        """Return ``3.61 ± 0.05 (n = 3)``, or the reason why there is no value."""
        if self.mean is None:
            reasons = [(self.failed, "failed"), (self.unmeasured, "not measured")]
            return ", ".join(f"{count} {what}" for count, what in reasons if count) or NOT_RUN
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{format_mean(self.mean, self.deviation, decimals)} (n = {self.n}{failed})"


@dataclass(frozen=True)
class Entry:
    """A cell and our result for it.

    Args:
        cell: The cell.
        ours: Our values.
        best: The same cell at each run's best epoch, if the table shows it.
    """

    cell: Cell
    ours: Ours
    best: Entry | None = None

    @property
    def text(self) -> str:
        """Our result as text. Passes are counted, so they have no deviation."""
        if self.cell.measure is Measure.PASSES and self.ours.mean is not None:
            return format_number(self.ours.mean, self.cell.measure.decimals)
        return self.ours.text(self.cell.measure.decimals)

    @property
    def paper_text(self) -> str:
        """The paper's figure as text; empty if it prints none."""
        paper = self.cell.paper
        if paper is None:
            return ""
        return format_mean(paper.mean, paper.deviation, self.cell.measure.decimals)

    @property
    def differs(self) -> bool | None:
        """Whether our mean differs from the paper's by more than every known deviation.

        Means that are equal after rounding to the paper's decimals do not differ. None if a figure
        is missing, or if neither side has a deviation.
        """
        paper, mean, decimals = self.cell.paper, self.ours.mean, self.cell.measure.decimals
        if paper is None or mean is None:
            return None
        if format_number(mean, decimals) == format_number(paper.mean, decimals):
            return False
        deviations = [d for d in (paper.deviation, self.ours.deviation) if d is not None]
        if not deviations:
            return None
        return abs(mean - paper.mean) > max(deviations) + 1e-9  # equality does not count


def _accuracy(record: Record) -> float | None:
    error = records.final_error(record)
    return None if error is None else 1 - error / 100


def _best_error(record: Record) -> float | None:
    errors = [epoch["test_error"] for epoch in record["curve"]]
    return min((float(error) for error in errors if error is not None), default=None)


def _percent_correct(error: float | None) -> float | None:
    return None if error is None else 100 - error


_FROM_RECORD: dict[Measure, Callable[[Record], float | None]] = {
    Measure.TEST_ERROR: records.final_error,
    Measure.BEST_ERROR: _best_error,
    Measure.TEST_ACCURACY: lambda record: _percent_correct(records.final_error(record)),
    Measure.BEST_ACCURACY: lambda record: _percent_correct(_best_error(record)),
    Measure.ACCURACY: _accuracy,
    Measure.TRAIN_LOSS: lambda record: record["curve"][-1]["train_loss"],
    Measure.TEST_METRIC: records.final_figure,
    Measure.TEST_LOSS: lambda record: record["curve"][-1].get("test_loss"),
    Measure.VALIDATION_ERROR: lambda record: record["curve"][-1].get("validation_error"),
    Measure.VALIDATION_LOSS: lambda record: record["curve"][-1].get("validation_loss"),
}
_EIGENVALUE_KEYS: dict[Measure, tuple[str, ...]] = {
    Measure.TOP_EIGENVALUE: (),
    Measure.EIGENVALUE_BY_BATCHES: (minima.TRAIN_MODE,),
    Measure.EIGENVALUE_ON_TEST: (minima.TEST_IMAGES,),
    **{one: (minima.READINGS, one) for one in Measure if one.startswith("top eigenvalue, ")},
}
"""Keys of each eigenvalue in a measurement."""


class RecordSource(Protocol):
    """Provides records of runs and the measurements at their minima."""

    def record(self, run: Run) -> Record | None:
        """Return the record of a run; None if there is none."""

    def minimum(self, run: Run) -> Mapping[str, Any] | None:
        """Return the measurement at a run's minimum; None if there is none."""


@dataclass(frozen=True)
class RecordFolder:
    """Records in a folder. Damaged files raise ValueError.

    Args:
        path: The folder.
        without: Keys of runs to skip, because their files are known to be damaged.
    """

    path: Path
    without: frozenset[str] = frozenset()

    def record(self, run: Run) -> Record | None:
        """Read the record of a run."""
        return None if run.key in self.without else records.read(self.path, run)

    def minimum(self, run: Run) -> Mapping[str, Any] | None:
        """Read the measurement at a run's minimum."""
        return minima.read_measurement(self.path, run)


def gather(table: Table, results: Path | RecordSource) -> list[Entry]:
    """Read our results for a table, one entry per cell.

    Args:
        table: The table.
        results: Folder of the records, which may be empty or missing; or another source of
            records.

    Raises:
        ValueError: A file in the folder is damaged.
    """
    source = RecordFolder(results) if isinstance(results, Path) else results
    references = [run for cell in table.cells for run in cell.reference]
    read = {run.key: source.record(run) for run in {*table.runs, *references}}
    entries = []
    for cell in table.cells:
        entry = Entry(cell, _read_cell(cell, read, source))
        if table.best_epoch and cell.measure is Measure.TEST_ERROR:
            best = replace(cell, column=f"{cell.column}, best epoch", measure=Measure.BEST_ERROR)
            entry = replace(entry, best=Entry(best, _read_cell(best, read, source)))
        entries.append(entry)
    return entries


def _read_cell(cell: Cell, read: Mapping[str, Record | None], source: RecordSource) -> Ours:
    values, failed, unmeasured = [], 0, 0
    for run in cell.runs:
        record = read[run.key]
        if record is None:
            continue
        if not records.is_finished(record):
            failed += 1
            continue
        value = _read_value(cell, run, record, read, source)
        if value is None:
            unmeasured += 1
        else:
            values.append(value)
    keys = tuple(run.key for run in cell.runs if read[run.key] is not None)
    return Ours(tuple(values), failed, unmeasured, len(cell.runs), keys)


def _read_value(
    cell: Cell,
    run: Run,
    record: Record,
    read: Mapping[str, Record | None],
    source: RecordSource,
) -> float | None:
    """Return the cell's quantity for a finished run; None if it was not measured."""
    if cell.measure is Measure.COST:
        return _cost(record, cell, read)
    if cell.measure is Measure.PASSES:
        return _passes(run, cell)
    if cell.measure in _EIGENVALUE_KEYS:
        measurement = source.minimum(run)
        keys = _EIGENVALUE_KEYS[cell.measure]
        return None if measurement is None else minima.read_eigenvalue(measurement, *keys)
    return _FROM_RECORD[cell.measure](record)


def _cost(record: Record, cell: Cell, read: Mapping[str, Record | None]) -> float | None:
    """Return a run's training time relative to that of the cell's first reference.

    The time of an epoch is the mean of all references that were trained on the same hardware. Runs
    that shared a GPU with others have no comparable time.
    """
    found = [one for run in cell.reference if (one := read[run.key]) is not None]
    timed = [one for one in found if records.has_own_device(one)]
    same = [one for one in timed if _device(one) == _device(record)]
    if not same or not records.has_own_device(record):
        return None
    seconds = fmean(records.training_seconds(one) / len(one["curve"]) for one in same)
    return records.training_seconds(record) / (seconds * cell.reference[0].epochs)


def _passes(run: Run, cell: Cell) -> float | None:
    """Return a run's passes relative to those of the cell's first reference."""
    passes = passes_per_step(run)
    return None if passes is None else passes * run.epochs / cell.reference[0].epochs


def _device(record: Record) -> tuple[Any, Any]:
    """Return the GPU, or the processor and the number of its threads."""
    hardware = record.get("hardware") or {}
    return hardware.get("gpu") or hardware.get("cpu"), hardware.get("threads")
