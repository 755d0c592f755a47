"""Runs of the public optimizers on the toy loss."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.optim import SGD, Optimizer

from wsam._utils.plot_style import METHOD_STYLES
from wsam.geometry import Adaptive, Euclidean, Fisher, Geometry
from wsam.methods import create
from wsam.toy.landscape import FLAT, SHARP, eigenvalues, loss, minimum_near
from wsam.toy.stable_digits import stable_decimals, thousandths

RULES = {rule: METHOD_STYLES[rule].title for rule in ("sgd", "sam", "gsam", "wsam", "coupled_wsam")}
GEOMETRIES: dict[str, Callable[[], Geometry]] = {
    "euclidean": Euclidean,
    "adaptive": Adaptive,
    "fisher": Fisher,
}
RULES_WITH_GAMMA = ("wsam", "coupled_wsam")

START_SHIFT = 1e-12  # of the second run, which shows the effect of rounding
LAST_STEPS = 10  # that the two runs are compared over
MAX_LOSS_DECIMALS = 5


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Configuration of a run; the defaults are the paper's.

    Args:
        rule: One of `RULES`.
        gamma: Weight parameter of WSAM and Coupled-WSAM, in [0, 1).
        rho: Radius, positive.
        lr: Learning rate of the base SGD, positive.
        momentum: Momentum of the base SGD, in [0, 1).
        alpha: Weight of GSAM's orthogonal component.
        geometry: One of `GEOMETRIES`.
        steps: Number of steps, at least 1.
        start: Start point (mu, sigma), sigma positive.
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

    @property
    def label(self) -> str:
        """Title of the rule, with gamma if the rule has one."""
        name = RULES[self.rule]
        return f"{name}, γ = {self.gamma:g}" if self.rule in RULES_WITH_GAMMA else name

    def optimizer(self, w: torch.Tensor) -> Optimizer:
        """Return the optimizer of this setting for the weights `w`."""
        base = SGD([w], lr=self.lr, momentum=self.momentum)
        if self.rule == "sgd":
            return base
        weights = {"gsam": {"alpha": self.alpha}}
        weights |= {rule: {"gamma": self.gamma} for rule in RULES_WITH_GAMMA}
        own = weights.get(self.rule, {})
        return create(self.rule, base, rho=self.rho, geometry=GEOMETRIES[self.geometry](), **own)


@dataclass(frozen=True)
class Trajectory:
    """The points of a run, beginning with the start."""

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
        """The minimum at the end: "sharp", "flat" or None."""
        return minimum_near(self.end)

    @property
    def eigenvalues(self) -> tuple[float, float]:
        """Eigenvalues of the Hessian at the end."""
        return eigenvalues(self.end)

    @property
    def spread(self) -> float:
        """Largest distance between the last points of this run and of one started 1e-12 away.

        It bounds the effect of rounding. At a constant radius a run does not settle: near a minimum
        the perturbation changes its direction at every step, and for a large weight (decoupled,
        gamma = 0.95) the motion is chaotic. Digits below the spread differ between machines.
        """
        return _max_or_nan(math.dist(one, other) for one, other in self._last_pairs)

    @property
    def loss_spread(self) -> float:
        """Largest difference of the loss at the last points of the two runs (see `spread`)."""
        return _max_or_nan(abs(_loss(one) - _loss(other)) for one, other in self._last_pairs)

    @property
    def eigenvalue_spreads(self) -> tuple[float, float]:
        """Largest difference of each eigenvalue at the last points of the two runs."""
        pairs = [(eigenvalues(one), eigenvalues(other)) for one, other in self._last_pairs]
        low, high = (_max_or_nan(abs(one[i] - other[i]) for one, other in pairs) for i in (0, 1))
        return low, high

    @cached_property
    def _last_pairs(self) -> list[tuple[tuple[float, float], tuple[float, float]]]:
        """The last points of this run, paired with those of a run from a shifted start."""
        mu, sigma = self.setting.start
        shifted = _points(replace(self.setting, start=(mu + START_SHIFT, sigma + START_SHIFT)))
        return list(zip(self.points[-LAST_STEPS:], shifted[-LAST_STEPS:], strict=True))

    @property
    def decimals(self) -> int:
        """Number of significant decimals of the end point, at most 4."""
        return stable_decimals(self.spread)

    @property
    def chaotic(self) -> bool:
        """Whether rounding alone changes the first two decimals of the end point."""
        return self.decimals < 2

    @property
    def end_text(self) -> str:
        """The end point to its significant decimals, as shown on the page and in the table."""
        if not self.end[1] > 0:  # also if it is NaN
            return "left the domain"
        mu, sigma = (f"{value:.{self.decimals}f}" for value in self.end)
        note = f" ± {self.spread:.1g}" if self.chaotic else ""
        return f"({mu}, {sigma}){note}"

    @property
    def loss_text(self) -> str:
        """The loss at the end to its significant decimals, at most 5."""
        return f"{self.loss:.{stable_decimals(self.loss_spread, MAX_LOSS_DECIMALS)}f}"

    @property
    def eigenvalues_text(self) -> str:
        """1000 times each eigenvalue to its significant digits, at most 3."""
        pairs = zip(self.eigenvalues, self.eigenvalue_spreads, strict=True)
        return ", ".join(thousandths(value, spread) for value, spread in pairs)


def _loss(point: tuple[float, float]) -> float:
    return loss(torch.tensor(point, dtype=torch.float64)).item()


def _max_or_nan(values: Iterable[float]) -> float:
    """Return the largest value, or NaN if one is NaN."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found)


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
    """Run a public optimizer on the toy loss, in float64, and return its trajectory.

    Args:
        setting: Configuration of the run. Default: `Setting()`.
        **values: Fields of the setting to replace.

    Returns:
        The points of the run.

    Example:
        >>> trace(rule="coupled_wsam", gamma=0.95).minimum
        'flat'
        >>> trace(rule="wsam", gamma=0.95).minimum
        'sharp'
    """
    setting = replace(setting, **values) if setting is not None else Setting(**values)
    return Trajectory(setting, _points(setting))


def verdict(runs: Sequence[Trajectory]) -> str:
    """Return a sentence that names the minimum at which each form of WSAM ends.

    Args:
        runs: One run of WSAM, one of Coupled-WSAM, or both. Other rules are ignored.

    Example:
        >>> verdict([trace(rule="wsam", gamma=0.95), trace(rule="coupled_wsam", gamma=0.95)])
        'only the coupled form reaches the flat minimum'
    """
    ends = {run.setting.rule: run.minimum for run in runs if run.setting.rule in RULES_WITH_GAMMA}
    if len(ends) == 1:
        ((rule, minimum),) = ends.items()
        return f"{RULES[rule]} ends at {_minimum_text(minimum)}"
    coupled, decoupled = ends.get("coupled_wsam"), ends.get("wsam")
    if coupled == decoupled:
        return f"both forms of WSAM end at {_minimum_text(coupled)}"
    if coupled == FLAT:
        return "only the coupled form reaches the flat minimum"
    if decoupled == FLAT:
        return "only the decoupled form reaches the flat minimum"
    reached = "coupled" if coupled == SHARP else "decoupled"
    return f"only the {reached} form settles, at the sharp minimum"


def _minimum_text(minimum: str | None) -> str:
    return f"the {minimum} minimum" if minimum else "neither minimum"
