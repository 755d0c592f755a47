"""What `wsam paper` and `wsam sweep` share: options, jobs, and the report of outcomes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wsam.cli._files import as_folder, check_writable, to_read

if TYPE_CHECKING:
    from wsam.lab.run import Run
    from wsam.paper import Profile, Table
    from wsam.sweep import Outcome

RESULTS, SMOKE_RESULTS = Path("results"), Path("smoke")

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="A name of `wsam paper list`, or FILE.toml for a grid of one's own."
    ),
]
Only = Annotated[
    str | None,
    typer.Option(help="Cells by a pattern: 'ResNet18/*/CIFAR-10', or one label: 'WSAM'."),
]
Seeds = Annotated[str | None, typer.Option(help="Such as 0,1,2. [default: the table's own]")]
Smoke = Annotated[
    bool,
    typer.Option("--smoke", help="The same on the embedded digits with a small CNN: a minute."),
]
Epochs = Annotated[
    int | None,
    typer.Option(help="Instead of the paper's 200 (ImageNet: 3); others change in proportion."),
]
Precision = Annotated[str | None, typer.Option(help="fp32 instead of bf16.")]
Pretrained = Annotated[
    str | None, typer.Option(help="Folder with DeiT's weights, instead of the hub's.")
]
Out = Annotated[
    Path | None,
    typer.Option("--out", callback=as_folder, help="Folder of the records. [default: results]"),
]
Results = Annotated[
    Path | None,
    typer.Option("--results", callback=to_read, help="Folder of the records. [default: results]"),
]


def _either_name(option: str) -> str:
    """Let the folder of the records be named as other verbs name it: they share it.

    A verb that fills it documents ``--out``, as all that write do; one that only reads it,
    ``--results``.
    """
    return "out" if option == "results" else option


EITHER_NAME: dict[str, Any] = {"token_normalize_func": _either_name}


def make_profile(
    smoke: bool,
    seeds: str | None,
    only: str | None,
    epochs: int | None,
    precision: str | None,
    pretrained: str | None,
) -> Profile:
    """Make a profile out of a verb's options."""
    from wsam.paper import Profile

    if epochs is not None and epochs < 1:
        raise ValueError(f"epochs must be at least 1, got {epochs}")
    return Profile(smoke, parse_seeds(seeds), only, epochs, precision, pretrained)


def parse_seeds(text: str | None) -> tuple[int, ...] | None:
    """Read ``0,1,2``.

    Raises:
        ValueError: Something else.
    """
    if text is None:
        return None
    try:
        seeds = tuple(int(word) for word in text.split(","))
    except ValueError:
        seeds = ()
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be different whole numbers such as 0,1,2, got {text!r}")
    return seeds


def folder(out: Path | None, smoke: bool) -> Path:
    """Return the folder of the records: smoke tests have one of their own."""
    return out or (SMOKE_RESULTS if smoke else RESULTS)


def tell_if_missing(read: Path) -> None:
    """Say that the folder of the records is not there: one that was named is refused before."""
    if not read.is_dir():
        print(f"there is no folder {read} here", file=sys.stderr)


def folder_to_fill(out: Path | None, smoke: bool) -> Path:
    """Return the folder of the records, after a look whether they can be written there.

    Raises:
        ValueError: They cannot.
    """
    chosen = folder(out, smoke)
    check_writable(chosen)
    return chosen


def prepare(smoke: bool, compile: bool | None) -> bool | None:
    """Make a smoke test's many tiny runs quick, and return whether models are to be compiled.

    Several threads spend longer waiting for each other at every layer of a model that small than
    one needs for the whole of it, and compiling it takes longer than training it.
    """
    if not smoke:
        return compile
    import torch

    torch.set_num_threads(1)
    return compile or False


def any_begun(runs: Iterable[Run], out: Path) -> bool:
    """Tell whether one of the runs has a record or a checkpoint to go on from."""
    from wsam.lab.train import is_begun

    return any(is_begun(run, out) for run in runs)


def follow(outcomes: Iterable[Outcome], total: int | None) -> list[Outcome]:
    """Print one line per outcome as they come, and return all of them."""
    done = []
    for outcome in outcomes:
        done.append(outcome)
        of = f"/{total}" if total is not None else ""
        print(f"[{len(done)}{of}] {line(outcome)}", file=sys.stderr, flush=True)
    return done


def line(outcome: Outcome) -> str:
    """Return an outcome as a line."""
    what = f" {outcome.error:.2f}%" if outcome.error is not None else ""
    why = f": {outcome.detail}" if outcome.detail else ""
    return f"{outcome.status}{what} {outcome.job.run.title} ({outcome.seconds:.1f} s){why}"


def summary(outcomes: Iterable[Outcome]) -> str:
    """Return how many outcomes there are of each kind."""
    from collections import Counter

    counts = Counter(str(outcome.status) for outcome in outcomes)
    return ", ".join(f"{count} {status}" for status, count in counts.items()) or "nothing to do"


def report(table: Table, out: Path, done: list[Outcome], as_json: bool) -> None:
    """Print what became of all jobs, and the table; exit with 1 if any did not finish."""
    from wsam.paper import gather, render
    from wsam.paper.comparison import RecordFolder

    lost = frozenset(outcome.job.run.key for outcome in done if not outcome.settled)
    entries = gather(table, RecordFolder(out, without=lost))
    if as_json:
        cells = render.cell_dicts(table, entries)
        print(json.dumps({"runs": [_plain(o) for o in done], "cells": cells}, allow_nan=False))
    else:
        print(f"{summary(done)}; records in {out}")
        render.print_table(table, entries)
    if not all(outcome.settled for outcome in done):
        raise typer.Exit(1)


def _plain(outcome: Outcome) -> dict[str, Any]:
    run = outcome.job.run
    return {
        "key": run.key,
        "title": run.title,
        "status": str(outcome.status),
        "test_error": outcome.error,
        "detail": outcome.detail,
        "seconds": outcome.seconds,
    }
