"""A phase of a comparison: how many of its runs ended, and how long they took."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from wsam.sweep import Job, Outcome, Status

_SLOWDOWN = (0.5, 4.0)
"""Limits of the ratio of measured to estimated durations."""


@dataclass(frozen=True)
class Entry:
    """What a comparison keeps about a running job.

    Args:
        label: Its description in messages.
        method: Its method.
        seconds: Its estimated duration.
    """

    label: str
    method: str
    seconds: float


class Phase:
    """The timing runs, the search or the final runs.

    Args:
        name: Its name in messages.
        total: Number of its runs.
        done: How many of them have ended.
    """

    def __init__(self, name: str, total: int, done: int = 0) -> None:
        self.name, self.total, self.done = name, total, done
        self.running: dict[str, Entry] = {}
        self.errors: Counter[str] = Counter()
        """Runs of each method that ended with an error; a loss that diverges is none."""
        self.expected = self.measured = 0.0

    def start(self, job: Job, entry: Entry) -> Job:
        """Add a job, and return it."""
        self.running[job.run.key] = entry
        return job

    def end(self, outcome: Outcome) -> Entry:
        """Count the outcome of a job, and return its entry."""
        entry = self.running.pop(outcome.job.run.key)
        self.done += 1
        if outcome.status is Status.FINISHED:
            self.expected += entry.seconds
            self.measured += outcome.seconds
        elif not outcome.has_record and outcome.status is not Status.FAILED:
            self.errors[entry.method] += 1
        return entry

    @property
    def running_seconds(self) -> float:
        """The sum of the estimated durations of the running jobs."""
        return sum(entry.seconds for entry in self.running.values())

    @property
    def slowdown(self) -> float:
        """The ratio of measured to estimated durations so far."""
        low, high = _SLOWDOWN
        return min(max(self.measured / self.expected, low), high) if self.expected else 1.0
