"""A training step, eager or captured, and the sums over the steps of an epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from wsam._core.pytree import map_tensors
from wsam.lab.metrics import Loss, count_correct, cross_entropy
from wsam.optimizer import SharpnessAware
from wsam.training_step import train_step


@contextmanager
def cudnn_settings(device: torch.device) -> Iterator[None]:
    """On CUDA, enable cuDNN's algorithm search, and use torch's attention instead of cuDNN's.

    The search pays, since shapes are constant during a run. The backward pass of cuDNN's attention can
    return NaN for some sequence lengths: https://github.com/pytorch/pytorch/issues/196678.
    """
    if device.type != "cuda":
        yield
        return
    benchmark = torch.backends.cudnn.benchmark
    attention = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
        torch.backends.cuda.enable_cudnn_sdp(attention)


def forward(model: Callable[[Any], Any], inputs: Any, precision: str, device: torch.device) -> Any:
    """Return the model's output in float32; the model runs in the given precision.

    A container keeps its type, such as a named tuple or Hugging Face's ModelOutput.
    """
    # Each weight is used once per pass, so the autocast cache would not help, and a CUDA graph must
    # not capture its tensors.
    with torch.autocast(
        device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False
    ):
        return map_tensors(lambda x: x.float() if x.is_floating_point() else x, model(inputs))


class Objective:
    """The loss of a batch, and how many of its predictions are correct.

    `wsam.train_step` calls it in both passes and returns the counts of the first.

    Args:
        model: The model, compiled or not.
        select: Reduces per-sample losses: the mean, or the optimizer's sample selection.
        precision: ``bf16`` or ``fp32``.
        device: The training device.
        loss: Compares outputs and targets.
        classifies: Count predictions; otherwise none are counted.
    """

    def __init__(
        self,
        model: Callable[[Any], Any],
        select: Callable[[Tensor], Tensor],
        precision: str,
        device: torch.device,
        loss: Loss = cross_entropy,
        classifies: bool = True,
    ) -> None:
        self.model, self.select = model, select
        self.precision, self.device = precision, device
        self.loss, self.classifies = loss, classifies

    def __call__(self, inputs: Any, targets: Any) -> tuple[Tensor, Tensor | None]:
        """Return the loss, and the numbers of correct and of all predictions."""
        output = forward(self.model, inputs, self.precision, self.device)
        counts = torch.stack(count_correct(output, targets)) if self.classifies else None
        loss = self.loss(output, targets)
        return self.select(loss) if loss.dim() else loss, counts


class EpochTotals:
    """Sums over the steps of an epoch, on the device."""

    def __init__(self, device: torch.device) -> None:
        self.steps = 0
        self.sums = torch.zeros(5, dtype=torch.float64, device=device)
        # Views of `sums`. `measured` is the number of steps with two passes, which measure the
        # sharpness; `counts` are the numbers of correct predictions and of all predictions.
        self.loss, self.sharpness, self.measured = self.sums[0], self.sums[1], self.sums[2]
        self.counts = self.sums[3:]

    def means(self) -> tuple[float, float, float]:
        """Return mean loss, error in percent and mean sharpness; synchronizes with the device."""
        loss, sharpness, measured, correct, predictions = self.sums.tolist()
        return (
            loss / max(self.steps, 1),
            100 * (1 - correct / max(predictions, 1)),
            sharpness / measured if measured else math.nan,
        )


class Stepper:
    """Makes training steps and sums their metrics, without device synchronizations.

    Args:
        optimizer: A `wsam.SharpnessAware` or a plain optimizer.
        objective: Computes the loss of a batch.
        capture: Replay the whole step from a CUDA graph.
        options: Of the run. ``gather`` and ``ascent_share`` are those of `wsam.train_step`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        capture: bool,
        options: Mapping[str, Any],
    ) -> None:
        self.optimizer, self.device = optimizer, objective.device
        ascent_share = options.get("ascent_share", 1.0)
        self._train_step = train_step(
            optimizer,
            objective,
            gather_selected=bool(options.get("gather")) or ascent_share < 1.0,
            ascent_share=ascent_share,
            capture=capture,
        )
        self.reset_totals()

    def reset_totals(self) -> None:
        """Begin the sums of a new epoch."""
        self.totals = EpochTotals(self.device)

    def __call__(self, inputs: Any, targets: Any) -> None:
        """Make one step."""
        loss, counts = self._train_step(inputs, targets)
        totals = self.totals
        totals.loss += loss
        if counts is not None:
            totals.counts += counts
        if isinstance(self.optimizer, SharpnessAware):
            sharpness = cast(Tensor, self.optimizer.sharpness)  # None before the first step
            one_pass = sharpness.isnan()
            totals.sharpness += sharpness.masked_fill(one_pass, 0.0)
            totals.measured += ~one_pass
        totals.steps += 1
