"""What `wsam paper` and `wsam sweep` share: options, folders, and printed outcomes."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from wsam._format import printable
from wsam.cli._files import check_results_folder
from wsam.cli._options import parse_seeds

if TYPE_CHECKING:
    from wsam.lab.run import Run
    from wsam.paper import Profile, Table
    from wsam.sweep import Outcome

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="A name from `wsam paper list`, or a TOML file with your own grid."
    ),
]
Only = Annotated[
    str | None,
    typer.Option(help="Select cells by a pattern, 'ResNet18/*/CIFAR-10', or one label, 'WSAM'."),
]
Seeds = Annotated[str | None, typer.Option(help="Such as 0,1,2. [default: the table's]")]
Smoke = Annotated[
    bool, typer.Option("--smoke", help="Run a small CNN on digits instead: about a minute.")
]
Epochs = Annotated[
    int | None,
    typer.Option(
        min=1, help="Instead of the paper's 200 (ImageNet: 3); scales other lengths with it."
    ),
]
Precision = Annotated[Literal["bf16", "fp32"] | None, typer.Option(help="[default: bf16]")]
Pretrained = Annotated[
    str | None, typer.Option(help="Folder with the DeiT weights, instead of the hub's.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", callback=check_results_folder, help="Folder for the records. [default: results]"
    ),
]
Results = Annotated[
    Path | None,
    typer.Option(
        "--results", exists=True, file_okay=False, help="Folder of the records. [default: results]"
    ),
]


def _rename_results(option: str) -> str:
    return "out" if option == "results" else option


# --out and --results name the same folder, so each verb accepts both and documents one.
ALIASES: dict[str, Any] = {"token_normalize_func": _rename_results}


def make_profile(
    smoke: bool,
    seeds: str | None,
    only: str | None,
    epochs: int | None,
    precision: str | None,
    pretrained: str | None,
) -> Profile:
    """Return a profile, given a verb's options."""
    from wsam.paper import Profile

    return Profile(smoke, parse_seeds(seeds), only, epochs, precision, pretrained)


def default_folder(folder: Path | None, smoke: bool) -> Path:
    """Return the folder of the records; smoke tests use their own."""
    return folder or Path("smoke" if smoke else "results")


def output_folder(out: Path | None, smoke: bool) -> Path:
    """Return the folder for the records, checked even if it was not given."""
    folder = default_folder(out, smoke)
    check_results_folder(folder)
    return folder


def warn_if_missing(folder: Path) -> None:
    """Print a warning if the default folder of the records does not exist."""
    if not folder.is_dir():
        print(f"there is no folder {folder} here", file=sys.stderr)


def configure_smoke(smoke: bool, compile: bool | None) -> bool | None:
    """Configure torch for smoke runs, and return whether to compile models.

    On models that small, one thread is faster than several, and compiling takes longer than
    training.
    """
    if not smoke:
        return compile
    import torch

    torch.set_num_threads(1)
    return compile or False


def has_progress(runs: Iterable[Run], out: Path) -> bool:
    """Return whether any of the runs has a record or a checkpoint."""
    from wsam.lab.train import has_started

    return any(has_started(run, out) for run in runs)


def print_outcomes(outcomes: Iterable[Outcome], total: int) -> list[Outcome]:
    """Print one line per outcome as they arrive, and return all of them."""
    done = []
    for outcome in outcomes:
        done.append(outcome)
        print(f"[{len(done)}/{total}] {format_outcome(outcome)}", file=sys.stderr, flush=True)
    return done


def format_outcome(outcome: Outcome) -> str:
    """Return an outcome as one line."""
    error = f" {outcome.error:.2f}%" if outcome.error is not None else ""
    if outcome.objective is not None and outcome.objective_name != "test error":
        percent = "%" if outcome.objective_name.endswith("error") else ""
        error = f" {outcome.objective_name} {outcome.objective:.4g}{percent}"
    detail = f": {outcome.detail}" if outcome.detail else ""
    title = outcome.job.run.title
    return printable(f"{outcome.status}{error} {title} ({outcome.seconds:.1f} s){detail}")


def report(table: Table, out: Path, outcomes: list[Outcome], as_json: bool) -> None:
    """Print the outcomes and the table; exit with status 1 if a run did not finish."""
    from wsam.paper import gather, render
    from wsam.paper.comparison import RecordFolder

    lost = frozenset(outcome.job.run.key for outcome in outcomes if not outcome.has_record)
    entries = gather(table, RecordFolder(out, without=lost))
    if as_json:
        runs = [_as_dict(outcome) for outcome in outcomes]
        cells = render.cell_dicts(table, entries)
        print(json.dumps({"runs": runs, "cells": cells}, allow_nan=False))
    else:
        counts = Counter(str(outcome.status) for outcome in outcomes)
        summary = ", ".join(f"{count} {status}" for status, count in counts.items())
        print(f"{summary or 'nothing to do'}; records in {out}")
        render.print_table(table, entries)
    if not all(outcome.has_record for outcome in outcomes):
        raise typer.Exit(1)


def _as_dict(outcome: Outcome) -> dict[str, Any]:
    run = outcome.job.run
    return {
        "key": run.key,
        "title": run.title,
        "status": str(outcome.status),
        "test_error": outcome.error,
        "detail": outcome.detail,
        "seconds": outcome.seconds,
    }
