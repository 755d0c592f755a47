"""The settings of a run as options. They are part of its key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from wsam.cli import _options as options

if TYPE_CHECKING:
    from wsam.lab.execution import ExecutionConfig

Data = Annotated[
    str,
    typer.Option(
        help="digits, cifar10, cifar100, fashion, imagenet; your own files: folder:PATH, table:PATH, "
        "text:PATH, hf:PATH; or your own function: path.py:function or package.module:function."
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="cnn, mlp, resnet18, wrn-28-10, deit-base, gpt, vit, timm:NAME, or your own function: "
        "path.py:function or package.module:function. [default: cnn for images, gpt for texts, "
        "else mlp]"
    ),
]
ModelArg = Annotated[
    list[str] | None,
    typer.Option(
        metavar=options.PAIR,
        help="An argument of mlp, gpt or vit, such as layers=6 or dropout=0.2. Repeatable.",
    ),
]
Method = Annotated[
    str,
    typer.Option(
        help=f"vanilla, {', '.join(options.METHODS)}, or your own subclass of wsam.SharpnessAware: "
        "path.py:Class or package.module:Class."
    ),
]
Rho = Annotated[float | None, typer.Option(help="Radius of the perturbation.")]
Gamma = Annotated[
    float | None,
    typer.Option(help="Weight of the sharpness term (WSAM); fraction of samples kept (ESAM)."),
]
Alpha = Annotated[float | None, typer.Option(help="Weight of the orthogonal component (GSAM).")]
Beta = Annotated[float | None, typer.Option(help="Fraction of tensors perturbed (ESAM).")]
Eta = Annotated[float | None, typer.Option(help="Stabilizing constant (ASAM, Fisher SAM).")]
Hyper = Annotated[
    list[str] | None,
    typer.Option(metavar=options.PAIR, help="Another hyperparameter of the method. Repeatable."),
]
Geometry = Annotated[
    str | None,
    typer.Option(
        help="Neighborhood other than a ball: adaptive, fisher, masked, norm-layers, per-layer or "
        "preconditioned."
    ),
]
GeometryArg = Annotated[
    list[str] | None,
    typer.Option(metavar=options.PAIR, help="An argument of the geometry. Repeatable."),
]
Lean = Annotated[
    bool,
    typer.Option(
        "--lean", help="Save one buffer: the base optimizer steps between the two passes."
    ),
]
Precondition = Annotated[
    bool | None,
    typer.Option(
        "--precondition/--no-precondition",
        help="Divide WSAM's sharpness term by the denominator of an adaptive base optimizer; gamma is "
        "then 0.5 by default. --no-precondition: the published form. [default: as the base allows]",
    ),
]
MaxNorm = Annotated[float | None, typer.Option(help="Clip gradients to this norm.")]
Every = Annotated[int, typer.Option(help="Make two passes on every N-th step only.")]
Reuse = Annotated[
    bool,
    typer.Option(
        "--reuse", help="With --every: apply WSAM's last sharpness gradient on the steps between."
    ),
]
Option = Annotated[
    list[str] | None,
    typer.Option(
        metavar=options.PAIR,
        help="Another option of the method: start, threshold, ascent_share, gather, rho_warmup, "
        "gamma_warmup, rho_follows_lr, reuse_scaled, reuse_average or reuse_weight. Repeatable.",
    ),
]
Base = Annotated[
    str,
    typer.Option(
        help="Base optimizer: sgd, adam, adamw, nadam, radam, adamax, rmsprop, adagrad, adadelta."
    ),
]
LearningRate = Annotated[float | None, typer.Option("--lr", help="Peak learning rate.")]
Momentum = Annotated[float | None, typer.Option(help="Momentum of the base optimizer.")]
WeightDecay = Annotated[float | None, typer.Option(help="Weight decay of the base optimizer.")]
Nesterov = Annotated[
    bool | None, typer.Option("--nesterov/--no-nesterov", help="Nesterov momentum.")
]
BaseArg = Annotated[
    list[str] | None,
    typer.Option(metavar=options.PAIR, help="Another argument of the base optimizer. Repeatable."),
]
Epochs = Annotated[int, typer.Option(help="Passes over the training data.")]
BatchSize = Annotated[int, typer.Option(help="Samples per step.")]
Seed = Annotated[int, typer.Option(help="Seed of initial weights, data order and augmentation.")]
Noise = Annotated[
    float, typer.Option(help="Fraction of training labels replaced by uniformly random ones.")
]
NoiseSeed = Annotated[int, typer.Option(help="Seed of the label noise.")]
Schedule = Annotated[
    Literal["cosine", "constant", "warmup-cosine"],
    typer.Option(
        help="Learning rate schedule; cosine decays to zero, every step, and warmup-cosine rises over "
        "the first 5% of the steps before."
    ),
]
DecayStart = Annotated[
    float | None,
    typer.Option(
        help="Keep the learning rate constant for this share of the steps before the cosine."
    ),
]
Precision = Annotated[
    Literal["bf16", "fp32"] | None,
    typer.Option(help="Training precision. [default: bf16 on CUDA, fp32 elsewhere]"),
]
Augment = Annotated[
    bool, typer.Option("--augment/--no-augment", help="Random crops and horizontal flips.")
]
Pretrained = Annotated[
    str | None,
    typer.Option(
        help="Initial weights (deit-base, timm:): a folder or a name on the hub; (gpt, vit): run:KEY, "
        "the kept weights of a run in the output folder."
    ),
]
TrainLimit = Annotated[int | None, typer.Option(help="Train on this many samples only.")]
TestLimit = Annotated[int | None, typer.Option(help="Test on this many samples only.")]
Validation = Annotated[
    float | None,
    typer.Option(
        metavar="SIZE",
        help="Hold out a part of the training data: a fraction or a number of samples. "
        "The test set is then evaluated once, at the end.",
    ),
]
ImageSize = Annotated[
    int | None,
    typer.Option(
        help="Rows and columns that image files are resized to. "
        "[default: the images' own; 224 for imagenet]"
    ),
]
Target = Annotated[
    str | None, typer.Option(help="Column to predict (table:, hf:). [default for hf: label]")
]
TaskName = Annotated[
    Literal["classification", "regression"] | None,
    typer.Option("--task", help="Kind of target (table:, hf:). [default: by its values]"),
]
BlockSize = Annotated[int | None, typer.Option(help="Characters per sample (text:). [default: 64]")]
MetricName = Annotated[
    str | None,
    typer.Option(
        "--metric",
        help="error, accuracy, loss, mse, macro-f1, or your own: path.py:NAME of a function of "
        "outputs and targets (lower is better) or of a wsam.lab.Metric. "
        "[default: as fits the data]",
    ),
]
ValidationSeed = Annotated[int | None, typer.Option(help="Seed of the validation split.")]

_PROBLEM = (
    *("data", "base", "epochs", "batch_size", "noise", "schedule", "decay_start", "augment"),
    *("pretrained", "train_limit", "test_limit", "metric", "image_size", "target", "task"),
    "block_size",
)
"""Options that are settings of `wsam.lab.run.Run` as they are given."""


def problem(given: Mapping[str, Any], config: ExecutionConfig) -> dict[str, Any]:
    """Return the settings of a run for which `wsam train` and `wsam compare` have the same options.

    Args:
        given: The values of all options, by name.
        config: The execution settings. The default precision depends on the device.
    """
    named = {name: given.get(name) for name in ("lr", "momentum", "weight_decay", "nesterov")}
    size = given["validation"]
    on_cuda = config.resolve_device().type == "cuda"
    return {
        **{name: given[name] for name in _PROBLEM},
        "model": given["model"] or "",
        "model_args": options.parse_pairs(given["model_arg"] or ()),
        "base_args": merge_pairs(named, "--base-arg", given["base_arg"] or ()),
        "precision": given["precision"] or ("bf16" if on_cuda else "fp32"),
        "validation": int(size) if size is not None and size > 1 and size.is_integer() else size,
    }


def merge_pairs(named: dict[str, Any], option: str, items: Iterable[str]) -> dict[str, Any]:
    """Merge the values of named options with the pairs of a general option.

    Args:
        named: Values of the named options; None means not given.
        option: The general option, such as ``--hyper``.
        items: Its ``name=value`` pairs.

    Raises:
        ValueError: A name is given by both.

    Example:
        >>> merge_pairs({"rho": 0.2, "gamma": None}, "--hyper", ["rho_min=0.01"])
        {'rho': 0.2, 'rho_min': 0.01}
    """
    values = {name: value for name, value in named.items() if value is not None}
    pairs = options.parse_pairs(items)
    for name in values.keys() & pairs.keys():
        flag = f"--{name.replace('_', '-')}"
        raise ValueError(f"{name} is given twice, by {flag} and by {option}: remove one")
    return values | pairs
