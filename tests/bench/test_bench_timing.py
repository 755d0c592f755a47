"""Interleaved timing, with a fake clock."""

import statistics
import time
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wsam.bench.timing import (
    Quartiles,
    Timer,
    TimingPlan,
    make_clock,
    paired_differences,
    paired_ratios,
    time_interleaved,
)

CPU = torch.device("cpu")


class FakeClock:
    """A clock that is advanced by the steps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.made: Counter[str] = Counter()
        self.order: list[str] = []

    def step(self, name: str, cost: float) -> Callable[[], None]:
        def run() -> None:
            self.now += cost
            self.made[name] += 1
            if not self.order or self.order[-1] != name:
                self.order.append(name)

        return run


def test_interleaved_timing_is_exact() -> None:
    clock = FakeClock()
    steps = {"a": clock.step("a", 1.0), "b": clock.step("b", 0.25), "c": clock.step("c", 3.0)}
    plan = TimingPlan(rounds=6, seconds=2.0, warmup=2)
    periods = {"a": 1, "b": 5, "c": 1}
    times = time_interleaved(steps, periods, plan, Timer(CPU, lambda: clock.now))
    assert times == {"a": [1.0] * 6, "b": [0.25] * 6, "c": [3.0] * 6}
    assert paired_ratios(times["c"], times["b"]) == Quartiles(12, 12, 12)
    assert paired_differences(times["c"], times["a"], 0.5) == Quartiles(2.5, 2.5, 2.5)
    # 2 periods of warm-up, 1 to calibrate, then 6 timings of at least 2 seconds, in whole periods.
    assert clock.made == {"a": 3 + 6 * 2, "b": 15 + 6 * 10, "c": 3 + 6 * 1}


def test_rounds_have_different_orders() -> None:
    clock = FakeClock()
    names = "abcde"
    steps = {name: clock.step(name, 1.0) for name in names}
    timer = Timer(CPU, lambda: clock.now)
    time_interleaved(steps, dict.fromkeys(names, 1), TimingPlan(8, 0.0), timer)
    orders = {tuple(clock.order[i : i + 5]) for i in range(5, len(clock.order) - 5, 5)}
    assert len(orders) > 3


def test_slow_phase_does_not_change_ratios() -> None:
    """Both cases slow down together from the third round on."""
    clock, factor = FakeClock(), [1.0]

    def step(cost: float) -> Callable[[], None]:
        def run() -> None:
            clock.now += cost * factor[0]

        return run

    def report(line: str) -> None:
        factor[0] = 7.0 if line.startswith(("round 3", "round 4", "round 5")) else 1.0

    steps = {"a": step(1.0), "b": step(2.0)}
    timer = Timer(CPU, lambda: clock.now)
    times = time_interleaved(steps, {"a": 1, "b": 1}, TimingPlan(5, 0.0), timer, report)
    assert Quartiles.of(times["a"]).median == 7
    assert paired_ratios(times["b"], times["a"]) == Quartiles(2, 2, 2)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_quartiles(values: list[float]) -> None:
    found = Quartiles.of(values)
    assert found.median == pytest.approx(statistics.median(values), abs=1e-6)
    assert min(values) - 1e-6 <= found.low <= found.median <= found.high <= max(values) + 1e-6


def test_cpu_clock_excludes_sleep() -> None:
    clock = make_clock("cpu", CPU)
    assert Timer(CPU, clock).time(lambda: time.sleep(0.2), 1) < 0.1
