"""What is trained while steps are timed: a model, one batch, a loss and a base optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wsam.lab import models
from wsam.lab.models import Task, parameter_count

FORMS = ("eager", "compiled", "captured")
PIXELS = 32
CIFAR = Task((3, PIXELS, PIXELS), 10)
BASE_ARGS: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}
RHO, GAMMA = 0.05, 0.9
SMOKE_BATCH = 4

Loss = Callable[..., Tensor]
Select = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Workload:
    """A training problem for a benchmark.

    Args:
        name: Name in tables.
        build_model: Builds the model on its device, with the same weights each time.
        make_loss: Builds the loss of a batch from a forward function and a reduction of the
            per-sample losses.
        batch: The batch of every step.
        device: The device.
        precision: ``fp32`` or ``bf16``.
        compilable: Whether the compiled form uses `torch.compile`.
        pixels: Side length of an image, if the batch has images.
    """

    name: str
    build_model: Callable[[], nn.Module]
    make_loss: Callable[[Callable[..., Tensor], Select], Loss]
    batch: tuple[Tensor, ...]
    device: torch.device
    precision: str
    compilable: bool = True
    pixels: int | None = None

    def forward(self, model: nn.Module, form: str) -> Callable[..., Tensor]:
        """Return the model's forward function: compiled unless the form is eager."""
        if form == "eager" or not self.compilable:
            return model
        return cast(Callable[..., Tensor], torch.compile(model))

    def base(self, model: nn.Module) -> torch.optim.SGD:
        """Return SGD with momentum and weight decay for the model."""
        return torch.optim.SGD(model.parameters(), **BASE_ARGS)

    def describe(self) -> dict[str, Any]:
        """Return the description of the workload in a record."""
        model = self.build_model()
        return {
            "model": self.name,
            "weights": parameter_count(model),
            "tensors": len(list(model.parameters())),
            "batch": len(self.batch[0]),
            "pixels": self.pixels,
            "precision": self.precision,
            "layout": "contiguous" if self.batch[0].is_contiguous() else "channels_last",
            "base": "SGD",
            "base_args": BASE_ARGS,
            "rho": RHO,
            "gamma": GAMMA,
        }


def default_batch_size(model: str, device: torch.device) -> int:
    """Return the default number of images per step."""
    if device.type != "cuda":
        return 32
    return 256 if model == "wrn-28-10" else 128


def image_workload(
    name: str, batch_size: int, device: torch.device, pixels: int | None = None
) -> Workload:
    """Return a model on random images, by default of CIFAR's size.

    On CUDA it uses bfloat16 autocast and channels_last, elsewhere float32.

    Args:
        name: ``mlp10m``, or a model of `wsam.lab`.
        batch_size: Images per step, at least 2 for BatchNorm.
        device: The device.
        pixels: Side length of an image. Small images make the passes cheap, so that the cost of the
            optimizer is easier to measure.

    Example:
        >>> image_workload("cnn", 4, torch.device("cpu")).describe()["weights"]
        24346
    """
    pixels = PIXELS if pixels is None else pixels
    task = Task((3, pixels, pixels), CIFAR.outputs)
    on_gpu = device.type == "cuda"
    layout = torch.channels_last if on_gpu else torch.contiguous_format

    def build_model() -> nn.Module:
        model = mlp10m(task) if name == "mlp10m" else models.build_model(name, task, 0)
        return model.to(device, memory_format=layout)  # type: ignore[call-overload, no-any-return]

    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch_size, *task.shape, generator=generator)
    labels = torch.randint(CIFAR.outputs, (batch_size,), generator=generator)
    batch = (images.to(device, memory_format=layout), labels.to(device))
    precision = "bf16" if on_gpu else "fp32"

    def make_loss(forward: Callable[..., Tensor], select: Select) -> Loss:
        def loss(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu, cache_enabled=False):
                logits = forward(x)
            return select(cross_entropy(logits.float(), y, reduction="none"))

        return loss

    return Workload(name, build_model, make_loss, batch, device, precision, pixels=pixels)


def mlp10m(task: Task) -> nn.Module:
    """Return a multilayer perceptron with ten million weights in eight tensors."""
    widths = (task.shape[0] * task.shape[1] * task.shape[2], 2048, 1536, 384)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in itertools.pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], task.outputs))


class _FixedGradients(torch.autograd.Function):
    """Zero losses whose gradients are copies of given tensors."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *_params: Tensor) -> Tensor:
        ctx.gradients = gradients
        return gradients[0].new_zeros(2)  # one loss for each of two samples

    @staticmethod
    def backward(ctx: Any, *_outputs: Tensor) -> Any:
        copies = [torch.empty_like(gradient) for gradient in ctx.gradients]
        torch._foreach_copy_(copies, ctx.gradients)
        return (None, *copies)


class SyntheticModel(nn.Module):
    """Parameters without a network: a pass copies the given gradients and computes nothing else.

    Args:
        gradients: The gradients of every pass, one per parameter.
    """

    def __init__(self, gradients: list[Tensor]) -> None:
        super().__init__()
        self.gradients = gradients
        self._listed = [nn.Parameter(torch.ones_like(gradient)) for gradient in gradients]
        for number, parameter in enumerate(self._listed):
            self.register_parameter(str(number), parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Return zero losses with the given gradients."""
        losses = _FixedGradients.apply(self.gradients, *self._listed)  # type: ignore[no-untyped-call]
        return cast(Tensor, losses)


def synthetic_workload(tensors: int, weights: int, device: torch.device) -> Workload:
    """Return a `SyntheticModel` with tensors of equal size and the given total number of weights."""
    size = max(1, weights // tensors)
    generator = torch.Generator(device=device).manual_seed(0)
    gradients = [
        1e-3 * torch.randn(size, generator=generator, device=device) for _ in range(tensors)
    ]

    def make_loss(forward: Callable[..., Tensor], select: Select) -> Loss:
        return lambda x: select(forward(x))

    def build_model() -> nn.Module:
        return SyntheticModel(gradients)

    name = f"{tensors} tensors of {size}"
    batch = (torch.zeros(2, device=device),)
    return Workload(name, build_model, make_loss, batch, device, "fp32", compilable=False)
