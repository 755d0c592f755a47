"""Progress of jobs: a live table on a terminal, one line per finished run elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wsam.demo.jobs import ignore_outcome, is_done
from wsam.demo.summary import names
from wsam.lab import records
from wsam.lab.files import no_op
from wsam.lab.train import run_checkpoints
from wsam.report.results import group_key
from wsam.sweep import Job, Outcome

if TYPE_CHECKING:
    from rich.table import Table

_BAR_WIDTH = 24
_REFRESH_RATE = 4
"""Updates per second."""
_MAX_ROWS = 24
"""With more jobs, only running ones are shown."""


class JobProgress:
    """The progress of a job, read from its files: another process runs it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.done = False
        self.epochs = 0
        self.error: float | None = None

    def refresh(self) -> None:
        """Read the files of the job."""
        if self.done:
            return
        out, run = self.job.out, self.job.run
        if records.record_path(out, run).exists():
            self.epochs = run.epochs
            self.done = is_done(self.job)
            self.error = _error(self.job) if self.done else None
            return
        self.epochs = max(self.epochs, run_checkpoints(run, out).newest or 0)

    @property
    def text(self) -> str:
        """The state of the job in words."""
        if self.done:
            return "failed" if self.error is None else f"{self.error:5.2f}% test error"
        if self.epochs == self.job.run.epochs:
            return "measuring its minimum"
        if self.epochs:
            return f"epoch {self.epochs} of {self.job.run.epochs}"
        return "started" if records.work_folder(self.job.out, self.job.run).exists() else "waiting"


def _error(job: Job) -> float | None:
    try:
        record = records.read(job.out, job.run)
    except ValueError:
        return None
    return None if record is None else records.final_error(record)


class ProgressTable:
    """All jobs as a table that rich draws repeatedly."""

    def __init__(self, jobs: Sequence[Job], title: str) -> None:
        self.jobs = [JobProgress(job) for job in jobs]
        self.title = title
        self.started = time.monotonic()
        self.labels = job_labels(jobs)

    def __rich__(self) -> Table:
        """Read the state of all jobs and draw it."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        for job in self.jobs:
            job.refresh()
        done = sum(job.done for job in self.jobs)
        elapsed = time.monotonic() - self.started
        table = Table.grid(padding=(0, 2, 0, 0))
        table.title = f"{self.title}: {done} of {len(self.jobs)} runs, {elapsed:.0f} s"
        table.title_justify = "left"
        for job in self._shown():
            run = job.job.run
            bar = ProgressBar(run.epochs, job.epochs, width=_BAR_WIDTH)
            table.add_row(Text(self.labels[run.key]), bar, Text(job.text))
        return table

    def _shown(self) -> list[JobProgress]:
        if len(self.jobs) <= _MAX_ROWS:
            return self.jobs
        return [job for job in self.jobs if job.epochs and not job.done][:_MAX_ROWS]


def job_labels(jobs: Sequence[Job]) -> dict[str, str]:
    """Return the label of each run by its key: row and seed, or its settings."""
    rows, found = names(), {}
    for run in (job.run for job in jobs):
        name = rows.get(group_key(run))
        found[run.key] = run.title if name is None else f"{name}, seed {run.seed}"
    return found


@dataclass(frozen=True)
class Callbacks:
    """Functions that receive messages for the user and the outcome of each job."""

    message: Callable[[str], None] = no_op
    finished: Callable[[Outcome], None] = ignore_outcome


class ProgressLog:
    """One line per finished job, for pipes and logs."""

    def __init__(self, jobs: Sequence[Job], title: str) -> None:
        self.labels = job_labels(jobs)
        self.total, self.done = len(jobs), sum(map(is_done, jobs))
        before = f", {self.done} of them done before" if self.done else ""
        self.message(f"{title}: {self.total} runs{before}")

    def message(self, text: str) -> None:
        """Print a line and flush."""
        print(text, file=sys.stderr, flush=True)

    def finished(self, outcome: Outcome) -> None:
        """Print the outcome of a job."""
        self.done += 1
        result = f"{outcome.status}: {outcome.detail}"
        if outcome.error is not None:
            result = f"{outcome.error:.2f}% test error"
        label = self.labels[outcome.job.run.key]
        self.message(f"[{self.done}/{self.total}] {label}: {result} ({outcome.seconds:.1f} s)")


@contextmanager
def show_progress(jobs: Sequence[Job], title: str, quiet: bool) -> Iterator[Callbacks]:
    """Show the progress of jobs: live on a terminal, one line per finished run elsewhere.

    Args:
        jobs: The jobs.
        title: The heading.
        quiet: Show nothing.

    Yields:
        The callbacks that update it.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if quiet:
        yield Callbacks()
    elif console.is_terminal:
        from rich.live import Live

        table: Any = ProgressTable(jobs, title)
        with Live(table, console=console, refresh_per_second=_REFRESH_RATE):
            yield Callbacks(lambda text: console.print(text, markup=False, highlight=False))
    else:
        log = ProgressLog(jobs, title)
        yield Callbacks(log.message, log.finished)
