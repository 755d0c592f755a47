"""Schedules, which change a hyperparameter over the steps, and intervals, which select steps.

A `Schedule` gives the value of rho, gamma or alpha at a step. An `Interval` decides whether a step is
sharpness-aware; one that is not is bitwise the base optimizer's, unless the method reuses a gradient
there. Both are small dataclasses of plain numbers, so that `state_dict` can hold them and a resumed run
continues exactly.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from wsam._core.mix import Scalar
from wsam._core.schedule_base import Both, Either, Interval, Schedule, saveable
from wsam._core.validation import count, number


@saveable
@dataclass(frozen=True)
class Constant(Schedule):
    """`level` at every step; a plain number does the same."""

    level: float

    def value(self, step: int, lr: Scalar) -> Scalar:
        """Return the constant."""
        return self.level

    def extremes(self) -> tuple[float, ...]:
        """Return the constant."""
        return (self.level,)


@saveable
@dataclass(frozen=True)
class Warmup(Schedule):
    """Linear from `start` to `level` over `steps` steps, then `level`.

    Useful for gamma: momentum does not average the decoupled term, so its first updates, made while
    gradients are large, are the most likely to diverge.

    Example:
        >>> Warmup(0.9, steps=10).value(5, lr=0.1)
        0.45
    """

    level: float
    steps: int
    start: float = 0.0

    def __post_init__(self) -> None:
        number("steps", self.steps)

    def value(self, step: int, lr: Scalar) -> Scalar:
        """Return the interpolated value."""
        if step >= self.steps:
            return self.level
        return self.start + (self.level - self.start) * (step / self.steps)

    def extremes(self) -> tuple[float, ...]:
        """Return both ends."""
        return (self.start, self.level)


@saveable
@dataclass(frozen=True)
class InverseSqrt(Schedule):
    """`level / sqrt(t)` with t = 1 at the first step, as the paper's convergence proofs assume."""

    level: float

    def value(self, step: int, lr: Scalar) -> Scalar:
        """Return the decayed value."""
        return self.level / math.sqrt(step + 1)

    def extremes(self) -> tuple[float, ...]:
        """Return the first value."""
        return (self.level,)


@saveable
@dataclass(frozen=True)
class FollowLR(Schedule):
    """`low + (high - low)(lr - lr_low)/(lr_high - lr_low)`, within [low, high] (GSAM's radius).

    The value is clamped: during warm-up the learning rate is below `lr_low`, where the line would be
    negative and turn the ascent into a descent.

    Args:
        high: the value at `lr_high` and above.
        low: the value at `lr_low` and below.
        lr_high: None for each parameter group's own largest learning rate: `max_lr` or `initial_lr`
            where a scheduler has set them in the group, otherwise its largest learning rate so far.
        lr_low: a learning rate, the same for all groups.
        found: the largest learning rate found for a group. Set by the optimizer.

    Reference: Zhuang et al., Surrogate Gap Minimization Improves Sharpness-Aware Training, 2022.
    """

    high: float
    low: float
    lr_high: float | None = None
    lr_low: float = 0.0
    found: float | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.lr_high is not None and not self.lr_high > self.lr_low:
            raise ValueError(f"lr_high must exceed lr_low, got {self.lr_high} and {self.lr_low}")
        if not self.high >= self.low:
            raise ValueError(f"high must be at least low, got {self.high} and {self.low}")

    def bind(self, group: dict[str, Any]) -> "FollowLR":
        """Return the schedule with the largest learning rate of the group."""
        if self.lr_high is not None:
            return self
        known = [group[key] for key in ("initial_lr", "max_lr") if key in group]
        if "max_lr" not in group:  # which is exact
            known += [group["lr"], self.found or 0.0]
        if self.found is not None and any(isinstance(lr, Tensor) and not lr.is_cpu for lr in known):
            return self  # reading them again would synchronize at every step
        largest = max(float(lr) for lr in known)
        return self if largest == self.found else replace(self, found=largest)

    def value(self, step: int, lr: Scalar) -> Scalar:
        """Return the value for the learning rate."""
        lr_high = self.found if self.lr_high is None else self.lr_high
        assert lr_high is not None, "lr_high=None is set by the optimizer"
        if lr_high > self.lr_low:
            slope = (self.high - self.low) / (lr_high - self.lr_low)
            value = self.low + slope * (lr - self.lr_low)
        else:  # a group whose learning rate is still zero
            value = self.low + (self.high - self.low) * (lr > self.lr_low)
        if isinstance(value, Tensor):
            return value.clamp(min=self.low, max=self.high)
        return min(self.high, max(self.low, value))

    def extremes(self) -> tuple[float, ...]:
        """Return both ends."""
        return (self.low, self.high)


