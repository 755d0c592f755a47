"""One run of a public optimizer over the toy loss."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch.optim import SGD, Optimizer

from wsam._core.validation import count, number
from wsam.geometry import Adaptive, Euclidean, Fisher, Geometry
from wsam.methods import GSAM, SAM, WSAM, CoupledWSAM
from wsam.plot_style import METHOD_STYLES
from wsam.toy.landscape import eigenvalues, loss, minimum_near

RULES = {rule: METHOD_STYLES[rule].title for rule in ("sgd", "sam", "gsam", "wsam", "coupled_wsam")}
GEOMETRIES: dict[str, Callable[[], Geometry]] = {
    "euclidean": Euclidean,
    "adaptive": Adaptive,
    "fisher": Fisher,
}
WEIGHTED = ("wsam", "coupled_wsam")

NUDGE = 1e-12
TAIL = 10
DECIMALS = 4
LOSS_DECIMALS = 5
DIGITS = 3


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a run is made of; the defaults are the paper's.

    Args:
        rule: one of `RULES`.
        gamma: weight of sharpness for WSAM and Coupled-WSAM, in [0, 1).
        rho: radius, positive.
        lr: learning rate of the base SGD, positive.
        momentum: of the base SGD, in [0, 1).
        alpha: weight of GSAM's orthogonal part.
        geometry: one of `GEOMETRIES`.
        steps: at least 1.
        start: (mu, sigma), sigma positive.
    """

    rule: str = "wsam"
    gamma: float = 0.95
    rho: float = 2.0
    lr: float = 5.0
    momentum: float = 0.9
    alpha: float = 0.1
    geometry: str = "euclidean"
    steps: int = 150
    start: tuple[float, float] = (-6.0, 10.0)

    def __post_init__(self) -> None:
        """Check every value."""
        if self.rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(RULES)}, got {self.rule!r}")
        if self.geometry not in GEOMETRIES:
            names = ", ".join(GEOMETRIES)
            raise ValueError(f"geometry must be one of {names}, got {self.geometry!r}")
        number("gamma", self.gamma, 0, 1)
        number("rho", self.rho, low_open=True)
        number("lr", self.lr, low_open=True)
        number("momentum", self.momentum, 0, 1)
        number("alpha", self.alpha)
        count("steps", self.steps, 1)
        if len(self.start) != 2:
            raise ValueError(f"start must be two numbers, mu and sigma, got {self.start!r}")
        mu = number("start mu", self.start[0], -math.inf, low_open=True)
        sigma = number("start sigma", self.start[1], low_open=True)
        # A tuple, whatever was given: finished runs are kept by their settings.
        object.__setattr__(self, "start", (mu, sigma))

    @property
    def label(self) -> str:
        """The name people read, with gamma where the rule has one."""
        name = RULES[self.rule]
        return f"{name}, γ = {self.gamma:g}" if self.rule in WEIGHTED else name

    def optimizer(self, w: torch.Tensor) -> Optimizer:
        """Return the public optimizer of this setting over `w`."""
        base = SGD([w], lr=self.lr, momentum=self.momentum)
        shape: dict[str, Any] = {"rho": self.rho, "geometry": GEOMETRIES[self.geometry]()}
        match self.rule:
            case "sgd":
                return base
            case "sam":
                return SAM(base, **shape)
            case "gsam":
                return GSAM(base, alpha=self.alpha, **shape)
            case "wsam":
                return WSAM(base, gamma=self.gamma, **shape)
            case _:
                return CoupledWSAM(base, gamma=self.gamma, **shape)


