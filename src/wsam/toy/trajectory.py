"""One run of a public optimizer over the toy loss."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch.optim import SGD, Optimizer

from wsam.checks import count, number
from wsam.geometry import Adaptive, Euclidean, Fisher, Geometry
from wsam.looks import LOOKS
from wsam.methods import GSAM, SAM, WSAM, CoupledWSAM
from wsam.toy.landscape import eigenvalues, loss, minimum_near

RULES = {rule: LOOKS[rule].title for rule in ("sgd", "sam", "gsam", "wsam", "coupled_wsam")}
GEOMETRIES: dict[str, Callable[[], Geometry]] = {
    "euclidean": Euclidean,
    "adaptive": Adaptive,
    "fisher": Fisher,
}
WEIGHTED = ("wsam", "coupled_wsam")

NUDGE = 1e-12
TAIL = 10
DECIMALS = 4


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
        return loss(torch.tensor(self.end, dtype=torch.float64)).item()

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
        mu, sigma = self.setting.start
        shadow = _points(replace(self.setting, start=(mu + NUDGE, sigma + NUDGE)))
        pairs = zip(self.points[-TAIL:], shadow[-TAIL:], strict=True)
        gaps = [math.dist(one, other) for one, other in pairs]
        return math.nan if any(math.isnan(gap) for gap in gaps) else max(gaps)

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


def stable_decimals(spread: float) -> int:
    """Return how many decimals a spread leaves standing: twice the spread is under one unit."""
    if not math.isfinite(spread):
        return 0
    if spread <= 0.5 * 10**-DECIMALS:
        return DECIMALS
    return max(0, math.floor(-math.log10(2 * spread)))


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
