"""Accelerate: both passes in place of `accelerator.backward`.

After `accelerator.prepare`, make `passes = TwoPasses(accelerator, model, optimizer)` and write
`passes.backward(compute_loss, batch)` where the loop said `accelerator.backward(loss)`.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from wsam.integrations.window import Window, unwrap

REPLICATING = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_HPU")
"""Ways to distribute in which every process holds all parameters as plain tensors."""


def check_accelerator(accelerator: Any) -> None:
    """Refuse what would be silently wrong: sharded parameters, and float16 that is none."""
    kind = getattr(accelerator.distributed_type, "value", str(accelerator.distributed_type))
    if kind not in REPLICATING:
        raise ValueError(
            f"distributed type {kind} is not supported: it shards parameters or steps by itself, so "
            f"perturbations would be wrong; supported are {', '.join(REPLICATING)}"
        )
    if getattr(accelerator, "parallelism_config", None) is not None:
        raise ValueError("a parallelism_config is not supported: it shards parameters or batches")
    if accelerator.mixed_precision == "fp16" and accelerator.scaler is None:
        raise ValueError(
            f"fp16 on {accelerator.device.type} would silently be float32 in Accelerate: use bf16"
        )


class TwoPasses:
    """Computes gradients as `accelerator.backward` does, at w and, once a step, again at w + d.

    Gradient accumulation, its `no_sync`, mixed precision and the GradScaler are the accelerator's.

    Args:
        accelerator: the `Accelerator`.
        model: the prepared model.
        optimizer: the prepared optimizer, with a sharpness-aware one inside.

    Example:
        passes = TwoPasses(accelerator, model, optimizer)
        loss = passes.backward(lambda x, y: cross_entropy(model(x), y), x, y)
    """

    def __init__(self, accelerator: Any, model: nn.Module, optimizer: Any) -> None:
        own = unwrap(optimizer)
        if own is None:
            raise TypeError(f"the optimizer is not a sharpness-aware one, got {optimizer!r}")
        check_accelerator(accelerator)
        self.optimizer = own
        self._accelerator = accelerator
        self._window = Window(own, functools.partial(accelerator.no_sync, model))

    @property
    def in_second_pass(self) -> bool:
        """Whether the loss is computed at w + d now: a metric kept by hand should not count then."""
        return self._window.replaying

    def backward(self, compute: Callable[..., Tensor], *batch: Any) -> Tensor:
        """Make the first pass of a micro-batch; after the last one of a step, the second pass of all.

        Args:
            compute: returns the loss of a batch. It runs twice, the second time after later batches
                have been loaded: it must not read the batch from a variable of the loop.
            *batch: its arguments.

        Returns:
            The loss at w.
        """
        accelerator = self._accelerator
        if not batch and accelerator.gradient_accumulation_steps > 1:
            raise TypeError(
                "give the batch as an argument, backward(compute, batch): with accumulation the "
                "function runs again when the loop's variables hold a later batch"
            )

        losses: list[Tensor] = []

        def run() -> Tensor:
            loss = compute(*batch)
            accelerator.backward(loss)
            losses.append(loss.detach())
            share: Tensor = losses[-1] / accelerator.gradient_accumulation_steps
            return share

        self._window.first(run)
        if accelerator.sync_gradients:
            self._window.finish(accelerator.scaler)
        return losses[0]
