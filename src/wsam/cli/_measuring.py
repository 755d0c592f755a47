"""What the verbs that measure a trained model share: `wsam curvature` and `wsam landscape`."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from wsam.curvature.progress import Progress, Report
    from wsam.lab.subject import Subject

Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A run's record, weights or work folder, or a file of a state dict.",
    ),
]
Data = Annotated[
    str | None, typer.Option(help="Data to measure on. [default: the run's; else needed]")
]
Model = Annotated[str | None, typer.Option(help="Of a plain state dict: resnet18, cnn, ...")]
Split = Annotated[str, typer.Option(help="train or test images, without augmentation.")]
Samples = Annotated[
    int, typer.Option(min=1, metavar="<int>", help="Measure on the first so many images.")
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="<int>", help="Images at a time. [default: 1000 on CUDA, 250 elsewhere]"
    ),
]
Mode = Annotated[
    str, typer.Option(help="eval (running statistics of BatchNorm) or train (the batch's own).")
]
Precision = Annotated[
    str, typer.Option(help="float32, float64, or tf32: float32 with faster, rounder products.")
]
Seed = Annotated[int, typer.Option(help="Of the random vectors.")]


def one_of(option: str, value: str, *allowed: str) -> None:
    """Refuse, before anything is loaded, a word that an option does not know."""
    if value not in allowed:
        known = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
        raise ValueError(f"{option} must be {known}, not {value}")


def is_given(context: typer.Context, name: str) -> bool:
    """Tell whether the user wrote an option, be it with the value it has without."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def above_zero(option: str, value: float | None) -> None:
    """Refuse what is given and no positive number."""
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{option} must be above 0, not {value}")


def open_checkpoint(
    checkpoint: Path,
    means: Any,
    data: str | None,
    model: str | None,
    split: str,
    samples: int | None,
    batch_size: int | None,
) -> Subject:
    """Open a checkpoint as a verb's options describe it."""
    from wsam.lab.subject import SPLITS, open_subject

    one_of("--split", split, *SPLITS)
    return open_subject(
        checkpoint, means, data=data, model=model, split=split,
        samples=samples, batch_size=batch_size,
    )  # fmt: skip


def about(subject: Subject, seed: int, begin: float) -> dict[str, Any]:
    """Return what a measurement is of and what it was made with: the head of its JSON."""
    from wsam.lab import environment

    device = next(subject.model.parameters()).device
    return {
        "title": subject.title,
        "split": subject.split,
        "labels": subject.labels,
        "seed": seed,
        "seconds": time.monotonic() - begin,
        **environment.facts(device),
    }


def require_pictures() -> None:
    """Refuse before anything is measured where pictures cannot be drawn."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ValueError("pictures need matplotlib: pip install 'wsam[plots]'")


def loss_options(mode: str, precision: str) -> Any:
    """Return the options of an objective; sets what the GPU may round, for the whole process."""
    import torch

    one_of("--mode", mode, "eval", "train")
    one_of("--precision", precision, "float32", "float64", "tf32")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    return {"mode": mode, "dtype": torch.float64 if precision == "float64" else torch.float32}


def cross_entropy() -> Any:
    """Return the loss the lab trains with."""
    from torch.nn.functional import cross_entropy as loss

    return loss


@contextmanager
def progress(quiet: bool) -> Iterator[Any]:
    """Yield a function that makes a `report` for a stage; a bar on a terminal, else nothing."""
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

    def follow(stage: str) -> Report:
        task = bar.add_task(stage, total=None, error="")

        def report(at: Progress) -> None:
            error = "" if at.error != at.error else f"error {at.error:.1e}"
            bar.update(task, completed=at.products, total=at.limit, error=error)

        return report

    with bar:
        yield follow
