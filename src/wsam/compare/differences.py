"""How much better than the base each method is, and whether that is beyond noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from wsam._utils.significance import ALPHA, holm, interval, paired_p
from wsam.compare.contenders import BASE

Values = Mapping[int, float]
"""The final figure of a method by seed."""


@dataclass(frozen=True)
class Difference:
    """How much better than the base a method is, over the seeds that both finished.

    Args:
        mean: The mean improvement; negative if the method is worse.
        interval: Half the width of its 95% confidence interval.
        p: The p-value of a paired t-test.
        p_holm: The same, corrected for the number of methods.
    """

    mean: float
    interval: float | None
    p: float | None
    p_holm: float | None

    @property
    def is_significant(self) -> bool:
        """Whether the difference is beyond noise."""
        return self.p_holm is not None and self.p_holm < ALPHA


def find_differences(values: Mapping[str, Values], lower_is_better: bool) -> dict[str, Difference]:
    """Return the difference to the base of each method that finished a seed of the base.

    Args:
        values: The figures of each method, the base included.
        lower_is_better: Whether lower figures are better.
    """
    base, sign = values[BASE], 1 if lower_is_better else -1
    largest = max((abs(one) for found in values.values() for one in found.values()), default=0)
    decimals = 11 - math.floor(math.log10(largest)) if largest else 0
    improvements = {  # rounded: equal differences of percentages must be equal
        name: [
            round(sign * (base[seed] - value), decimals)
            for seed, value in found.items()
            if seed in base
        ]
        for name, found in values.items()
        if name != BASE
    }
    p_values = {name: paired_p(ours) for name, ours in improvements.items() if len(ours) > 1}
    # Equal differences have no p-value, but they were compared: the others are corrected for them.
    corrected = holm({name: 1.0 if p is None else p for name, p in p_values.items()})
    differences = {}
    for name, ours in improvements.items():
        if ours:
            p = p_values.get(name)
            p_holm = None if p is None else corrected[name]
            differences[name] = Difference(statistics.fmean(ours), interval(ours), p, p_holm)
    return differences
