"""`wsam sweep`: run a table or grid in parallel, or search it with Optuna."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from wsam.cli import _executors as executors
from wsam.cli import _options as options
from wsam.cli import _tables as shared
from wsam.cli._app import app, resumable

if TYPE_CHECKING:
    from wsam.lab.run import Run
    from wsam.paper import Profile
    from wsam.paper.registry import JobFactory
    from wsam.sweep import Executor
    from wsam.sweep.grid import Grid
    from wsam.sweep.search import Search

Axes = Annotated[
    list[str] | None,
    typer.Option(
        "--grid",
        metavar="NAME=VALUE,...",
        help="Vary a setting: data, model, method, base, lr, rho, epochs, ... One value fixes it. "
        "Settings that a method or base does not have are ignored for it. Repeatable.",
    ),
]
Ray = Annotated[str | None, typer.Option(help="Address of a Ray cluster, or 'local' to start one.")]
Gpus = Annotated[float, typer.Option(min=0, help="With --ray: GPUs per run; may be a fraction.")]
Submitit = Annotated[
    Literal["slurm", "local"] | None, typer.Option(help="Submit each run as a job with submitit.")
]
SubmititArg = Annotated[
    list[str] | None,
    typer.Option(
        metavar=options.PAIR,
        help="With --submitit, such as timeout_min=60 or slurm_partition=gpu. Repeatable.",
    ),
]
Optuna = Annotated[
    bool,
    typer.Option(
        "--optuna", help="Search with Optuna: first the grid points, then --trials others."
    ),
]
Trials = Annotated[
    int, typer.Option(min=0, help="With --optuna: trials in addition to the grid points.")
]
Storage = Annotated[
    str | None,
    typer.Option(help="With --optuna: URL of a storage. [default: SQLite in the folder]"),
]


@app.command(
    context_settings=shared.ALIASES,
    epilog="Examples: wsam sweep cifar --workers 4; wsam sweep --grid method=vanilla,sam,wsam "
    "--grid lr=0.02,0.05 --grid gamma=0.8,0.9 --grid validation=0.1 --epochs 20 --out runs",
)
def sweep(
    name: Annotated[str | None, shared.NAME] = None,
    axes: Axes = None,
    only: shared.Only = None,
    seeds: shared.Seeds = None,
    smoke: shared.Smoke = False,
    epochs: shared.Epochs = None,
    precision: shared.Precision = None,
    pretrained: shared.Pretrained = None,
    out: shared.Out = None,
    data_dir: options.DataDir = None,
    download: options.Download = True,
    device: executors.Device = "auto",
    workers: executors.Workers = None,
    ray: Ray = None,
    gpus: Gpus = 0.0,
    submitit: Submitit = None,
    submitit_arg: SubmititArg = None,
    retries: executors.Retries = 2,
    optuna: Optuna = False,
    trials: Trials = 0,
    storage: Storage = None,
    compile: options.Compile = None,
    capture: options.Capture = None,
    checkpoint_seconds: options.CheckpointSeconds = 60.0,
    retry: options.Retry = False,
    as_json: options.Json = False,
) -> None:
    """Run a table or grid in parallel.

    Any number of sweeps, on any number of machines, can share a folder. Each run is executed once,
    and a run whose worker was killed is resumed from its last checkpoint.
    """
    from wsam.paper import find_grid
    from wsam.paper.registry import JobFactory

    if ray is not None and submitit is not None:
        raise ValueError("give --ray or --submitit, not both")
    if (trials or storage) and not optuna:
        raise ValueError("--trials and --storage need --optuna")
    grid_or_name = _grid_or_name(name, parse_axes(axes or []))
    profile = shared.make_profile(locals())
    results = shared.output_folder(out, smoke)
    config = options.make_config(
        data_dir,
        download,
        device=executors.config_device(device),
        compile=shared.configure_smoke(smoke, compile),
        capture=capture,
        checkpoint_seconds=checkpoint_seconds,
        retry=retry,
    )
    executor = executors.make_executor(
        results,
        device,
        workers,
        retries,
        ray=ray,
        gpus=gpus,
        submitit=submitit,
        submitit_args=submitit_arg or [],
    )
    jobs = JobFactory(results, config, profile, name)
    if optuna:
        grid = find_grid(grid_or_name) if isinstance(grid_or_name, str) else grid_or_name
        _search(grid, profile, jobs, executor, results, trials, storage, as_json)
    else:
        _run_all(grid_or_name, profile, jobs, executor, results, as_json)


def parse_axes(items: Iterable[str]) -> dict[str, list[Any]]:
    """Parse ``NAME=VALUE,...`` options. Values are JSON or plain words; ``none`` is None.

    Raises:
        ValueError: An item has no values, or a name is given twice.

    Example:
        >>> parse_axes(["method=sam,wsam", "lr=0.1,0.2", "betas=[0.9,0.99],[0.8,0.9]"])
        {'method': ['sam', 'wsam'], 'lr': [0.1, 0.2], 'betas': [[0.9, 0.99], [0.8, 0.9]]}
    """
    axes: dict[str, list[Any]] = {}
    for item in items:
        name, _, text = item.partition("=")
        if not (name := name.strip()) or not text.strip():
            raise ValueError(f"--grid expects NAME=VALUE,VALUE,..., got {item!r}")
        if name in axes:
            raise ValueError(f"--grid {name} is given twice; write --grid {name}=VALUE,VALUE")
        try:
            axes[name] = json.loads(f"[{text}]")
        except ValueError:
            words = map(str.strip, text.split(","))
            axes[name] = [None if word == "none" else options.parse_value(word) for word in words]
    return axes


def _grid_or_name(name: str | None, axes: dict[str, list[Any]]) -> Grid | str:
    """Return the grid of a file or of --grid, or the name of a table or grid of the paper.

    With both, --grid replaces and adds axes.
    """
    from wsam.paper import find_grid
    from wsam.sweep.grid import freeze_axes, make_grid

    if name is None:
        if not axes:
            raise ValueError("give the NAME of a table or grid, or vary settings with --grid")
        return make_grid(" ".join(axes), axes)
    if not axes:
        return find_grid(name) if name.endswith(".toml") else name
    found = find_grid(name)
    if len(found.bases) > 1:
        raise ValueError(f"{name} has several columns: --grid needs a grid of your own")
    axes_of_both = {**found.axes, **freeze_axes(axes)}
    # A grid of the paper becomes one of the user's own, with the defaults of `wsam.WSAM`.
    changed = replace(found, axes=axes_of_both, given=found.given or frozenset())
    changed.check()
    return changed


def _run_all(
    grid_or_name: Grid | str,
    profile: Profile,
    jobs: JobFactory,
    executor: Executor,
    out: Path,
    as_json: bool,
) -> None:
    """Run a table or grid and print its results."""
    from wsam.paper import find
    from wsam.paper.grids import grid_table
    from wsam.paper.study import choose
    from wsam.sweep import sweep as sweep_jobs
    from wsam.sweep.summary import summarize

    whole = find(grid_or_name) if isinstance(grid_or_name, str) else grid_table(grid_or_name)
    table = choose(profile.table(whole), out)
    if not profile.smoke:
        shared.warn_if_not_searched(table)
    outcomes = sweep_jobs(map(jobs, table.runs), executor)
    with resumable(lambda: shared.has_progress(table.runs, out)):
        done = shared.print_outcomes(outcomes, table.runs)
    summary = None if isinstance(grid_or_name, str) else summarize(table.runs, out)
    shared.report(table, out, done, as_json, summary)


def _search(
    found: Grid,
    profile: Profile,
    jobs: JobFactory,
    executor: Executor,
    out: Path,
    trials: int,
    storage: str | None,
    as_json: bool,
) -> None:
    """Search each column of a grid with Optuna and print the best points."""
    from wsam.sweep.search import Search

    grid = profile.grid(found)
    pattern = profile.only or "*"
    columns = [c for c in grid.bases if fnmatchcase(c.lower(), pattern.lower())]
    if not columns:
        raise ValueError(f"--only matches none of the columns {', '.join(grid.bases)}")
    seeds = profile.seeds or (0,)
    bests: list[dict[str, Any]] = []
    lines: list[str] = []
    complete = True
    with resumable(lambda: shared.has_progress(_grid_runs(grid, columns, seeds), out)):
        for column in columns:
            with closing(Search(grid, column, seeds, jobs, out, storage)) as search:
                complete &= _run_search(search, trials, executor)
                best, (figure, lower) = search.best(), search.objective
            if best is not None:
                point, value = best
                figure_key = figure.replace(" ", "_").replace("-", "_")
                bests.append(
                    {"column": column, "best": point, "objective": figure, figure_key: value}
                )
                varied = {k: v for k, v in point.items() if len(grid.axes[k]) > 1}
                lines.append(_best_line(column, varied, value, figure, lower))
    for line in [json.dumps(bests, allow_nan=False)] if as_json else lines:
        print(line)
    if not complete:
        raise typer.Exit(1)


def _run_search(search: Search, trials: int, executor: Executor) -> bool:
    """Run a search, print a line for each run, and return whether no run ended with an error."""
    from wsam.lab.titles import run_titles
    from wsam.sweep import Status
    from wsam.sweep import sweep as sweep_jobs

    known = list(_grid_runs(search.grid, [search.column], search.seeds))
    complete = True
    for outcome in sweep_jobs(search.jobs(trials), executor):
        run = outcome.job.run
        line = shared.format_outcome(outcome, run_titles([*known, run])[run.key])
        print(line, file=sys.stderr, flush=True)
        search.tell(outcome)
        complete = complete and outcome.status not in (Status.ERROR, Status.LOST)
    return complete


def _best_line(
    column: str, best: dict[str, Any], value: float, figure: str, lower_is_better: bool
) -> str:
    """Return the best point of a column as one line."""
    from wsam.sweep.search import DIVERGED  # the metrics in percent

    point = ", ".join(f"{axis} {_text(at)}" for axis, at in best.items())
    text = f"{value:.2f}%" if figure.rpartition(" ")[2] in DIVERGED else f"{value:g}"
    direction = "lowest" if lower_is_better else "highest"
    return f"{column}: {direction} {figure}, {text}, at {point}"


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _grid_runs(grid: Grid, columns: Sequence[str], seeds: Sequence[int]) -> Iterator[Run]:
    """Yield the runs of the grid points, with which a search begins."""
    from wsam.sweep.grid import with_seeds

    for column in columns:
        for point in grid.points():
            yield from with_seeds(grid.run(column, point), seeds)
