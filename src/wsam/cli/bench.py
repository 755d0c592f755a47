"""`wsam bench`: time a training step on this machine, compared with other libraries."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from wsam.cli import _options as options
from wsam.cli._app import app
from wsam.cli._files import check_output_folder, staged

if TYPE_CHECKING:
    from collections.abc import Callable

_EXAMPLE = (
    "Example: wsam bench --model resnet18 --batch-size 128 --peer davda54=sam.py --out results"
)

Model = Annotated[
    Literal["resnet18", "wrn-28-10", "mlp10m", "cnn"] | None,
    typer.Option(help="Model to train. [default: resnet18 on CUDA, mlp10m elsewhere]"),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        min=2, help="Images per step. [default: 128 on CUDA, 256 for wrn-28-10; 32 elsewhere]"
    ),
]
Pixels = Annotated[
    int | None,
    typer.Option(
        min=8, help="Image size; small images make the optimizer's share larger. [default: 32]"
    ),
]
Peer = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=PATH",
        help="File with a class SAM or WeightedSAM to compare with. Its code is executed.",
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Measure cases whose name starts with NAME, and their baseline. Repeatable.",
    ),
]
AllMethods = Annotated[
    bool,
    typer.Option(
        "--all-methods",
        help="Every method and other libraries, eager and (on CUDA) in CUDA graphs; no compilation.",
    ),
]
Scaling = Annotated[
    Literal["tensors", "weights"] | None,
    typer.Option(help="Time the optimizer alone over the number of tensors or weights."),
]
Rounds = Annotated[
    int | None,
    typer.Option(min=1, help="Measurements of each case. [default: 15 on CUDA, 11 elsewhere]"),
]
ClockName = Annotated[
    Literal["wall", "cpu"],
    typer.Option(help="cpu counts CPU seconds of one thread, for a busy machine."),
]


@app.command(epilog=_EXAMPLE)
def bench(
    model: Model = None,
    batch_size: BatchSize = None,
    pixels: Pixels = None,
    device: options.Device = "auto",
    peer: Peer = None,
    only: Only = None,
    all_methods: AllMethods = False,
    scaling: Scaling = None,
    rounds: Rounds = None,
    clock: ClockName = "wall",
    smoke: Annotated[
        bool,
        typer.Option(
            "--smoke", help="A few seconds: a tiny model on one thread, to test that all cases run."
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            callback=check_output_folder, help="Folder for the record (JSON) and a plot (PNG)."
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Time a step of every method on this machine.

    Each is compared with two plain forward and backward passes, the base optimizer, and other
    libraries.
    """
    from wsam.bench import report
    from wsam.bench.run import Settings, measure
    from wsam.bench.scaling import measure_scaling
    from wsam.bench.timing import one_thread
    from wsam.lab.execution import ExecutionConfig

    settings = Settings(
        device=ExecutionConfig(device=device).resolve_device(),
        model=model,
        batch=batch_size,
        pixels=pixels,
        peers=tuple(peer or ()),
        only=tuple(only or ()),
        rounds=rounds,
        clock=clock,
        smoke=smoke,
        all_methods=all_methods,
    )
    progress = _progress(quiet=as_json)
    with one_thread() if smoke else nullcontext():
        if scaling is None:
            record = measure(settings, progress)
        else:
            record = measure_scaling(scaling, settings, progress)
    progress("")
    files: list[Path] = []
    if out:
        with staged(out) as staging:
            files = [out / path.name for path in report.save(record, staging)]
    if as_json:
        print(json.dumps({**record, "files": [str(f) for f in files]}, allow_nan=False))
        return
    print(report.table(record))
    for file in files:
        print(f"wrote {file}")


def _progress(quiet: bool) -> Callable[[str], None]:
    """Return a progress callback: one line that is overwritten on a terminal, else a no-op."""
    if quiet or not sys.stderr.isatty():
        return lambda _line: None
    return lambda line: print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
