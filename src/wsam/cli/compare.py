"""`wsam compare`: does a sharpness-aware method help on this problem, at equal training time?"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from wsam.cli import _executors as executors
from wsam.cli import _options as options
from wsam.cli import _run_options as run_options
from wsam.cli._app import app, resumable
from wsam.cli._files import check_output_folder, staged

if TYPE_CHECKING:
    from wsam.compare import Request, Summary
    from wsam.lab.execution import ExecutionConfig
    from wsam.sweep import Executor

_EXAMPLE = (
    "Example: wsam compare --model my.py:net --data my.py:data --base adamw --lr 3e-4 "
    "--weight-decay 0.05 --batch-size 64 --epochs 50 --budget 20m --methods base,sam,wsam,cheap"
)

Budget = Annotated[str, typer.Option(help="Time for the whole comparison, such as 90s, 20m or 2h.")]
Methods = Annotated[
    str,
    typer.Option(
        help="Names separated by commas: base, cheap (WSAM with two passes on every n-th step), "
        f"{', '.join(options.METHODS)}, or your own class: path.py:Class."
    ),
]
Seeds = Annotated[str, typer.Option(help="Number of seeds, or a list such as 0,1,2.")]
Trials = Annotated[
    int, typer.Option(min=1, help="Settings tried for each method; fewer if time is short.")
]
Epochs = Annotated[
    int, typer.Option(min=1, help="Epochs of the base in every run; fewer if time is short.")
]
Every = Annotated[int, typer.Option(min=2, help="For cheap: two passes on every N-th step.")]
Equal = Annotated[
    Literal["time", "passes"],
    typer.Option(
        help="What is equal in all runs: the measured training time, or the number of forward and "
        "backward passes, which does not depend on the machine."
    ),
]
LearningRate = Annotated[
    float | None,
    typer.Option("--lr", help="Middle of the learning rates to try. [default: the base's]"),
]
Noise = Annotated[
    float,
    typer.Option(
        "--noise",
        "--label-noise",
        help="Fraction of training labels replaced by uniformly random ones.",
    ),
]
Validation = Annotated[
    float | None,
    typer.Option(
        metavar="SIZE",
        help="Part of the training data by which settings are chosen: a fraction or a number of "
        "samples. [default: the data's own split, else 0.2]",
    ),
]
Kind = Annotated[
    Literal["processes", "ray", "slurm"],
    typer.Option("--executor", help="Train in processes of this machine, on Ray or on SLURM."),
]
Address = Annotated[
    str | None,
    typer.Option(
        help="With ray: address of a cluster, auto, or local to start one. [default: local]"
    ),
]
Gpus = Annotated[float, typer.Option(min=0, help="With ray: GPUs per run; may be a fraction.")]
SubmititArg = Annotated[
    list[str] | None,
    typer.Option(
        metavar=options.PAIR,
        help="With slurm, such as timeout_min=60 or slurm_partition=gpu. Repeatable.",
    ),
]
Compile = Annotated[
    bool,
    typer.Option("--compile/--no-compile", help="Use torch.compile, in every run."),
]
Out = Annotated[
    Path,
    typer.Option(
        "--out", callback=check_output_folder, help="Folder for records, figures and the page."
    ),
]


@app.command(epilog=_EXAMPLE)
def compare(
    data: run_options.Data = "digits",
    model: run_options.Model = None,
    model_arg: run_options.ModelArg = None,
    base: run_options.Base = "sgd",
    methods: Methods = "base,sam,wsam,cheap",
    budget: Budget = "20m",
    seeds: Seeds = "3",
    trials: Trials = 8,
    epochs: Epochs = 30,
    every: Every = 2,
    equal: Equal = "time",
    lr: LearningRate = None,
    momentum: run_options.Momentum = None,
    weight_decay: run_options.WeightDecay = None,
    base_arg: run_options.BaseArg = None,
    batch_size: run_options.BatchSize = 128,
    noise: Noise = 0.0,
    schedule: run_options.Schedule = "cosine",
    decay_start: run_options.DecayStart = None,
    precision: run_options.Precision = None,
    augment: run_options.Augment = True,
    pretrained: run_options.Pretrained = None,
    train_limit: run_options.TrainLimit = None,
    test_limit: run_options.TestLimit = None,
    validation: Validation = None,
    metric: run_options.MetricName = None,
    image_size: run_options.ImageSize = None,
    target: run_options.Target = None,
    task: run_options.TaskName = None,
    block_size: run_options.BlockSize = None,
    out: Out = Path("compare"),
    data_dir: options.DataDir = None,
    download: options.Download = True,
    device: executors.Device = "auto",
    workers: executors.Workers = None,
    executor: Kind = "processes",
    address: Address = None,
    gpus: Gpus = 0.0,
    submitit_arg: SubmititArg = None,
    retries: executors.Retries = 2,
    compile: Compile = False,
    capture: options.Capture = None,
    checkpoint_seconds: options.CheckpointSeconds = 60.0,
    as_json: options.Json = False,
) -> None:
    """Compare methods on a problem at equal training time.

    Searches settings for every method with the same effort, trains several seeds, and answers
    whether a method beats the base beyond noise. Interrupted, the same command continues.
    """
    given, start = locals(), time.monotonic()
    check_libraries()
    from wsam.compare import Request, parse_budget
    from wsam.compare.page import page
    from wsam.compare.request import with_validation
    from wsam.lab.run import Run
    from wsam.lab.settings import VANILLA

    config = options.make_config(
        data_dir,
        download,
        device=executors.config_device(device),
        compile=compile,
        capture=capture,
        checkpoint_seconds=checkpoint_seconds,
    )
    problem = Run(**run_options.problem(given, config), method=VANILLA)
    request = Request(
        with_validation(problem),
        tuple(map(_method_name, methods.split(","))),
        parse_seeds(seeds),
        parse_budget(budget),
        trials,
        every,
        equal,
    )
    if address is not None and executor != "ray":
        raise ValueError("--address needs --executor ray")
    jobs = executors.make_executor(
        out,
        device,
        workers,
        retries,
        ray=(address or "local") if executor == "ray" else None,
        gpus=gpus,
        submitit="slurm" if executor == "slurm" else None,
        submitit_args=submitit_arg or [],
    )
    summary = run(request, out, jobs, config, start, as_json)
    report(summary, out, page(summary), as_json)


def _method_name(text: str) -> str:
    """Return the name of a method: that of a class as it is given, others in any spelling."""
    from wsam.lab.user_code import is_code

    name = text.strip()
    return name if is_code(name) else name.lower().replace("-", "_")


def parse_seeds(text: str) -> tuple[int, ...]:
    """Return the seeds: ``3`` is 0, 1, 2, and ``4,5`` are themselves."""
    if "," in text:
        return options.parse_seeds(text)
    if not text.strip().isdigit() or int(text) < 1:
        raise ValueError(f"--seeds must be a number of seeds or a list such as 0,1,2; got {text!r}")
    return tuple(range(int(text)))


def check_libraries() -> None:
    """Report a missing library before anything runs."""
    import matplotlib  # noqa: F401
    import scipy  # noqa: F401


def run(
    request: Request,
    out: Path,
    executor: Executor,
    config: ExecutionConfig,
    start: float,
    as_json: bool,
) -> Summary:
    """Run or continue a comparison with a progress display.

    Args:
        request: What to compare.
        out: The folder of the comparison.
        executor: Runs the jobs.
        config: How to train.
        start: When the command started, as `time.monotonic()`.
        as_json: Show no progress.
    """
    from wsam.compare import Comparison
    from wsam.compare.progress import show_progress
    from wsam.compare.state import FILE_NAME

    with (
        resumable((out / FILE_NAME).exists),
        executors.kept_workers(executor) as jobs,
        show_progress(request.budget, quiet=as_json) as progress,
    ):
        return Comparison(request, out, jobs, config, progress, start).run()


def report(
    summary: Summary, out: Path, page: str, as_json: bool, last_line: str | None = None
) -> None:
    """Print the result, write figures and page, and exit with status 1 if a run failed.

    Args:
        summary: The figures.
        out: The folder of the comparison.
        page: The page as HTML.
        as_json: Print JSON.
        last_line: Printed at the end, but not as JSON.
    """
    if not as_json:
        _print_summary(summary)
    files = [out / "compare.json", out / "compare.html"]
    with staged(out) as staging:
        numbers = json.dumps(summary.as_dict(), indent=1, allow_nan=False)
        (staging / files[0].name).write_text(numbers, encoding="utf-8")
        (staging / files[1].name).write_text(page, encoding="utf-8")
    if as_json:
        print(json.dumps({**summary.as_dict(), "files": [str(file) for file in files]}))
    else:
        print(f"figures: {files[0]}; open {files[1]}")
        if last_line is not None:
            print(last_line)
    if summary.failures:
        raise typer.Exit(1)


def _print_summary(summary: Summary) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from wsam.compare.formatting import format_point
    from wsam.compare.page import table_heads, table_rows

    console = Console()

    def print_line(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for number, head in enumerate(table_heads(summary)):
        table.add_column(head, justify="right" if number else "left")
    for row in table_rows(summary):
        table.add_row(*row)
    console.print(table)
    console.print()
    print_line(summary.sentence, "bold")
    console.print()
    for found in summary.rows.values():
        print_line(f"{found.method.title}: {format_point(found.point)}")
    console.print()
    for note in summary.notes:
        print_line(note, "dim")
    for failure in summary.failures:
        print_line(f"Failed: {failure}", "red")
