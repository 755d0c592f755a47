"""The plan and progress of a comparison, as a file in its folder.

``OUT/plan.json`` is written before anything runs, and after every decision and outcome.
``OUT/search`` and ``OUT/runs`` hold the records of the search and of the final runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

from wsam.compare.contenders import BASE, Contender, Point
from wsam.compare.plan import Plan, equal_epochs
from wsam.compare.request import Request
from wsam.compare.timing import Timing
from wsam.lab import records
from wsam.lab.files import write_atomic
from wsam.lab.passes import passes_per_step
from wsam.lab.records import Record
from wsam.lab.run import Run, with_seed

FORMAT = 1
FILE_NAME = "plan.json"
SEARCH_SEED = 1000
"""Seed of all trials. The seeds of the final runs are not used in the search."""

_WORDS = {"base_args": "the arguments of the base", "digests": "your code"}
"""Settings whose names are not those of options, for messages."""


@dataclass(frozen=True)
class Final:
    """What the final runs train.

    Args:
        chosen: The best settings of each method.
        epochs: The epochs of each method.
        epoch_seconds: The duration of the training steps of an epoch, measured in the search.
    """

    chosen: dict[str, Point]
    epochs: dict[str, int]
    epoch_seconds: dict[str, float]


@dataclass
class State:
    """Plan and progress of a comparison.

    Args:
        request: What to compare.
        timing: Times of each method, from the timing runs.
        startup: Seconds until the workers of a phase run; 0 if they are kept.
        plan: Trials and epochs that fit into the budget.
        trials: Trials per method that were started.
        final: What the final runs train.
        spent: Seconds so far, of all calls.
        notes: What was reduced, and warnings.
        failures: Messages about runs that failed, by the key of the run.
    """

    request: Request
    timing: dict[str, Timing] = field(default_factory=dict)
    startup: float = 0.0
    plan: Plan | None = None
    trials: int = 0
    final: Final | None = None
    spent: float = 0.0
    notes: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def costs(self) -> dict[str, float]:
        """The cost of an epoch relative to the base, of each method that could be timed."""
        if self.request.equal == "passes":
            methods = self.request.contenders
            return {name: cast(float, passes_per_step(methods[name].run)) for name in self.timing}
        base = self.timing[BASE].cost
        return {name: timing.cost / base for name, timing in self.timing.items()}

    def trial_run(self, method: Contender, trial: int) -> Run:
        """Return the run of a trial, as long as the final runs are planned to be."""
        assert self.plan is not None
        epochs = equal_epochs(self.plan.epochs, self.costs)[method.name]
        run = method.at(method.point(trial)).replace(epochs=epochs)
        return with_seed(run, SEARCH_SEED)

    def final_run(self, method: Contender, seed: int) -> Run:
        """Return a final run."""
        assert self.final is not None
        run = method.at(self.final.chosen[method.name])
        return with_seed(run.replace(epochs=self.final.epochs[method.name]), seed)

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON-compatible data."""
        return {
            "format": FORMAT,
            **vars(self),
            "request": self.request.to_dict(),
            "timing": {name: asdict(timing) for name, timing in self.timing.items()},
            "plan": None if self.plan is None else asdict(self.plan),
            "final": None if self.final is None else asdict(self.final),
            "spent": round(self.spent, 2),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> State:
        """Return the state whose `to_dict` is given."""
        given = {name: value for name, value in data.items() if name != "format"}
        plan, final = given["plan"], given["final"]
        made = {
            "request": Request.from_dict(given["request"]),
            "timing": {name: Timing(**times) for name, times in given["timing"].items()},
            "plan": None if plan is None else Plan(**plan),
            "final": None if final is None else Final(**final),
        }
        return cls(**{**given, **made})


def search_folder(out: Path) -> Path:
    """Return the folder of the records of the search."""
    return out / "search"


def final_folder(out: Path) -> Path:
    """Return the folder of the records of the final runs."""
    return out / "runs"


def write_state(out: Path, state: State) -> None:
    """Write the state."""
    text = json.dumps(state.to_dict(), indent=1, allow_nan=False)
    write_atomic(out / FILE_NAME, f"{text}\n".encode())


def read_state(out: Path) -> State | None:
    """Return the state of the comparison in a folder; None if there is none.

    Raises:
        ValueError: The file is damaged.
    """
    path = out / FILE_NAME
    if not path.exists():
        return None
    try:
        data = records.read_json(path)
        if data["format"] != FORMAT:
            raise ValueError("unknown format")
        return State.from_dict(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged; remove it to plan again") from error


def open_state(out: Path, request: Request) -> State:
    """Return the state to continue from.

    The same request continues. A request for the same problem with another budget or other methods,
    seeds, trials, epochs or `equal` is planned again and uses the times and records that exist. What
    ended without a plan neither counts as spent time nor reserves the folder.

    Raises:
        ValueError: The folder has a comparison of another problem.
    """
    state = read_state(out)
    if state is None:
        return State(request)
    if state.request == request:
        return state if state.plan is not None else replace(state, spent=0.0)
    if changed := _differing_settings(request.run, state.request.run):
        if state.plan is None:
            return State(request)
        raise ValueError(
            f"{out} has a comparison of another problem (it differs in "
            f"{', '.join(_WORDS.get(name, name) for name in changed)}): use another --out"
        )
    timed = state.request.contenders
    kept = {
        name: state.timing[name]
        for name, method in request.contenders.items()
        if name in state.timing and not _differing_settings(method.run, timed[name].run)
    }
    return State(request, kept, state.startup)


def _differing_settings(run: Run, other: Run) -> list[str]:
    """Return the settings in which two runs differ, other than epochs."""
    names = (f.name for f in fields(Run) if f.name != "epochs")
    return [name for name in names if getattr(run, name) != getattr(other, name)]


def trial_records(out: Path, state: State, method: Contender) -> dict[int, Record]:
    """Return the records of the trials of a method by number; those that have one."""
    found = {}
    for trial in range(state.trials):
        record = records.read(search_folder(out), state.trial_run(method, trial))
        if record is not None:
            found[trial] = record
    return found


def finished_trials(out: Path, state: State, method: Contender) -> dict[int, Record]:
    """Return the records of the finished trials of a method by number."""
    found = trial_records(out, state, method)
    return {trial: record for trial, record in found.items() if records.is_finished(record)}
