"""Options that several verbs share, and how they are parsed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wsam.cli._files import check_results_folder

if TYPE_CHECKING:
    from wsam.lab.callbacks import Callback
    from wsam.lab.data.download import Progress
    from wsam.lab.execution import ExecutionConfig

PAIR = "NAME=VALUE"
METHODS = (
    *("sam", "wsam", "coupled_wsam", "gsam", "esam", "asam", "fisher_sam"),
    *("looksam", "vasso", "friendly_sam", "msam"),
)
"""The names of `wsam.METHODS`; importing them would load torch for every `--help`."""

Out = Annotated[
    Path, typer.Option("--out", callback=check_results_folder, help="Folder for the records.")
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        help="Data folder; missing data is downloaded to it. [default: WSAM_DATA or ~/.cache/wsam]"
    ),
]
Download = Annotated[bool, typer.Option("--download/--no-download", help="Download missing data.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Compile = Annotated[
    bool | None,
    typer.Option("--compile/--no-compile", help="Use torch.compile. [default: on CUDA]"),
]
Capture = Annotated[
    bool | None,
    typer.Option(
        "--capture/--no-capture", help="Replay each step from a CUDA graph. [default: on CUDA]"
    ),
]
CheckpointSeconds = Annotated[float, typer.Option(help="Minimum seconds between two checkpoints.")]
Retry = Annotated[bool, typer.Option("--retry", help="Run failed runs again.")]
Json = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]


def parse_pairs(items: Iterable[str]) -> dict[str, Any]:
    """Parse ``name=value`` options; see `parse_value`.

    Raises:
        ValueError: An item has no ``=``, or a name occurs twice.

    Example:
        >>> parse_pairs(["momentum=0.9", "betas=[0.9, 0.99]", "nesterov=true"])
        {'momentum': 0.9, 'betas': [0.9, 0.99], 'nesterov': True}
    """
    values: dict[str, Any] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"expected name=value, got {item!r}")
        if (name := name.strip()) in values:
            raise ValueError(f"{name!r} is given twice, the second time by {item!r}")
        values[name] = parse_value(text)
    return values


def parse_value(text: str) -> Any:
    """Parse a value: JSON, a number or switch as in Python, or a string.

    Example:
        >>> parse_value("[0.9, 0.99]"), parse_value(".5"), parse_value("True"), parse_value("sam")
        ([0.9, 0.99], 0.5, True, 'sam')
    """
    try:
        return json.loads(text)
    except ValueError:
        word = text.strip()
    try:
        return float(word)
    except ValueError:
        return {"True": True, "False": False}.get(word, word)


def parse_seeds(text: str) -> tuple[int, ...]:
    """Parse a list of seeds such as ``0,1,2``.

    Raises:
        ValueError: The text is not a list of distinct non-negative integers.
    """
    try:
        seeds = tuple(int(word) for word in text.split(","))
    except ValueError:
        seeds = ()
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ValueError(
            f"seeds must be distinct non-negative integers such as 0,1,2; got {text!r}"
        )
    return seeds


def make_config(data_dir: Path | None, download: bool, **settings: Any) -> ExecutionConfig:
    """Return the execution settings of a run, given a verb's options."""
    from wsam.lab.data.datasets import DataSource, default_folder
    from wsam.lab.execution import ExecutionConfig

    source = DataSource(data_dir or default_folder(), download, download_progress)
    return ExecutionConfig(source=source, **settings)


def make_callbacks(quiet: bool) -> list[Callback]:
    """Return a progress bar on a terminal, a line per epoch elsewhere, nothing if quiet."""
    from wsam.lab.callbacks import LogLines, ProgressBar

    if quiet:
        return []
    return [ProgressBar() if sys.stderr.isatty() else LogLines()]


def download_progress(name: str) -> Progress:
    """Return a callback that prints the progress of a download.

    It prints every percent on a terminal and every ten percent elsewhere.
    """
    terminal = sys.stderr.isatty()
    printed = -1

    def progress(done: int, total: int) -> None:
        nonlocal printed
        percent = 100 * done // total
        step = percent if terminal else percent // 10
        if step == printed:
            return
        printed = step
        end = "\r" if terminal and done < total else "\n"
        text = f"{name}: {done / 1e6:.0f} of {total / 1e6:.0f} MB"
        print(text, end=end, file=sys.stderr, flush=True)

    return progress
