"""Durations, settings and figures of a comparison as text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_UNITS = {"s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smh])")
_MAX_DECIMALS = 6


def parse_budget(text: str) -> float:
    """Return the seconds of a duration such as ``90s``, ``20m``, ``2h`` or ``1h30m``.

    Raises:
        ValueError: Not a duration.

    Example:
        >>> parse_budget("20m"), parse_budget("1h30m")
        (1200.0, 5400.0)
    """
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"--budget must be a duration such as 90s, 20m or 2h, got {text!r}")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def format_seconds(seconds: float) -> str:
    """Return a duration in at most two units.

    Example:
        >>> format_seconds(0.4), format_seconds(80), format_seconds(7260)
        ('0.4s', '1m 20s', '2h 1m')
    """
    if seconds < 10:
        return f"{max(seconds, 0):.2g}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m {rest}s" if rest else f"{minutes}m"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes}m" if minutes else f"{hours}h"


def format_point(point: Mapping[str, float]) -> str:
    """Return settings as text: ``lr 0.05, rho 0.1``."""
    return ", ".join(f"{name} {value:g}" for name, value in point.items())


def format_number(value: float, unit: str, width: float | None = None) -> str:
    """Return a number, with ``± width`` if it is given, in equal decimals.

    The width has one significant digit after the point; percentages have at least one decimal. Tiny
    and huge numbers have an exponent.

    Example:
        >>> format_number(0.813, "%", 0.21), format_number(0.01234, "", 0.00042)
        ('0.8 ± 0.2', '0.0123 ± 0.0004')
        >>> format_number(8.13e-10, "", 2.1e-10), format_number(1.2345e9, "", 2.1e6)
        ('8.1e-10 ± 2e-10', '1.234e+09 ± 2e+06')
    """
    scale = abs(value) if width is None or width == 0 else width
    decimals = 1 if scale == 0 or not math.isfinite(scale) else -_exponent(scale)
    if not -_MAX_DECIMALS < decimals <= _MAX_DECIMALS:
        digits = max(_exponent(value) + decimals + 1, 2) if value else 2
        return f"{value:.{digits}g}" + ("" if width is None else f" ± {width:.1g}")
    decimals = max(decimals, 1 if unit == "%" else 0)
    decimals += 2 if width is None and unit != "%" else int(width is None)
    return f"{value:z.{decimals}f}" + ("" if width is None else f" ± {width:.{decimals}f}")


def _exponent(value: float) -> int:
    """Return the power of ten of the first digit of a number other than 0."""
    return math.floor(math.log10(abs(value)))


def format_p(p: float | None) -> str:
    """Return a p-value: ``p = 0.012``, ``p < 0.001``."""
    if p is None:
        return "no test"
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"
