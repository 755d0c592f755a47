"""Numbers on their way to people and files: means with deviations, null where JSON has no number."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
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
