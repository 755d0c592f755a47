"""Progress of a comparison: a live bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from wsam._utils.text import pluralize
from wsam.compare.formatting import format_seconds
from wsam.compare.phase import Phase

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


class Progress:
    """Receives messages and estimates; this base class shows nothing."""

    def message(self, text: str) -> None:
        """Show a line."""

    def update(self, phase: Phase, left: float | None) -> None:
        """Show how far a phase is.

        Args:
            phase: The phase.
            left: Estimated seconds until the end of the comparison; None if they are not known.
        """

    def outcome(self, text: str, phase: Phase, left: float) -> None:
        """Show how a run ended, and how far its phase is."""


class Lines(Progress):
    """Prints lines to stderr."""

    def message(self, text: str) -> None:
        """Print a line and flush."""
        print(text, file=sys.stderr, flush=True)

    def update(self, phase: Phase, left: float | None) -> None:
        """Print the first estimate of a phase."""
        if left is not None or not phase.done:
            before = f", {phase.done} of them done before" if phase.done else ""
            runs = pluralize(phase.total, "run")
            self.message(f"{phase.name}: {runs}{before}, {format_left(left)}")

    def outcome(self, text: str, phase: Phase, left: float) -> None:
        """Print a line with the estimate."""
        self.message(f"[{phase.done}/{phase.total}] {text}; {format_left(left)}")


class Bar(Progress):
    """A bar with an estimate of the time left, which counts down between outcomes."""

    def __init__(self, console: Console, budget: float) -> None:
        self.console, self.budget = console, budget
        self.start = self.updated = time.monotonic()
        self.phase = Phase("starting", 0)
        self.left: float | None = None

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def update(self, phase: Phase, left: float | None) -> None:
        """Store the values; rich draws them."""
        self.phase, self.left = phase, left
        self.updated = time.monotonic()

    def outcome(self, text: str, phase: Phase, left: float) -> None:
        """Print a line above the bar and update it."""
        self.message(text)
        self.update(phase, left)

    def __rich__(self) -> RenderableType:
        """Return the bar."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        now = time.monotonic()
        left = None if self.left is None else max(self.left - (now - self.updated), 0.0)
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_row(
            self.phase.name,
            ProgressBar(max(self.phase.total, 1), self.phase.done, width=24),
            f"{self.phase.done}/{self.phase.total} runs",
            format_left(left),
            f"{format_seconds(now - self.start)} of {format_seconds(self.budget)}",
        )
        return line


def format_left(seconds: float | None) -> str:
    """Return an estimate in words."""
    return "measuring the time" if seconds is None else f"about {format_seconds(seconds)} left"


@contextmanager
def show_progress(budget: float, quiet: bool) -> Iterator[Progress]:
    """Yield the progress display: live on a terminal, lines elsewhere, nothing if quiet."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet:
        yield Progress()
    elif console.is_terminal:
        from rich.live import Live

        bar: Any = Bar(console, budget)
        with Live(bar, console=console, refresh_per_second=4, transient=True):
            yield bar
    else:
        yield Lines()
