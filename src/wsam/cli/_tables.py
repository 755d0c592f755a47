"""What `wsam paper` and `wsam sweep` share: options, folders, and printed outcomes."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from wsam._utils.text import align_columns, printable
from wsam.cli._files import check_results_folder
from wsam.cli._options import parse_seeds

if TYPE_CHECKING:
    from wsam.lab.run import Run
    from wsam.paper import Profile, Table
    from wsam.sweep import Outcome
    from wsam.sweep.summary import Summary

NAME = typer.Argument(
    metavar="NAME", help="A name from `wsam paper list`, or a TOML file with your own grid."
)
Name = Annotated[str, NAME]
Only = Annotated[
    str | None,
    typer.Option(help="Select cells by a pattern, 'ResNet18/*/CIFAR-10', or one label, 'WSAM'."),
]
Seeds = Annotated[
    str | None, typer.Option(help="Such as 0,1,2. [default: the table's; 0 in a grid of your own]")
]
Smoke = Annotated[
    bool, typer.Option("--smoke", help="Run a small CNN on digits instead: about a minute.")
]
Epochs = Annotated[
    int | None,
    typer.Option(
        min=1, help="Instead of the paper's 200 (ImageNet: 3); scales other lengths with it."
    ),
]
Precision = Annotated[
    Literal["bf16", "fp32"] | None, typer.Option(help="[default: bf16; fp32 in a grid of your own]")
]
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


def make_profile(given: Mapping[str, Any]) -> Profile:
    """Return a profile, given the values of a verb's options by name."""
    from wsam.paper import Profile

    seeds = None if given["seeds"] is None else parse_seeds(given["seeds"])
    names = ("smoke", "only", "epochs", "precision", "pretrained")
    return Profile(seeds=seeds, **{name: given[name] for name in names})


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


def warn_if_not_searched(table: Table) -> None:
    """Print a warning if hyperparameters of a study have not been chosen yet."""
    cells = sum(not cell.is_searched for cell in table.cells)
    if cells:
        print(
            f"{cells} of {len(table.cells)} cells were not searched and take their first candidate: "
            f"run `wsam paper run {table.name}-search` first",
            file=sys.stderr,
        )


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


def print_outcomes(outcomes: Iterable[Outcome], runs: Sequence[Run]) -> list[Outcome]:
    """Print one line per outcome as they arrive, and return all of them.

    Args:
        outcomes: The outcomes.
        runs: All runs. A line names what differs between them.
    """
    from wsam.lab.titles import run_titles

    done, titles = [], run_titles(runs)
    for outcome in outcomes:
        done.append(outcome)
        line = format_outcome(outcome, titles[outcome.job.run.key])
        print(f"[{len(done)}/{len(runs)}] {line}", file=sys.stderr, flush=True)
    return done


def format_outcome(outcome: Outcome, title: str) -> str:
    """Return an outcome as one line; `title` names its run."""
    figure = f" {outcome.figure}" if outcome.figure else ""
    figure += ":" if " " in outcome.figure else ""
    detail = f": {outcome.detail}" if outcome.detail else ""
    return printable(f"{outcome.status}{figure} {title} ({outcome.seconds:.1f} s){detail}")


def report(
    table: Table,
    out: Path,
    outcomes: list[Outcome],
    as_json: bool,
    summary: Summary | None = None,
) -> None:
    """Print the outcomes and a table; exit with status 1 if a run did not finish.

    Args:
        table: The runs.
        out: Folder of the records.
        outcomes: Of the runs.
        as_json: Print JSON.
        summary: The results of a grid of the user's own, printed instead of the paper's table.
    """
    from wsam.paper import gather, render
    from wsam.paper.comparison import RecordFolder

    lost = frozenset(outcome.job.run.key for outcome in outcomes if not outcome.has_record)
    entries = gather(table, RecordFolder(out, without=lost))
    if as_json:
        runs = [_as_dict(outcome) for outcome in outcomes]
        cells = render.cell_dicts(table, entries)
        found: dict[str, Any] = {"runs": runs, "cells": cells}
        if summary is not None:
            found["objective"] = summary.objective_name
            found["rows"] = [row.as_dict() for row in summary.rows]
        print(json.dumps(found, allow_nan=False))
    else:
        counts = Counter(str(outcome.status) for outcome in outcomes)
        line = ", ".join(f"{count} {status}" for status, count in counts.items())
        print(f"{line or 'nothing to do'}; records in {out}")
        if summary is None:
            render.print_table(table, entries)
        else:
            _print_summary(summary)
    if not all(outcome.has_record for outcome in outcomes):
        raise typer.Exit(1)


def _print_summary(summary: Summary) -> None:
    heads, rows = summary.table()
    for line in (*align_columns([heads, *rows]), *summary.conclusion()):
        print(printable(line))


def _as_dict(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as JSON data."""
    run = outcome.job.run
    return {
        "key": run.key,
        "title": run.title,
        "status": str(outcome.status),
        "test_error": outcome.error,
        "objective": outcome.objective,
        "objective_name": outcome.objective_name,
        "detail": outcome.detail,
        "seconds": outcome.seconds,
    }
