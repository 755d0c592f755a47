"""One job of a sweep: a run, how to execute it, and its outcome."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch

from wsam.lab import attempts, records
from wsam.lab.callbacks import Callback
from wsam.lab.errors import RunError
from wsam.lab.execution import ExecutionConfig
from wsam.lab.files import BusyError, format_os_error
from wsam.lab.records import Record
from wsam.lab.run import Run
from wsam.lab.titles import figure_name
from wsam.lab.train import train

After = Callable[[Run, Path, ExecutionConfig], object]
"""Called after a run finished; a module-level function, so that it can be pickled."""

Task = Callable[[Run, Path, ExecutionConfig, Sequence[Callback]], Record]
"""Trains a run and returns its record; can be pickled, as a module-level function."""

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@dataclass(frozen=True)
class Job:
    """A run to train. It can be pickled and sent to another process or machine.

    Args:
        run: What to train.
        out: The results folder, shared by all workers.
        execution: How to train it.
        after: Called when the run is finished, also if its record already existed; it must return
            quickly if it was called before.
        task: Called instead of `wsam.lab.train.train`.
    """

    run: Run
    out: Path
    execution: ExecutionConfig
    after: After | None = None
    task: Task | None = None


class Status(StrEnum):
    """How a job ended."""

    FINISHED = "finished"
    SKIPPED = "skipped"
    """The record already existed."""
    FAILED = "failed"
    """The loss was not finite."""
    BUSY = "busy"
    """Another process is training the run."""
    REFUSED = "refused"
    """The user must act first, for all jobs: data is missing, or the disk is full."""
    ERROR = "error"
    """Out of memory, code of the user's own, a damaged file or a bug; others are not affected."""
    LOST = "lost"
    """Its workers died too often."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job.

    Args:
        job: The job.
        status: How it ended.
        detail: The problem, in one line.
        error: The final test error.
        seconds: How long it took.
        missing_module: The module that is not installed, if the job was refused for that.
        objective: What a search minimizes: `records.objective` of the record.
        objective_name: The figure that it improves, such as ``validation error``.
        lower_is_better: Whether the objective is the figure itself, and not its negative.
        figure: The objective as text, in its own direction: ``4.20%``, ``validation accuracy 95.10%``.
    """

    job: Job
    status: Status
    detail: str = ""
    error: float | None = None
    seconds: float = 0.0
    missing_module: str | None = None
    objective: float | None = None
    objective_name: str = "test error"
    lower_is_better: bool = True
    figure: str = ""

    @property
    def has_record(self) -> bool:
        """Whether the run has a finished record."""
        return self.status in (Status.FINISHED, Status.SKIPPED)


class _StartedFlag(Callback):
    """Whether training started in this process; another one may have finished the run."""

    started = False

    def on_train_start(self, run: Run, steps: int, done: int, batch_size: int) -> None:
        self.started = True


def run_job(job: Job, callbacks: Sequence[Callback] = ()) -> Outcome:
    """Train the run of a job, unless it has a record or another process is training it.

    Any number of processes and machines that share the results folder may call this, and again after
    any of them was killed: a run is trained by one process at a time and resumes from its last
    checkpoint.
    """
    start = time.monotonic()
    flag = _StartedFlag()
    try:
        record = (job.task or train)(job.run, job.out, job.execution, [*callbacks, flag])
        if records.is_finished(record) and job.after is not None:
            with records.lock_run(job.out, job.run):
                job.after(job.run, job.out, job.execution)
    except BusyError as error:
        return Outcome(job, Status.BUSY, str(error))
    except (OSError, ValueError, ModuleNotFoundError) as error:
        message = format_os_error(error)
        if _concerns_this_run_only(error, job.run):
            return _failed_attempt(job, message)
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        detail = f"{job.run.title}: {message}"
        return Outcome(job, Status.REFUSED, detail, missing_module=missing)
    except Exception as error:
        return _failed_attempt(job, _describe(error))
    seconds = time.monotonic() - start
    finished, metric = records.is_finished(record), records.metric(record)
    text = records.final_text(record, metric["split"])
    status = Status.FINISHED if flag.started else Status.SKIPPED
    return Outcome(
        job,
        status if finished else Status.FAILED,
        "" if finished else records.failure_reason(record),
        error=records.final_error(record),
        objective=records.objective(record),
        objective_name=figure_name(metric),
        lower_is_better=metric["lower_is_better"],
        # A test error is shown without its name.
        figure=text.removeprefix("test error ") if finished else "",
        seconds=seconds,
    )


def _failed_attempt(job: Job, reason: str) -> Outcome:
    """Store why a run could not be trained, so that a report of the folder shows it."""
    attempts.write(job.out, job.run, reason)
    return Outcome(job, Status.ERROR, reason)


def _describe(error: Exception) -> str:
    """Return an unexpected error in one line; print the traceback of a bug."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        reason = str(error).partition("\n")[0].partition(". ")[0]
        return f"out of memory: {reason}" if reason else "out of memory"
    import traceback

    traceback.print_exc()  # the worker's log should contain it
    return f"{type(error).__name__}: {error}"


def _concerns_this_run_only(error: Exception, run: Run) -> bool:
    """Return whether an error is about a file of this run; their paths contain the run's key."""
    if isinstance(error, RunError):
        return True
    if run.key not in str(error):
        return False
    if not isinstance(error, OSError):
        return True
    # `lab.files` raises OSError without `filename` if it cannot write; other jobs cannot either.
    unwritable = error.errno is not None and error.filename is None
    return not unwritable and error.errno not in _DISK_FULL
