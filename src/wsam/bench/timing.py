"""Interleaved timing: every round times every case, so that a slow phase of the machine affects all.

Ratios are computed round by round, from two timings that are close in time, and reported as median and
quartiles.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

from wsam.lab.files import no_op

Clock = Callable[[], float]


@dataclass(frozen=True)
class Quartiles:
    """Median, lower and upper quartile of a sample."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """Return the quartiles of values.

        Example:
            >>> Quartiles.of([1.0, 2.0, 3.0, 4.0, 5.0])
            Quartiles(median=3.0, low=2.0, high=4.0)
        """
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def as_dict(self) -> dict[str, float]:
        """Return the three numbers by name."""
        return asdict(self)


@dataclass(frozen=True)
class TimingPlan:
    """How often and how long each case is timed.

    Args:
        rounds: Number of timings of each case.
        seconds: Minimum duration of a timing; it has at least one period of steps.
        warmup: Periods before the first timing. A captured step is captured at its third call.
    """

    rounds: int
    seconds: float
    warmup: int = 4


def make_clock(name: str, device: torch.device) -> Clock:
    """Return a clock: ``wall``, or ``cpu`` for the CPU time of this process.

    CPU time is fair on a shared machine, but only for one thread on the CPU.

    Raises:
        ValueError: The CPU clock with a GPU or several threads.
    """
    if name == "wall":
        return time.perf_counter
    if device.type != "cpu" or torch.get_num_threads() != 1:
        raise ValueError("--clock cpu needs --device cpu and one thread (OMP_NUM_THREADS=1)")
    return time.process_time


class Timer:
    """Times steps on one device."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self.device, self._clock = device, clock

    def time(self, step: Callable[[], object], count: int) -> float:
        """Return the mean seconds of a step over `count` steps."""
        self._synchronize()
        start = self._clock()
        for _ in range(count):
            step()
        self._synchronize()
        return (self._clock() - start) / count

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def time_interleaved(
    steps: Mapping[str, Callable[[], object]],
    periods: Mapping[str, int],
    plan: TimingPlan,
    timer: Timer,
    report: Callable[[str], None] = no_op,
) -> dict[str, list[float]]:
    """Time all steps in rounds, each in a random order.

    Args:
        steps: Functions that make one step, by name.
        periods: The number of steps in a timing is a multiple of this.
        plan: Number of rounds and duration of a timing.
        timer: Has the device and the clock.
        report: Called with the round and the name before each timing.

    Returns:
        Seconds per step for each name, one number per round.
    """
    counts = {}
    for name, step in steps.items():
        report(f"warm-up: {name}")
        timer.time(step, plan.warmup * periods[name])
        seconds = timer.time(step, periods[name])
        wanted = math.ceil(plan.seconds / max(seconds, 1e-9) / periods[name])
        counts[name] = max(1, wanted) * periods[name]
    times: dict[str, list[float]] = {name: [] for name in steps}
    with gc_paused():
        for number in range(plan.rounds):
            gc.collect()
            order = list(steps)
            random.Random(number).shuffle(order)
            for name in order:
                report(f"round {number + 1} of {plan.rounds}: {name}")
                times[name].append(timer.time(steps[name], counts[name]))
    return times


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: for a tiny model several threads are slower, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable automatic garbage collection, which would slow some cases at random.

    Existing objects are frozen, so that explicit calls of `gc.collect` are fast.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def paired_ratios(times: Sequence[float], others: Sequence[float]) -> Quartiles:
    """Return the quartiles of ``times / others``, computed round by round."""
    return Quartiles.of([a / b for a, b in zip(times, others, strict=True)])


def paired_differences(times: Sequence[float], others: Sequence[float], factor: float) -> Quartiles:
    """Return the quartiles of ``times - factor * others``, computed round by round."""
    return Quartiles.of([a - factor * b for a, b in zip(times, others, strict=True)])
