"""What the verbs that measure a trained model share: `wsam curvature` and `wsam landscape`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from wsam.curvature.progress import Progress, ProgressCallback
    from wsam.lab.loaded_model import LoadedModel

Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="Record, weights or work folder of a run, or a file with a state dict.",
    ),
]
Data = Annotated[
    str | None, typer.Option(help="Dataset to measure on. [default: the run's; else required]")
]
Model = Annotated[str | None, typer.Option(help="Model of a state dict: resnet18, cnn, ...")]
Split = Annotated[
    Literal["train", "test"], typer.Option(help="Samples to measure on, without augmentation.")
]
Samples = Annotated[int, typer.Option(min=1, help="Measure on the first N samples.")]
BatchSize = Annotated[
    int | None,
    typer.Option(min=1, help="Samples per batch. [default: 1000 on CUDA, 250 elsewhere]"),
]
Mode = Annotated[
    Literal["eval", "train"],
    typer.Option(help="BatchNorm uses running (eval) or batch (train) statistics."),
]
Precision = Annotated[
    Literal["float32", "float64", "tf32"],
    typer.Option(help="tf32 is float32 with faster, less exact matrix products."),
]
Seed = Annotated[int, typer.Option(help="Seed of the random vectors.")]


def describe(loaded: LoadedModel, seed: int, start: float) -> dict[str, Any]:
    """Return the first entries of a measurement's JSON: model, data, time and environment."""
    from wsam.lab import environment

    device = next(loaded.model.parameters()).device
    return {
        "title": loaded.title,
        "split": loaded.split,
        "labels": loaded.labels,
        "seed": seed,
        "seconds": time.monotonic() - start,
        **environment.describe_environment(device),
    }


def loss_options(mode: str, precision: str) -> Any:
    """Return mode and dtype of the loss; allows or forbids TF32 for the whole process."""
    import torch

    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    return {"mode": mode, "dtype": torch.float64 if precision == "float64" else torch.float32}


@contextmanager
def progress(quiet: bool) -> Iterator[Any]:
    """Yield a function that returns a progress callback for a stage.

    The callback draws a bar on a terminal. It is None if `quiet`, or without a terminal.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda _stage: None
        return
    from rich import progress as bars
    from rich.console import Console

    bar = bars.Progress(
        bars.TextColumn("{task.description}"),
        bars.BarColumn(None),
        bars.MofNCompleteColumn(),
        bars.TextColumn("{task.fields[error]}"),
        bars.TimeElapsedColumn(),
        console=Console(stderr=True),
    )

    def follow(stage: str) -> ProgressCallback:
        task = bar.add_task(stage, total=None, error="")

        def report(at: Progress) -> None:
            error = "" if at.error != at.error else f"error {at.error:.1e}"
            bar.update(task, completed=at.products, total=at.limit, error=error)

        return report

    with bar:
        yield follow
