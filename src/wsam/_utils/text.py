"""Means with standard deviations, numbers and columns as text, values that JSON can hold."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Collection, Sequence
from typing import Any

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    r"""Return a text with control characters escaped, except newlines and tabs.

    Text of a file may hold escape sequences, which would control the terminal.

    Example:
        >>> printable("\x1b[2Jdone")
        '\\x1b[2Jdone'
    """
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def mean_and_std(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean and the sample standard deviation.

    The mean of no values and the deviation of fewer than two are None. If a value is not finite,
    the mean is not finite and the deviation is None. A deviation that overflows is None.

    Example:
        >>> mean_and_std([1.0, 2.0, 3.0]), mean_and_std([5.0]), mean_and_std([])
        ((2.0, 1.0), (5.0, None), (None, None))
    """
    if not values:
        return None, None
    if not all(map(math.isfinite, values)):
        return sum(values) / len(values), None
    try:
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
    except OverflowError:
        return math.fsum(value / len(values) for value in values), None


def format_mean_std(mean: float, std: float | None, number: Callable[[float], str]) -> str:
    """Return ``mean ± std``, or the mean alone if there is no deviation.

    The deviation has the decimals of the mean, or one digit if it is smaller than the last of them.

    Args:
        mean: The mean.
        std: The standard deviation, or None.
        number: Formats the mean.

    Example:
        >>> format_mean_std(4.31, 0.2, "{:.1f}".format), format_mean_std(4.31, None, "{:.1f}".format)
        ('4.3 ± 0.2', '4.3')
        >>> format_mean_std(0.85591, 0.004866, "{:.4g}".format)
        '0.8559 ± 0.0049'
        >>> format_mean_std(18.17, 0.005, "{:.2f}".format)
        '18.17 ± 0.005'
    """
    text = number(mean)
    if std is None:
        return text
    decimals = len(text.partition(".")[2])
    if "e" in text or 0 < std < 10**-decimals:
        return f"{text} ± {std:.1g}"
    return f"{text} ± {std:.{decimals}f}"


def pluralize(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 run``, ``2 runs``.

    Example:
        >>> pluralize(1, "run"), pluralize(0, "group")
        ('1 run', '0 groups')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def align_columns(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Return the rows of a table as lines, with columns of equal width.

    Args:
        rows: The cells of each row.
        left: Numbers of the columns that are aligned at the left; the others at the right.

    Example:
        >>> align_columns([["method", "error"], ["SAM", "4.1"]])
        ['method  error', 'SAM       4.1']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def json_safe(value: Any) -> Any:
    """Return the same data with None in place of NaN and infinity, which JSON cannot represent.

    Example:
        >>> json_safe({"losses": [1.0, float("inf")], "epoch": 3})
        {'losses': [1.0, None], 'epoch': 3}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): json_safe(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return value
