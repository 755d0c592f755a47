"""Named models: ResNet18 and WRN-28-10 for CIFAR, small ones for CPUs, DeiT, and timm's models.

Convolutions use He's normal initialization, linear layers torch's default with zero biases;
transformers and timm's models use their own. Weights are drawn on the CPU from the run's seed, so
they do not depend on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from wsam.lab.transformers import GPT, ViT

VALUES, TOKENS = "values", "tokens"


@dataclass(frozen=True)
class Task:
    """Inputs and outputs, from which a named model is built.

    Args:
        shape: Shape of one input; of an image, its channels, rows and columns.
        outputs: Number of outputs: the classes, or the numbers to predict.
        data: Name of the data, for error messages.
        kind: `VALUES` or `TOKENS`, whole numbers less than `outputs`.
        categories: For a table, the number of categories of each of the last entries of an input.
    """

    shape: tuple[int, ...]
    outputs: int
    data: str = "the data"
    kind: str = VALUES
    categories: tuple[int, ...] = ()


def build_model(
    name: str,
    task: Task,
    seed: int,
    pretrained: str | None = None,
    args: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Build a model; its weights depend on `seed` alone, and the global generator is unchanged.

    Args:
        name: One of `settings.MODELS`, or ``timm:NAME``.
        task: Shape of the inputs and number of outputs.
        seed: Seed of the weights.
        pretrained: Initial weights: a folder or hub name for ``deit-base``, any string to use
            timm's own for ``timm:``.
        args: Arguments of the model; see `settings.MODEL_ARGS`.

    Raises:
        ValueError: The model has no pretrained weights or does not fit the inputs, or timm cannot be
            imported.
        ModuleNotFoundError: transformers, which ``deit-base`` needs, is not installed.

    Example:
        >>> model = build_model("mlp", Task((1, 8, 8), 10), seed=0)
        >>> model(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _check_inputs(name, task)
        if name.startswith("timm:"):
            return timm_model(name.removeprefix("timm:"), task, pretrained is not None)
        if name == "deit-base":
            return DeiT(task, pretrained)
        if pretrained is not None:
            raise ValueError(f"{name} has no pretrained weights; use deit-base or a timm: model")
        return _BUILDERS[name](task, **(args or {}))


def _check_inputs(name: str, task: Task) -> None:
    """Raise ValueError if a model is for other inputs."""
    dimensions, has_tokens = len(task.shape), task.kind == TOKENS
    if name == "gpt":
        fits = has_tokens and dimensions == 1
    else:
        fits = not has_tokens and (name == "mlp" or dimensions == 3)
    if not fits:
        raise ValueError(
            f"{name} does not fit the inputs of {task.data}: gpt needs a text, mlp numbers, and the "
            "other named models images; or use a model of your own"
        )


def he_init(model: nn.Module) -> None:
    """Initialize convolutions by He's normal distribution (fan-out), linear layers as torch does.

    Biases of linear layers are zero.

    Reference:
        He et al., Delving deep into rectifiers, ICCV 2015.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5))
            nn.init.zeros_(module.bias)


def _conv(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: relu(shortcut(x) + bn(conv(relu(bn(conv(x))))))."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = _conv(outputs, outputs), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            projection = _conv(inputs, outputs, 1, stride)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        y = relu(self.bn1(self.conv1(x)))
        return relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet18 for CIFAR: a 3x3 stem, no max-pooling; 11.17 million parameters.

    Reference:
        He et al., Deep residual learning for image recognition, CVPR 2016.
    """

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.stem, self.bn = _conv(task.shape[0], 64), nn.BatchNorm2d(64)
        blocks, inputs = [], 64
        for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [BasicBlock(inputs, outputs, stride), BasicBlock(outputs, outputs, 1)]
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(512, task.outputs)
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = self.blocks(relu(self.bn(self.stem(x))))
        return cast(Tensor, self.head(x.mean((2, 3))))


class WideBlock(nn.Module):
    """Twice BatchNorm, ReLU, convolution; the projection shortcut takes the activated input."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), _conv(inputs, outputs, 3, stride)
        self.bn2, self.conv2 = nn.BatchNorm2d(outputs), _conv(outputs, outputs)
        self.projection = _conv(inputs, outputs, 1, stride) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        y = relu(self.bn1(x))
        shortcut = x if self.projection is None else self.projection(y)
        y = self.conv2(relu(self.bn2(self.conv1(y))))
        return cast(Tensor, y + shortcut)


class WideResNet(nn.Module):
    """WRN-28-10 by default: 36.5 million parameters.

    Reference:
        Zagoruyko and Komodakis, Wide residual networks, BMVC 2016.
    """

    def __init__(self, task: Task, depth: int = 28, widen: int = 10) -> None:
        super().__init__()
        self.stem = _conv(task.shape[0], 16)
        blocks, inputs = [], 16
        for outputs, stride in ((16 * widen, 1), (32 * widen, 2), (64 * widen, 2)):
            for number in range((depth - 4) // 6):
                blocks.append(WideBlock(inputs, outputs, stride if number == 0 else 1))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(inputs)
        self.head = nn.Linear(inputs, task.outputs)
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = relu(self.bn(self.blocks(self.stem(x))))
        return cast(Tensor, self.head(x.mean((2, 3))))


def small_cnn(task: Task) -> nn.Module:
    """Three convolutions with BatchNorm; trains in seconds on a CPU."""
    layers: list[nn.Module] = []
    inputs = task.shape[0]
    for outputs, stride in ((16, 1), (32, 2), (64, 2)):
        layers += [_conv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs), nn.ReLU()]
        inputs = outputs
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, task.outputs)]
    model = nn.Sequential(*layers)
    he_init(model)
    return model


