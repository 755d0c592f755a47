"""Ranges, ticks and numbers of the charts: linear or logarithmic axes without far outliers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TICK_STEPS = [1, 2, 2.5, 5, 10]
_LOG_RATIO = 10.0
"""Positive values that span a larger ratio get a logarithmic axis."""
_LEAST, _LARGEST = 1e-100, 1e100
"""Of the absolute values that are drawn, beyond which matplotlib cannot compute axes. A smaller one
counts as zero, a larger one as the largest."""


def drawable(value: float) -> float:
    """Return the nearest value that can be drawn; infinity and NaN are returned as they are."""
    if not math.isfinite(value):
        return value
    return 0.0 if abs(value) < _LEAST else max(-_LARGEST, min(_LARGEST, value))


def usual_range(groups: Sequence[Sequence[float]], baseline: float = 0.0) -> tuple[float, float]:
    """Return the range of values to show, without groups far from all others.

    A group is left out if it is more than five times as far from the baseline as the others, and if
    its gap to them is more than twice their range, both as ratios where possible. At most two fifths
    of the groups are left out at either end. A diverged run then does not flatten the others.

    Args:
        groups: The values of each line or row.
        baseline: Where the axis starts.

    Example:
        >>> usual_range([[4.0], [4.2], [4.5], [90.0]])
        (4.0, 4.5)
        >>> usual_range([[4.0], [90.0]])
        (4.0, 90.0)
    """
    known = [[v for v in group if math.isfinite(v)] for group in groups]
    known = [group for group in known if group] or [[baseline]]
    top = _cut([max(group) - baseline for group in known]) + baseline
    bottom = baseline - _cut([baseline - min(group) for group in known])
    kept = [group for group in known if max(group) <= top and min(group) >= bottom] or known
    return min(map(min, kept)), max(map(max, kept))


def _cut(values: Sequence[float]) -> float:
    """Return the largest value that is not far above the others."""
    ordered = sorted(values)
    found = ordered[-1]
    for number in range(1, 2 * len(ordered) // 5 + 1):
        kept, next_value = ordered[:-number], ordered[-number]
        low, high = kept[0], kept[-1]
        if next_value <= max(5 * high, -high, 0.0):
            continue
        if low > 0:
            low, high, next_value = math.log(low), math.log(high), math.log(next_value)
        if next_value - high > 2 * (high - low):
            found = kept[-1]
    return found


def set_scale(
    axes: Axes,
    which: str,
    shown: tuple[float, float],
    *,
    log: bool = False,
    baseline: float = 0.0,
) -> None:
    """Set limits, ticks and tick labels of an axis.

    Args:
        axes: The axes.
        which: "x" or "y".
        shown: The range of the values to show.
        log: Use a logarithmic scale if the values span more than a factor of 10.
        baseline: A value that a linear axis includes.
    """
    from matplotlib import ticker

    axis = getattr(axes, f"{which}axis")
    low, high = map(drawable, shown)
    formatter: Any = ticker.FuncFormatter(lambda value, _: short(value))
    if log and low > 0 and high > _LOG_RATIO * low and baseline <= low:
        axes.set(**{f"{which}scale": "log", f"{which}lim": (low / 1.15, high * 1.15)})
        subs = (1, 2, 5) if high < 100 * low else (1,)
        axis.set_major_locator(ticker.LogLocator(subs=subs))
        axis.set_minor_locator(ticker.NullLocator())
    else:
        low, high = min(low, baseline), max(high, baseline)
        if low == high:
            high = low + 1.0
        margin = 0.06 * (high - low)
        start = low if low == baseline else low - margin
        end = high if high == baseline else high + margin
        axes.set(**{f"{which}lim": (start, end)})
        axis.set_major_locator(ticker.MaxNLocator(5, steps=TICK_STEPS))
        if high - low >= 1e-2 and max(-low, high) < 1e4:
            formatter = ticker.ScalarFormatter(useOffset=False)  # equal numbers of decimals
    axis.set_major_formatter(formatter)


def short(value: float) -> str:
    """Return a number in few characters.

    Example:
        >>> short(0.30000000000000004), short(20000.0), short(1e-05)
        ('0.3', '20k', '1e-5')
    """
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        mantissa, _, exponent = f"{value:.2g}".partition("e")
        return f"{mantissa}e{int(exponent)}" if exponent else mantissa
    if abs(value) >= 1e4:
        return f"{value / 1000:.4g}k"
    return f"{value:.4g}"