@dataclass(frozen=True)
class Trajectory:
    """The points a run went through, the start first."""

    setting: Setting
    points: tuple[tuple[float, float], ...]

    @property
    def end(self) -> tuple[float, float]:
        """The last point."""
        return self.points[-1]

    @property
    def loss(self) -> float:
        """The loss at the end."""
        return _loss(self.end)

    @property
    def minimum(self) -> str | None:
        """The minimum it ended at: "sharp", "flat" or None."""
        return minimum_near(self.end)

    @property
    def eigenvalues(self) -> tuple[float, float]:
        """Eigenvalues of the Hessian at the end."""
        return eigenvalues(self.end)

    @cached_property
    def spread(self) -> float:
        """How far the last points move if the start is moved by 1e-12: what rounding may do.

        A constant radius never lets the run settle: near a minimum the perturbation's direction
        jumps, and with a large weight (decoupled gamma = 0.95) the rattle is chaotic. Digits below
        the spread mean nothing, and differ between machines and languages.
        """
        return _largest(math.dist(one, other) for one, other in self._tails)

    @cached_property
    def loss_spread(self) -> float:
        """How far the loss of the last points moves with the start."""
        return _largest(abs(_loss(one) - _loss(other)) for one, other in self._tails)

    @cached_property
    def eigenvalue_spreads(self) -> tuple[float, float]:
        """How far each eigenvalue at the last points moves with the start."""
        pairs = [(eigenvalues(one), eigenvalues(other)) for one, other in self._tails]
        low, high = (_largest(abs(one[i] - other[i]) for one, other in pairs) for i in (0, 1))
        return low, high

    @property
    def _tails(self) -> list[tuple[tuple[float, float], tuple[float, float]]]:
        """The last points, each with the one that a run from a start moved by 1e-12 has there."""
        mu, sigma = self.setting.start
        shadow = _points(replace(self.setting, start=(mu + NUDGE, sigma + NUDGE)))
        return list(zip(self.points[-TAIL:], shadow[-TAIL:], strict=True))

    @property
    def decimals(self) -> int:
        """How many decimals of the end mean something, at most 4."""
        return stable_decimals(self.spread)

    @property
    def chaotic(self) -> bool:
        """Whether rounding alone moves the end visibly."""
        return self.decimals < 2

    @property
    def end_text(self) -> str:
        """The end to the digits that mean something, as the page and the table show it."""
        if any(math.isnan(value) for value in self.end):
            return "left the domain"
        mu, sigma = (f"{value:.{self.decimals}f}" for value in self.end)
        note = f" ± {self.spread:.1g}" if self.chaotic else ""
        return f"({mu}, {sigma}){note}"

    @property
    def loss_text(self) -> str:
        """The loss at the end to the digits that mean something, at most 5 decimals."""
        return f"{self.loss:.{stable_decimals(self.loss_spread, LOSS_DECIMALS)}f}"

    @property
    def eigenvalues_text(self) -> str:
        """A thousand times each eigenvalue to the digits that mean something, at most 3."""
        pairs = zip(self.eigenvalues, self.eigenvalue_spreads, strict=True)
        return ", ".join(thousandths(value, spread) for value, spread in pairs)


def stable_decimals(spread: float, most: int = DECIMALS) -> int:
    """Return how many decimals a spread leaves standing: twice the spread is under one unit."""
    if not math.isfinite(spread):
        return 0
    if spread <= 0.5 * 10**-most:
        return most
    return max(0, math.floor(-math.log10(2 * spread)))


def stable_digits(value: float, spread: float) -> int:
    """Return how many leading digits of a value a spread leaves standing, at most 3; 0 if none."""
    if spread == 0 or value == 0:
        return DIGITS
    if not (math.isfinite(spread) and math.isfinite(value)):
        return 0
    leading, unit = math.floor(math.log10(abs(value))), math.ceil(math.log10(2 * spread))
    return max(0, min(DIGITS, leading - unit + 1))


def thousandths(value: float, spread: float = 0.0) -> str:
    """Return 1000 times a value to its stable digits; with the spread where there are none.

    Example:
        >>> thousandths(0.0049012), thousandths(0.0049012, 2e-5), thousandths(0.0049, 9e-4)
        ('4.90', '4.9', '5 ± 0.9')
    """
    digits = stable_digits(value, spread)
    text = f"{1000 * value:#.{max(1, digits)}g}".rstrip(".")
    return text if digits or not math.isfinite(spread) else f"{text} ± {1000 * spread:.1g}"


def _loss(point: tuple[float, float]) -> float:
    return loss(torch.tensor(point, dtype=torch.float64)).item()


def _largest(gaps: Iterable[float]) -> float:
    """Return the largest of some gaps; NaN if one is."""
    found = list(gaps)
    return math.nan if any(map(math.isnan, found)) else max(found)


@lru_cache(maxsize=64)  # a run is a function of its setting, and the shadows are asked for again
def _points(setting: Setting) -> tuple[tuple[float, float], ...]:
    w = torch.tensor(setting.start, dtype=torch.float64, requires_grad=True)
    optimizer = setting.optimizer(w)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(w)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    points = [setting.start]
    for _ in range(setting.steps):
        optimizer.step(closure)  # type: ignore[arg-type]
        mu, sigma = w.tolist()
        points.append((mu, sigma))
    return tuple(points)


def trace(setting: Setting | None = None, /, **values: Any) -> Trajectory:
    """Run a setting with the public optimizers, in float64, and return its trajectory.

    Args:
        setting: a `Setting`; or give its values as keywords.
        **values: changes to the setting.

    Example:
        >>> trace(rule="coupled_wsam", gamma=0.95).minimum
        'flat'
        >>> trace(rule="wsam", gamma=0.95).minimum
        'sharp'
    """
    setting = replace(setting, **values) if setting is not None else Setting(**values)
    return Trajectory(setting, _points(setting))