def mlp(task: Task, width: int = 64) -> nn.Module:
    """A perceptron with two hidden layers; categories of a table are embedded."""
    inputs = math.prod(task.shape)
    first: nn.Module = nn.Flatten()
    if task.categories:
        first = EmbedCategories(task.categories)
        inputs += first.added
    layers = (nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    model = nn.Sequential(first, *layers, nn.Linear(width, task.outputs))
    he_init(model)
    return model


class EmbedCategories(nn.Module):
    """Replaces the last entries of each row, numbers of categories, by vectors.

    Args:
        categories: Number of categories of each of these entries.
    """

    def __init__(self, categories: tuple[int, ...]) -> None:
        super().__init__()
        widths = [min(16, (size + 1) // 2) for size in categories]
        pairs = zip(categories, widths, strict=True)
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size, width in pairs)
        self.added = sum(widths) - len(widths)

    def forward(self, x: Tensor) -> Tensor:
        """Return the numbers and the vectors."""
        numbers = x.shape[1] - len(self.tables)
        codes = x[:, numbers:].long()
        vectors = [table(codes[:, column]) for column, table in enumerate(self.tables)]
        return torch.cat((x[:, :numbers], *vectors), 1)


def load_all_but_head(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load the weights of another task; head and adapters keep their initial values.

    Raises:
        ValueError: A tensor of the state is not in the model, or has another shape.
    """
    own = model.state_dict()
    kept = {name: tensor for name, tensor in state.items() if not name.startswith("head.")}
    for name, tensor in kept.items():
        if name not in own or own[name].shape != tensor.shape:
            raise ValueError(f"the pretrained weights do not fit the model: {name!r} differs")
    model.load_state_dict(kept, strict=False)


class DeiT(nn.Module):
    """DeiT-base of transformers, for 224 x 224 images; returns the logits.

    Args:
        task: Shape of the images and number of classes.
        pretrained: A local folder or hub name; None for random weights.

    Raises:
        ValueError: The pretrained weights have another number of classes.

    Reference:
        Touvron et al., Training data-efficient image transformers, ICML 2021.
    """

    def __init__(self, task: Task, pretrained: str | None = None) -> None:
        super().__init__()
        from transformers import DeiTConfig, DeiTForImageClassification

        channels, rows, _ = task.shape
        if pretrained is None:
            config = DeiTConfig(image_size=rows, num_channels=channels, num_labels=task.outputs)
            self.deit = DeiTForImageClassification(config)
            return
        try:
            self.deit = DeiTForImageClassification.from_pretrained(
                pretrained, num_labels=task.outputs
            )
        except RuntimeError as error:  # its message refers to printed output
            raise ValueError(
                f"the weights in {pretrained} do not fit deit-base with the {task.outputs} classes "
                f"of {task.data}"
            ) from error

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return cast(Tensor, self.deit(x).logits)


def timm_model(name: str, task: Task, pretrained: bool) -> nn.Module:
    """Return a model of timm.

    Raises:
        ValueError: timm cannot be imported, or cannot create the model.
    """
    sizes = {"num_classes": task.outputs, "in_chans": task.shape[0]}
    try:
        import timm

        return cast(nn.Module, timm.create_model(name, pretrained=pretrained, **sizes))
    except (ImportError, RuntimeError) as error:  # a broken torchvision raises RuntimeError
        raise ValueError(f"timm cannot create {name!r}: {error}") from error


def parameter_count(model: nn.Module) -> int:
    """Return the number of parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())


_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "cnn": small_cnn,
    "mlp": mlp,
    "resnet18": ResNet18,
    "wrn-28-10": WideResNet,
    "gpt": lambda task, **args: GPT(task.shape[0], task.outputs, **args),
    "vit": lambda task, **args: ViT(task.shape, task.outputs, **args),
}
