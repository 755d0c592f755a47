"""Optimizer, training step (eager or captured) and evaluation of a run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from wsam.lab import settings
from wsam.lab.data_feed import Batch
from wsam.lab.run import Run


def make_optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    """Return the base optimizer, wrapped in the method unless the run is vanilla.

    Raises:
        ValueError: A hyperparameter is out of range.
    """
    base_class = getattr(torch.optim, settings.BASE_CLASSES[run.base])
    base = cast(torch.optim.Optimizer, base_class(model.parameters(), **run.base_args))
    if run.method == settings.VANILLA:
        return base
    from wsam.methods import METHODS, create

    arguments: dict[str, Any] = {**run.hyper, **run.options, "model": model}
    if run.geometry is not None:
        arguments["geometry"] = _make_geometry(dict(run.geometry), run.seed)
    arguments |= _seed_argument(METHODS[run.method], run.seed)
    return create(run.method, base, **arguments)


def _make_geometry(arguments: dict[str, Any], seed: int) -> object:
    geometry = settings.geometry_classes()[arguments.pop("name")]
    return geometry(**arguments, **_seed_argument(geometry, seed))


def _seed_argument(function: Callable[..., object], seed: int) -> dict[str, int]:
    """Return ``{"seed": seed}`` if the function has such a parameter."""
    has_seed = settings.SEED in inspect.signature(function).parameters
    return {settings.SEED: seed} if has_seed else {}


@contextmanager
def cudnn_benchmark(device: torch.device) -> Iterator[None]:
    """Enable cuDNN's algorithm search on CUDA: shapes are constant during a run."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or device.type == "cuda"
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def learning_rate(run: Run, step: int, steps: int) -> float:
    """Return the learning rate of a step: ``lr * (1 + cos(pi * step/steps)) / 2`` for cosine.

    Args:
        run: Has the schedule and the initial learning rate.
        step: From 0.
        steps: Steps of the whole run.
    """
    initial = cast(float, run.base_args["lr"])
    if run.schedule == "constant":
        return initial
    return initial * (1 + math.cos(math.pi * step / steps)) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of all groups; a tensor, as read by a CUDA graph, is set in place."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


class Objective:
    """The loss of a batch; counts correct predictions at w without a device synchronization.

    A step may compute the loss twice; only the first call after `begin` is at w and counted. A
    captured step calls this during capture only, and replays the writes to `correct`, so that tensor
    is never replaced.

    Args:
        model: The model, compiled or not.
        select: Reduces per-sample losses: the mean, or the optimizer's sample selection.
        precision: ``bf16`` or ``fp32``.
        device: The training device.
    """

    def __init__(
        self,
        model: Callable[[Tensor], Tensor],
        select: Callable[[Tensor], Tensor],
        precision: str,
        device: torch.device,
    ) -> None:
        self.model, self.select = model, select
        self.precision, self.device = precision, device
        self.correct = torch.zeros((), device=device)
        self._first_pass = True

    def begin(self) -> None:
        """Begin a step: the next call counts correct predictions."""
        self._first_pass = True

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        logits = forward(self.model, images, self.precision, self.device)
        if self._first_pass:
            self._first_pass = False
            with torch.no_grad():
                self.correct.copy_((logits.argmax(1) == labels).sum())
        return self.select(cross_entropy(logits, labels, reduction="none"))


def forward(
    model: Callable[[Tensor], Tensor], images: Tensor, precision: str, device: torch.device
) -> Tensor:
    """Return the logits in float32; the model runs in the given precision."""
    # Each weight is used once per pass, so the autocast cache would not help, and a CUDA graph must
    # not capture its tensors.
    with torch.autocast(
        device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False
    ):
        return model(images).float()


def check_forward(run: Run, model: nn.Module, images: Tensor) -> None:
    """Run a forward pass in training mode and leave the model and generators unchanged.

    Third-party models often do not declare which images they accept. This check refuses an
    unsuitable one before the run creates any files.

    Args:
        run: Has the names of model and data, and the precision.
        model: On the images' device.
        images: (count, channels, rows, columns).

    Raises:
        ValueError: The forward pass fails.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    device = images.device
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            forward(
                lambda x: cast(Tensor, functional_call(model, buffers, (x,))),
                images,
                run.precision,
                device,
            )
    except torch.OutOfMemoryError:
        raise  # does not mean that the images are unsuitable
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        shape = " x ".join(map(str, images.shape))
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"{run.model} does not accept the images of {run.data} ({shape}): {reason}"
        ) from error


@dataclass
class EpochTotals:
    """Sums over the steps of an epoch, on the device."""

    loss: Tensor
    correct: Tensor
    sharpness: Tensor
    steps: int = 0
    images: int = 0

    @classmethod
    def zeros(cls, device: torch.device) -> EpochTotals:
        """Return sums over no steps."""
        loss, correct, sharpness = torch.zeros(3, dtype=torch.float64, device=device)
        return cls(loss, correct, sharpness)

    def means(self) -> tuple[float, float, float]:
        """Return mean loss, error in percent and mean sharpness; synchronizes with the device."""
        sums = torch.stack((self.loss, self.correct, self.sharpness)).tolist()
        steps, images = max(self.steps, 1), max(self.images, 1)
        return sums[0] / steps, 100 * (1 - sums[1] / images), sums[2] / steps


class Stepper:
    """Makes training steps and sums their metrics, without device synchronizations.

    Args:
        optimizer: A `wsam.SharpnessAware` or a plain optimizer.
        objective: Computes the loss of a batch.
        capture: Replay the whole step from a CUDA graph.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, objective: Objective, capture: bool
    ) -> None:
        self.optimizer, self.objective, self.capture = optimizer, objective, capture
        self.sharpness_aware = hasattr(optimizer, "sharpness")
        self._captured: Callable[..., Tensor] | None = None
        self.totals = EpochTotals.zeros(objective.device)

    def reset_totals(self) -> None:
        """Begin the sums of a new epoch."""
        self.totals = EpochTotals.zeros(self.objective.device)

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        """Make one step."""
        self.objective.begin()
        loss = self._step(images, labels)
        totals = self.totals
        totals.loss += loss.detach()
        totals.correct += self.objective.correct
        if self.sharpness_aware:
            totals.sharpness += cast(Tensor, self.optimizer.sharpness)  # type: ignore[attr-defined]
        totals.steps += 1
        totals.images += len(labels)

    def _step(self, images: Tensor, labels: Tensor) -> Tensor:
        if self.capture:
            if self._captured is None:
                from wsam.accel.cuda_graph import capture

                self._captured = capture(self.optimizer, self.objective, images, labels)
            return self._captured(images, labels)

        def closure() -> Tensor:
            loss = self.objective(images, labels)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        if self.sharpness_aware:
            return cast(Tensor, self.optimizer.step(closure))  # type: ignore[arg-type]
        self.optimizer.zero_grad()
        loss = closure()
        self.optimizer.step()
        return loss


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], precision: str, device: torch.device
) -> tuple[float, float]:
    """Return the mean loss and the error in percent over all batches."""
    loss = torch.zeros((), dtype=torch.float64, device=device)
    correct = torch.zeros((), dtype=torch.float64, device=device)
    count = 0
    model.eval()
    for images, labels in batches:
        logits = forward(model, images, precision, device)
        loss += cross_entropy(logits, labels, reduction="sum")
        correct += (logits.argmax(1) == labels).sum()
        count += len(labels)
    model.train()
    sums = torch.stack((loss, correct)).tolist()
    return sums[0] / count, 100 * (1 - sums[1] / count)
