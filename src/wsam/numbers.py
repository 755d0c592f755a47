"""Numbers on their way to people and files: means with deviations, null where JSON has no number."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any


def mean_deviation(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean and the sample deviation; None where there are too few values.

    Values that are not finite have a mean, which is not finite either, and no deviation.

    Example:
        >>> mean_deviation([1.0, 2.0, 3.0]), mean_deviation([5.0]), mean_deviation([])
        ((2.0, 1.0), (5.0, None), (None, None))
    """
    if not values:
        return None, None
    if not all(map(math.isfinite, values)):
        return sum(values) / len(values), None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def plus_minus(mean: float, deviation: float | None, text: Callable[[float], str]) -> str:
    """Return a mean with its deviation, or alone where it has none.

    Args:
        mean: The mean.
        deviation: The deviation, or None.
        text: Writes a number.

    Example:
        >>> plus_minus(4.31, 0.2, "{:.1f}".format), plus_minus(4.31, None, "{:.1f}".format)
        ('4.3 ± 0.2', '4.3')
    """
    return text(mean) if deviation is None else f"{text(mean)} ± {text(deviation)}"


def counted(count: int, noun: str) -> str:
    """Return a number of things: ``1 run``, ``2 runs``.

    Example:
        >>> counted(1, "run"), counted(0, "group")
        ('1 run', '0 groups')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def plain(value: Any) -> Any:
    """Return the same data with None for every number that is not finite: JSON has none for it.

    Example:
        >>> plain({"losses": [1.0, float("inf")], "epoch": 3})
        {'losses': [1.0, None], 'epoch': 3}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
