"""What closures return: a loss, a tuple that begins with one, or a dict with the key "loss"."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def loss_of(value: Any) -> Any:
    """Return the loss in a closure's result, as a number or tensor; None if there is none.

    A Hugging Face `ModelOutput` is a dict.
    """
    if isinstance(value, tuple) and value:
        value = value[0]
    elif isinstance(value, dict):
        value = value.get("loss")
    if isinstance(value, Tensor):
        return value if value.numel() == 1 and value.is_floating_point() else None
    return value if isinstance(value, int | float) else None


def loss_increase(second: Any, first: Any) -> Tensor:
    """Return L(w + d) - L(w); NaN if the closure returned no loss."""
    after, before = loss_of(second), loss_of(first)
    if after is None or before is None:
        known = before if after is None else after
        device = known.device if isinstance(known, Tensor) else None
        return torch.full((), torch.nan, device=device)
    return torch.as_tensor(after - before)


def total(values: list[Any], weights: Sequence[float]) -> Any:
    """Return the weighted sum of the losses of closures; None if one of them returned no loss."""
    losses = [loss_of(value) for value in values]
    if any(loss is None for loss in losses):
        return None
    weighted = [weight * loss for weight, loss in zip(weights, losses, strict=True)]
    return sum(weighted[1:], weighted[0])
