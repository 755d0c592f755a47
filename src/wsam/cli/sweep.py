"""`wsam sweep`: run a table or grid in parallel, or search it with Optuna."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wsam.cli import _options as options
from wsam.cli import _tables as shared
from wsam.cli._app import app, resumable

if TYPE_CHECKING:
    from wsam.lab.run import Run
    from wsam.paper import Profile
    from wsam.paper.registry import JobFactory
    from wsam.sweep import Executor
    from wsam.sweep.grid import Grid

Name = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME", help="A name from `wsam paper list`, or a TOML file with your own grid."
    ),
]
Axes = Annotated[
    list[str] | None,
    typer.Option(
        "--grid",
        metavar="NAME=VALUE,...",
        help="Vary a setting: data, model, method, base, lr, rho, epochs, ... One value fixes it. "
        "Settings that a method or base does not have are ignored for it. Repeatable.",
    ),
]
Device = Annotated[
    str, typer.Option(help="auto (all GPUs, otherwise the CPU), cpu, or cuda:0,cuda:1.")
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Parallel runs. [default: one per GPU, otherwise per core]"),
]
Ray = Annotated[str | None, typer.Option(help="Address of a Ray cluster, or 'local' to start one.")]
Gpus = Annotated[float, typer.Option(min=0, help="With --ray: GPUs per run; may be a fraction.")]
Submitit = Annotated[
    str | None, typer.Option(help="Submit each run as a job with submitit: slurm or local.")
]
SubmititArg = Annotated[
    list[str] | None,
    typer.Option(
        metavar=options.PAIR,
        help="With --submitit, such as timeout_min=60 or slurm_partition=gpu. Repeatable.",
    ),
]
Retries = Annotated[int, typer.Option(min=0, help="Retries of a run whose worker died.")]
Optuna = Annotated[
    bool,
    typer.Option(
        "--optuna", help="Search with Optuna: first the grid points, then --trials others."
    ),
]
Trials = Annotated[int, typer.Option(min=0, help="With --optuna: trials besides the grid points.")]
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
    name: Name = None,
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
    device: Device = "auto",
    workers: Workers = None,
    ray: Ray = None,
    gpus: Gpus = 0.0,
    submitit: Submitit = None,
    submitit_arg: SubmititArg = None,
    retries: Retries = 2,
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
    from wsam.paper.registry import JobFactory

    own = _own_grid(name, parse_axes(axes or []))
    profile = shared.make_profile(smoke, seeds, only, epochs, precision, pretrained)
    results = shared.output_folder(out, smoke)
    config = options.make_config(
        data_dir,
        download,
        device="auto" if "," in device else device,
        compile=shared.configure_smoke(smoke, compile),
        capture=capture,
        checkpoint_seconds=checkpoint_seconds,
        retry=retry,
    )
    executor = make_executor(
        results, device, workers, retries, ray, gpus, submitit, submitit_arg or []
    )
    jobs = JobFactory(results, config, profile, name)
    if optuna:
        _search(
            own or _paper_grid(name), profile, jobs, executor, results, trials, storage, as_json
        )
    elif trials or storage:
        raise ValueError("--trials and --storage need --optuna")
    else:
        _run_all(own or name, profile, jobs, executor, results, as_json)


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


def _own_grid(name: str | None, axes: dict[str, list[Any]]) -> Grid | None:
    """Return the grid of a file or of --grid; None for a table or grid of the paper.

    With both, --grid replaces and adds axes.
    """
    from dataclasses import replace

    from wsam.paper import find_grid
    from wsam.sweep.grid import freeze_axes, make_grid

    if name is None:
        if not axes:
            raise ValueError("give the NAME of a table or grid, or vary settings with --grid")
        return make_grid(" ".join(axes), axes)
    if not axes:
        return find_grid(name) if name.endswith(".toml") else None
    found = find_grid(name)
    if len(found.bases) > 1:
        raise ValueError(f"{name} has several columns: --grid needs a grid of your own")
    axes_of_both = {**found.axes, **freeze_axes(axes)}
    changed = replace(found, axes=axes_of_both, given=found.given or frozenset())
    changed.check()
    return changed


def _paper_grid(name: str | None) -> Grid:
    from wsam.paper import find_grid

    assert name is not None
    return find_grid(name)


def make_executor(
    out: Path,
    device: str,
    workers: int | None,
    retries: int,
    ray: str | None,
    gpus: float,
    submitit: str | None,
    submitit_arg: list[str],
) -> Executor:
    """Return the executor of a verb, given its options."""
    from wsam.sweep import Processes, local_devices

    if ray is not None and submitit is not None:
        raise ValueError("give --ray or --submitit, not both")
    if submitit_arg and submitit is None:
        raise ValueError("--submitit-arg needs --submitit")
    if gpus and ray is None:
        raise ValueError("--gpus needs --ray; with submitit, use --submitit-arg gpus_per_node=1")
    devices = local_devices(device, workers)
    if ray is not None:
        from wsam.sweep.ray_cluster import RayCluster

        return RayCluster(ray, workers, gpus, retries)
    if submitit is not None:
        from wsam.lab import records
        from wsam.sweep.slurm import Submitit

        parallel = workers or (64 if submitit == "slurm" else len(devices))
        folder = records.work_root(out) / "submitit"
        return Submitit(folder, submitit, parallel, options.parse_pairs(submitit_arg), retries)
    return Processes(devices, retries)


def _run_all(
    what: Grid | str | None,
    profile: Profile,
    jobs: JobFactory,
    executor: Executor,
    out: Path,
    as_json: bool,
) -> None:
    from wsam.paper import find
    from wsam.paper.grids import grid_table
    from wsam.paper.study import choose
    from wsam.sweep import sweep as sweep_jobs
    from wsam.sweep.grid import Grid
    from wsam.sweep.summary import summarize

    own = isinstance(what, Grid)
    table = choose(
        profile.table(grid_table(what) if isinstance(what, Grid) else find(str(what))), out
    )
    outcomes = sweep_jobs(map(jobs, table.runs), executor)
    with resumable(lambda: shared.has_progress(table.runs, out)):
        done = shared.print_outcomes(outcomes, table.runs)
    shared.report(table, out, done, as_json, summarize(table.runs, out) if own else None)


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
    from wsam.lab.titles import run_titles
    from wsam.sweep import sweep as sweep_jobs
    from wsam.sweep.search import Search

    grid = profile.grid(found)
    pattern = profile.only or "*"
    columns = [c for c in grid.bases if fnmatchcase(c.lower(), pattern.lower())]
    if not columns:
        raise ValueError(f"--only matches none of the columns {', '.join(grid.bases)}")
    seeds = profile.seeds or (0,)
    bests: list[dict[str, Any]] = []
    lines: list[str] = []
    settled = True
    with resumable(lambda: shared.has_progress(_grid_runs(grid, columns, seeds), out)):
        for column in columns:
            with closing(Search(grid, column, seeds, jobs, out, storage)) as search:
                known = list(_grid_runs(grid, [column], seeds))
                for outcome in sweep_jobs(search.jobs(trials), executor):
                    run = outcome.job.run
                    line = shared.format_outcome(outcome, run_titles([*known, run])[run.key])
                    print(line, file=sys.stderr, flush=True)
                    search.tell(outcome)
                    settled = settled and outcome.status.value not in ("error", "lost")
                best, (figure, lower) = search.best(), search.objective
            if best is not None:
                column_name = figure.replace(" ", "_").replace("-", "_")
                bests.append(
                    {"column": column, "best": best[0], "objective": figure, column_name: best[1]}
                )
                varied = {k: v for k, v in best[0].items() if len(grid.axes[k]) > 1}
                lines.append(_best_line(column, varied, best[1], figure, lower))
    if as_json:
        print(json.dumps(bests, allow_nan=False))
    for line in [] if as_json else lines:
        print(line)
    if not settled:
        raise typer.Exit(1)


def _best_line(
    column: str, best: dict[str, Any], value: float, figure: str, lower_is_better: bool
) -> str:
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
