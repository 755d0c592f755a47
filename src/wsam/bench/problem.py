"""What is trained while steps are timed: a model, one batch, a loss and a base optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wsam.lab.models import Task, build, parameter_count

MODELS = ("resnet18", "wrn-28-10", "mlp10m", "cnn")
FORMS = ("eager", "compiled", "captured")
PIXELS = 32
CIFAR = Task((3, PIXELS, PIXELS), 10)
BASE: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}
RHO, GAMMA = 0.05, 0.9

Loss = Callable[..., Tensor]
Select = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Problem:
    """One thing to train.

    Args:
        name: What a table calls it.
        build: Makes the model on its device, with the same weights each time.
        loss: Makes of a forward function and a choice among losses the loss of a batch.
        batch: The one batch that every step is given.
        device: Where it trains.
        precision: ``fp32`` or ``bf16``.
        compiles: Whether compiling the model is worth it.
        pixels: The side of an image, for problems with images.
    """

    name: str
    build: Callable[[], nn.Module]
    loss: Callable[[Callable[..., Tensor], Select], Loss]
    batch: tuple[Tensor, ...]
    device: torch.device
    precision: str
    compiles: bool = True
    pixels: int | None = None

    def forward(self, model: nn.Module, form: str) -> Callable[..., Tensor]:
        """Return the model as a form runs it: compiled, unless the form is eager."""
        if form == "eager" or not self.compiles:
            return model
        return cast(Callable[..., Tensor], torch.compile(model))

    def base(self, model: nn.Module) -> torch.optim.SGD:
        """Return SGD with momentum and weight decay over the model's weights."""
        return torch.optim.SGD(model.parameters(), **BASE)

    def facts(self) -> dict[str, Any]:
        """Return what a record says of the problem."""
        model = self.build()
        return {
            "model": self.name,
            "weights": parameter_count(model),
            "tensors": len(list(model.parameters())),
            "batch": len(self.batch[0]),
            "pixels": self.pixels,
            "precision": self.precision,
            "layout": "contiguous" if self.batch[0].is_contiguous() else "channels_last",
            "base": "SGD",
            "base_args": BASE,
            "rho": RHO,
            "gamma": GAMMA,
        }


SMOKE_BATCH = 4


def default_batch(model: str, device: torch.device) -> int:
    """Return how many images a step takes by default."""
    if device.type != "cuda":
        return 32
    return 256 if model == "wrn-28-10" else 128


def image_problem(
    name: str, batch: int, device: torch.device, pixels: int | None = None
) -> Problem:
    """Return a model on random images, of CIFAR's size unless said otherwise.

    On CUDA in bfloat16 autocast and channels_last, elsewhere in float32.

    Args:
        name: One of `MODELS`.
        batch: Images per step.
        device: Where to train.
        pixels: The side of an image; small ones make the passes cheap, and the optimizer show.

    Raises:
        ValueError: No such model, or no images.

    Example:
        >>> image_problem("cnn", 4, torch.device("cpu")).facts()["weights"]
        24346
    """
    if name not in MODELS:
        raise ValueError(f"--model must be one of {', '.join(MODELS)}, not {name}")
    if batch < 2:
        raise ValueError(f"--batch-size must be at least 2 (BatchNorm needs two), not {batch}")
    pixels = PIXELS if pixels is None else pixels
    if pixels < 8:
        raise ValueError(f"--pixels must be at least 8, not {pixels}")
    task = Task((3, pixels, pixels), CIFAR.classes)
    on_gpu = device.type == "cuda"
    layout = torch.channels_last if on_gpu else torch.contiguous_format

    def made() -> nn.Module:
        model = mlp10m(task) if name == "mlp10m" else build(name, task, 0)
        return model.to(device, memory_format=layout)  # type: ignore[call-overload, no-any-return]

    draw = torch.Generator().manual_seed(0)
    images = torch.randn(batch, *task.shape, generator=draw)
    labels = torch.randint(CIFAR.classes, (batch,), generator=draw)
    data = (images.to(device, memory_format=layout), labels.to(device))
    precision = "bf16" if on_gpu else "fp32"

    def loss(forward: Callable[..., Tensor], select: Select) -> Loss:
        def of_batch(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu, cache_enabled=False):
                logits = forward(x)
            return select(cross_entropy(logits.float(), y, reduction="none"))

        return of_batch

    return Problem(name, made, loss, data, device, precision, pixels=pixels)


def mlp10m(task: Task) -> nn.Module:
    """Return a multilayer perceptron of ten million weights in eight tensors."""
    widths = (task.shape[0] * task.shape[1] * task.shape[2], 2048, 1536, 384)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in itertools.pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], task.classes))


class _Given(torch.autograd.Function):
    """Losses of zero whose gradients are copies of given tensors."""

    @staticmethod
    def forward(ctx: Any, sources: list[Tensor], *_params: Tensor) -> Tensor:
        ctx.sources = sources
        return sources[0].new_zeros(2)  # a loss for each of two samples

    @staticmethod
    def backward(ctx: Any, *_outputs: Tensor) -> Any:
        fresh = [torch.empty_like(source) for source in ctx.sources]
        torch._foreach_copy_(fresh, ctx.sources)
        return (None, *fresh)


class Bag(nn.Module):
    """Parameters without a network: a pass costs one copy of the weights, the rest is the optimizer.

    Args:
        sources: The gradients that every pass gives, one per parameter.
    """

    def __init__(self, sources: list[Tensor]) -> None:
        super().__init__()
        self.sources = sources
        self._listed = [nn.Parameter(torch.ones_like(source)) for source in sources]
        for number, parameter in enumerate(self._listed):
            self.register_parameter(str(number), parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Return zeros, whose gradients are the sources."""
        return cast(Tensor, _Given.apply(self.sources, *self._listed))  # type: ignore[no-untyped-call]


def bag_problem(tensors: int, weights: int, device: torch.device) -> Problem:
    """Return a bag of equal tensors with so many weights in all."""
    size = max(1, weights // tensors)
    draw = torch.Generator(device=device).manual_seed(0)
    sources = [1e-3 * torch.randn(size, generator=draw, device=device) for _ in range(tensors)]

    def loss(forward: Callable[..., Tensor], select: Select) -> Loss:
        return lambda x: select(forward(x))

    name = f"{tensors} tensors of {size}"
    batch = (torch.zeros(2, device=device),)
    return Problem(name, lambda: Bag(sources), loss, batch, device, "fp32", compiles=False)
