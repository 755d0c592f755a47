"""Axes: where a number stands in a picture, and which numbers are written beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_WIDE = 10.0
"""Positive numbers that span more than this factor are drawn on a logarithmic scale."""
_ONE_DECADE = (1, 2, 5)


@dataclass(frozen=True)
class Scale:
    """Maps numbers from `low` to `high` onto pixels from `start` to `stop`.

    Example:
        >>> Scale(0.0, 10.0, 0.0, 100.0)(2.5)
        25.0
        >>> Scale(1.0, 100.0, 0.0, 100.0, log=True)(10.0)
        50.0
    """

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a number, held between the ends."""
        low, high, value = (self._turn(v) for v in (self.low, self.high, value))
        share = (value - low) / (high - low)
        return self.start + min(max(share, 0.0), 1.0) * (self.stop - self.start)

    def _turn(self, value: float) -> float:
        return math.log10(max(value, self.low)) if self.log else value

    def ticks(self, count: int = 5) -> list[float]:
        """Return round numbers between the ends, about `count` of them."""
        return _log_ticks(self.low, self.high) if self.log else _ticks(self.low, self.high, count)


def fit(
    values: Iterable[float], start: float, stop: float, *, zero: bool = False, log: bool = False
) -> Scale:
    """Return a scale that shows all of some numbers.

    Args:
        values: The numbers; those that are not finite are passed over.
        start: Pixel of the low end.
        stop: Pixel of the high end.
        zero: Let a linear scale begin at zero.
        log: Take a logarithmic scale where the numbers span much.
    """
    known = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(known), max(known)
    if log and low > 0 and high > _WIDE * low:
        return Scale(low / 1.15, high * 1.15, start, stop, log=True)
    low = min(low, 0.0) if zero else low
    if high <= low:
        low, high = (0.0, 1.0) if low == 0 else (low - abs(low) / 2, low + abs(low) / 2)
    return Scale(low, high + (high - low) * 0.05, start, stop)


def _ticks(low: float, high: float, count: int) -> list[float]:
    rough = (high - low) / count
    power = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    heads = _ONE_DECADE if len(decades) <= 4 else (1,)
    found = [head * 10.0**decade for decade in decades for head in heads]
    return [tick for tick in found if low <= tick <= high]


def short(value: float) -> str:
    """Return a number in few characters.

    Example:
        >>> short(0.30000000000000004), short(20000.0), short(1e-05)
        ('0.3', '20k', '1e-5')
    """
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        head, _, power = f"{value:.0e}".partition("e")
        return f"{head}e{int(power)}"
    if abs(value) >= 1e4:
        return f"{value / 1000:g}k"
    return f"{value:.4g}"
