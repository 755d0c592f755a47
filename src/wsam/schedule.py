"""How a hyperparameter moves with the steps, and which steps are perturbed.

A `Schedule` gives the value of rho, gamma or alpha at a step; an `Interval` says whether a step is
sharpness-aware at all (a step that is not is bitwise the base optimizer's). Both are small
dataclasses of plain numbers, so that `state_dict` can hold them and a resumed run goes on exactly;
all but `NormAbove`, which keeps running statistics, are frozen.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any

from torch import Tensor

from wsam.checks import count, number

Scalar = float | Tensor
"""A number, or one on a device that nobody waits for."""


class Schedule:
    """The value of a hyperparameter at a step; the first step is number 0."""

    def value(self, step: int, lr: Scalar) -> Scalar:
        """Return the value at `step`, where the group's learning rate is `lr`."""
        raise NotImplementedError

    def extremes(self) -> tuple[float, ...]:
        """Return values the schedule is sure to take, so that they can be checked early."""
        return ()

    def heed(self, group: dict[str, Any]) -> "Schedule":
        """Return the schedule for this parameter group, asked when it is adopted and at each step."""
        return self


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


@dataclass(frozen=True)
class Warmup(Schedule):
    """Linear from `start` to `level` over `steps` steps, then `level`.

    Worth using for gamma: the decoupled term is not averaged by momentum, so its first kicks, made
    while gradients are large, are the most dangerous ones.

    Example:
        >>> Warmup(0.9, steps=10).value(5, lr=0.1)
        0.45
    """

    level: float
    steps: int
    start: float = 0.0

    def __post_init__(self) -> None:
        """Check the number of steps."""
        count("steps", self.steps, 1)

    def value(self, step: int, lr: Scalar) -> Scalar:
        """Return the point on the line."""
        return self.start + (self.level - self.start) * min(1.0, step / self.steps)

    def extremes(self) -> tuple[float, ...]:
        """Return both ends of the line."""
        return (self.start, self.level)


@dataclass(frozen=True)
class InverseSqrt(Schedule):
    """`level / sqrt(t)` with t = 1 at the first step: what the paper's convergence proofs assume."""

    level: float

    def value(self, step: int, lr: Scalar) -> Scalar:
        """Return the decayed value."""
        return self.level / math.sqrt(step + 1)

    def extremes(self) -> tuple[float, ...]:
        """Return the first value."""
        return (self.level,)


