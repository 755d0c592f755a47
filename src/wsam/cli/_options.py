"""Options that several verbs share, and the little parsing they need."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wsam.cli._files import as_folder

if TYPE_CHECKING:
    from wsam.lab.fetch import Progress
    from wsam.lab.means import Means
    from wsam.lab.watch import Watcher

PAIR = "NAME=VALUE"

# What is trained: the settings of a run.
Data = Annotated[
    str, typer.Option(help="digits, cifar10, cifar100, fashion, imagenet or folder:NAME.")
]
Model = Annotated[str, typer.Option(help="cnn, mlp, resnet18, wrn-28-10, deit-base or timm:NAME.")]
Method = Annotated[
    str, typer.Option(help="vanilla, sam, wsam, coupled_wsam, gsam, esam, asam or fisher_sam.")
]
Rho = Annotated[float | None, typer.Option(help="Radius of the perturbation.")]
Gamma = Annotated[
    float | None, typer.Option(help="Weight of sharpness (WSAM); share of samples kept (ESAM).")
]
Alpha = Annotated[float | None, typer.Option(help="Weight of the orthogonal part (GSAM).")]
Beta = Annotated[float | None, typer.Option(help="Share of tensors perturbed (ESAM).")]
Eta = Annotated[float | None, typer.Option(help="Of the geometry of ASAM or Fisher SAM.")]
Hyper = Annotated[
    list[str] | None,
    typer.Option(metavar=PAIR, help="Any hyperparameter of the method, as name=value."),
]
Geometry = Annotated[
    str | None, typer.Option(help="Another neighbourhood than a ball: adaptive, fisher or masked.")
]
GeometryArg = Annotated[
    list[str] | None,
    typer.Option(metavar=PAIR, help="An argument of the geometry, as name=value."),
]
Lean = Annotated[
    bool, typer.Option("--lean", help="Save one buffer: the base steps between the passes.")
]
MaxNorm = Annotated[float | None, typer.Option(help="Clip gradients to this norm.")]
Base = Annotated[
    str,
    typer.Option(
        help="Base optimizer: sgd, adam, adamw, nadam, radam, adamax, rmsprop, adagrad, adadelta."
    ),
]
LearningRate = Annotated[
    float | None, typer.Option("--lr", help="The base's highest learning rate.")
]
Momentum = Annotated[float | None, typer.Option(help="The base's momentum.")]
WeightDecay = Annotated[float | None, typer.Option(help="The base's weight decay.")]
Nesterov = Annotated[
    bool | None, typer.Option("--nesterov/--no-nesterov", help="Nesterov's form of momentum.")
]
BaseArg = Annotated[
    list[str] | None,
    typer.Option(metavar=PAIR, help="Any argument of the base, as name=value."),
]
Epochs = Annotated[int, typer.Option(help="Passes over the training data.")]
BatchSize = Annotated[int, typer.Option(help="Images per step.")]
Seed = Annotated[
    int, typer.Option(help="Of the weights, the order of images and their augmentation.")
]
Noise = Annotated[
    float, typer.Option(help="Fraction of training labels drawn anew, uniformly over all classes.")
]
NoiseSeed = Annotated[int, typer.Option(help="Of that drawing.")]
Schedule = Annotated[
    str, typer.Option(help="Of the learning rate: cosine (step by step, to zero) or constant.")
]
Precision = Annotated[
    str | None, typer.Option(help="bf16 or fp32. [default: bf16 on CUDA, fp32 elsewhere]")
]
Augment = Annotated[
    bool, typer.Option("--augment/--no-augment", help="Random crops and mirror images.")
]
Pretrained = Annotated[
    str | None,
    typer.Option(help="Weights to start from (deit-base, timm:): a folder or a hub name."),
]
TrainLimit = Annotated[int | None, typer.Option(help="Train on this many images only.")]
TestLimit = Annotated[int | None, typer.Option(help="Test on this many images only.")]

# How it is carried out: no part of a run's key.
Out = Annotated[Path, typer.Option("--out", callback=as_folder, help="Folder of the records.")]
DataDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the data; what is missing is downloaded into it. "
        "[default: WSAM_DATA or ~/.cache/wsam]"
    ),
]
Download = Annotated[
    bool, typer.Option("--download/--no-download", help="Download data that is missing.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Compile = Annotated[
    bool | None,
    typer.Option("--compile/--no-compile", help="Compile the model. [default: on CUDA]"),
]
Capture = Annotated[
    bool | None,
    typer.Option(
        "--capture/--no-capture", help="Replay the whole step from a CUDA graph. [default: on CUDA]"
    ),
]
KeepCheckpoint = Annotated[
    bool, typer.Option("--keep-checkpoint", help="Keep the final weights beside the record.")
]
CheckpointSeconds = Annotated[float, typer.Option(help="Least time between two checkpoints.")]
TensorBoard = Annotated[
    bool | None,
    typer.Option(
        "--tensorboard/--no-tensorboard",
        help="Write TensorBoard events. [default: where it is installed]",
    ),
]
Retry = Annotated[bool, typer.Option("--retry", help="Run again what failed before.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print machine-readable output alone on stdout.")
]


def pairs(given: Iterable[str]) -> dict[str, Any]:
    """Read ``name=value`` options; a value is JSON, or else the word it is.

    Raises:
        ValueError: No ``=`` in one of them, or a name twice.

    Example:
        >>> pairs(["momentum=0.9", "betas=[0.9, 0.99]", "nesterov=true"])
        {'momentum': 0.9, 'betas': [0.9, 0.99], 'nesterov': True}
    """
    values: dict[str, Any] = {}
    for item in given:
        name, equals, text = item.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"expected name=value, got {item!r}")
        if (name := name.strip()) in values:
            raise ValueError(f"{name!r} is given twice, the second time by {item!r}")
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text.strip()
    return values


def merged(named: dict[str, Any], option: str, items: Iterable[str]) -> dict[str, Any]:
    """Join what options of their own say with the pairs of a general one.

    Args:
        named: What the options of their own say, by name.
        option: The general one, such as ``--hyper``.
        items: Its pairs, as `pairs` reads them.

    Raises:
        ValueError: Both say the same name: it would be a guess which is meant.

    Example:
        >>> merged({"rho": 0.2}, "--hyper", ["rho_min=0.01"])
        {'rho': 0.2, 'rho_min': 0.01}
    """
    others = pairs(items)
    for name in named.keys() & others.keys():
        own = f"--{name.replace('_', '-')}"
        raise ValueError(f"{name} is given twice, by {own} and by {option}: leave one out")
    return named | others


def given(**values: Any) -> dict[str, Any]:
    """Return the values that were given: those that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def make_means(data_dir: Path | None, download: bool, **how: Any) -> Means:
    """Make the means of a run out of a verb's options."""
    from wsam.lab.data import Source, default_folder
    from wsam.lab.means import Means

    source = Source(data_dir or default_folder(), download, download_bar, _say)
    return Means(source=source, **how)


def _say(message: str) -> None:
    print(message, file=sys.stderr)


def make_watchers(quiet: bool) -> list[Watcher]:
    """Return a progress bar on a terminal, lines elsewhere, nothing when quiet."""
    from wsam.lab.watch import Bar, Lines

    if quiet:
        return []
    return [Bar() if sys.stderr.isatty() else Lines()]


def download_bar(name: str) -> Progress:
    """Return what shows the progress of a download, ten times per file where there is no terminal."""
    shown = -1

    def progress(have: int, total: int) -> None:
        nonlocal shown
        percent = 100 * have // total
        step = percent if sys.stderr.isatty() else percent // 10
        if step == shown:
            return
        shown = step
        end = "\r" if sys.stderr.isatty() and have < total else "\n"
        text = f"{name}: {have / 1e6:.0f} of {total / 1e6:.0f} MB"
        print(text, end=end, file=sys.stderr, flush=True)

    return progress
