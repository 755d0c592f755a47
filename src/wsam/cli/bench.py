"""`wsam bench`: what a step costs on this machine, beside the floor and beside others."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wsam.cli import _options as options
from wsam.cli._app import app
from wsam.cli._files import as_folder, together

if TYPE_CHECKING:
    from collections.abc import Callable

_EXAMPLE = (
    "Example: wsam bench --model resnet18 --batch-size 128 --peer davda54=sam.py --out results"
)

Model = Annotated[
    str | None,
    typer.Option(
        help="resnet18, wrn-28-10, mlp10m or cnn. [default: resnet18 on CUDA, mlp10m elsewhere]"
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(help="Images per step. [default: 128 on CUDA, 256 for wrn-28-10; 32 elsewhere]"),
]
Pixels = Annotated[
    int | None,
    typer.Option(help="Side of an image; small ones let the optimizer show. [default: 32]"),
]
Peer = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=PATH",
        help="A file with a class SAM or WeightedSAM to compare with; its code is run.",
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Measure only cases whose name begins so, and their floor. Repeatable.",
    ),
]
Scaling = Annotated[
    str | None,
    typer.Option(help="Measure the optimizer alone against the number of tensors or weights."),
]
Rounds = Annotated[
    int | None, typer.Option(help="Visits to each case. [default: 15 on CUDA, 11 elsewhere]")
]
ClockName = Annotated[
    str,
    typer.Option(help="wall, or cpu: seconds of computing, for one thread on a busy machine."),
]


@app.command(epilog=_EXAMPLE)
def bench(
    model: Model = None,
    batch_size: BatchSize = None,
    pixels: Pixels = None,
    device: options.Device = "auto",
    peer: Peer = None,
    only: Only = None,
    scaling: Scaling = None,
    rounds: Rounds = None,
    clock: ClockName = "wall",
    smoke: Annotated[
        bool,
        typer.Option("--smoke", help="Seconds: a tiny model and one thread, to see that all runs."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            callback=as_folder, help="Folder for the record (JSON) and its picture (PNG)."
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Time a step of every member on this machine.

    Beside it stand two bare passes, the plain base and other libraries.
    """
    from wsam.bench import report
    from wsam.bench.run import Settings, measure
    from wsam.bench.scaling import measure_scaling
    from wsam.bench.timing import one_thread
    from wsam.lab.means import Means

    settings = Settings(
        device=Means(device=device).place(),
        model=model,
        batch=batch_size,
        pixels=pixels,
        peers=tuple(peer or ()),
        only=tuple(only or ()),
        rounds=rounds,
        clock=clock,
        smoke=smoke,
    )
    follow = _follow(quiet=as_json)
    with one_thread() if smoke else nullcontext():
        if scaling is None:
            record = measure(settings, follow)
        else:
            record = measure_scaling(scaling, settings, follow)
    follow("")
    files: list[Path] = []
    if out:
        with together(out) as unfinished:
            files = [out / path.name for path in report.save(record, unfinished)]
    if as_json:
        print(json.dumps({**record, "files": [str(f) for f in files]}, allow_nan=False))
        return
    print(report.table(record))
    for file in files:
        print(f"wrote {file}")


def _follow(quiet: bool) -> Callable[[str], None]:
    """Return what shows where the measurement stands: one line of a terminal, else nothing."""
    if quiet or not sys.stderr.isatty():
        from wsam.lab.files import quiet as say_nothing

        return say_nothing
    return lambda line: print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
