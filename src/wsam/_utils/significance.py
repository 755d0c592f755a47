"""Intervals and tests over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

LEVEL = 0.95
ALPHA = 1 - LEVEL


def interval(values: Sequence[float]) -> float | None:
    """Return half the width of the 95% confidence interval of the mean; None for fewer than two.

    Equation: ``t(0.975, n - 1) * std / sqrt(n)``.

    Example:
        >>> round(interval([1.0, 2.0, 3.0]), 3), interval([1.0])
        (2.484, None)
    """
    from scipy.stats import t

    count = len(values)
    if count < 2:
        return None
    quantile = float(t.ppf((1 + LEVEL) / 2, count - 1))
    return quantile * statistics.stdev(values) / math.sqrt(count)


def paired_p(differences: Sequence[float]) -> float | None:
    """Return the two-sided p-value of a paired t-test: is the mean difference zero?

    None for fewer than two differences, or if all of them are equal.

    Example:
        >>> round(paired_p([0.5, 0.8, 0.6]), 3), paired_p([0.5, 0.5])
        (0.019, None)
    """
    from scipy.stats import ttest_1samp

    if len({*differences}) < 2:
        return None
    p = float(ttest_1samp(differences, 0.0).pvalue)
    return p if math.isfinite(p) else None


def welch_p(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the p-value of Welch's t-test, which does not assume equal variances.

    None if a sample has fewer than two values or both have no variance.

    Example:
        >>> round(welch_p([3.73, 3.86, 3.67], [3.62, 3.65, 3.61]), 2), welch_p([1.0], [2.0, 3.0])
        (0.15, None)

    Reference:
        Welch, The generalization of "Student's" problem when several different population variances
        are involved, Biometrika 1947.
    """
    from scipy.stats import t

    found = _welch(first, second)
    if found is None:
        return None
    difference, error, degrees = found
    return 2 * float(t.sf(abs(difference) / error, degrees))


def welch_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95% confidence interval of mean(second) - mean(first); None as for `welch_p`.

    Example:
        >>> low, high = welch_interval([3.73, 3.86, 3.67], [3.62, 3.65, 3.61])
        >>> round(low, 2), round(high, 2)
        (-0.35, 0.1)
    """
    from scipy.stats import t

    found = _welch(first, second)
    if found is None:
        return None
    difference, error, degrees = found
    half = float(t.ppf((1 + LEVEL) / 2, degrees)) * error
    return difference - half, difference + half


def _welch(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float] | None:
    """Return the difference of the means, its standard error and Welch's degrees of freedom.

    scipy's test warns if one of the samples has no variance, although its result is correct.
    """
    counts = len(first), len(second)
    if min(counts) < 2:
        return None
    of_means = [statistics.variance(values) / len(values) for values in (first, second)]
    total = sum(of_means)
    if total == 0:
        return None
    inverse = sum(
        (one / total) ** 2 / (count - 1) for one, count in zip(of_means, counts, strict=True)
    )
    return statistics.fmean(second) - statistics.fmean(first), math.sqrt(total), 1 / inverse


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return p-values corrected for their number by Holm's method.

    Example:
        >>> holm({"sam": 0.04, "wsam": 0.01, "gsam": 0.5})
        {'wsam': 0.03, 'sam': 0.08, 'gsam': 0.5}

    Reference:
        Holm, A simple sequentially rejective multiple test procedure, 1979.
    """
    found, least = {}, 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        least = max(least, min(1.0, (len(p_values) - rank) * p))
        found[name] = least
    return found
