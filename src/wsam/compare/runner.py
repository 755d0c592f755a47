"""Runs a comparison: timing, search, final runs."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import nn

from wsam._core.validation import WsamWarning
from wsam._utils.text import pluralize
from wsam.compare.contenders import BASE, Contender, Point
from wsam.compare.formatting import format_point, format_seconds
from wsam.compare.phase import Entry, Phase
from wsam.compare.plan import (
    MIN_TRIALS,
    Estimator,
    Plan,
    equal_epochs,
    fit_epochs,
    make_plan,
)
from wsam.compare.progress import Progress
from wsam.compare.request import Request
from wsam.compare.sharpness import measure_sharpness, sharpness_path
from wsam.compare.state import (
    Final,
    final_folder,
    finished_trials,
    open_state,
    search_folder,
    trial_records,
    write_state,
)
from wsam.compare.summary import Summary, read_trials, summarize
from wsam.compare.timing import Timing, measure_time, read_timing, train_quietly
from wsam.lab import records
from wsam.lab.execution import ExecutionConfig
from wsam.lab.optimizers import make_optimizer
from wsam.lab.records import Record
from wsam.sweep import Executor, Job, Outcome, Status, sweep

_TIMING_SHARE = 0.02
"""Part of the budget for the timing run of a method."""
_TIMING_SECONDS = (0.5, 10.0)
"""Limits of its duration."""
_PAGE_SECONDS = 3.0
_MAX_ERRORS = 2
"""A method whose first runs end with errors is not tried again."""


class Comparison:
    """Runs a comparison, or continues one.

    Args:
        request: What to compare.
        out: The folder of the comparison.
        executor: Runs the jobs. Durations are estimated by its attributes `parallel`, how many jobs
            run at a time (default 1), and `keeps_workers`, whether a worker runs the jobs of several
            calls of `run` (default False).
        execution: How to train.
        progress: Receives messages and estimates.
        started: When the comparison was started, as `time.monotonic()`; default now.

    Raises:
        ValueError: The folder has a comparison of another problem.

    Example:
        >>> import tempfile
        >>> from wsam.lab.run import Run
        >>> from wsam.sweep import InProcess
        >>> small = Run(method="vanilla", model="mlp", epochs=2, train_limit=200, validation=0.2)
        >>> request = Request(small, ("sam",), seeds=(0, 1), budget=60, trials=1)
        >>> folder, config = Path(tempfile.mkdtemp()), ExecutionConfig(device="cpu")
        >>> summary = Comparison(request, folder, InProcess(), config).run()
        >>> list(summary.rows)
        ['base', 'sam']
    """

    def __init__(
        self,
        request: Request,
        out: Path,
        executor: Executor,
        execution: ExecutionConfig,
        progress: Progress | None = None,
        started: float | None = None,
    ) -> None:
        self.out, self.executor, self.execution = out.resolve(), executor, execution
        self.progress = progress or Progress()
        self.parallel: int = getattr(executor, "parallel", 1)
        self.keeps_workers: bool = getattr(executor, "keeps_workers", False)
        self.request = request
        self.state = open_state(out, request)
        self.contenders = request.contenders
        self._clock = time.monotonic() if started is None else started
        self._phase = Phase("starting", 0)

    def run(self) -> Summary:
        """Run what has no record yet and return the figures.

        Raises:
            ValueError: The budget is too small, or the base cannot be trained.
        """
        write_state(self.out, self.state)
        try:
            self._note_warnings()
            if self.state.plan is None:
                self._measure_times()
                self._make_plan()
            if self.state.final is None:
                self._search()
                self._choose()
            self._train()
        finally:
            self._save()
        return summarize(self.out, self.state)

    def _save(self) -> None:
        """Write the state with the time spent so far."""
        now = time.monotonic()
        self.state.spent += now - self._clock
        self._clock = now
        write_state(self.out, self.state)

    @property
    def _available(self) -> float:
        """The seconds left for runs."""
        spent = self.state.spent + time.monotonic() - self._clock
        return self.request.budget - spent - self._page_seconds

    @property
    def _page_seconds(self) -> float:
        """The duration of making the page, mostly imports, as in the first run of a worker."""
        imports = max((timing.cold for timing in self.state.timing.values()), default=0.0)
        return _PAGE_SECONDS + imports

    @property
    def _active(self) -> list[Contender]:
        """The methods that could be timed."""
        return [method for name, method in self.contenders.items() if name in self.state.timing]

    def _note(self, text: str) -> None:
        """Add a note to the summary, and show it."""
        if text not in self.state.notes:
            self.state.notes.append(text)
            self.progress.message(text)

    def _note_warnings(self) -> None:
        """Note the warnings of the methods, which the runs do not print."""
        for method in self.contenders.values():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", WsamWarning)
                make_optimizer(method.run, nn.Linear(1, 1))
            for warning in caught:
                if issubclass(warning.category, WsamWarning):
                    self._note(str(warning.message).partition(" To use ")[0])

    # Timing and plan ----------------------------------------------------------------------------

    def _measure_times(self) -> None:
        """Time an epoch of each method whose times are not known, and show the relative costs."""
        low, high = _TIMING_SECONDS
        seconds = min(max(_TIMING_SHARE * self.request.budget, low), high)
        task = partial(measure_time, seconds=seconds)
        untimed = [m for name, m in self.contenders.items() if name not in self.state.timing]
        jobs = [Job(method.run, self.out, self.execution, task=task) for method in untimed]
        methods = {method.run.key: method for method in untimed}
        start = time.monotonic()
        phase = Phase("timing", len(jobs))
        if jobs:
            self.progress.update(phase, None)
        # One at a time on this machine: runs that share its memory and caches slow each other down.
        batches = [[job] for job in jobs] if self.keeps_workers else [jobs]
        outcomes = (outcome for batch in batches for outcome in self.executor.run(batch))
        for outcome in outcomes:
            if not phase.done and not self.keeps_workers:
                self.state.startup = max(time.monotonic() - start - outcome.seconds, 0.0)
            self._record_timing(methods[outcome.job.run.key], outcome)
            phase.done += 1
            self.progress.update(phase, None)
        timing = self.state.timing
        if not self.keeps_workers:  # every run starts a new process
            timing = {n: replace(t, setup=t.setup + t.cold, cold=0.0) for n, t in timing.items()}
        setup = min(times.setup for times in timing.values())
        self.state.timing = {n: replace(t, setup=setup) for n, t in timing.items()}
        self._show_costs()

    def _show_costs(self) -> None:
        """Show the duration of an epoch of the base, and the costs relative to it."""
        costs = (
            f"{self.contenders[name].title} {cost:.2f}"
            for name, cost in self.state.costs.items()
            if name != BASE
        )
        seconds = format_seconds(self.state.timing[BASE].cost)
        self.progress.message(
            f"an epoch of {self.contenders[BASE].title} takes {seconds}; "
            f"relative cost: {', '.join(costs) or 'no other method'}"
        )

    def _record_timing(self, method: Contender, outcome: Outcome) -> None:
        """Store the times of a method; leave it out if it cannot be trained."""
        if outcome.has_record:
            self.state.timing[method.name] = read_timing(self.out, method.run)
        elif method.name == BASE:
            raise ValueError(f"the base cannot be trained: {_detail(outcome)}")
        else:
            self._leave_out(method, _detail(outcome))
        self._save()

    def _leave_out(self, method: Contender, reason: str) -> None:
        """Store and show why a method is left out."""
        text = f"{method.title}: left out: {reason}"
        self.state.failures[method.run.key] = text
        self.progress.message(text)

    def _estimator(self, times: dict[str, Timing] | None = None) -> Estimator:
        """Return an estimator of durations, given the times of some methods; default all."""
        found = self.state.timing if times is None else times
        costs = {name: cost for name, cost in self.state.costs.items() if name in found}
        seeds = len(self.request.seeds)
        return Estimator(found, costs, seeds, self.parallel, self.state.startup)

    def _make_plan(self) -> None:
        """Choose the trials and epochs that fit into the budget, and show them."""
        request, estimator = self.request, self._estimator()
        plan = make_plan(
            estimator, request.trials, request.run.epochs, self._available, request.budget
        )
        self.state.plan = plan
        self._note_epochs(plan.epochs)
        methods = pluralize(len(self._active), "method")
        seconds = request.budget - self._available + estimator.total(plan)
        self.progress.message(
            f"plan: {methods}, {pluralize(plan.trials, 'trial')} each, then "
            f"{pluralize(len(request.seeds), 'seed')}, every run at the {request.effort} of "
            f"{pluralize(plan.epochs, 'epoch')} of the base; about "
            f"{format_seconds(seconds)} of {format_seconds(request.budget)} in all"
        )
        self._save()

    def _note_epochs(self, epochs: int) -> None:
        """Note that the base has fewer epochs than requested, instead of an earlier such note."""
        request = self.request
        if epochs < request.run.epochs:
            start = "Reduced epochs of the base"
            note = (
                f"{start} to fit into {format_seconds(request.budget)}: {epochs} instead of "
                f"{request.run.epochs}."
            )
            others = [n for n in self.state.notes if n == note or not n.startswith(start)]
            self.state.notes = others
            self._note(note)

    @property
    def _plan(self) -> Plan:
        assert self.state.plan is not None
        return self.state.plan

    # Jobs ---------------------------------------------------------------------------------------

    def _run(self, jobs: Iterable[Job]) -> None:
        """Run jobs and record their outcomes."""
        for outcome in sweep(jobs, self.executor, stop_if_refused=False):
            self._record(outcome)

    def _record(self, outcome: Outcome) -> None:
        """Store and show how a run of the search or a final run ended."""
        run, searches = outcome.job.run, self._phase.name == "search"
        entry = self._phase.end(outcome)
        if outcome.has_record:
            self.state.failures.pop(run.key, None)
            record = records.read(outcome.job.out, run)
            assert record is not None
            split = records.metric(record)["split"] if searches else "test"
            text = f"{entry.label}: {records.final_text(record, split)} ({outcome.seconds:.1f} s)"
        else:
            text = f"{entry.label}: {outcome.status}: {_detail(outcome)}"
            diverged = outcome.status is Status.FAILED
            if not (searches and diverged):  # large learning rates may diverge
                self.state.failures[run.key] = text
        self._save()
        self.progress.outcome(text, self._phase, self._left())

    def _left(self) -> float:
        """Return the estimated seconds until the end."""
        phase = self._phase
        if phase.name == "search":
            plan, estimator = self._plan, self._estimator()
            rounds = (phase.total - phase.done) / len(self._active)
            search = rounds * sum(estimator.trials(plan.epochs)) / self.parallel
            seconds = search + estimator.final(plan.epochs)
        else:
            seconds = phase.running_seconds / self.parallel
        return phase.slowdown * seconds + self._page_seconds

    # Search -------------------------------------------------------------------------------------

    def _search(self) -> None:
        """Train the trials of all methods."""
        done = sum(len(trial_records(self.out, self.state, method)) for method in self._active)
        total = max(self._plan.trials * len(self._active), done)
        self._phase = Phase("search", total, done)
        self.progress.update(self._phase, self._left())
        self._run(self._search_jobs())
        if self.state.trials < self.request.trials:
            self._note(
                f"Reduced trials to fit into {format_seconds(self.request.budget)}: "
                f"{self.state.trials} per method instead of {self.request.trials}."
            )
        self._save()

    def _search_jobs(self) -> Iterator[Job]:
        """Yield one trial of every method, then the next, while they fit into the budget."""
        folder = search_folder(self.out)
        for trial in range(self.request.trials):
            runs = {method.name: self.state.trial_run(method, trial) for method in self._active}
            left = [name for name, run in runs.items() if records.read(folder, run) is None]
            if len(left) == len(runs) and trial >= MIN_TRIALS and not self._round_fits():
                return
            self.state.trials = max(self.state.trials, trial + 1)
            self._phase.total = max(self._phase.total, self.state.trials * len(runs))
            for name in left:
                method, run = self.contenders[name], runs[name]
                if self._is_hopeless(method):
                    self._phase.done += 1
                    continue
                label = f"{method.title}, {format_point(method.point(trial))}"
                seconds = self.state.timing[method.name].seconds(run.epochs)
                job = Job(run, folder, self.execution, task=train_quietly)
                yield self._phase.start(job, Entry(label, method.name, seconds))

    def _is_hopeless(self, method: Contender) -> bool:
        """Return whether the first runs of a method ended with errors."""
        fails = self._phase.errors[method.name] >= _MAX_ERRORS
        return fails and not finished_trials(self.out, self.state, method)

    def _round_fits(self) -> bool:
        """Return whether another trial of every method fits before the final runs."""
        plan, estimator = self._plan, self._estimator()
        seconds = self._phase.running_seconds / self.parallel
        seconds += estimator.search(1, plan.epochs) - estimator.startup
        seconds += estimator.final(plan.epochs)
        return self._phase.slowdown * seconds <= self._available

    def _choose(self) -> None:
        """Choose the settings of each method, and its epochs."""
        chosen: dict[str, Point] = {}
        times: dict[str, Timing] = {}
        for method in self._active:
            found = finished_trials(self.out, self.state, method)
            if not found:
                failures = (trial.failure for trial in read_trials(self.out, self.state, method))
                reason = f"no trial finished: {next(filter(None, failures), 'none was started')}"
                if method.name == BASE:
                    raise ValueError(f"{method.title}: {reason}; change --lr or the data")
                self._leave_out(method, reason)
                continue
            best = min(found, key=lambda trial: (_objective(found[trial]), trial))
            chosen[method.name] = method.point(best)
            epoch = statistics.median(record["epoch_seconds"] for record in found.values())
            times[method.name] = replace(self.state.timing[method.name], epoch=epoch)
            self.progress.message(f"chosen: {method.title}, {format_point(chosen[method.name])}")
        available = self._available / max(self._phase.slowdown, 1.0)
        estimator = self._estimator(times)
        epochs = fit_epochs(estimator, self._plan.epochs, available)
        self._note_epochs(epochs)
        seconds = {name: timing.epoch for name, timing in times.items()}
        self.state.final = Final(chosen, equal_epochs(epochs, estimator.costs), seconds)
        self._save()

    # Final runs ---------------------------------------------------------------------------------

    def _train(self) -> None:
        """Train the final runs and measure the sharpness of their weights."""
        final = self.state.final
        assert final is not None
        folder = final_folder(self.out)
        execution = replace(self.execution, keep_weights=True)
        self._phase = Phase("final runs", len(self.request.seeds) * len(final.chosen))
        jobs = []
        for seed in self.request.seeds:
            for name in final.chosen:
                method = self.contenders[name]
                run = self.state.final_run(method, seed)
                record = records.read(folder, run)
                measured = sharpness_path(folder, run).exists()
                if record is None or (records.is_finished(record) and not measured):
                    timing = replace(self.state.timing[name], epoch=final.epoch_seconds[name])
                    seconds = timing.final_seconds(run.epochs)
                    job = Job(run, folder, execution, measure_sharpness, train_quietly)
                    entry = Entry(f"{method.title}, seed {seed}", name, seconds)
                    jobs.append(self._phase.start(job, entry))
        self._phase.done = self._phase.total - len(jobs)
        if jobs:
            self.progress.update(self._phase, self._left())
            self._run(jobs)


def _detail(outcome: Outcome) -> str:
    """Return the problem of a job without the title of its run."""
    return outcome.detail.removeprefix(f"{outcome.job.run.title}: ")


def _objective(record: Record) -> float:
    value = records.objective(record)
    assert value is not None
    return value
