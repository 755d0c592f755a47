"""Accelerate: `TwoPasses.backward` replaces `accelerator.backward`.

passes = TwoPasses(accelerator, model, optimizer)       # after accelerator.prepare
loss = passes.backward(compute_loss, batch)             # instead of accelerator.backward(loss)
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from wsam._core.framework_checks import DEEPSPEED, FSDP1
from wsam.integrations.metrics import metrics_unchanged
from wsam.integrations.microbatch_replay import MicrobatchReplay, unwrap

SUPPORTED_TYPES = (
    "NO",
    "FSDP",
    *(f"MULTI_{kind}" for kind in ("CPU", "GPU", "XPU", "NPU", "MLU", "HPU")),
)
"""Distributed types in which parameters are plain tensors or, with FSDP of version 2, DTensors."""
_FSDP2 = "FullyShardedDataParallelPlugin(fsdp_version=2), or fsdp=True of TrainingArguments"


def check_accelerator(accelerator: Any) -> None:
    """Raise for settings whose results would be silently wrong."""
    kind = getattr(accelerator.distributed_type, "value", str(accelerator.distributed_type))
    if kind == "DEEPSPEED":
        raise ValueError(f"{DEEPSPEED}: {_FSDP2}")
    if kind == "FSDP" and not getattr(accelerator, "is_fsdp2", False):
        raise ValueError(f"{FSDP1}: {_FSDP2}")
    if kind not in SUPPORTED_TYPES:
        raise ValueError(
            f"distributed type {kind} is not supported: it shards parameters or updates them itself, "
            f"so the perturbation would be wrong; use one of {', '.join(SUPPORTED_TYPES)}"
        )
    parallelism = getattr(accelerator, "parallelism_config", None)
    if parallelism is not None and not (kind == "FSDP" and not parallelism.non_dp_dim_names):
        raise ValueError(
            "this parallelism_config is not supported: it shards parameters or batches; with FSDP2, "
            "dp_shard_size and dp_replicate_size are"
        )
    if accelerator.mixed_precision == "fp16" and accelerator.scaler is None:
        raise ValueError(
            f"mixed_precision='fp16' on {accelerator.device.type}: Accelerate would train in float32 "
            "without a warning; use 'bf16'"
        )


class TwoPasses:
    """Computes gradients as `accelerator.backward` does, at w and, once a step, again at w + d.

    The accelerator's gradient accumulation, `no_sync`, mixed precision and GradScaler apply to both
    passes.

    Args:
        accelerator: the `Accelerator`.
        model: the prepared model.
        optimizer: the prepared optimizer, which wraps a sharpness-aware one.

    Example:
        passes = TwoPasses(accelerator, model, optimizer)
        loss = passes.backward(lambda x, y: cross_entropy(model(x), y), x, y)
    """

    def __init__(self, accelerator: Any, model: nn.Module, optimizer: Any) -> None:
        inner = unwrap(optimizer)
        if inner is None:
            raise TypeError(
                f"optimizer must contain a sharpness-aware optimizer, got {optimizer!r}"
            )
        check_accelerator(accelerator)
        self.optimizer = inner
        self._accelerator, self._model = accelerator, model
        self._replay = MicrobatchReplay(inner, functools.partial(accelerator.no_sync, model))

    @property
    def in_second_pass(self) -> bool:
        """Whether the loss is being computed at w + d. Do not update metrics of your own then."""
        return self._replay.in_second_pass

    def backward(self, compute: Callable[..., Tensor], *batch: Any) -> Tensor:
        """Run the first pass of a micro-batch, and after a step's last one the second pass of all.

        Args:
            compute: returns the loss of a batch. It runs again after later batches were loaded, so it
                must not read the batch from a variable of the loop.
            *batch: its arguments.

        Returns:
            The loss at w.
        """
        accelerator = self._accelerator
        if not batch and accelerator.gradient_accumulation_steps > 1:
            raise TypeError(
                "with gradient accumulation, pass the batch as an argument: backward(compute, batch). "
                "compute runs again when the loop's variables hold a later batch"
            )

        losses: list[Tensor] = []

        def run() -> Tensor:
            loss = compute(*batch)
            accelerator.backward(loss)
            losses.append(loss.detach())
            share: Tensor = losses[-1] / accelerator.gradient_accumulation_steps
            return share

        self._replay.run_first_pass(run)
        if accelerator.sync_gradients:
            with metrics_unchanged(self._model.modules()):
                self._replay.run_second_pass(accelerator.scaler)
        return losses[0]
