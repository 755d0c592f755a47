"""`wsam landscape`: the loss around a trained model, or between two."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wsam.cli import _measuring as shared
from wsam.cli import _options as options
from wsam.cli._app import WithArguments, app
from wsam.cli._files import as_folder, together

if TYPE_CHECKING:
    from wsam.lab.subject import Subject

_EXAMPLE = "Example: wsam landscape runs/KEY.json --dimensions 2 --radius 1 --out seen"


@app.command(cls=WithArguments, epilog=_EXAMPLE)
def landscape(
    context: typer.Context,
    checkpoint: shared.Checkpoint,
    to: Annotated[
        Path | None, typer.Option(help="Another checkpoint: the line from the first to it.")
    ] = None,
    along: Annotated[
        str, typer.Option(help="random (filter-normalised) or eigen (largest eigenvalues).")
    ] = "random",
    dimensions: Annotated[int, typer.Option(help="1 for a line, 2 for a surface.")] = 1,
    radius: Annotated[
        float, typer.Option(help="From minus to plus this; with --to, as far beyond both ends.")
    ] = 1.0,
    points: Annotated[
        int | None, typer.Option(help="Points per direction. [default: 41 for 1, 21 for 2]")
    ] = None,
    log: Annotated[
        bool | None, typer.Option("--log/--linear", help="Scale of the loss in the plots.")
    ] = None,
    data: shared.Data = None,
    model: shared.Model = None,
    split: shared.Split = "train",
    samples: shared.Samples = 2_000,
    batch_size: shared.BatchSize = None,
    mode: shared.Mode = "eval",
    precision: shared.Precision = "float32",
    seed: shared.Seed = 0,
    out: Annotated[
        Path,
        typer.Option(
            callback=as_folder, help="Folder for landscape.png, landscape.html and landscape.json."
        ),
    ] = Path("landscape"),
    data_dir: options.DataDir = None,
    download: options.Download = True,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Draw the loss around a trained model.

    Along directions through its weights, or from one model to another.
    """
    from wsam import curvature as measure

    if dimensions not in (1, 2):
        raise ValueError(f"--dimensions must be 1 or 2, not {dimensions}")
    allowed = 0 < radius < math.inf or (radius == 0 and to is not None)
    if not allowed or (points is not None and points < 2):
        raise ValueError("--radius must be above 0 and --points at least 2")
    shared.one_of("--along", along, "random", "eigen")
    if to is not None:
        _check_line(dimensions, shared.is_given(context, "along"))
    settings = shared.loss_options(mode, precision)
    shared.require_pictures()
    means = options.make_means(data_dir, download, device=device)
    begin = time.monotonic()
    with shared.progress(quiet=as_json) as follow:
        subject = shared.open_checkpoint(checkpoint, means, data, model, split, samples, batch_size)
        loss = shared.cross_entropy()
        lines, labels, origin = _directions(
            subject, (checkpoint, to), along, dimensions, seed, settings, follow
        )
        count = points or (41 if dimensions == 1 else 21)
        low, high = (-radius, 1 + radius) if to is not None else (-radius, radius)
        axis = [low + (high - low) * i / (count - 1) for i in range(count)]
        found = measure.landscape(
            subject.model, loss, subject.batches, lines, [axis] * len(lines),
            origin=origin, labels=labels, report=follow("landscape"), **settings,
        )  # fmt: skip
    files = [out / f"landscape.{kind}" for kind in ("png", "html", "json")]
    numbers = found.as_dict()
    axes = numbers.pop("labels")  # a name that the labels of the images have, here and elsewhere
    record = {**shared.about(subject, seed, begin), "axes": axes, **numbers}
    with together(out) as unfinished:
        for file in files[:-1]:
            found.save(unfinished / file.name, log=log)
        (unfinished / files[-1].name).write_text(json.dumps(record, allow_nan=False))
    if as_json:
        print(json.dumps({**record, "files": [str(f) for f in files]}, allow_nan=False))
        return
    print(subject.title)
    print(f"loss {found.info['loss']:.6g} on {found.info['samples']:,} {split} images")
    print(f"labels {subject.labels}")
    if found.note:
        print(found.note)
    print(*files, sep="\n")


def _check_line(dimensions: int, along: bool) -> None:
    """Refuse, before anything is loaded, what the line to another checkpoint leaves no choice of."""
    if dimensions != 1:
        raise ValueError("between two checkpoints lies a line: leave --dimensions at 1")
    if along:
        raise ValueError("--along changes nothing with --to: the line goes to that checkpoint")


def _directions(
    subject: Subject,
    ends: tuple[Path, Path | None],
    along: str,
    dimensions: int,
    seed: int,
    settings: Any,
    follow: Any,
) -> tuple[list[Any], list[str], Any]:
    """Return directions, their names, and where they start (None: at the model)."""
    from wsam import curvature as measure
    from wsam.lab.subject import read_checkpoint

    first, to = ends
    if to is not None:
        second, _ = read_checkpoint(to)
        origin, line = measure.between(_on_cpu(subject), second)
        return [line], [_line_label(first, to)], origin
    if along == "random":
        lines = [measure.random_direction(subject.model, seed=seed + i) for i in range(dimensions)]
        return lines, [f"filter-normalised direction {i + 1}" for i in range(dimensions)], None
    H = measure.hessian(subject.model, shared.cross_entropy(), subject.batches, **settings)
    found = measure.top_eigenvalues(H, dimensions, seed=seed, report=follow("eigenvalues"))
    values = [float(value) for value in found.values]
    labels = [f"eigenvector {i + 1} (eigenvalue {value:.4g})" for i, value in enumerate(values)]
    return [H.split(found.vectors[:, i]) for i in range(len(values))], labels, None


def _line_label(first: Path, second: Path) -> str:
    """Name a line by its ends; files of one name, as weights are, by their whole paths."""
    ends = (first, second) if first.name == second.name else (first.name, second.name)
    return f"the line from {ends[0]} (0) to {ends[1]} (1)"


def _on_cpu(subject: Subject) -> dict[str, Any]:
    return {name: tensor.cpu() for name, tensor in subject.model.state_dict().items()}
