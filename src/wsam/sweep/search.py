"""Search over a grid and between its points with Optuna: `pip install 'wsam[optuna]'`.

All points of the grid are enqueued before the first trial is requested, so each is tried once for
any number of workers. Only this process calls Optuna; any executor runs the jobs. Several
searches may share a storage if they share the results folder: each holds a lock there while it is
alive, so that the others can detect the trials of a search that was killed.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wsam.lab import records
from wsam.lab.files import BusyError, exclusive_lock
from wsam.lab.run import Run
from wsam.lab.values import Value, is_number
from wsam.sweep.grid import Grid, Point, with_seeds
from wsam.sweep.jobs import Job, Outcome, Status
from wsam.sweep.settings import has_setting, in_order, is_integer_setting

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

DIVERGED = {"error": 100.0, "accuracy": 0.0, "macro-f1": 0.0}
"""The objective of a run whose loss was not finite, by metric; infinite for metrics without a bound."""
_LOG_SCALE = ("rho", "lr", "weight_decay", "eta")


@dataclass
class _RunningTrial:
    """A trial, the keys of its runs, and the objectives of those that ended."""

    trial: optuna.Trial
    keys: set[str]
    objectives: dict[str, float] = field(default_factory=dict)


class Search:
    """A study of one column of a grid that minimizes the mean of `records.objective` over seeds.

    That is the final validation error of runs with a validation split, else the test error.

    Args:
        grid: Its points are tried first; the ends of its axes bound the points tried after them.
        column: Which of the grid's base runs.
        seeds: Each trial trains one run per seed.
        make_job: Returns the job of a run.
        out: The results folder.
        storage: An Optuna URL; None for SQLite in the results folder.
        seed: Seed of the sampler.
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
        import optuna

        self.grid, self.column, self.seeds = grid, column, tuple(seeds)
        self.make_job, self.out = make_job, out
        self.running: list[_RunningTrial] = []
        self.failed: set[int] = set()  # trials of this search; a later search may try them again
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.states = optuna.trial.TrialState
        # Other base runs, fixed values or seeds define another objective, so they get another study.
        seed_names = ",".join(map(str, self.seeds))
        choices = {n: _choices(v) for n, v in grid.axes.items() if not _is_range(v)}
        chosen = f" of {json.dumps(choices)}" if choices else ""  # Optuna's choices are fixed
        self.name = f"{grid.name} {column} {grid.bases[column].key} seeds {seed_names}{chosen}"
        self.owner = uuid.uuid4().hex
        # Concurrent creation breaks a SQLite study.
        self._study_lock = records.work_root(out) / "search.lock"
        self._alive = ExitStack()
        self._alive.enter_context(exclusive_lock(self._owner_lock(self.owner)))
        with exclusive_lock(self._study_lock, wait=True):
            self.study = self._open_study(storage or sqlite_url(out), seed)
            self._requeue_orphans()
            self._enqueue_grid()

    def _open_study(self, storage: str, seed: int) -> optuna.Study:
        """Create or open the study.

        Raises:
            ValueError: The storage cannot be used.
        """
        import optuna
        from sqlalchemy.exc import SQLAlchemyError

        try:
            return optuna.create_study(
                storage=storage,
                study_name=self.name,
                sampler=optuna.samplers.TPESampler(seed=seed),
                direction="minimize",
                load_if_exists=True,
            )
        except (SQLAlchemyError, ImportError, optuna.exceptions.OptunaError) as error:
            self.close()
            reason = str(error).partition("\n")[0]  # never the URL: it may contain a password
            raise ValueError(f"Optuna cannot use this storage: {reason}") from error

    def close(self) -> None:
        """Release the lock: other searches may then take over trials that are still running."""
        self._alive.close()

    def _owner_lock(self, owner: str) -> Path:
        """Return the lock file that a search holds while it is alive."""
        return records.work_root(self.out) / "searches" / owner

    def _requeue_orphans(self) -> None:
        """Mark the running trials of dead searches as failed and enqueue their points again."""
        for trial in self.study.get_trials(deepcopy=False, states=(self.states.RUNNING,)):
            if self._is_alive(trial.user_attrs.get("owner")):
                continue
            self.study.tell(trial.number, state=self.states.FAIL, skip_if_finished=True)
            if trial.params and "point" not in trial.user_attrs:
                self.study.enqueue_trial(trial.params)

    def _enqueue_grid(self) -> None:
        """Enqueue every point of the grid that is not completed, waiting or running."""
        trials = self.study.get_trials(deepcopy=False)
        known = {t.user_attrs.get("point") for t in trials if t.state != self.states.FAIL}
        for point in self.grid.points():
            parameters = self._as_parameters(point)
            name = json.dumps(parameters)
            if name not in known:
                known.add(name)
                self.study.enqueue_trial(parameters, user_attrs={"point": name})

    def _is_alive(self, owner: str | None) -> bool:
        """Return whether the search that owns a trial is alive."""
        if owner is None:
            return False  # killed between `ask` and setting the owner
        try:
            with exclusive_lock(self._owner_lock(owner)):
                return False
        except BusyError:
            return True

    def _ask(self, extra: int) -> optuna.Trial | None:
        """Return a trial owned by this search; None if there are enough.

        Args:
            extra: Number of trials in addition to the points of the grid, which are enqueued.
        """
        with exclusive_lock(self._study_lock, wait=True):
            trials = self.study.get_trials(deepcopy=False)
            waiting = any(trial.state == self.states.WAITING for trial in trials)
            if not waiting and sum(map(self._is_extra, trials)) >= extra:
                return None
            trial = self.study.ask()
            trial.set_user_attr("owner", self.owner)
            return trial

    def _is_extra(self, trial: FrozenTrial) -> bool:
        """Return whether a trial counts in addition to the grid's points.

        Trials that failed in this search count: replacing them might never end.
        """
        counts = trial.state != self.states.FAIL or trial.number in self.failed
        return counts and "point" not in trial.user_attrs

    def jobs(self, trials: int = 0) -> Iterator[Job]:
        """Yield the jobs of the grid's points, then those of `trials` more points."""
        while (trial := self._ask(trials)) is not None:
            runs = with_seeds(self.grid.run(self.column, self._suggest(trial)), self.seeds)
            self.running.append(_RunningTrial(trial, {run.key for run in runs}))
            yield from map(self.make_job, runs)

    def _suggest(self, trial: optuna.Trial) -> Point:
        """Return a point. A setting that the run does not have, given the others, is not suggested."""
        point: Point = {}
        for name in in_order(self.grid.axes):
            run = self.grid.run(self.column, point)
            if not has_setting(run, name):
                continue
            axis = self.grid.axes[name]
            if not _is_range(axis):
                choices = _choices(axis)
                point[name] = axis[choices.index(trial.suggest_categorical(name, choices))]
                continue
            low, high = min(axis), max(axis)  # type: ignore[type-var]
            if is_integer_setting(run, name):
                point[name] = int(trial.suggest_int(name, low, high))
            else:
                log = name in _LOG_SCALE and low > 0  # type: ignore[operator]
                point[name] = float(trial.suggest_float(name, low, high, log=log))
        return point

    def _as_parameters(self, point: Mapping[str, Value]) -> dict[str, Any]:
        """Return a point with the types of `_suggest`, so that Optuna recognizes it."""
        run = self.grid.run(self.column, point)
        found: dict[str, Any] = {}
        for name, value in point.items():
            if not _is_range(self.grid.axes[name]):
                found[name] = _choice(value)
            elif has_setting(run, name):
                found[name] = value if is_integer_setting(run, name) else float(value)  # type: ignore[arg-type]
        return found

    def tell(self, outcome: Outcome) -> None:
        """Report the outcome of a job to the study."""
        key = outcome.job.run.key
        for entry in [entry for entry in self.running if key in entry.keys]:
            if outcome.status in (Status.ERROR, Status.LOST):
                self.study.tell(entry.trial, state=self.states.FAIL, skip_if_finished=True)
                self.failed.add(entry.trial.number)
                self.running.remove(entry)
                continue
            objective = [outcome.objective_name, outcome.lower_is_better]
            self.study.set_user_attr("objective", objective)
            worst = DIVERGED.get(outcome.objective_name.rpartition(" ")[2], math.inf)
            entry.objectives[key] = worst if outcome.objective is None else outcome.objective
            if entry.keys == entry.objectives.keys():
                mean = sum(entry.objectives.values()) / len(entry.objectives)
                self.study.tell(entry.trial, mean, skip_if_finished=True)
                self.running.remove(entry)

    @property
    def objective(self) -> tuple[str, bool]:
        """Name of the figure, such as ``validation error``, and whether lower values are better."""
        name, lower = self.study.user_attrs.get("objective", ("test error", True))
        return name, lower

    def best(self) -> tuple[dict[str, Any], float] | None:
        """Return the best point and the mean of its figure; None if no trial has one."""
        complete = self.study.get_trials(deepcopy=False, states=(self.states.COMPLETE,))
        done = [trial for trial in complete if math.isfinite(trial.value)]
        if not done:
            return None
        trial = min(done, key=lambda trial: trial.value)
        return dict(trial.params), trial.value if self.objective[1] else -trial.value


def _is_range(axis: Sequence[Value]) -> bool:
    """Return whether a search may try values between those of an axis; one value is fixed."""
    return len(axis) > 1 and all(map(is_number, axis))


def _choices(axis: Sequence[Value]) -> list[Any]:
    return [_choice(value) for value in axis]


def _choice(value: Value) -> Any:
    """Return a value that Optuna can store; several numbers become text."""
    return json.dumps(value) if isinstance(value, tuple) else value


def sqlite_url(out: Path) -> str:
    """Return the URL of the default storage."""
    from sqlalchemy import URL

    path = (records.work_root(out) / "optuna.db").resolve()
    # URL.create escapes characters such as ? and %, which folder names may contain.
    return URL.create("sqlite", database=str(path)).render_as_string()
