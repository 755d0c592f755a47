"""`wsam demo`: a short demonstration of sharpness-aware training."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wsam.cli import _options as options
from wsam.cli._app import app, resumable
from wsam.cli._files import check_output_folder, staged

if TYPE_CHECKING:
    from wsam.demo import Summary
    from wsam.demo.tuning import TuningResults
    from wsam.sweep import Job

_EXAMPLE = "Example: wsam demo --out demo"


@app.command(epilog=_EXAMPLE)
def demo(
    out: Annotated[
        Path,
        typer.Option(
            callback=check_output_folder, help="Folder for records, plots and the report."
        ),
    ] = Path("demo"),
    seeds: Annotated[str | None, typer.Option(help="Seeds to run. [default: 0,1,2]")] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Parallel runs, with one thread each. [default: one per core]"),
    ] = None,
    make_map: Annotated[
        bool,
        typer.Option(
            "--map", help="Also compute the map of gamma and rho: ten minutes on two cores."
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Compare SGD, SAM and WSAM on digits with label noise.

    Takes one to four minutes on two cores and downloads nothing. Finished runs are skipped.
    """
    import matplotlib  # noqa: F401 (report a missing library before anything runs)
    import sklearn  # noqa: F401

    from wsam.demo import SEEDS, demo_jobs, summarise, tuning_jobs
    from wsam.demo.tuning import FILE_NAME, read, write
    from wsam.lab.train import has_started

    start = time.monotonic()
    chosen = options.parse_seeds(seeds) or SEEDS
    grid = tuning_jobs(out / "map") if make_map else []
    jobs = demo_jobs(out / "runs", chosen)
    with resumable(lambda: any(has_started(job.run, job.out) for job in (*grid, *jobs))):
        if make_map:
            _run(grid, "Map of gamma and rho", workers, as_json)
            write(out / "map")
        tuning = read(out / FILE_NAME if (out / FILE_NAME).exists() else None)
        _run(jobs, "Digits with label noise", workers, as_json)
        summary = summarise(out / "runs", chosen)
        written = _write(summary, tuning, out)
    _show(summary, written, time.monotonic() - start, as_json)


def _run(jobs: Sequence[Job], title: str, workers: int | None, quiet: bool) -> None:
    from wsam.demo import run_jobs
    from wsam.demo.progress import show_progress

    with show_progress(jobs, title, quiet) as callbacks:
        run_jobs(jobs, workers, callbacks.message, callbacks.finished)


def _write(summary: Summary, tuning: TuningResults, out: Path) -> list[Path]:
    """Write plots, numbers and the report; all of them or none."""
    from wsam.demo.figures import save_figures
    from wsam.demo.page import page

    with staged(out) as staging:
        paths = save_figures(summary, tuning, staging)
        numbers = json.dumps(summary.as_dict(), indent=1, allow_nan=False)
        for name, text in (("demo.json", numbers), ("report.html", page(summary, tuning))):
            paths.append(staging / name)
            paths[-1].write_text(text, encoding="utf-8")
    return [out / path.name for path in paths]


def _show(summary: Summary, written: list[Path], seconds: float, as_json: bool) -> None:
    if as_json:
        files = [str(path) for path in written]
        print(json.dumps({**summary.as_dict(), "seconds": seconds, "files": files}))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from wsam.demo.page import HEADS, table_rows

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for number, head in enumerate(HEADS):
        table.add_column(head, justify="right" if number else "left")
    for row in table_rows(summary, narrow=True):
        table.add_row(*row)
    console = Console()
    console.print(table)
    for comparison in summary.comparisons:
        console.print(comparison, markup=False, highlight=False, soft_wrap=True)
    plots = ", ".join(path.name for path in written if path.suffix == ".png")
    print(f"{seconds:.0f} s; plots: {plots}; in {written[-1].parent}")
    print(f"open {written[-1]}")
