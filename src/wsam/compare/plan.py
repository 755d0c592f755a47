"""How much fits into the budget: trials of the search and epochs of the final runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from wsam._utils.text import pluralize
from wsam.compare.formatting import format_seconds
from wsam.compare.timing import Timing

MIN_TRIALS = 3
"""The defaults, a smaller and a larger learning rate."""
_RESERVE = 0.05
"""Part of the budget that is not planned."""


@dataclass(frozen=True)
class Plan:
    """Numbers of trials and epochs.

    Args:
        trials: Settings tried for each method. The search tries more, up to the requested number, if
            its runs are faster than estimated.
        epochs: Epochs of the base in a trial and in a final run; the other methods get as many as cost
            the same.
    """

    trials: int
    epochs: int


def equal_epochs(epochs: int, costs: Mapping[str, float]) -> dict[str, int]:
    """Return the epochs of each method that cost as much as those of the base.

    Args:
        epochs: Epochs of the base.
        costs: The cost of an epoch of each method relative to the base.

    Example:
        >>> equal_epochs(20, {"base": 1.0, "sam": 1.9})
        {'base': 20, 'sam': 11}
    """
    return {name: max(1, round(epochs / cost)) for name, cost in costs.items()}


def least_epochs(costs: Mapping[str, float]) -> int:
    """Return the epochs of the base that cost as much as one epoch of the most expensive method."""
    return math.ceil(max(costs.values()) - 1e-9)


def wall_time(seconds: Iterable[float], parallel: int) -> float:
    """Return an upper bound of the duration of jobs on parallel workers.

    Reference:
        Graham, Bounds on multiprocessing timing anomalies, 1969.
    """
    durations = list(seconds)
    if not durations:
        return 0.0
    return sum(durations) / parallel + max(durations) * (1 - 1 / parallel)


@dataclass(frozen=True)
class Estimator:
    """Estimates durations.

    Args:
        times: Times of all methods.
        costs: The cost of an epoch of each method relative to the base.
        seeds: Number of seeds.
        parallel: Number of workers.
        startup: Seconds until workers run.
    """

    times: Mapping[str, Timing]
    costs: Mapping[str, float]
    seeds: int
    parallel: int
    startup: float = 0.0

    def trials(self, epochs: int) -> list[float]:
        """Return the duration of a trial of each method."""
        counts = equal_epochs(epochs, self.costs)
        return [self.times[name].seconds(count) for name, count in counts.items()]

    def search(self, trials: int, epochs: int) -> float:
        """Return the duration of a search of some trials of each method."""
        return wall_time(self.trials(epochs) * trials, self.parallel) + self.startup

    def final(self, epochs: int) -> float:
        """Return the duration of the final runs."""
        counts = equal_epochs(epochs, self.costs)
        jobs = [self.times[name].final_seconds(count) for name, count in counts.items()]
        return wall_time(jobs * self.seeds, self.parallel) + self.startup

    def total(self, plan: Plan) -> float:
        """Return the duration of search and final runs."""
        return self.search(plan.trials, plan.epochs) + self.final(plan.epochs)


def make_plan(
    estimator: Estimator, trials: int, epochs: int, available: float, budget: float
) -> Plan:
    """Return the largest plan that fits: first fewer trials, then fewer epochs.

    Args:
        estimator: Estimates durations.
        trials: The requested number of trials.
        epochs: The requested epochs of the base.
        available: Seconds that are left.
        budget: The whole budget, for messages.

    Raises:
        ValueError: Not even the smallest plan fits; the message gives the budget it needs.
    """
    planned = available - _RESERVE * budget
    fewest = min(MIN_TRIALS, trials)
    least = min(least_epochs(estimator.costs), epochs)
    plans = [Plan(count, epochs) for count in range(trials, fewest - 1, -1)]
    plans += [Plan(fewest, fewer) for fewer in range(epochs - 1, least - 1, -1)]
    for plan in plans:
        if estimator.total(plan) <= planned:
            return plan
    missing = estimator.total(plans[-1]) - planned
    needed = math.ceil((budget + missing) / (1 - _RESERVE))
    raise ValueError(
        f"a budget of {format_seconds(budget)} is too small: the shortest comparison here "
        f"({pluralize(fewest, 'trial')} per method, {pluralize(least, 'epoch')} of the base) takes "
        f"about {format_seconds(needed)}; use a larger --budget, fewer --methods or --seeds, or "
        "--train-limit"
    )


def fit_epochs(estimator: Estimator, epochs: int, available: float) -> int:
    """Return the most epochs of the base whose final runs fit into the time left; at least one."""
    least = min(least_epochs(estimator.costs), epochs)
    for fewer in range(epochs, least, -1):
        if estimator.final(fewer) <= available:
            return fewer
    return least
