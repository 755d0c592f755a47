"""The methods of a comparison, and the settings that the search tries for each of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from wsam._utils.plot_style import METHOD_STYLES, method_title
from wsam.lab.run import Run, with_wsam_defaults
from wsam.lab.settings import BASE_CLASSES, VANILLA
from wsam.lab.values import Value, is_number
from wsam.report.charts import LineStyle
from wsam.sweep.settings import with_value

BASE = "base"
CHEAP = "cheap"
"""WSAM with two passes on every n-th step; the steps between reuse its sharpness gradient."""
EVERY = 2
_FACTORS = {"lr": (0.1, 10.0), "rho": (0.4, 10.0), "gamma": (0.2, 4.0), "alpha": (0.2, 4.0)}
"""Range of each setting as factors of its default; for gamma as factors of gamma / (1 - gamma)."""
_MSAM_RADII = (0.1, 10.0)
"""The default of MSAM, 3, is often too large: trials on CIFAR-10 chose a tenth of it."""
_WEIGHTS = {"wsam": "gamma", "coupled_wsam": "gamma", "gsam": "alpha"}
"""The weight of the sharpness of each method that has one."""
_PRIMES = {"lr": 2, "rho": 3, "gamma": 5, "alpha": 5}
_CHEAP_DASHES = (5, 3)

Point = dict[str, float]
"""A value for each searched setting."""


@dataclass(frozen=True)
class Contender:
    """A method of a comparison.

    Args:
        name: As in the request: ``base``, ``wsam``, ``cheap``.
        title: As displayed.
        run: Its run at the default settings.
        axes: The settings that the search varies.
        color: The color of its lines: a name in `METHOD_STYLES`, or ``ink``.
    """

    name: str
    title: str
    run: Run
    axes: tuple[str, ...]
    color: str = "ink"

    def point(self, trial: int) -> Point:
        """Return the settings of a trial.

        The first trial has the defaults. The others are points of a Halton sequence, on logarithmic
        scales around the defaults. All methods try the same learning rates.

        Reference:
            Halton, On the efficiency of certain quasi-random sequences of points, 1960.
        """
        settings = {**self.run.base_args, **self.run.hyper}
        defaults = {name: float(cast(float, settings[name])) for name in self.axes}
        if trial == 0:
            return defaults
        factors = _FACTORS | ({"rho": _MSAM_RADII} if self.name == "msam" else {})
        # Number 1 of the sequence is the middle of the learning rates: the default again.
        return {
            name: _scaled(name, default, van_der_corput(trial + 1, _PRIMES[name]), factors[name])
            for name, default in defaults.items()
        }

    def at(self, point: Mapping[str, float]) -> Run:
        """Return its run at a point."""
        run = self.run
        for name, value in point.items():
            run = with_value(run, name, value)
        return run

    @property
    def style(self) -> LineStyle:
        """Color and dashes of its lines."""
        if self.name == CHEAP:
            return LineStyle("wsam", _CHEAP_DASHES, shade=3)
        if self.color not in METHOD_STYLES:
            return LineStyle("ink", (1, 2))
        return LineStyle(self.color, METHOD_STYLES[self.color].dashes)


def contender(name: str, run: Run, every: int, own: Run | None = None) -> Contender:
    """Return a method of a comparison.

    Args:
        name: ``base``, ``cheap``, a name of `wsam.METHODS` or ``path/file.py:Class``.
        run: The problem and the base optimizer, as a vanilla run.
        every: Steps between the two-pass steps of ``cheap``.
        own: The run at the defaults of a method of the user's own, so that its code is not executed.
    """
    if own is not None:
        searched = [axis for axis in ("rho", "gamma", "alpha") if _can_search(axis, own)]
        # Gamma and alpha would be searched along the same sequence.
        return Contender(name, method_title(name), own, ("lr", *searched[:2]))
    if name == BASE:
        return Contender(BASE, BASE_CLASSES[run.base], run.replace(method=VANILLA), ("lr",))
    if name in ("wsam", CHEAP):
        options: dict[str, Value] = {"every": every, "reuse": True} if name == CHEAP else {}
        found = with_wsam_defaults(run.replace(method="wsam", options=options), given=options)
        title = "Cheap WSAM" if name == CHEAP else method_title(name)
        return Contender(name, title, found, ("lr", "rho", "gamma"))
    weight = (_WEIGHTS[name],) if name in _WEIGHTS else ()
    return Contender(name, method_title(name), run.replace(method=name), ("lr", "rho", *weight))


def _can_search(axis: str, run: Run) -> bool:
    """Return whether the range around the default of a hyperparameter is defined."""
    default = run.hyper.get(axis)
    return is_number(default) and 0 < default < (1 if axis == "gamma" else math.inf)


def van_der_corput(number: int, base: int) -> float:
    """Return an element of the van der Corput sequence: the digits of a number, mirrored.

    Example:
        >>> [van_der_corput(number, 2) for number in (1, 2, 3, 4)]
        [0.5, 0.25, 0.75, 0.125]
    """
    value, scale = 0.0, 1.0
    while number:
        number, digit = divmod(number, base)
        scale /= base
        value += digit * scale
    return value


def _scaled(name: str, default: float, part: float, factors: tuple[float, float]) -> float:
    """Return a value between the ends of a range, with three significant digits."""
    low, high = map(math.log, factors)
    factor = math.exp(low + part * (high - low))
    if name == "gamma":
        weight = factor * default / (1 - default)
        return float(f"{weight / (1 + weight):.3g}")
    return float(f"{factor * default:.3g}")
