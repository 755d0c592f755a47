"""One job: a run, all that it takes to carry it out, and what became of it."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from wsam.lab import records
from wsam.lab.files import BusyError, sentence
from wsam.lab.means import Means
from wsam.lab.run import Run
from wsam.lab.train import train
from wsam.lab.watch import Watcher

After = Callable[[Run, Path, Means], object]
"""What is done with a finished run; a function of a module, so that it can be sent elsewhere."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""A disk that takes no more."""


@dataclass(frozen=True)
class Job:
    """A run to carry out. It can be pickled and sent to another process or machine.

    Args:
        run: What to train.
        out: The folder of the results, which all workers share.
        means: How to train it.
        after: Done once the run is finished; must be quick where it has been done before.
    """

    run: Run
    out: Path
    means: Means
    after: After | None = None


class Status(StrEnum):
    """What became of a job."""

    FINISHED = "finished"
    SKIPPED = "skipped"
    """Its record was there already."""
    FAILED = "failed"
    """The loss was no longer finite."""
    BUSY = "busy"
    """Another process works on it."""
    REFUSED = "refused"
    """Its user must do something first, for all jobs: data is missing, the disk is full."""
    ERROR = "error"
    """A defect, or a file of its own is damaged: of no concern to other jobs."""
    LOST = "lost"
    """Whoever worked on it died, too often."""


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Args:
        job: The job.
        status: How it ended.
        detail: What went wrong, in a line.
        error: The final test error.
        seconds: How long it took.
        lacks: The module that is not installed, if it was refused for that.
    """

    job: Job
    status: Status
    detail: str = ""
    error: float | None = None
    seconds: float = 0.0
    lacks: str | None = None

    @property
    def settled(self) -> bool:
        """Whether a finished record is there."""
        return self.status in (Status.FINISHED, Status.SKIPPED)


class _Begun(Watcher):
    """Knows whether training has begun: a run that another finished meanwhile is not ours."""

    begun = False

    def start(self, run: Run, steps: int, done: int, images: int) -> None:
        self.begun = True


def perform(job: Job, watchers: Sequence[Watcher] = ()) -> Outcome:
    """Carry out a job: train its run, unless it is done or another process is at it.

    It can be called by any number of processes and machines that share the folder of results, and
    again after any of them was killed: a run is trained by one at a time, and goes on from its last
    checkpoint.
    """
    begin = time.monotonic()
    begun = _Begun()
    try:
        record = train(job.run, job.out, job.means, [*watchers, begun])
        if records.is_finished(record) and job.after is not None:
            with records.claim(job.out, job.run):
                job.after(job.run, job.out, job.means)
    except BusyError as error:
        return Outcome(job, Status.BUSY, str(error))
    except (OSError, ValueError, ModuleNotFoundError) as error:
        what = sentence(error)
        if _is_its_own(error, job.run):
            return Outcome(job, Status.ERROR, what)
        lacks = error.name if isinstance(error, ModuleNotFoundError) else None
        return Outcome(job, Status.REFUSED, f"{job.run.title}: {what}", lacks=lacks)
    except Exception as error:
        import traceback

        traceback.print_exc()  # a defect: its traceback belongs into the worker's log
        return Outcome(job, Status.ERROR, f"{type(error).__name__}: {error}")
    seconds = time.monotonic() - begin
    if not records.is_finished(record):
        return Outcome(job, Status.FAILED, str(record.get("failure")), seconds=seconds)
    status = Status.FINISHED if begun.begun else Status.SKIPPED
    return Outcome(job, status, error=records.final_error(record), seconds=seconds)


def _is_its_own(error: Exception, run: Run) -> bool:
    """Tell whether an error is about a file of this run alone: all of them are named by its key."""
    if run.key not in str(error):
        return False
    if not isinstance(error, OSError):
        return True
    # `files` says in its own words, without `filename`, what cannot be written: nor can others be.
    unwritable = error.errno is not None and error.filename is None
    return not unwritable and error.errno not in _FULL
