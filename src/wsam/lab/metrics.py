"""Losses and metrics: how the outputs of a model are compared with the targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from wsam.lab import settings
from wsam.lab.values import check_choice

Loss = Callable[[Any, Any], Tensor]
"""Returns the loss of a batch, given outputs and targets: one value per sample, or their mean."""
IGNORED = -100
"""Targets that cross-entropy leaves out, such as padding."""


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy of each sample; targets are classes, which outputs have in dim 1."""
    return _per_sample(functional.cross_entropy(output, target.long(), reduction="none"))


def is_used(target: Tensor) -> Tensor:
    """Return which targets the cross-entropy does not leave out."""
    return target.long() != IGNORED  # as bytes, -100 is class 156


def count_correct(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of correct predictions and that of targets that are not left out."""
    return (output.argmax(1) == target).sum(), is_used(target).sum()


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error of each sample.

    Raises:
        ValueError: Output and target have different sizes; torch would broadcast them.
    """
    return _per_sample((_like(output, target) - target).square())


def _per_sample(values: Tensor) -> Tensor:
    return values if values.dim() < 2 else values.flatten(1).mean(1)


def _like(output: Tensor, target: Tensor) -> Tensor:
    """Return the output in the shape of the target: (batch, 1) becomes (batch,)."""
    if output.numel() != target.numel():
        raise ValueError(f"output {format_shape(output)} and target {format_shape(target)} differ")
    return output.reshape(target.shape)


def loss_sum(loss: Loss, output: Any, target: Any, count: int) -> Tensor:
    """Return the loss of a batch of `count` samples as a sum over the samples."""
    if loss is cross_entropy and target.dim() == 1:
        return functional.cross_entropy(output, target.long(), reduction="sum")
    values = loss(output, target)
    return values.sum() if values.dim() == 1 and len(values) == count else values.mean() * count


def mean_loss(loss: Loss) -> Loss:
    """Return a function for the mean loss of a batch; torch's own for classification."""
    if loss is cross_entropy:
        return functional.cross_entropy
    return lambda output, target: loss(output, target).mean()


@dataclass(frozen=True)
class Metric:
    """A figure that shows how good a model is.

    Args:
        name: Its name. Records have ``test_NAME`` and ``validation_NAME``.
        function: Called with all outputs and all targets of a split, on the CPU; returns a number, or
            one for each sample, whose mean is then the figure.
        lower_is_better: Whether searches minimize it; otherwise they maximize it.
        unit: ``%`` or empty.

    Example:
        >>> within = Metric("within_1", lambda y, t: ((y - t).abs() < 1).float().mean(), False)
        >>> within(torch.tensor([1.0, 5.0]), torch.tensor([1.5, 2.0]))
        0.5
    """

    name: str
    function: Callable[[Any, Any], Any] | None
    lower_is_better: bool
    unit: str = ""

    @property
    def column(self) -> str:
        """The name in the rows of a curve."""
        return self.name.replace("-", "_")

    def __call__(self, outputs: Any, targets: Any) -> float:
        """Return the figure of a whole split."""
        assert self.function is not None
        value = self.function(outputs, targets)
        return float(value.double().mean() if isinstance(value, Tensor) else value)


def mean_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error over all samples."""
    return squared_error(outputs, targets).mean()


def macro_f1(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean F1 score over the classes that are predicted or present, in percent."""
    used = is_used(targets)
    predicted, true = outputs.argmax(1)[used], targets[used]
    classes = int(torch.cat((predicted, true)).max()) + 1
    hits = torch.bincount(true[predicted == true], minlength=classes)
    found = torch.bincount(predicted, minlength=classes) + torch.bincount(true, minlength=classes)
    return 100 * (2 * hits[found > 0] / found[found > 0]).mean()


# Computed by `evaluation.evaluate` together with the loss:
ERROR = Metric("error", None, lower_is_better=True, unit="%")
ACCURACY = Metric("accuracy", None, lower_is_better=False, unit="%")
LOSS = Metric("loss", None, lower_is_better=True)
MSE = Metric("mse", mean_squared_error, lower_is_better=True)
MACRO_F1 = Metric("macro-f1", macro_f1, lower_is_better=False, unit="%")
METRICS = {metric.name: metric for metric in (ERROR, ACCURACY, LOSS, MSE, MACRO_F1)}
assert tuple(METRICS) == settings.METRICS
OF_CLASSES = (ERROR, ACCURACY, MACRO_F1)


def resolve_metric(metric: str | Metric | Callable[[Any, Any], Any]) -> Metric:
    """Return a metric, given its name, itself or its function; lower values of that are better.

    Raises:
        ValueError: Unknown name.
    """
    if isinstance(metric, Metric):
        return metric
    if isinstance(metric, str):
        return METRICS[check_choice("metric", metric, METRICS)]
    name = getattr(metric, "__name__", type(metric).__name__).lstrip("_")
    return Metric(name if name.isidentifier() else "metric", metric, lower_is_better=True)


def format_shape(value: Any) -> str:
    """Return the shape and type of a tensor, or of each tensor in a container.

    Example:
        >>> format_shape((torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)))
        '(2 x 3 of float32, 2 of int64)'
    """
    if isinstance(value, Tensor):
        shape = " x ".join(map(str, value.shape)) or "a scalar"
        return f"{shape} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {format_shape(v)}" for name, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(format_shape, value))})"
    return type(value).__name__
