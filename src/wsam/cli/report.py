"""`wsam report`: a folder of results as one HTML file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wsam._utils.text import mean_and_std, pluralize, printable
from wsam.cli import _options as options
from wsam.cli._app import app

if TYPE_CHECKING:
    from wsam.report import Folder
    from wsam.report.labels import LabeledGroup

_EXAMPLE = "Example: wsam report results --out results.html"


def _check_page(path: Path | None) -> Path | None:
    """Check, as a typer callback, that an HTML file is named, so that no other file is replaced."""
    if path is not None and path.suffix not in (".html", ".htm"):
        raise ValueError(f"--out is the HTML file to write, but {path} does not end in .html")
    return path


@app.command(epilog=_EXAMPLE)
def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="Results of `wsam train`, `compare`, `sweep`, `paper run` or `demo`.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            callback=_check_page,
            help="HTML file to write. [default: report.html in FOLDER]",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Write a folder of results as one HTML page.

    The page compares results with the paper's, plots curves and sharpness, and lists the commands
    that reproduce each run. It needs no network and supports dark mode and phones.
    """
    from wsam.report import write

    path, found = write(folder, out)
    if as_json:
        print(json.dumps({"file": str(path), **_plain(found)}, allow_nan=False))
        return
    if found.path != folder:
        print(f"no records in {folder} itself; using those in {found.path}")
    finished = sum(result.finished for result in found.results)
    print(f"{pluralize(finished, 'finished run')} in {pluralize(len(found.groups), 'group')}")
    for trouble in found.troubles:
        print(printable(f"{trouble.kind}: {trouble.what}: {trouble.why}"))
    print(f"wrote {path}")


def _plain(found: Folder) -> dict[str, Any]:
    """Return what a report shows as JSON data."""
    from wsam.report.labels import experiments

    return {
        "experiments": [
            {"title": one.title, "groups": [_group(item) for item in one.groups]}
            for one in experiments(found.groups)
        ],
        "troubles": [asdict(trouble) for trouble in found.troubles],
    }


def _group(item: LabeledGroup) -> dict[str, Any]:
    """Return runs that differ in their seeds only as JSON data."""
    from wsam.lab.titles import figure_column, figure_splits
    from wsam.report.commands import commands

    metric, figures = item.group.metric, {}
    for split in figure_splits(metric):
        mean, deviation = mean_and_std(item.group.metric_values(split))
        column = figure_column(metric, split)
        figures[column] = {"mean": mean, "deviation": deviation}
    return {
        "name": item.name,
        "finished": len(item.group.finished),
        "failed": len(item.group.results) - len(item.group.finished),
        **figures,
        "commands": {result.run.key: commands(result) for result in item.group.results},
    }
