"""`wsam landscape`: the loss around a trained model, or between two."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from wsam.cli import _checkpoints as shared
from wsam.cli import _options as options
from wsam.cli._app import app
from wsam.cli._files import check_output_folder, staged

if TYPE_CHECKING:
    from wsam.lab.loaded_model import LoadedModel
    from wsam.lab.run import Run

_EXAMPLE = "Example: wsam landscape runs/KEY.json --dimensions 2 --radius 1 --out figures"


@app.command(epilog=_EXAMPLE)
def landscape(
    checkpoint: shared.Checkpoint,
    to: Annotated[
        Path | None,
        typer.Option(help="Another checkpoint; measures the line from the first to it."),
    ] = None,
    along: Annotated[
        Literal["random", "eigen"] | None,
        typer.Option(
            help="Filter-normalized random directions, or top eigenvectors. [default: random]"
        ),
    ] = None,
    dimensions: Annotated[
        int, typer.Option(min=1, max=2, help="1 for a line, 2 for a surface.")
    ] = 1,
    radius: Annotated[
        float,
        typer.Option(help="Distance to each side; with --to, beyond both checkpoints."),
    ] = 1.0,
    points: Annotated[
        int | None,
        typer.Option(min=2, help="Points per direction. [default: 41 for 1, 21 for 2]"),
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
            callback=check_output_folder,
            help="Folder for landscape.png, landscape.html and landscape.json.",
        ),
    ] = Path("landscape"),
    data_dir: options.DataDir = None,
    download: options.Download = True,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Plot the loss around a trained model.

    Along directions through its weights, or from one model to another.
    """
    import matplotlib  # noqa: F401 (if it is missing, the error comes before the measurement)

    from wsam import curvature as measure
    from wsam.lab.loaded_model import load_model

    if to is not None and (along is not None or dimensions != 1):
        raise ValueError(
            "--to measures the line between two checkpoints: remove --along and --dimensions"
        )
    if radius < 0 or (radius == 0 and to is None):
        raise ValueError(f"--radius must be above 0, got {radius:g}")
    settings = shared.loss_options(mode, precision)
    config = options.make_config(data_dir, download, device=device)
    start = time.monotonic()
    with shared.progress(quiet=as_json) as follow:
        loaded = load_model(
            checkpoint, config, data=data, model=model, split=split,
            samples=samples, batch_size=batch_size,
        )  # fmt: skip
        lines, labels, origin = _directions(
            loaded, checkpoint, to, along, dimensions, seed, settings, follow
        )
        count = points or (41 if dimensions == 1 else 21)
        low, high = (-radius, 1 + radius) if to is not None else (-radius, radius)
        axis = [low + (high - low) * (i / (count - 1)) for i in range(count)]
        found = measure.landscape(
            loaded.model, loaded.batches.loss, loaded.batches, lines, [axis] * len(lines),
            origin=origin, labels=labels, report=follow("landscape"), **settings,
        )  # fmt: skip
    files = [out / f"landscape.{kind}" for kind in ("png", "html", "json")]
    numbers = found.as_dict()
    axes = numbers.pop("labels")  # "labels" describes those of the data
    record = {**shared.describe(loaded, seed, start), "axes": axes, **numbers}
    with staged(out) as staging:
        for file in files[:-1]:
            found.save(staging / file.name, log=log, ends=to is not None)
        (staging / files[-1].name).write_text(json.dumps(record, allow_nan=False))
    if as_json:
        print(json.dumps({**record, "files": [str(f) for f in files]}, allow_nan=False))
        return
    print(loaded.title)
    print(f"loss {found.info['loss']:.6g} on {found.info['samples']:,} {split} samples")
    print(f"labels {loaded.labels}")
    if found.note:
        print(found.note)
    print(*files, sep="\n")


def _directions(
    loaded: LoadedModel,
    first: Path,
    to: Path | None,
    along: str | None,
    dimensions: int,
    seed: int,
    settings: Any,
    follow: Any,
) -> tuple[list[Any], list[str], Any]:
    """Return directions, their labels, and their origin (None: the weights of the model)."""
    from wsam import curvature as measure
    from wsam.lab.loaded_model import read_checkpoint

    if to is not None:
        second, run = read_checkpoint(to)
        origin, line = measure.between(loaded.model.state_dict(), second)
        return [line], [_line_label((first, to), (read_checkpoint(first)[1], run))], origin
    if along != "eigen":
        lines = [measure.random_direction(loaded.model, seed=seed + i) for i in range(dimensions)]
        return lines, [f"filter-normalized direction {i + 1}" for i in range(dimensions)], None
    H = measure.hessian(loaded.model, loaded.batches.loss, loaded.batches, **settings)
    found = measure.top_eigenvalues(H, dimensions, seed=seed, report=follow("eigenvalues"))
    values = [float(value) for value in found.values]
    labels = [f"eigenvector {i + 1} (eigenvalue {value:.4g})" for i, value in enumerate(values)]
    return [H.split(found.vectors[:, i]) for i in range(len(values))], labels, None


def _line_label(paths: tuple[Path, Path], runs: tuple[Run | None, Run | None]) -> str:
    """Label a line by the titles of its runs or the names of its files; by paths if these are equal.

    The name of a record's file is a hash, which means nothing to a reader.
    """
    names = [path.name if run is None else run.title for path, run in zip(paths, runs, strict=True)]
    if names[0] == names[1]:
        names = [str(path) for path in paths]
    return f"the line from {names[0]} (0) to {names[1]} (1)"
