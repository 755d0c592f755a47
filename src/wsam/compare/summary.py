"""The figures of a comparison and the sentence that answers its question."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from wsam._utils.significance import LEVEL, interval
from wsam._utils.text import mean_and_std, pluralize
from wsam.compare.contenders import BASE, Contender, Point
from wsam.compare.differences import Difference, find_differences
from wsam.compare.formatting import format_number, format_p, format_seconds
from wsam.compare.sharpness import DISTANCES, RADIUS, Surroundings, read_sharpness
from wsam.compare.state import State, final_folder, trial_records
from wsam.lab import records
from wsam.lab.records import Record
from wsam.lab.run import Run

FORMAT = 1
USE_THE_BASE = "No method beats the base here beyond noise; use the base."
_EQUAL = 0.1
"""Training times or passes that differ by less count as equal."""
_MEASURED = {
    "time": "by the cost of an epoch measured in timing runs (processor time on a CPU)",
    "passes": "counted from the settings: a forward and backward pass for each gradient",
}
_BUSY = 0.2
"""Measured training times that differ from the planned ones by more are noted."""


@dataclass(frozen=True)
class Trial:
    """A trial of the search; `value` is None if it failed."""

    point: Point
    key: str
    value: float | None
    failure: str | None


@dataclass(frozen=True)
class Row:
    """The figures of a method.

    Args:
        method: The method.
        point: The chosen settings.
        trials: The trials of the search.
        epochs: Epochs of the final runs.
        epoch_seconds: Training time of an epoch, measured in the timing run.
        cost: Training time or passes of an epoch relative to the base.
        planned_time: Planned training time or passes of a run relative to the base.
        records: The finished final runs by seed.
        surroundings: The loss around their weights.
        failures: Problems of its final runs.
        difference: Compared with the base; None for the base, or if nothing can be compared.
    """

    method: Contender
    point: Point
    trials: tuple[Trial, ...]
    epochs: int
    epoch_seconds: float
    cost: float
    planned_time: float
    records: Mapping[int, Record]
    surroundings: tuple[Surroundings, ...]
    failures: tuple[str, ...]
    difference: Difference | None = None

    @property
    def values(self) -> dict[int, float]:
        """The final test figure by seed."""
        found = {seed: records.final_figure(record) for seed, record in self.records.items()}
        return {seed: value for seed, value in found.items() if value is not None}

    @property
    def mean(self) -> float | None:
        """The mean test figure."""
        return mean_and_std(list(self.values.values()))[0]

    @property
    def interval(self) -> float | None:
        """Half the width of the 95% confidence interval of the mean."""
        return interval(list(self.values.values()))

    @property
    def sharpness(self) -> list[float]:
        """The sharpness of the trained weights of each run that has it."""
        return [s.sharpness for s in self.surroundings if s.sharpness is not None]

    @property
    def slices(self) -> list[tuple[float | None, ...]]:
        """The loss along a line through the trained weights of each run that has it."""
        return [s.slice for s in self.surroundings if s.slice]

    @property
    def seconds(self) -> float | None:
        """The mean training time of a final run, without evaluation."""
        times = [sum(row["seconds"] for row in r["curve"]) for r in self.records.values()]
        return statistics.fmean(times) if times else None


@dataclass(frozen=True)
class Summary:
    """The figures of a comparison.

    Args:
        state: Its plan and progress.
        rows: The figures of each method that reached the final runs.
        metric: Name, unit and direction of the figure, and the split of the curves.
    """

    state: State
    rows: dict[str, Row]
    metric: dict[str, Any]

    @property
    def samples(self) -> float | None:
        """Number of samples on which the sharpness was measured, the same for all runs."""
        found = (s.samples for row in self.rows.values() for s in row.surroundings)
        return next((count for count in found if count is not None), None)

    @property
    def slice_samples(self) -> float | None:
        """Number of samples on which the slices were measured, the same for all runs."""
        found = (s.slice_samples for row in self.rows.values() for s in row.surroundings)
        return next((count for count in found if count is not None), None)

    @property
    def differences(self) -> dict[str, Difference]:
        """How much better than the base each method is that was compared with it."""
        found = {name: row.difference for name, row in self.rows.items()}
        return {name: one for name, one in found.items() if one is not None}

    @property
    def compared(self) -> list[str]:
        """The methods that were compared with the base."""
        return list(self.differences)

    @property
    def winner(self) -> str | None:
        """The method with the largest significant improvement over the base."""
        found = self.differences.items()
        better = {name: one.mean for name, one in found if one.is_significant and one.mean > 0}
        return max(better, key=better.__getitem__, default=None)

    @property
    def sentence(self) -> str:
        """The answer: the best method, if one is better than the base, and those that are worse."""
        if self.rows[BASE].mean is None:
            return "The base did not finish, so nothing can be compared with it."
        if not self.compared:
            return "No other method finished, so nothing can be compared with the base."
        if all(one.interval is None for one in self.differences.values()):
            return "One seed cannot separate a difference from noise; use more --seeds."
        best = USE_THE_BASE
        if self.winner is not None:
            best = self._improvement(self.rows[self.winner], self.differences[self.winner])
        worse = [
            f"{self.rows[name].method.title} is worse than the base by {self._size(one)} "
            f"({format_p(one.p_holm)}, corrected)."
            for name, one in self.differences.items()
            if one.is_significant and one.mean < 0
        ]
        return " ".join([best, *worse])

    def _size(self, difference: Difference) -> str:
        """Return the size of a difference with its interval: ``0.8 ± 0.2 points``."""
        unit = self.metric["unit"]
        number = format_number(abs(difference.mean), unit, difference.interval)
        return f"{number} points" if unit == "%" else number

    def _improvement(self, row: Row, difference: Difference) -> str:
        """Return the sentence about the winner."""
        verb = "lowers" if self.metric["lower_is_better"] else "raises"
        equal = self.state.request.equal
        effort = f"at equal {equal}"
        if abs(row.planned_time - 1) > _EQUAL:
            effort = f"in {row.planned_time:.2f} times the base's {equal}"
        return (
            f"{row.method.title} {verb} the {self.metric['name']} by {self._size(difference)} {effort} "
            f"({format_p(difference.p_holm)})."
        )

    @property
    def notes(self) -> list[str]:
        """How the comparison was made, what was reduced, and what went wrong."""
        state, plan = self.state, self.state.plan
        assert plan is not None
        equal, effort = state.request.equal, state.request.effort
        compared = f"{pluralize(len(self.compared), 'method')} compared with the base"
        if len(state.request.seeds) > 1:
            compared += (
                f": paired t-test over {len(state.request.seeds)} seeds, p-values corrected by Holm's "
                f"method; ± is a {LEVEL:.0%} confidence interval"
            )
        base = self.rows[BASE].method.title
        notes = [
            f"Settings: {pluralize(state.trials, 'trial')} for every method, {base} included, each at "
            f"the {effort} of {pluralize(plan.epochs, 'epoch')} of {base}; chosen by the "
            f"validation {self.metric['name']}.",
            f"Equal {equal}: {pluralize(self.rows[BASE].epochs, 'epoch')} of {base}, and for the "
            f"others as many as take the same {effort}, {_MEASURED[equal]}.",
            f"{compared}.",
            f"Time: {format_seconds(state.spent)} of {format_seconds(state.request.budget)}.",
            *state.notes,
        ]
        uneven = [row for row in self.rows.values() if abs(row.planned_time - 1) > _EQUAL]
        notes += [
            f"{row.method.title} gets {row.planned_time:.2f} times the base's {effort}: epochs "
            "are whole."
            for row in uneven
        ]
        return notes if equal == "passes" else notes + self._busy_note()

    def _busy_note(self) -> list[str]:
        """Return a note if the final runs took longer or shorter than planned; else nothing."""
        base = self.rows[BASE].seconds
        ratios = [
            row.seconds / (base * row.planned_time)
            for row in self.rows.values()
            if base and row.seconds is not None
        ]
        if not ratios or max(abs(ratio - 1) for ratio in ratios) <= _BUSY:
            return []
        return [
            f"The final runs took {min(ratios):.2f} to {max(ratios):.2f} times as long as planned, "
            "relative to the base's: other programs ran on the machine."
        ]

    @property
    def failures(self) -> list[str]:
        """Runs that failed, one line each."""
        return list(self.state.failures.values())

    def as_dict(self) -> dict[str, Any]:
        """Return all figures as JSON data."""
        state, request = self.state, self.state.request
        assert state.plan is not None
        return {
            "format": FORMAT,
            "sentence": self.sentence,
            "winner": self.winner,
            "metric": self.metric,
            "problem": request.run.to_dict(),
            "seeds": list(request.seeds),
            "equal": request.equal,
            "budget_seconds": request.budget,
            "spent_seconds": round(state.spent, 1),
            "trials": state.trials,
            "search_epochs": state.plan.epochs,
            "compared": self.compared,
            "confidence_level": LEVEL,
            "test": "paired t-test over seeds, two-sided, Holm's correction",
            "sharpness": {"radius": RADIUS, "samples": self.samples},
            "slice": {"distances": list(DISTANCES), "samples": self.slice_samples},
            "methods": {name: self._row_dict(row) for name, row in self.rows.items()},
            "notes": self.notes,
            "failures": self.failures,
            "environment": self._environment,
        }

    @property
    def _environment(self) -> dict[str, Any]:
        """Hardware, versions and commit of the first run of the base."""
        record = next(iter(self.rows[BASE].records.values()), {})
        return {name: record.get(name) for name in ("hardware", "versions", "commit")}

    def _row_dict(self, row: Row) -> dict[str, Any]:
        """Return the figures of a method as JSON data."""
        timing = self.state.timing[row.method.name]
        assert self.state.final is not None
        return {
            "title": row.method.title,
            "settings": row.point,
            "options": dict(row.method.run.options),
            "epochs": row.epochs,
            "epoch_seconds": {
                "cost": timing.cost,
                "timing_run": timing.epoch,
                "search": self.state.final.epoch_seconds[row.method.name],
            },
            "cost": row.cost,
            "planned_time": row.planned_time,
            "training_seconds": row.seconds,
            "values": {str(seed): value for seed, value in row.values.items()},
            "mean": row.mean,
            "interval": row.interval,
            "improvement": None if row.difference is None else asdict(row.difference),
            "sharpness": row.sharpness,
            "slices": [list(losses) for losses in row.slices],
            "keys": [record["key"] for record in row.records.values()],
            "trials": [
                {"settings": t.point, "key": t.key, "value": t.value, "failure": t.failure}
                for t in row.trials
            ],
            "failures": list(row.failures),
        }


def summarize(out: Path, state: State) -> Summary:
    """Read the records of a comparison whose final runs have ended.

    Raises:
        ValueError: A record is damaged.
    """
    final = state.final
    assert final is not None
    contenders = state.request.contenders
    rows = {name: _row(out, state, contenders[name]) for name in final.chosen}
    found = [record for row in rows.values() for record in row.records.values()]
    if not found:
        found = list(trial_records(out, state, contenders[BASE]).values())
    metric = records.metric(found[0])
    values = {name: row.values for name, row in rows.items()}
    differences = find_differences(values, metric["lower_is_better"])
    rows = {name: replace(row, difference=differences.get(name)) for name, row in rows.items()}
    return Summary(state, rows, metric)


def _row(out: Path, state: State, method: Contender) -> Row:
    """Return the figures of a method, without its difference to the base."""
    final, name, folder = state.final, method.name, final_folder(out)
    assert final is not None
    found: dict[int, Record] = {}
    surroundings, failures = [], []
    for seed in state.request.seeds:
        run = state.final_run(method, seed)
        record = records.read(folder, run)
        if record is None or not records.is_finished(record):
            failures.append(state.failures.get(run.key) or _failure(run, record))
            continue
        found[seed] = record
        surroundings.append(read_sharpness(folder, run))
    cost, epochs = state.costs[name], final.epochs[name]
    return Row(
        method,
        final.chosen[name],
        read_trials(out, state, method),
        epochs,
        state.timing[name].cost,
        cost,
        epochs * cost / final.epochs[BASE],
        found,
        tuple(surroundings),
        tuple(failures),
    )


def _failure(run: Run, record: Record | None) -> str:
    """Return why a final run has no figure."""
    reason = "it has no record" if record is None else records.failure_reason(record)
    return f"{run.title}: {reason}"


def read_trials(out: Path, state: State, method: Contender) -> tuple[Trial, ...]:
    """Return the trials of a method."""
    found = trial_records(out, state, method)
    trials = []
    for number in range(state.trials):
        run, record = state.trial_run(method, number), found.get(number)
        value, failure = None, state.failures.get(run.key)
        if record is not None and records.is_finished(record):
            value = records.final_figure(record, records.metric(record)["split"])
        elif record is not None:
            failure = records.failure_reason(record)
        trials.append(Trial(method.point(number), run.key, value, failure))
    return tuple(trials)
