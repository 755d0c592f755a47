"""`wsam paper`: run the paper's tables and figures and compare the results with it."""

from __future__ import annotations

import json
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from wsam._utils.text import align_columns
from wsam.cli import _options as options
from wsam.cli import _tables as shared
from wsam.cli._app import app, resumable
from wsam.cli._files import staged

paper = typer.Typer(
    help="The paper's tables and figures: list, run, compare.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings=shared.ALIASES,
    epilog="Example: wsam paper table cifar",
)
app.add_typer(paper, name="paper")


@paper.command("list", epilog="Example: wsam paper list")
def list_(results: shared.Results = None, as_json: options.Json = False) -> None:
    """List all tables, figures and searches.

    Shows for each how many of its runs are finished.
    """
    from wsam.lab import records
    from wsam.paper import find, names
    from wsam.paper.study import choose

    out = shared.default_folder(results, smoke=False)
    tables = {name: choose(find(name), out) for name in names()}
    runs = {run for table in tables.values() for run in table.runs}
    finished = {run for run in runs if records.is_finished(records.read(out, run))}
    rows = []
    for name, table in tables.items():
        done = len(finished.intersection(table.runs))
        rows.append((name, str(table.kind), len(table.cells), len(table.runs), done, table.title))
    heads = ("name", "kind", "cells", "runs", "finished", "title")
    shared.warn_if_missing(out)
    if as_json:
        print(json.dumps([dict(zip(heads, row, strict=True)) for row in rows]))
        return
    lines = [[str(value) for value in row] for row in (heads, *rows)]
    print(*align_columns(lines, left=range(len(heads))), sep="\n")


@paper.command(
    epilog='Example: wsam paper run cifar --only "ResNet18/*/CIFAR-10" --seeds 0,1,2',
)
def run(
    name: shared.Name,
    only: shared.Only = None,
    seeds: shared.Seeds = None,
    smoke: shared.Smoke = False,
    epochs: shared.Epochs = None,
    precision: shared.Precision = None,
    pretrained: shared.Pretrained = None,
    out: shared.Out = None,
    data_dir: options.DataDir = None,
    download: options.Download = True,
    device: options.Device = "auto",
    compile: options.Compile = None,
    capture: options.Capture = None,
    retry: options.Retry = False,
    plane: Annotated[
        bool, typer.Option("--plane", help="With minima: also measure a surface around each.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Run a table, one run after another.

    Finished runs are skipped; interrupted ones are resumed. `wsam sweep` uses several devices or
    machines.
    """
    from wsam.paper.registry import JobFactory, load
    from wsam.sweep import InProcess, sweep

    if plane and name != "minima":
        raise ValueError(f"--plane applies to minima only, not to {name}")
    profile = shared.make_profile(locals())
    results = shared.output_folder(out, smoke)
    table = load(name, profile, results)
    if not smoke:
        shared.warn_if_not_searched(table)
    config = options.make_config(
        data_dir,
        download,
        device=device,
        compile=shared.configure_smoke(smoke, compile),
        capture=capture,
        retry=retry,
    )
    jobs = JobFactory(results, config, profile, name, plane)
    executor = InProcess(lambda: options.make_callbacks(quiet=as_json or smoke))
    with resumable(lambda: shared.has_progress(table.runs, results)):
        done = shared.print_outcomes(sweep(map(jobs, table.runs), executor), table.runs)
    shared.report(table, results, done, as_json)


Format = Annotated[
    Literal["rich", "markdown", "csv"], typer.Option("--format", help="Output format.")
]
Plot = Annotated[
    Path | None, typer.Option(dir_okay=False, help="Also plot it to a .png, .svg or .pdf file.")
]
Welch = Annotated[
    bool,
    typer.Option(
        "--welch",
        help="Show Welch's t-test for each pair of methods instead; of a grid, for each two rows that "
        "differ in one setting.",
    ),
]


@paper.command(epilog="Example: wsam paper table cifar --format markdown --plot cifar.png")
def table(
    name: shared.Name,
    only: shared.Only = None,
    seeds: shared.Seeds = None,
    smoke: shared.Smoke = False,
    epochs: shared.Epochs = None,
    precision: shared.Precision = None,
    pretrained: shared.Pretrained = None,
    results: shared.Results = None,
    format_: Format = "rich",
    plot: Plot = None,
    welch: Welch = False,
    as_json: options.Json = False,
) -> None:
    """Compare our results with the paper's.

    Ours are mean ± standard deviation and the number of runs, or "not run".
    """
    from wsam.paper import gather, plot_slices, render, significance
    from wsam.paper.plot import save
    from wsam.paper.registry import load

    profile = shared.make_profile(locals())
    out = shared.default_folder(results, smoke)
    selected = load(name, profile, out)
    entries = gather(selected, out)
    if plot is not None:
        with staged(plot.parent) as staging:
            save(selected, entries, staging / plot.name, plot_slices.read_slices(selected, out))
    if as_json:
        cells = (
            significance.as_dicts(selected, entries)
            if welch
            else render.cell_dicts(selected, entries)
        )
        print(json.dumps(cells, allow_nan=False))
    elif welch:
        print(significance.markdown(selected, entries), end="")
    elif format_ == "rich":
        render.print_table(selected, entries)
    else:
        to_text = render.markdown if format_ == "markdown" else render.csv_text
        print(to_text(selected, entries), end="")
    if plot is not None:
        # stdout holds nothing but the table if another program may read it.
        print(f"wrote {plot}", file=sys.stderr if as_json or format_ != "rich" else sys.stdout)
    shared.warn_if_missing(out)


@paper.command(epilog="Example: wsam paper page docs/paper.md README.md --check")
def page(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Markdown files.")],
    results: shared.Results = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 if a file is out of date.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Update the tables in Markdown files.

    A table is between the lines '<!-- wsam paper table NAME -->' and '<!-- end -->'.
    """
    from wsam.lab.markdown_tables import update_tables

    out = shared.default_folder(results, smoke=False)
    render = partial(_markdown, out)
    changed = [path for path in files if update_tables(path, "wsam paper table", render, check)]
    if as_json:
        print(json.dumps({"checked": check, "changed": [str(path) for path in changed]}))
    else:
        for path in changed:
            print(f"{path} {'is out of date' if check else 'has new tables'}")
    shared.warn_if_missing(out)
    if check and changed:
        raise typer.Exit(1)


def _markdown(out: Path, arguments: str) -> str:
    """Return a table as Markdown, given arguments of `wsam paper table` that select its runs."""
    from wsam.paper import gather, render, significance
    from wsam.paper.registry import load

    group: Any = typer.main.get_command(paper)
    given = group.commands["table"].make_context("wsam paper table", shlex.split(arguments)).params
    selected = load(given["name"], shared.make_profile(given), out)
    to_text = significance.markdown if given["welch"] else render.page_markdown
    return to_text(selected, gather(selected, out))
