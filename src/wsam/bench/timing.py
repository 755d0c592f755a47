"""Interleaved timing: every round visits every case, so that whatever slows the machine slows all.

A ratio is made round by round, of two visits that lie close together, and told by its median and
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

from wsam.lab.files import quiet

Clock = Callable[[], float]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of some numbers."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of values.

        Example:
            >>> Spread.of([1.0, 2.0, 3.0, 4.0, 5.0])
            Spread(median=3.0, low=2.0, high=4.0)
        """
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def as_dict(self) -> dict[str, float]:
        """Return the three numbers by name."""
        return asdict(self)


@dataclass(frozen=True)
class Visits:
    """How often and how long each case is visited."""

    rounds: int
    seconds: float
    """What a visit should last, at least; it makes one period of steps in any case."""
    warmup: int = 4
    """Steps before the first measured one: a captured step is recorded at its third."""


def clock_of(name: str, device: torch.device) -> Clock:
    """Return the clock: ``wall``, or ``cpu``, the seconds this process was computing.

    The second is fair on a machine that others use too, with one thread and on the CPU alone.

    Raises:
        ValueError: No such clock, or one that would not tell the truth here.
    """
    if name == "wall":
        return time.perf_counter
    if name != "cpu":
        raise ValueError(f"--clock must be wall or cpu, not {name}")
    if device.type != "cpu" or torch.get_num_threads() != 1:
        raise ValueError("--clock cpu needs --device cpu and one thread (OMP_NUM_THREADS=1)")
    return time.process_time


class Visitor:
    """Times visits to steps on one device."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self.device, self._clock = device, clock

    def visit(self, step: Callable[[], object], count: int) -> float:
        """Return the seconds a step takes, over `count` of them."""
        self._wait()
        start = self._clock()
        for _ in range(count):
            step()
        self._wait()
        return (self._clock() - start) / count

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def interleave(
    steps: Mapping[str, Callable[[], object]],
    periods: Mapping[str, int],
    visits: Visits,
    visitor: Visitor,
    report: Callable[[str], None] = quiet,
) -> dict[str, list[float]]:
    """Time all steps, round robin in an order drawn anew each round.

    Args:
        steps: Each makes one step.
        periods: A visit makes a multiple of so many steps.
        visits: How many rounds, how long a visit.
        visitor: Has the clock.
        report: Told the round and the case before each visit.

    Returns:
        Seconds per step, one number per round, for each case.
    """
    counts = {}
    for name, step in steps.items():
        report(f"warm-up: {name}")
        visitor.visit(step, visits.warmup * periods[name])
        once = visitor.visit(step, periods[name])
        wanted = math.ceil(visits.seconds / max(once, 1e-9) / periods[name])
        counts[name] = max(1, wanted) * periods[name]
    found: dict[str, list[float]] = {name: [] for name in steps}
    with no_collections():
        for number in range(visits.rounds):
            gc.collect()
            order = list(steps)
            random.Random(number).shuffle(order)
            for name in order:
                report(f"round {number + 1} of {visits.rounds}: {name}")
                found[name].append(visitor.visit(steps[name], counts[name]))
    return found


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread meanwhile.

    A model that is tiny takes several threads longer than one: on a busy machine they spend their
    time waiting for each other.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def no_collections() -> Iterator[None]:
    """Keep the garbage collector from hitting one case and sparing the others.

    What is alive now is set aside, so that `gc.collect` looks at newer objects only and is quick.
    """
    was = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was:
            gc.enable()


def ratios(times: Sequence[float], others: Sequence[float]) -> Spread:
    """Return the spread of the ratio of two cases, made round by round."""
    return Spread.of([one / other for one, other in zip(times, others, strict=True)])


def differences(times: Sequence[float], others: Sequence[float], share: float) -> Spread:
    """Return the spread of `times - share * others`, made round by round."""
    return Spread.of([a - share * b for a, b in zip(times, others, strict=True)])
