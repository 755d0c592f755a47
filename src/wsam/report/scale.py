"""Axes: where a number stands in a picture, and which numbers are written beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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

    def ticks(self, count: int = 5, whole: bool = False) -> list[float]:
        """Return round numbers between the ends, about `count` of them.

        Args:
            count: About how many; of no effect on a logarithmic scale.
            whole: Whole numbers alone; the same.
        """
        if self.log:
            return _log_ticks(self.low, self.high)
        return _ticks(self.low, self.high, count, whole)

    def marks(self, count: int = 5, whole: bool = False) -> list[tuple[float, str]]:
        """Return the ticks with what is written beside them.

        Example:
            >>> [text for _, text in Scale(0.0, 10.0, 0.0, 100.0).marks(4)]
            ['0.0', '2.5', '5.0', '7.5', '10.0']
        """
        ticks = self.ticks(count, whole)
        texts = list(map(short, ticks)) if self.log else alike(ticks)
        return list(zip(ticks, texts, strict=True))


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


def _ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    if whole:
        power = max(power, 1.0)
    steps = [m * power for m in (1, 2, 2.5, 5, 10) if not whole or (m * power).is_integer()]
    step = next(step for step in steps if step >= rough * (1 - 1e-9))
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


def alike(values: Sequence[float]) -> list[str]:
    """Return numbers in few characters, all with as many decimals as the one that needs most.

    Example:
        >>> alike([0.0, 0.5, 1.0]), alike([0.0, 10000.0, 20000.0])
        (['0.0', '0.5', '1.0'], ['0', '10k', '20k'])
    """
    texts = [short(value) for value in values]
    if any("k" in text or "e" in text for text in texts):
        return texts
    decimals = max((len(text.partition(".")[2]) for text in texts), default=0)
    return [f"{value:.{decimals}f}" for value in values]
