"""One step of training, eager or captured, and what it leaves behind on the device."""

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

from wsam.lab import names
from wsam.lab.batches import Batch
from wsam.lab.run import Run


def make_optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    """Build the base optimizer and, unless the run is vanilla, the method around it.

    Raises:
        ValueError: A hyperparameter out of its range.
    """
    kind = getattr(torch.optim, names.BASE_CLASSES[run.base])
    base = cast(torch.optim.Optimizer, kind(model.parameters(), **run.base_args))
    if run.method == names.VANILLA:
        return base
    from wsam.methods import METHODS, create

    arguments: dict[str, Any] = {**run.hyper, **run.options, "model": model}
    if run.geometry is not None:
        arguments["geometry"] = _geometry(dict(run.geometry), run.seed)
    arguments |= _seeded(METHODS[run.method], run.seed)
    return create(run.method, base, **arguments)


def _geometry(arguments: dict[str, Any], seed: int) -> object:
    kind = names.geometry_classes()[arguments.pop("name")]
    return kind(**arguments, **_seeded(kind, seed))


def _seeded(kind: Callable[..., object], seed: int) -> dict[str, int]:
    """Return the run's seed as an argument, for those that draw."""
    return {names.SEED: seed} if names.SEED in inspect.signature(kind).parameters else {}


@contextmanager
def fast_convolutions(device: torch.device) -> Iterator[None]:
    """Let cuDNN try its algorithms once and keep the fastest: shapes never change here."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or device.type == "cuda"
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def learning_rate(run: Run, step: int, steps: int) -> float:
    """Return the learning rate of a step: ``lr * (1 + cos(pi * step/steps)) / 2`` for cosine.

    Args:
        run: Says the schedule and its highest value.
        step: From 0.
        steps: Of the whole run.
    """
    highest = cast(float, run.base_args["lr"])
    if run.schedule == "constant":
        return highest
    return highest * (1 + math.cos(math.pi * step / steps)) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of all groups; a tensor stays the tensor that a graph reads."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


class Objective:
    """The loss of a batch, and how many of it were right at w, without waiting for the device.

    A step may compute the loss twice; only the first time since `begin` is at w and counted. A
    captured step runs this once, when it is recorded, and replays what was recorded then: `right`
    is one tensor for good.

    Args:
        model: The model, compiled or not.
        select: Makes one loss of many: the mean, or the optimizer's choice among them.
        precision: ``bf16`` or ``fp32``.
        device: Where the model trains.
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
        self.right = torch.zeros((), device=device)
        self._first = True

    def begin(self) -> None:
        """Say that a step begins."""
        self._first = True

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        logits = forward(self.model, images, self.precision, self.device)
        if self._first:
            self._first = False
            with torch.no_grad():
                self.right.copy_((logits.argmax(1) == labels).sum())
        return self.select(cross_entropy(logits, labels, reduction="none"))


def forward(
    model: Callable[[Tensor], Tensor], images: Tensor, precision: str, device: torch.device
) -> Tensor:
    """Return the logits in float32; the model itself runs in the run's precision."""
    # The cache of cast weights helps only where a weight is used twice, and a graph must not hold it.
    with torch.autocast(
        device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False
    ):
        return model(images).float()


def try_out(run: Run, model: nn.Module, images: Tensor) -> None:
    """Show a model some images as a step would, and leave it as it was.

    What a model by another library can take is often not known before it is tried, and a run that
    cannot be trained is to be refused before it has made any files.

    Args:
        run: Names model and data, and says the precision.
        model: On the images' device.
        images: (count, channels, rows, columns).

    Raises:
        ValueError: The model fails on them.
    """
    # In training BatchNorm writes to buffers and dropout draws numbers: neither must be seen later.
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
        raise  # not the model's mistake
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        shape = " x ".join(map(str, images.shape))
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"{run.model} does not take the images of {run.data} ({shape}): {reason}"
        ) from error


@dataclass
class Totals:
    """Sums over the steps of an epoch, on the device."""

    loss: Tensor
    right: Tensor
    sharpness: Tensor
    steps: int = 0
    images: int = 0

    @classmethod
    def on(cls, device: torch.device) -> Totals:
        """Return sums of nothing."""
        loss, right, sharpness = torch.zeros(3, dtype=torch.float64, device=device)
        return cls(loss, right, sharpness)

    def read(self) -> tuple[float, float, float]:
        """Wait for the device and return mean loss, error in percent and mean sharpness."""
        sums = torch.stack((self.loss, self.right, self.sharpness)).tolist()
        steps, images = max(self.steps, 1), max(self.images, 1)
        return sums[0] / steps, 100 * (1 - sums[1] / images), sums[2] / steps


class Stepper:
    """Makes steps and sums up what they leave behind; nothing in a step waits for the device.

    Args:
        optimizer: A member of the family, or a plain optimizer.
        objective: Computes the loss of a batch.
        capture: Replay the whole step from a CUDA graph.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, objective: Objective, capture: bool
    ) -> None:
        self.optimizer, self.objective, self.capture = optimizer, objective, capture
        self.sharp = hasattr(optimizer, "sharpness")
        self._replay: Callable[..., Tensor] | None = None
        self.totals = Totals.on(objective.device)

    def restart(self) -> None:
        """Begin new sums."""
        self.totals = Totals.on(self.objective.device)

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        """Make one step."""
        self.objective.begin()
        loss = self._step(images, labels)
        totals = self.totals
        totals.loss += loss.detach()
        totals.right += self.objective.right
        if self.sharp:
            totals.sharpness += cast(Tensor, self.optimizer.sharpness)  # type: ignore[attr-defined]
        totals.steps += 1
        totals.images += len(labels)

    def _step(self, images: Tensor, labels: Tensor) -> Tensor:
        if self.capture:
            if self._replay is None:
                from wsam.graph import capture

                self._replay = capture(self.optimizer, self.objective, images, labels)
            return self._replay(images, labels)

        def closure() -> Tensor:
            loss = self.objective(images, labels)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        if self.sharp:
            return cast(Tensor, self.optimizer.step(closure))  # type: ignore[arg-type]
        self.optimizer.zero_grad()
        loss = closure()
        self.optimizer.step()
        return loss


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], precision: str, device: torch.device
) -> tuple[float, float]:
    """Return the mean loss and the error in percent over all of some batches."""
    loss = torch.zeros((), dtype=torch.float64, device=device)
    right = torch.zeros((), dtype=torch.float64, device=device)
    count = 0
    model.eval()
    for images, labels in batches:
        logits = forward(model, images, precision, device)
        loss += cross_entropy(logits, labels, reduction="sum")
        right += (logits.argmax(1) == labels).sum()
        count += len(labels)
    model.train()
    sums = torch.stack((loss, right)).tolist()
    return sums[0] / count, 100 * (1 - sums[1] / count)
