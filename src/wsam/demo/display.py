"""The display: live, one line per run with its epochs; through a pipe, one per run that has ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wsam.demo.summary import names
from wsam.demo.work import is_done, unheard
from wsam.lab import records
from wsam.lab.files import no_op as say_nothing
from wsam.lab.train import run_checkpoints
from wsam.report.gather import group_key
from wsam.sweep import Job, Outcome

if TYPE_CHECKING:
    from rich.table import Table

_BAR = 24
_EVERY = 4
"""Looks per second."""
_MOST = 24
"""Lines; of more jobs than that only those under way are shown."""


class State:
    """How far a job is, read from the disk, whoever works on it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.done = False
        self.epochs = 0
        self.error: float | None = None

    def look(self) -> None:
        """Look at the disk."""
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
        """What is said of it."""
        if self.done:
            return "failed" if self.error is None else f"{self.error:5.2f}% test error"
        if self.epochs == self.job.run.epochs:
            return "measuring its minimum"
        if self.epochs:
            return f"epoch {self.epochs} of {self.job.run.epochs}"
        return "begun" if records.work_folder(self.job.out, self.job.run).exists() else "waiting"


def _error(job: Job) -> float | None:
    try:
        record = records.read(job.out, job.run)
    except ValueError:
        return None
    return None if record is None else records.final_error(record)


class Display:
    """All jobs of a demonstration as a table that rich draws again and again."""

    def __init__(self, jobs: Sequence[Job], title: str) -> None:
        self.states = [State(job) for job in jobs]
        self.title = title
        self.begun = time.monotonic()
        self.labels = labels(jobs)

    def __rich__(self) -> Table:
        """Look at the disk and draw."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        for state in self.states:
            state.look()
        done = sum(state.done for state in self.states)
        elapsed = time.monotonic() - self.begun
        head = f"{self.title}: {done} of {len(self.states)} runs, {elapsed:.0f} s"
        drawn = Table.grid(padding=(0, 2, 0, 0))
        drawn.title, drawn.title_justify = head, "left"
        for state in self._shown():
            run = state.job.run
            bar = ProgressBar(run.epochs, state.epochs, width=_BAR)
            drawn.add_row(Text(self.labels[run.key]), bar, Text(state.text))
        return drawn

    def _shown(self) -> list[State]:
        if len(self.states) <= _MOST:
            return self.states
        return [state for state in self.states if state.epochs and not state.done][:_MOST]


def labels(jobs: Sequence[Job]) -> dict[str, str]:
    """Return what people read for each run: its row and seed, or its settings, by its key."""
    rows, found = names(), {}
    for run in (job.run for job in jobs):
        name = rows.get(group_key(run))
        found[run.key] = run.title if name is None else f"{name}, seed {run.seed}"
    return found


@dataclass(frozen=True)
class Ears:
    """What hears of jobs under way: messages for the user, and the end of each job."""

    say: Callable[[str], None] = say_nothing
    ended: Callable[[Outcome], None] = unheard


class Lines:
    """One line per job that has ended, for pipes and logs."""

    def __init__(self, jobs: Sequence[Job], title: str) -> None:
        self.labels = labels(jobs)
        self.total, self.done = len(jobs), sum(map(is_done, jobs))
        before = f", {self.done} of them done before" if self.done else ""
        self.say(f"{title}: {self.total} runs{before}")

    def say(self, message: str) -> None:
        """Print a line at once."""
        print(message, file=sys.stderr, flush=True)

    def ended(self, outcome: Outcome) -> None:
        """Print what became of a job."""
        self.done += 1
        what = f"{outcome.status}: {outcome.detail}"
        if outcome.error is not None:
            what = f"{outcome.error:.2f}% test error"
        label = self.labels[outcome.job.run.key]
        self.say(f"[{self.done}/{self.total}] {label}: {what} ({outcome.seconds:.1f} s)")


@contextmanager
def shown(jobs: Sequence[Job], title: str, quiet: bool) -> Iterator[Ears]:
    """Show how far jobs are: live on a terminal, one line per finished run elsewhere.

    Yields:
        What is to hear of them.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if quiet:
        yield Ears()
    elif console.is_terminal:
        from rich.live import Live

        display: Any = Display(jobs, title)
        with Live(display, console=console, refresh_per_second=_EVERY):
            yield Ears(lambda message: console.print(message, markup=False, highlight=False))
    else:
        lines = Lines(jobs, title)
        yield Ears(lines.say, lines.ended)
