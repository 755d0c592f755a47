"""Checks that model, loss and metric of a run fit its data, and that the data is finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from wsam._core.pytree import tensors_of
from wsam._utils.batches import count_samples
from wsam.lab import metrics
from wsam.lab.data.feed import Batch, DataFeed
from wsam.lab.data.image_feed import ImageFeed
from wsam.lab.errors import (
    USER_EXCEPTIONS,
    RunError,
    UserCodeError,
    describe_error,
    is_from_user_code,
    is_out_of_memory,
)
from wsam.lab.metrics import format_shape
from wsam.lab.problem import Problem
from wsam.lab.records import NOT_FINITE
from wsam.lab.run import Run
from wsam.lab.step import forward
from wsam.lab.user_code import is_code_or_object

_CHECKED_SAMPLES = 10_000
"""Samples that are read to find out whether the data is the cause of a loss that is not finite."""


def check_problem(run: Run, problem: Problem, batch: Batch) -> Any:
    """Run model, metric and loss on a small batch and return the model's output.

    Raises:
        ValueError: They do not fit together.
    """
    inputs, targets = batch
    output = check_forward(run, problem.model, inputs, problem.feed.device)
    check_metric(run, problem, output, targets)
    check_loss(run, problem, output, targets)
    return output


def check_forward(run: Run, model: nn.Module, inputs: Any, device: torch.device) -> Any:
    """Run a forward pass in training mode and leave the model and generators unchanged.

    Third-party models often do not declare which inputs they accept. This check refuses an
    unsuitable one before the run creates any files.

    Args:
        run: Has the names of model and data, and the precision.
        model: On the device.
        inputs: A small batch.
        device: The training device.

    Returns:
        The output.

    Raises:
        ValueError: The forward pass fails.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            return forward(
                lambda x: functional_call(model, buffers, (x,)), inputs, run.precision, device
            )
    except USER_EXCEPTIONS as error:
        if is_out_of_memory(error):
            raise  # does not mean that the inputs are unsuitable
        images = isinstance(inputs, Tensor) and inputs.dim() == 4
        shape = " x ".join(map(str, inputs.shape)) if images else format_shape(inputs)
        what = "images" if images else "inputs"
        own = is_code_or_object(run.model) and is_from_user_code(error)
        unpack = "; forward receives them as one argument" if not isinstance(inputs, Tensor) else ""
        raise UserCodeError(
            f"{run.model} does not accept the {what} of {run.data} ({shape}): "
            f"{describe_error(error) if own else _reason(error)}{unpack}"
        ) from error


def check_metric(run: Run, problem: Problem, output: Any, targets: Any) -> None:
    """Compare the metric with the output and the targets of a small batch.

    Raises:
        ValueError: The metric needs classes and the targets are numbers, or the reverse.
    """
    if problem.metric not in (*metrics.OF_CLASSES, metrics.MSE):
        return
    tensors = isinstance(output, Tensor) and isinstance(targets, Tensor)
    if problem.metric == metrics.MSE:
        needs = "one output for each number"
        fits = tensors and output.numel() == targets.numel()
    else:
        needs = "classes, and one score for each of them in dim 1"
        classes = tensors and not targets.is_floating_point() and output.dim() > 1
        fits = classes and output.argmax(1).shape == targets.shape
    if not fits:
        raise RunError(
            f"the metric {problem.metric.name} needs {needs}: {run.model} on {run.data} has outputs "
            f"of {format_shape(output)} and targets of {format_shape(targets)}"
        )


def check_loss(run: Run, problem: Problem, output: Any, targets: Any) -> None:
    """Compute the loss of a small batch.

    Raises:
        ValueError: The output does not fit the targets, or the loss is not a tensor of one value or
            of one per sample.
    """
    name = getattr(problem.loss, "__name__", type(problem.loss).__name__)
    try:
        with torch.no_grad():
            value = problem.loss(output, targets)
            if problem.classifies and output.argmax(1).shape != targets.shape:
                raise ValueError("there must be one score per class in dim 1")
    except USER_EXCEPTIONS as error:
        the_output = f"the output of {run.model}, {format_shape(output)}"
        the_targets = f"the targets of {run.data}, {format_shape(targets)}"
        if is_from_user_code(error):
            message = f"{name} raised {describe_error(error)} for {the_output}, and {the_targets}"
        else:
            message = f"{the_output}, does not fit {name} with {the_targets}: {_reason(error)}"
        raise UserCodeError(message) from error
    count, selects = count_samples(targets), run.method == "esam"
    shapes = ((count,),) if selects else ((count,), ())
    if not isinstance(value, Tensor) or value.shape not in shapes:
        otherwise = ", by which esam selects them" if selects else ", or their mean"
        raise UserCodeError(
            f"{name} must return one value per sample{otherwise}; got {format_shape(value)} for "
            f"{count} samples"
        )


def _reason(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def describe_nonfinite(feed: DataFeed, split: str) -> str | None:
    """Return which of the first samples of a split are not finite; None if all are.

    Images are decoded from bytes, so they are finite.
    """
    if isinstance(feed, ImageFeed):
        return None
    first = 1
    for batch in feed.fixed(split, _CHECKED_SAMPLES, feed.batch_size):
        for what, values in zip(("inputs", "targets"), batch, strict=True):
            for tensor in map(torch.atleast_1d, tensors_of(values)):
                wrong = (~tensor.isfinite()).nonzero()
                if len(wrong):
                    value = float(tensor[tuple(wrong[0])])
                    return (
                        f"the {split} {what} of {feed.name} {NOT_FINITE}, such as {value} in sample "
                        f"{first + int(wrong[0, 0])}"
                    )
        first += count_samples(batch)
    return None
