"""What closures return: a loss, or a tuple that begins with one."""

from typing import Any

import torch
from torch import Tensor

_NUMBER = (int, float, Tensor)


def detach(value: Any) -> Any:
    """Return a closure's result without its autograd graph."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, tuple):
        parts = map(detach, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def loss_increase(second: Any, first: Any) -> Any:
    """Return L(w + d) - L(w); NaN if the closure returned no loss."""
    if isinstance(second, tuple) and isinstance(first, tuple) and second and first:
        second, first = second[0], first[0]
    if _is_loss(second) and _is_loss(first):
        return torch.as_tensor(second - first)
    return torch.full((), torch.nan)


def _is_loss(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.is_floating_point()
    return isinstance(value, _NUMBER)


def total(values: list[Any]) -> Any:
    """Return the sum of numbers. A single other value is returned as it is, several give None."""
    if all(isinstance(value, _NUMBER) for value in values):
        return sum(values[1:], values[0])
    return values[0] if len(values) == 1 else None
