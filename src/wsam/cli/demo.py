"""`wsam demo`: a few minutes that show what sharpness-aware training does."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wsam.cli import _options as options
from wsam.cli._app import app
from wsam.cli._errors import pausing
from wsam.cli._files import as_folder, together
from wsam.cli._paper import parse_seeds

if TYPE_CHECKING:
    from wsam.demo import Summary
    from wsam.demo.choice import Choice
    from wsam.sweep import Job

_EXAMPLE = "Example: wsam demo --out demo"


@app.command(epilog=_EXAMPLE)
def demo(
    out: Annotated[
        Path, typer.Option(callback=as_folder, help="Folder for records, pictures and the report.")
    ] = Path("demo"),
    seeds: Annotated[str | None, typer.Option(help="Seeds to run. [default: 0,1,2]")] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="<int>", help="Runs at a time, a thread each. [default: one per core]"
        ),
    ] = None,
    make_map: Annotated[
        bool,
        typer.Option(
            "--map", help="First make the map of gamma and rho again: ten minutes on two cores."
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """See in a few minutes what WSAM does to wrong labels.

    SGD, SAM and WSAM are trained on digits with wrong labels, and what came of it is shown.
    One to four minutes on two cores, on data that is there. Finished runs are not run again.
    """
    import matplotlib  # noqa: F401 (missing ones are told of before anything runs)
    import sklearn  # noqa: F401

    from wsam.demo import SEEDS, demo_jobs, map_jobs, summarise
    from wsam.demo.choice import NAME, read, write
    from wsam.lab.train import is_begun

    begin = time.monotonic()
    chosen = parse_seeds(seeds) or SEEDS
    looks = map_jobs(out / "map") if make_map else []
    jobs = demo_jobs(out / "runs", chosen)
    with pausing(lambda: any(is_begun(job.run, job.out) for job in (*looks, *jobs))):
        if make_map:
            _run(looks, "The map of gamma and rho", workers, as_json)
            write(out / "map")
        choice = read(out / NAME if (out / NAME).exists() else None)
        _run(jobs, "Digits with wrong labels", workers, as_json)
        summary = summarise(out / "runs", chosen)
        written = _write(summary, choice, out)
    _show(summary, written, time.monotonic() - begin, as_json)


def _run(jobs: Sequence[Job], title: str, workers: int | None, quiet: bool) -> None:
    from wsam.demo import carry_out
    from wsam.demo.display import shown

    with shown(jobs, title, quiet) as ears:
        carry_out(jobs, workers, ears.say, ears.ended)


def _write(summary: Summary, choice: Choice, out: Path) -> list[Path]:
    """Write pictures, figures and the report; all of them or none."""
    from wsam.demo.page import page
    from wsam.demo.pictures import write_all

    with together(out) as unfinished:
        paths = write_all(summary, choice, unfinished)
        figures = json.dumps(summary.as_dict(), indent=1, allow_nan=False)
        for name, text in (("demo.json", figures), ("report.html", page(summary, choice))):
            paths.append(unfinished / name)
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

    shown = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for number, head in enumerate(HEADS):
        shown.add_column(head, justify="right" if number else "left")
    for row in table_rows(summary, narrow=True):
        shown.add_row(*row)
    console = Console()
    console.print(shown)
    for sentence in summary.claims:
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    pictures = ", ".join(path.name for path in written if path.suffix == ".png")
    print(f"{seconds:.0f} s; pictures: {pictures}; all in {written[-1].parent}")
    print(f"open {written[-1]}")
