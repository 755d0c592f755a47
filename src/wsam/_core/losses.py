"""What closures return: a loss, a tuple that begins with one, or a dict with the key "loss"."""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from wsam._core.pytree import map_tensors


def detach(value: Any) -> Any:
    """Return a closure's result without its autograd graph."""
    if isinstance(value, Tensor):  # the usual case, where a tree costs more than the loss
        return value.detach()
    return map_tensors(Tensor.detach, value)


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


def total(values: list[Any]) -> Any:
    """Return the sum of the losses of several closures; None if one of them returned no loss."""
    losses = [loss_of(value) for value in values]
    return None if any(loss is None for loss in losses) else sum(losses[1:], losses[0])


LARGEST_RATIO = 1000.0
"""Between the loss that backward is called on and the returned one. A GradScaler starts at 65536."""


def run_and_check_scale(closure: Callable[[], Any]) -> Any:
    """Call the closure and return its result; check that it calls backward on the loss it returns.

    Gradients of a loss that a GradScaler has scaled would move the weights thousands of times too far.

    Raises:
        RuntimeError: if the closure uses a GradScaler, or calls backward on a much larger loss than it
            returns.
    """
    with _observe_backward() as roots:
        result = closure()
    returned = loss_of(detach(result))
    numbers = [root for root in roots if root.numel() == 1 and not root.is_meta]
    if numbers and returned is not None:
        used, returned = sum(map(float, numbers)), float(returned)
        if math.isfinite(used) and abs(used) > LARGEST_RATIO * abs(returned) > 0:
            raise RuntimeError(
                f"the closure returned the loss {returned:.4g} and called backward on {used:.4g}, "
                f"{used / returned:.4g} times as much: call backward on the loss that is returned"
            )
    return result


@contextlib.contextmanager
def _observe_backward() -> Iterator[list[Tensor]]:
    """Collect the tensors on which this thread calls backward, and reject the use of a GradScaler."""
    thread = threading.get_ident()
    roots: list[Tensor] = []
    backward, scale = torch.autograd.backward, torch.amp.GradScaler.scale

    def observed_backward(tensors: Any, *arguments: Any, **options: Any) -> None:
        if threading.get_ident() == thread:
            found = [tensors] if isinstance(tensors, Tensor) else tensors
            roots.extend(tensor.detach() for tensor in found)
        backward(tensors, *arguments, **options)

    def observed_scale(scaler: Any, outputs: Any) -> Any:
        if threading.get_ident() == thread and scaler.is_enabled():
            raise RuntimeError(
                "the closure scales its loss, but its gradients are not unscaled: use "
                "wsam.train_step(optimizer, loss_fn, scaler=scaler), or run both passes by hand"
            )
        return scale(scaler, outputs)

    torch.autograd.backward, torch.amp.GradScaler.scale = observed_backward, observed_scale  # type: ignore[method-assign, assignment]
    try:
        yield roots
    finally:
        torch.autograd.backward, torch.amp.GradScaler.scale = backward, scale  # type: ignore[method-assign]