@dataclass(frozen=True)
class FollowLR(Schedule):
    """`low + (high - low)(lr - lr_low)/(lr_high - lr_low)`, within [low, high] (GSAM's radius).

    The clamps matter. During warm-up the learning rate lies under `lr_low`, and the unclamped line
    goes negative, which turns the ascent into a descent. A learning rate above `lr_high` would give
    a value larger than any that was asked for.

    Args:
        high: the value at `lr_high` and above.
        low: the value at `lr_low` and below.
        lr_high: None for each parameter group's own largest learning rate. That is `max_lr` or
            `initial_lr` where a scheduler has left them in the group, be it made before or after;
            without `max_lr` it is at least what the learning rate was when the group was adopted.
            A group whose largest is not above `lr_low` has `low`.
        lr_low: a learning rate, the same for all groups.
        found: what `lr_high=None` has found for a group; not for you to give.

    Reference: Zhuang et al., Surrogate Gap Minimization Improves Sharpness-Aware Training, 2022.
    """

    high: float
    low: float
    lr_high: float | None = None
    lr_low: float = 0.0
    found: float | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Check that the line is one."""
        if self.lr_high is not None and not self.lr_high > self.lr_low:
            raise ValueError(f"lr_high must exceed lr_low, got {self.lr_high} and {self.lr_low}")
        if not self.high >= self.low:
            raise ValueError(f"high must be at least low, got {self.high} and {self.low}")

    def heed(self, group: dict[str, Any]) -> "FollowLR":
        """Return the same with the largest learning rate that is known of the group."""
        if self.lr_high is not None:
            return self
        told = [group[key] for key in ("initial_lr", "max_lr") if key in group]
        if "max_lr" not in group:  # which says it exactly: what was found before is void
            told.append(group["lr"] if self.found is None else self.found)
        if self.found is not None and any(isinstance(lr, Tensor) and not lr.is_cpu for lr in told):
            return self  # to look again would be to wait for the device at every step
        largest = max(float(lr) for lr in told)
        return self if largest == self.found else replace(self, found=largest)

    def value(self, step: int, lr: Scalar) -> Scalar:
        """Return the point on the line that belongs to the learning rate."""
        lr_high = self.found if self.lr_high is None else self.lr_high
        if lr_high is None:
            raise ValueError(
                "lr_high=None is filled in by the optimizer: to call value() yourself, give a number"
            )
        if lr_high > self.lr_low:
            slope = (self.high - self.low) / (lr_high - self.lr_low)
            value = self.low + slope * (lr - self.lr_low)
        else:  # no line: a frozen group, say, until its learning rate is set by hand
            value = self.low + (self.high - self.low) * (lr > self.lr_low)
        if isinstance(value, Tensor):
            return value.clamp(min=self.low, max=self.high)
        return min(self.high, max(self.low, value))

    def extremes(self) -> tuple[float, ...]:
        """Return both ends of the line."""
        return (self.low, self.high)


@dataclass(frozen=True)
class Function(Schedule):
    """Any function of the step number. It cannot be saved: pass it again when resuming."""

    function: Callable[[int], float]

    def value(self, step: int, lr: Scalar) -> Scalar:
        """Return the function's value."""
        return self.function(step)

    def extremes(self) -> tuple[float, ...]:
        """Return the first value."""
        return (self.function(0),)


class Interval:
    """Which steps are sharpness-aware. Combine with `&` and `|`."""

    needs_norm = False

    def chosen(self, step: int, norm: Callable[[], float]) -> bool:
        """Say whether `step` is perturbed; `norm()` is the gradient norm and costs a device sync."""
        raise NotImplementedError

    def remember(self) -> Any:
        """Return what `chosen` may change, for `recall` in case the step fails."""

    def recall(self, memory: Any) -> None:
        """Be as one was when `remember` returned this."""

    def __and__(self, other: "Interval") -> "Interval":
        return Both(self, other)

    def __or__(self, other: "Interval") -> "Interval":
        return Either(self, other)


@dataclass(frozen=True)
class Every(Interval):
    """Each n-th step, beginning with number `offset`."""

    n: int
    offset: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        count("n", self.n, 1)
        count("offset", self.offset)

    def chosen(self, step: int, norm: Callable[[], float]) -> bool:
        """Say whether the step's number fits."""
        return step >= self.offset and (step - self.offset) % self.n == 0


@dataclass(frozen=True)
class Between(Interval):
    """Steps from `start` on, before `stop`: `Between(int(0.75 * total))` is the last quarter.

    `Between(0, 0)` is never.
    """

    start: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        count("start", self.start)
        if self.stop is not None and count("stop", self.stop) < self.start:
            raise ValueError(
                f"stop must not be below start, got Between({self.start}, {self.stop})"
            )

    def chosen(self, step: int, norm: Callable[[], float]) -> bool:
        """Say whether the step's number lies between."""
        return step >= self.start and (self.stop is None or step < self.stop)


