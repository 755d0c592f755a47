"""`wsam sweep`: run a table or grid in parallel, or search it with Optuna."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
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
    epilog="Examples: wsam sweep cifar --workers 4; wsam sweep rho-gamma --optuna --trials 20",
)
def sweep(
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
    jobs = JobFactory(results, config, profile, measure=name == "minima")
    if optuna:
        _search(name, profile, jobs, executor, results, trials, storage, as_json)
    elif trials or storage:
        raise ValueError("--trials and --storage need --optuna")
    else:
        _run_all(name, profile, jobs, executor, results, as_json)


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
    name: str, profile: Profile, jobs: JobFactory, executor: Executor, out: Path, as_json: bool
) -> None:
    from wsam.paper import find
    from wsam.sweep import sweep as sweep_jobs

    table = profile.table(find(name))
    outcomes = sweep_jobs(map(jobs, table.runs), executor)
    with resumable(lambda: shared.has_progress(table.runs, out)):
        done = shared.print_outcomes(outcomes, len(table.runs))
    shared.report(table, out, done, as_json)


def _search(
    name: str,
    profile: Profile,
    jobs: JobFactory,
    executor: Executor,
    out: Path,
    trials: int,
    storage: str | None,
    as_json: bool,
) -> None:
    from wsam.paper import find_grid
    from wsam.sweep import sweep as sweep_jobs
    from wsam.sweep.search import Search

    grid = profile.grid(find_grid(name))
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
                for outcome in sweep_jobs(search.jobs(trials), executor):
                    print(shared.format_outcome(outcome), file=sys.stderr, flush=True)
                    search.tell(outcome)
                    settled = settled and outcome.status.value not in ("error", "lost")
                best = search.best()
            if best is not None:
                name = search.objective_name
                bests.append({"column": column, "best": best[0], name.replace(" ", "_"): best[1]})
                lines.append(_best_line(column, best[0], name, best[1]))
    if as_json:
        print(json.dumps(bests, allow_nan=False))
    for line in [] if as_json else lines:
        print(line)
    if not settled:
        raise typer.Exit(1)


def _best_line(column: str, best: dict[str, float], name: str, value: float) -> str:
    point = ", ".join(f"{axis} {at:g}" for axis, at in best.items())
    figure = f"{value:.2f}%" if name.endswith("error") else f"{value:g}"
    return f"{column}: best at {point}: {name} {figure}"


def _grid_runs(grid: Grid, columns: Sequence[str], seeds: Sequence[int]) -> Iterator[Run]:
    """Yield the runs of the grid points, with which a search begins."""
    from wsam.sweep.grid import with_seeds

    for column in columns:
        for point in grid.points():
            yield from with_seeds(grid.run(column, point), seeds)
