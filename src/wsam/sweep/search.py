"""Search over a grid and between its points with Optuna: `pip install 'wsam[optuna]'`.

The study is made first, every point of the grid is enqueued, and only then trials are asked for:
so each point is tried once, whatever the number of workers. This process alone asks and tells;
jobs are carried out by any executor. Several searches may share a storage, if they share the folder
of results too: each holds a lock there for as long as it lives, which tells the others what is left
of one that was killed.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wsam.lab import records
from wsam.lab.files import BusyError, claimed
from wsam.lab.names import Value
from wsam.lab.run import Run
from wsam.sweep.grid import Grid, is_whole, repeated
from wsam.sweep.work import Job, Outcome, Status

DIVERGED = 100.0
"""The error, in percent, that a run counts with whose loss was no longer finite."""
_LOGARITHMIC = ("rho", "lr", "weight_decay", "eta")


@dataclass
class _Open:
    """A trial under way: its runs' keys, and the errors of those that ended."""

    trial: Any
    keys: set[str]
    errors: dict[str, float] = field(default_factory=dict)


class Search:
    """A study over one column of a grid: the mean final test error over seeds, made small.

    Args:
        grid: Its points are tried first; its axes' ends bound what is tried after them.
        column: Which of the grid's base runs.
        seeds: Each trial trains one run per seed.
        make_job: Makes the job of a run.
        out: The folder of the results.
        storage: An URL of Optuna's; None for SQLite in the folder of the results.
        seed: Of the sampler.
    """

    def __init__(
        self,
        grid: Grid,
        column: str,
        seeds: Sequence[int],
        make_job: Callable[[Run], Job],
        out: Path,
        storage: str | None = None,
        seed: int = 0,
    ) -> None:
        self.grid, self.column, self.seeds = grid, column, tuple(seeds)
        self.make_job, self.out = make_job, out
        self.open: list[_Open] = []
        self.failed: set[int] = set()  # trials of this search: a later one may try them again
        optuna = _optuna()
        # Another base run, or other seeds, are another question: they never share a study.
        repeats = ",".join(map(str, self.seeds))
        self.name = f"{grid.name} {column} {grid.bases[column].key} seeds {repeats}"
        self.owner = uuid.uuid4().hex
        self._lock = records.work(out) / "search.lock"
        self._alive = ExitStack()
        self._alive.enter_context(claimed(self._life(self.owner)))
        sampler = optuna.samplers.TPESampler(seed=seed)
        with _alone(self._lock):
            self.study = self._study(optuna, storage or sqlite_url(out), sampler)
            self._take_up()
            self._enqueue()

    def _study(self, optuna: Any, storage: str, sampler: Any) -> Any:
        """Make the study, or open it; a storage that cannot be used is the user's to mend."""
        from sqlalchemy.exc import SQLAlchemyError

        try:
            return optuna.create_study(
                storage=storage,
                study_name=self.name,
                sampler=sampler,
                direction="minimize",
                load_if_exists=True,
            )
        except (SQLAlchemyError, ImportError, optuna.exceptions.OptunaError) as error:
            self.close()
            reason = str(error).partition("\n")[0]  # never the URL: it may hold a password
            raise ValueError(f"Optuna cannot use this storage: {reason}") from error

    def close(self) -> None:
        """Let go: what is still under way may be taken up by another search."""
        self._alive.close()

    def _life(self, owner: str) -> Path:
        """Return the file that a search holds locked for as long as it lives."""
        return records.work(self.out) / "searches" / owner

    def _take_up(self) -> None:
        """Give up what a search was trying that is no longer alive, and enqueue it anew."""
        for trial in self.study.get_trials(deepcopy=False, states=(_state("RUNNING"),)):
            if self._lives(trial.user_attrs.get("owner")):
                continue
            self.study.tell(trial.number, state=_state("FAIL"), skip_if_finished=True)
            if trial.params and "point" not in trial.user_attrs:
                self.study.enqueue_trial(trial.params)

    def _enqueue(self) -> None:
        """Enqueue every point of the grid that is neither done, nor waiting, nor under way."""
        trials = self.study.get_trials(deepcopy=False)
        there = {t.user_attrs.get("point") for t in trials if t.state != _state("FAIL")}
        for point in self.grid.points():
            numbers = self._numbers(point)
            name = json.dumps(numbers)
            if name not in there:
                self.study.enqueue_trial(numbers, user_attrs={"point": name})

    def _lives(self, owner: str | None) -> bool:
        if owner is None:
            return False  # killed right after it asked
        try:
            with claimed(self._life(owner)):
                return False
        except BusyError:
            return True

    def _ask(self, beyond: int) -> Any:
        """Take a trial and sign it, with nobody looking on in between; None if there are enough.

        Args:
            beyond: How many are wanted beside the points of the grid, all of which are enqueued.
        """
        with _alone(self._lock):
            trials = self.study.get_trials(deepcopy=False)
            waiting = any(trial.state == _state("WAITING") for trial in trials)
            if not waiting and sum(map(self._is_beyond, trials)) >= beyond:
                return None
            trial = self.study.ask()
            trial.set_user_attr("owner", self.owner)
            return trial

    def _is_beyond(self, trial: Any) -> bool:
        """Tell whether a trial counts as one beside the grid's points.

        One that failed here does: another in its place may fail as well, and so on without end.
        """
        counts = trial.state != _state("FAIL") or trial.number in self.failed
        return counts and "point" not in trial.user_attrs

    def jobs(self, trials: int = 0) -> Iterator[Job]:
        """Yield jobs: those of the grid's points, then those of `trials` more points."""
        while (trial := self._ask(trials)) is not None:
            point = {name: self._suggest(trial, name) for name in self.grid.axes}
            runs = repeated(self.grid.run(self.column, point), self.seeds)
            self.open.append(_Open(trial, {run.key for run in runs}))
            yield from map(self.make_job, runs)

    def _suggest(self, trial: Any, name: str) -> float | int:
        axis = self.grid.axes[name]
        low, high = min(axis), max(axis)  # type: ignore[type-var]
        if is_whole(self.grid.bases[self.column], name):
            return int(trial.suggest_int(name, low, high))
        logarithmic = name in _LOGARITHMIC and low > 0  # type: ignore[operator]
        return float(trial.suggest_float(name, low, high, log=logarithmic))

    def _numbers(self, point: Mapping[str, Value]) -> dict[str, float | int]:
        """Return a point in the types that `_suggest` gives, so that Optuna knows it again."""
        base = self.grid.bases[self.column]
        numbers: dict[str, float | int] = {}
        for name, value in point.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"a search varies numbers, {name} has the value {value!r}")
            numbers[name] = value if is_whole(base, name) else float(value)
        return numbers

    def tell(self, outcome: Outcome) -> None:
        """Tell the study what became of a job."""
        key = outcome.job.run.key
        for entry in [entry for entry in self.open if key in entry.keys]:
            if outcome.status in (Status.ERROR, Status.LOST):
                self.study.tell(entry.trial, state=_state("FAIL"), skip_if_finished=True)
                self.failed.add(entry.trial.number)
                self.open.remove(entry)
                continue
            entry.errors[key] = DIVERGED if outcome.error is None else outcome.error
            if entry.keys == entry.errors.keys():
                mean = sum(entry.errors.values()) / len(entry.errors)
                self.study.tell(entry.trial, mean, skip_if_finished=True)
                self.open.remove(entry)

    def best(self) -> tuple[dict[str, float], float] | None:
        """Return the best point and its mean error in percent; None if there is none yet."""
        done = self.study.get_trials(deepcopy=False, states=(_state("COMPLETE"),))
        if not done:
            return None
        trial = min(done, key=lambda trial: trial.value)
        return dict(trial.params), trial.value


def sqlite_url(out: Path) -> str:
    """Return the storage that is used unless the user names another."""
    from sqlalchemy import URL

    path = (records.work(out) / "optuna.db").resolve()
    # It escapes what means something in a URL: ? and % are fine in the name of a folder.
    return URL.create("sqlite", database=str(path)).render_as_string()


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Wait for a lock: several processes making one SQLite study at once break it."""
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(claimed(lock))
                break
            except BusyError:
                time.sleep(0.1)
        yield


def _state(name: str) -> Any:
    return getattr(_optuna().trial.TrialState, name)


def _optuna() -> Any:
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise ValueError("a search needs Optuna: pip install 'wsam[optuna]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
