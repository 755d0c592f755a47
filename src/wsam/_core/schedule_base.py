"""Interfaces of schedules and intervals, and their conversion to and from plain values.

`wsam.schedule` has the implementations.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, TypeVar

from wsam._core.mix import Scalar


class Schedule:
    """The value of a hyperparameter at each step. The first step has number 0."""

    def value(self, step: int, lr: Scalar) -> Scalar:
        """Return the value at `step`, given the parameter group's learning rate `lr`."""
        raise NotImplementedError

    def extremes(self) -> tuple[float, ...]:
        """Return values that the schedule takes, so that they can be validated early."""
        return ()

    def bind(self, group: dict[str, Any]) -> "Schedule":
        """Return the schedule for one parameter group. Called before each step."""
        return self


class Interval:
    """Which steps are sharpness-aware. Combine intervals with `&` and `|`."""

    needs_norm = False

    def chosen(self, step: int, norm: Callable[[], float]) -> bool:
        """Return whether `step` is perturbed.

        Args:
            step: the number of the step.
            norm: returns the gradient norm. Each call synchronizes with the device.
        """
        raise NotImplementedError

    def remember(self) -> Any:
        """Return the state that `chosen` may change."""

    def recall(self, memory: Any) -> None:
        """Restore the state saved by `remember`."""

    def __and__(self, other: "Interval") -> "Interval":
        return Both(self, other) if isinstance(other, Interval) else NotImplemented

    def __or__(self, other: "Interval") -> "Interval":
        return Either(self, other) if isinstance(other, Interval) else NotImplemented

    def __bool__(self) -> bool:
        raise TypeError("combine intervals with & and | instead of `and` and `or`")


Kind = TypeVar("Kind", bound=type)
_SAVEABLE: dict[str, type] = {}


def saveable(kind: Kind) -> Kind:
    """Register a schedule or interval, a dataclass of plain values, so that states can hold it."""
    _SAVEABLE[kind.__name__] = kind
    return kind


@dataclass(frozen=True)
class _Pair(Interval):
    one: Interval
    other: Interval

    @property
    def needs_norm(self) -> bool:  # type: ignore[override]
        """Whether either interval reads the gradient norm."""
        return self.one.needs_norm or self.other.needs_norm

    def remember(self) -> Any:
        """Return the state of both."""
        return self.one.remember(), self.other.remember()

    def recall(self, memory: Any) -> None:
        """Restore the state of both."""
        self.one.recall(memory[0])
        self.other.recall(memory[1])

    def _answers(self, step: int, norm: Callable[[], float]) -> tuple[bool, bool]:
        """Evaluate both, always, so that both update their running statistics."""
        return self.one.chosen(step, norm), self.other.chosen(step, norm)


@saveable
class Both(_Pair):
    """Steps that both intervals choose."""

    def chosen(self, step: int, norm: Callable[[], float]) -> bool:
        """Return whether both choose the step."""
        return all(self._answers(step, norm))


@saveable
class Either(_Pair):
    """Steps that at least one of two intervals chooses."""

    def chosen(self, step: int, norm: Callable[[], float]) -> bool:
        """Return whether either chooses the step."""
        return any(self._answers(step, norm))


def pack(part: Schedule | Interval) -> dict[str, Any] | None:
    """Return a schedule or interval as plain values; None if its class is not registered."""
    if _SAVEABLE.get(type(part).__name__) is not type(part):  # a user's class may share the name
        return None
    packed: dict[str, Any] = {"kind": type(part).__name__}
    for item in fields(part):  # type: ignore[arg-type]
        value = getattr(part, item.name)
        if isinstance(value, Real) and hasattr(value, "item"):
            value = value.item()  # torch.load(weights_only=True) rejects numpy's scalars
        packed[item.name] = pack(value) if isinstance(value, Interval) else value
        if isinstance(value, Interval) and packed[item.name] is None:
            return None
    return packed


def unpack(packed: dict[str, Any]) -> Any:
    """Return the schedule or interval that `pack` was given."""
    values = {k: unpack(v) if isinstance(v, dict) else v for k, v in packed.items()}
    return _SAVEABLE[values.pop("kind")](**values)
