"""`wsam paper`: the tables and figures of the paper, run and shown beside what it says."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wsam.cli import _options as options
from wsam.cli import _paper as shared
from wsam.cli._app import WithArguments, app
from wsam.cli._errors import pausing
from wsam.cli._files import together

if TYPE_CHECKING:
    from wsam.lab.run import Run
    from wsam.paper import Table

paper = typer.Typer(
    help="The paper's tables and figures: list, run, compare.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings=shared.EITHER_NAME,
    epilog="Example: wsam paper table cifar",
)
app.add_typer(paper, name="paper")


@paper.command("list", epilog="Example: wsam paper list")
def list_(results: shared.Results = None, as_json: options.Json = False) -> None:
    """List all tables, figures and searches.

    Beside each stands how many of its runs are finished.
    """
    from wsam.paper import find, names

    out = shared.folder(results, smoke=False)
    tables = {name: find(name) for name in names()}
    finished, damaged = _finished({run for table in tables.values() for run in table.runs}, out)
    rows = []
    for name, table in tables.items():
        done = len(finished.intersection(table.runs))
        rows.append((name, str(table.kind), len(table.cells), len(table.runs), done, table.title))
    heads = ("name", "kind", "cells", "runs", "finished", "title")
    shared.tell_if_missing(out)
    for why in damaged:
        print(f"damaged: {why}", file=sys.stderr)
    if as_json:
        print(json.dumps([dict(zip(heads, row, strict=True)) for row in rows]))
        return
    widths = [max(len(str(row[i])) for row in (heads, *rows)) for i in range(len(heads))]
    for row in (heads, *rows):
        print("  ".join(str(v).ljust(w) for v, w in zip(row, widths, strict=True)).rstrip())


def _finished(runs: Iterable[Run], out: Path) -> tuple[set[Run], list[str]]:
    """Return the runs that are finished, and what is wrong with records that cannot be read."""
    from wsam.lab import records
    from wsam.lab.files import sentence

    finished, damaged = set(), []
    for run in runs:
        try:
            if records.is_finished(records.read(out, run)):
                finished.add(run)
        except (OSError, ValueError) as error:
            damaged.append(sentence(error))
    return finished, sorted(damaged)


@paper.command(
    cls=WithArguments,
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
        bool, typer.Option("--plane", help="With minima: a surface around each, besides a line.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Run a table, one run after the other.

    Finished runs are skipped, interrupted ones go on. To run it on several devices or
    machines, see `wsam sweep`.
    """
    from wsam.paper import find
    from wsam.paper.registry import JobFactory
    from wsam.sweep import Here, sweep

    if plane and name != "minima":
        raise ValueError(f"--plane looks around minima: it belongs to minima, not to {name}")
    profile = shared.make_profile(smoke, seeds, only, epochs, precision, pretrained)
    table = profile.table(find(name))
    results = shared.folder_to_fill(out, smoke)
    compile = shared.prepare(smoke, compile)
    means = options.make_means(
        data_dir, download, device=device, compile=compile, capture=capture, retry=retry
    )
    jobs = JobFactory(results, means, profile, measure=name == "minima", plane=plane)
    here = Here(lambda: options.make_watchers(quiet=as_json or smoke))
    with pausing(lambda: shared.any_begun(table.runs, results)):
        done = shared.follow(sweep(map(jobs, table.runs), here), len(table.runs))
    shared.report(table, results, done, as_json)


Format = Annotated[str, typer.Option("--format", help="rich, markdown or csv.")]
Plot = Annotated[Path | None, typer.Option(help="Also draw it: a .png, .svg or .pdf file.")]
Welch = Annotated[
    bool,
    typer.Option("--welch", help="Instead show Welch's t-test for each pair of methods."),
]


@paper.command(
    cls=WithArguments,
    epilog="Example: wsam paper table cifar --format markdown --plot cifar.png",
)
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
    """Show our results next to the paper's.

    Ours are mean ± standard deviation and the number of runs; "not run" means that there is none.
    """
    from wsam.lab.names import chosen
    from wsam.paper import gather, plot_slices, render, significance
    from wsam.paper.plot import save

    chosen("format", format_, render.FORMATS)
    made = _made(name, only, seeds, smoke, epochs, precision, pretrained)
    out = shared.folder(results, smoke)
    entries = gather(made, out)
    if plot is not None:
        with together(plot.parent) as unfinished:
            save(made, entries, unfinished / plot.name, plot_slices.read_slices(made, out))
    if as_json:
        cells = significance.as_dicts(entries) if welch else render.cell_dicts(made, entries)
        print(json.dumps(cells, allow_nan=False))
    elif welch:
        print(significance.markdown(made, entries), end="")
    elif format_ == "rich":
        render.print_table(made, entries)
    else:
        to_text = render.markdown if format_ == "markdown" else render.csv_text
        print(to_text(made, entries), end="")
    if plot is not None:
        # What other programs read stays alone on stdout.
        print(f"wrote {plot}", file=sys.stderr if as_json or format_ != "rich" else sys.stdout)
    shared.tell_if_missing(out)


def _made(
    name: str,
    only: str | None,
    seeds: str | None,
    smoke: bool,
    epochs: int | None,
    precision: str | None,
    pretrained: str | None,
) -> Table:
    from wsam.paper import find

    profile = shared.make_profile(smoke, seeds, only, epochs, precision, pretrained)
    return profile.table(find(name))


@paper.command(cls=WithArguments, epilog="Example: wsam paper page docs/paper.md README.md --check")
def page(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Pages in Markdown.")],
    results: shared.Results = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 if a page is out of date.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Make the tables in pages anew from the records.

    So no figure is typed by hand. A page holds lines '<!-- wsam paper table NAME -->' and
    '<!-- end -->'.
    """
    from wsam.lab.pages import renew

    out = shared.folder(results, smoke=False)

    def render(words: str) -> str:
        return _markdown(shlex.split(words), out)

    changed = [path for path in files if renew(path, "wsam paper table", render, check)]
    if as_json:
        print(json.dumps({"checked": check, "changed": [str(path) for path in changed]}))
    for path in [] if as_json else changed:
        print(f"{path} {'is out of date' if check else 'has new tables'}")
    shared.tell_if_missing(out)
    if check and changed:
        raise typer.Exit(1)


def _markdown(words: list[str], out: Path) -> str:
    """Return the Markdown of a table, given words that `wsam paper table` takes."""
    from wsam.paper import gather, render, significance

    given = _parsed(words)
    to_text = significance.markdown if given.pop("welch") else render.page_markdown
    made = _made(**given, smoke=False)
    return to_text(made, gather(made, out))


def _parsed(words: list[str]) -> dict[str, Any]:
    from argparse import ArgumentError, ArgumentParser

    parser = ArgumentParser(exit_on_error=False, add_help=False, allow_abbrev=False)
    parser.add_argument("name")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--welch", action="store_true")
    for option in ("--only", "--seeds", "--precision", "--pretrained"):
        parser.add_argument(option)
    try:
        given, unknown = parser.parse_known_args(words)
    except ArgumentError as error:
        raise ValueError(f"wsam paper table {' '.join(words)}: {error}") from error
    if unknown:
        raise ValueError(f"a table in a page does not take {unknown[0]!r}")
    return vars(given)