@dataclass
class NormAbove(Interval):
    """Steps whose squared gradient norm exceeds its running mean by `factor` running deviations.

        q = norm(g0)^2,    chosen where q >= mean + factor sqrt(variance), and then
        variance <- decay variance + (1 - decay)(q - mean)^2,    mean <- decay mean + (1 - decay) q

    The first step that it is asked about is chosen, and its q becomes the mean. It is not asked about
    steps whose radius is 0, nor heeds a norm that is not finite. It reads the norm on the host, so
    every step costs a device sync. Each optimizer needs its own.

    Args:
        factor: how many deviations above the mean.
        decay: of mean and variance, in [0, 1).
        mean: the running mean of q.
        variance: the running variance of q.
        begun: whether it was asked before.

    Reference: the idea of AE-SAM, Jiang et al., An Adaptive Policy to Employ Sharpness-Aware
    Minimization, ICLR 2023: sharpness matters most where gradients are large.
    """

    factor: float = 1.0
    decay: float = 0.9
    mean: float = field(default=0.0, repr=False)
    variance: float = field(default=1e-8, repr=False)
    begun: bool = field(default=False, repr=False)
    needs_norm = True

    def __post_init__(self) -> None:
        """Check the numbers."""
        number("factor", self.factor, -math.inf)
        number("decay", self.decay, 0, 1)
        self.begun = self.begun or self.mean != 0.0  # states of earlier versions do not say it

    def chosen(self, step: int, norm: Callable[[], float]) -> bool:
        """Compare this step's norm with the running statistics, then update them."""
        square = norm() ** 2
        if not math.isfinite(square):
            return True  # the two-pass step knows what to do with it
        above = not self.begun or square >= self.mean + self.factor * math.sqrt(self.variance)
        self.variance = self.decay * self.variance + (1 - self.decay) * (square - self.mean) ** 2
        self.mean = self.decay * self.mean + (1 - self.decay) * square if self.begun else square
        self.begun = True
        return above

    def remember(self) -> Any:
        """Return the running statistics."""
        return self.mean, self.variance, self.begun

    def recall(self, memory: Any) -> None:
        """Put the running statistics back."""
        self.mean, self.variance, self.begun = memory


@dataclass(frozen=True)
class _Pair(Interval):
    one: Interval
    other: Interval

    @property
    def needs_norm(self) -> bool:  # type: ignore[override]
        """Whether a part reads the norm."""
        return self.one.needs_norm or self.other.needs_norm

    def remember(self) -> Any:
        """Return what both remember."""
        return self.one.remember(), self.other.remember()

    def recall(self, memory: Any) -> None:
        """Let both recall."""
        self.one.recall(memory[0])
        self.other.recall(memory[1])

    def answers(self, step: int, norm: Callable[[], float]) -> tuple[bool, bool]:
        """Ask both, always, so that both keep count."""
        return self.one.chosen(step, norm), self.other.chosen(step, norm)


class Both(_Pair):
    """Steps that both intervals choose."""

    def chosen(self, step: int, norm: Callable[[], float]) -> bool:
        """Ask both."""
        return all(self.answers(step, norm))


class Either(_Pair):
    """Steps that at least one interval chooses."""

    def chosen(self, step: int, norm: Callable[[], float]) -> bool:
        """Ask both."""
        return any(self.answers(step, norm))


KINDS: dict[str, type[Schedule] | type[Interval]] = {
    kind.__name__: kind
    for kind in (Constant, Warmup, InverseSqrt, FollowLR, Every, Between, NormAbove, Both, Either)
}


def pack(part: Schedule | Interval) -> dict[str, Any] | None:
    """Return a schedule or interval as plain values for `state_dict`; None if it cannot be saved."""
    if KINDS.get(type(part).__name__) is not type(part):  # a user's own may have the same name
        return None
    packed: dict[str, Any] = {"kind": type(part).__name__}
    for item in fields(part):  # type: ignore[arg-type]
        value = getattr(part, item.name)
        if isinstance(value, Real) and hasattr(value, "item"):
            value = value.item()  # numpy's numbers are no plain ones to torch.load
        packed[item.name] = pack(value) if isinstance(value, Interval) else value
        if isinstance(value, Interval) and packed[item.name] is None:
            return None
    return packed


def unpack(packed: dict[str, Any]) -> Schedule | Interval:
    """Return what `pack` was given."""
    values = {k: unpack(v) if isinstance(v, dict) else v for k, v in packed.items() if k != "kind"}
    return KINDS[packed["kind"]](**values)


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
