"""Checks of arguments, with messages that state what is allowed, and the library's warning."""

import inspect
import math
import os
import sys
import warnings
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Self


class WsamWarning(UserWarning):
    """The category of all warnings issued by this library."""


def warn(message: str) -> None:
    """Issue a `WsamWarning` that points to the first line outside this package and torch."""
    files = [sys.modules[name].__file__ for name in ("wsam", "torch") if name in sys.modules]
    inside = tuple(str(Path(file).parent) + os.sep for file in files if file)
    depth, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, WsamWarning, stacklevel=depth)


def number(
    name: str,
    value: Any,
    low: float = 0.0,
    high: float = math.inf,
    *,
    low_open: bool = False,
    high_open: bool = True,
) -> float:
    """Return `value` as a finite float inside the interval.

    Raises:
        TypeError: if `value` is not a real number.
        ValueError: if it is NaN or outside the interval.
    """
    interval = f"{'(' if low_open else '['}{low:g}, {high:g}{')' if high_open else ']'}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number in {interval}, got {value!r}")
    found = float(value)
    above = found > low if low_open else found >= low
    below = found < high if high_open else found <= high
    if not (above and below):  # also rejects NaN
        raise ValueError(f"{name} must be in {interval}, got {value!r}")
    return found


def count(name: str, value: Any, low: int = 0) -> int:
    """Return `value` as an integer of at least `low`, or raise."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number of at least {low}, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value!r}")
    return int(value)


class CheckedArguments:
    """Checks the names of arguments in `__new__`, so that `__init__` and its signature stay plain."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Raise a `TypeError` that shows a call if `__init__` does not take the arguments."""
        if args or options:  # copying and unpickling pass none
            try:
                inspect.signature(cls).bind(*args, **options)
            except TypeError as error:
                example = f"{cls.__name__}(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05)"
                raise TypeError(f"{cls.__name__}() {error}; write {example}") from None
        return super().__new__(cls)