@dataclass(frozen=True)
class Function(Schedule):
    """Any function of the step number. It cannot be saved: pass it again when you resume."""

    function: Callable[[int], float]

    def value(self, step: int, lr: Scalar) -> Scalar:
        """Return the function's value."""
        return self.function(step)

    def extremes(self) -> tuple[float, ...]:
        """Return the first value."""
        return (self.function(0),)


@saveable
@dataclass(frozen=True)
class Every(Interval):
    """Each n-th step, beginning with number `offset`."""

    n: int
    offset: int = 0

    def __post_init__(self) -> None:
        count("n", self.n, 1)
        count("offset", self.offset)

    def chosen(self, step: int, norm: Callable[[], float]) -> bool:
        """Return whether the step is chosen."""
        return step >= self.offset and (step - self.offset) % self.n == 0


@saveable
@dataclass(frozen=True)
class Between(Interval):
    """Steps from `start` on, before `stop`: `Between(int(0.75 * total))` is the last quarter.

    `Between(0, 0)` is never.
    """

    start: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        count("start", self.start)
        if self.stop is not None:
            count("stop", self.stop, self.start)

    def chosen(self, step: int, norm: Callable[[], float]) -> bool:
        """Return whether start <= step < stop."""
        return step >= self.start and (self.stop is None or step < self.stop)


@saveable
@dataclass
class NormAbove(Interval):
    """Steps whose squared gradient norm exceeds its running mean by `factor` running deviations.

        q = norm(g0)^2,    chosen where q >= mean + factor sqrt(variance), and then
        variance <- decay variance + (1 - decay)(q - mean)^2,    mean <- decay mean + (1 - decay) q

    The first step is chosen, and its q becomes the mean. Steps with a radius of 0 and norms that are
    not finite are ignored. Each step synchronizes with the device to read the norm. Each optimizer
    needs its own instance.

    Args:
        factor: how many deviations above the mean.
        final: the factor at step `steps` and after it, if it changes: linearly from `factor`. AE-SAM's
            falls from 1 to -1 over the run, so that more and more steps are perturbed.
        steps: see `final`.
        decay: of mean and variance, in [0, 1).
        mean: the running mean of q.
        variance: the running variance of q.
        begun: whether a step was seen before.

    Reference: the idea of AE-SAM, Jiang et al., An Adaptive Policy to Employ Sharpness-Aware
    Minimization, ICLR 2023: sharpness matters most where gradients are large.
    """

    factor: float = 1.0
    decay: float = 0.9
    mean: float = field(default=0.0, repr=False)
    variance: float = field(default=1e-8, repr=False)
    begun: bool = field(default=False, repr=False)
    final: float | None = None
    steps: int | None = None
    needs_norm = True

    def __post_init__(self) -> None:
        number("decay", self.decay, 0, 1)
        if (self.final is None) != (self.steps is None):
            raise ValueError("final and steps need each other")
        self.begun = self.begun or self.mean != 0.0  # absent from states of earlier versions

    def chosen(self, step: int, norm: Callable[[], float]) -> bool:
        """Compare this step's norm with the running statistics, then update them."""
        square = norm()
        square *= square  # not `**`, which raises OverflowError
        if not math.isfinite(square * square):
            return True  # the two-pass step handles it
        threshold = self.mean + self.factor_at(step) * math.sqrt(self.variance)
        above = not self.begun or square >= threshold
        self.variance = self.decay * self.variance + (1 - self.decay) * (square - self.mean) ** 2
        self.mean = self.decay * self.mean + (1 - self.decay) * square if self.begun else square
        self.begun = True
        return above

    def factor_at(self, step: int) -> float:
        """Return the factor at a step."""
        if self.final is None or self.steps is None:
            return self.factor
        return self.factor + (self.final - self.factor) * min(1.0, step / self.steps)

    def remember(self) -> Any:
        """Return the running statistics."""
        return self.mean, self.variance, self.begun

    def recall(self, memory: Any) -> None:
        """Restore the running statistics."""
        self.mean, self.variance, self.begun = memory


__all__ = [
    "Between",
    "Both",
    "Constant",
    "Either",
    "Every",
    "FollowLR",
    "Function",
    "Interval",
    "InverseSqrt",
    "NormAbove",
    "Schedule",
    "Warmup",
]
