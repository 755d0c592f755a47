"""GradScaler: report an overflow of the first pass to it, and reject it in closures.

It checks and unscales the gradients of the second pass only.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from wsam._core.param_blocks import Block, local_shards, squared_norm_of_g0


class OverflowReport:
    """Makes a gradient of the second pass NaN if one of the first pass was not finite.

    At w + d a gradient can be zero although the weights are NaN, so the perturbation itself does not
    always show the overflow to the scaler, which must lower its scale.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._zero_or_nan = 0.0 * squared_norm_of_g0(blocks)
        add_hook = blocks[-1].params[-1].register_post_accumulate_grad_hook
        self._handle: RemovableHandle = add_hook(self._add)  # type: ignore[no-untyped-call]

    def include(self, blocks: Sequence[Block]) -> None:
        """Report an overflow of these g0, too."""
        self._zero_or_nan = self._zero_or_nan + 0.0 * squared_norm_of_g0(blocks)

    def _add(self, p: Tensor) -> None:
        with torch.no_grad():
            (grad,) = local_shards([p.grad])  # type: ignore[list-item]
            grad.add_(self._zero_or_nan.to(grad.device))

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def found_overflow(self, found_inf: Tensor) -> Tensor:
        """Return whether the scaler or the first pass has found an overflow, as a tensor."""
        return found_inf + self._zero_or_nan.isnan().to(found_inf.device)


_scale = torch.amp.GradScaler.scale
_threads: set[int] = set()
"""The threads in which no loss may be scaled."""


def _checked_scale(scaler: Any, outputs: Any) -> Any:
    if threading.get_ident() in _threads and scaler.is_enabled():
        raise RuntimeError(
            "the closure scales its loss, but its gradients are not unscaled: use "
            "wsam.train_step(optimizer, loss_fn, scaler=scaler), or run both passes by hand"
        )
    return _scale(scaler, outputs)


@contextlib.contextmanager
def reject_grad_scaler() -> Iterator[None]:
    """Raise if this thread scales a loss by a GradScaler within the `with` block.

    Its gradients would not be unscaled, and would move the weights thousands of times too far.
    """
    thread = threading.get_ident()
    try:
        _threads.add(thread)
        torch.amp.GradScaler.scale = _checked_scale  # type: ignore[method-assign, assignment]
        yield
    finally:
        _threads.discard(thread)
        if not _threads:
            torch.amp.GradScaler.scale = _scale  # type: ignore[method-assign]
