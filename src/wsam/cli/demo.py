"""`wsam demo`: a short demonstration of sharpness-aware training."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from wsam.cli import _executors as executors
from wsam.cli import _options as options
from wsam.cli import compare as comparisons
from wsam.cli._app import app

_EXAMPLE = "Example: wsam demo --out demo"


@app.command(epilog=_EXAMPLE)
def demo(
    out: comparisons.Out = Path("demo"),
    seeds: Annotated[
        str | None, typer.Option(help="Number of seeds, or a list such as 0,1,2. [default: 8]")
    ] = None,
    workers: executors.Workers = None,
    as_json: options.Json = False,
) -> None:
    """Compare tuned SGD, SAM and WSAM on digits with wrong labels.

    A preset of `wsam compare`. Takes about two minutes on two cores and downloads nothing.
    Interrupted, the same command continues.
    """
    start = time.monotonic()
    comparisons.check_libraries()
    import sklearn  # noqa: F401

    from wsam.demo import demo_request
    from wsam.demo.page import OWN_DATA, page
    from wsam.lab.execution import ExecutionConfig
    from wsam.sweep import Processes, local_devices

    request = demo_request() if seeds is None else demo_request(comparisons.parse_seeds(seeds))
    executor = Processes(local_devices("cpu", workers))
    config = ExecutionConfig(device="cpu")
    summary = comparisons.run(request, out, executor, config, start, as_json)
    last_line = f"now your own data, with your own settings: {OWN_DATA}"
    comparisons.report(summary, out, page(summary), as_json, last_line)
