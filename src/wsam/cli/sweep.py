"""`wsam sweep`: many runs on many devices, or machines; or a search."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wsam.cli import _options as options
from wsam.cli import _paper as shared
from wsam.cli._app import WithArguments, app
from wsam.cli._errors import pausing

if TYPE_CHECKING:
    from wsam.lab.run import Run
    from wsam.paper import Profile
    from wsam.paper.registry import JobFactory
    from wsam.sweep import Executor
    from wsam.sweep.grid import Grid

Device = Annotated[
    str, typer.Option(help="auto (all GPUs, or else the CPU), cpu, or cuda:0,cuda:1.")
]
Workers = Annotated[
    int | None, typer.Option(help="Runs at a time. [default: one per GPU, or one per core]")
]
Ray = Annotated[
    str | None, typer.Option(help="Address of a Ray cluster, or 'local' to start one here.")
]
Gpus = Annotated[float, typer.Option(help="With --ray: GPUs of a run; may be a fraction.")]
Submitit = Annotated[
    str | None, typer.Option(help="slurm, or local: each run is a job that submitit submits.")
]
SubmititArg = Annotated[
    list[str] | None,
    typer.Option(
        metavar=options.PAIR,
        help="With --submitit, as name=value: timeout_min=60, slurm_partition=gpu.",
    ),
]
Retries = Annotated[int, typer.Option(help="How often a run whose worker died is taken up again.")]
Optuna = Annotated[
    bool,
    typer.Option("--optuna", help="Search: the grid's points first, then --trials between them."),
]
Trials = Annotated[int, typer.Option(help="With --optuna: points beside those of the grid.")]
Storage = Annotated[
    str | None, typer.Option(help="With --optuna: a URL. [default: SQLite in the folder]")
]


@app.command(
    cls=WithArguments,
    context_settings=shared.EITHER_NAME,
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
    """Run all runs of a table or grid, several at a time.

    Any number of sweeps may work on one folder, from any number of machines: none does a run that
    another is at, and what a killed one left is taken up from its last checkpoint.
    """
    from wsam.paper.registry import JobFactory

    for option, number in (("--retries", retries), ("--trials", trials), ("--gpus", gpus)):
        if not number >= 0:
            raise ValueError(f"{option} must be at least 0, got {number}")
    profile = shared.make_profile(smoke, seeds, only, epochs, precision, pretrained)
    results = shared.folder_to_fill(out, smoke)
    means = options.make_means(
        data_dir,
        download,
        device="auto" if "," in device else device,
        compile=shared.prepare(smoke, compile),
        capture=capture,
        checkpoint_seconds=checkpoint_seconds,
        retry=retry,
    )
    where = {"device": device, "workers": workers, "retries": retries}
    executor = _executor(results, ray, gpus, submitit, submitit_arg or [], where)
    jobs = JobFactory(results, means, profile, measure=name == "minima")
    if optuna:
        _search(name, profile, jobs, executor, results, trials, storage, as_json)
    elif trials or storage:
        raise ValueError("--trials and --storage need --optuna")
    else:
        _run_all(name, profile, jobs, executor, results, as_json)


def _executor(
    out: Path,
    ray: str | None,
    gpus: float,
    submitit: str | None,
    submitit_arg: list[str],
    where: dict[str, Any],
) -> Executor:
    from wsam.sweep import Processes, local_devices

    if ray is not None and submitit is not None:
        raise ValueError("give --ray or --submitit, not both")
    if submitit_arg and submitit is None:
        raise ValueError("--submitit-arg needs --submitit")
    if gpus and ray is None:
        raise ValueError("--gpus needs --ray; submitit takes --submitit-arg gpus_per_node=1")
    workers, retries = where["workers"], where["retries"]
    devices = local_devices(where["device"], workers)
    if ray is not None:
        from wsam.sweep.ray_cluster import RayCluster

        return RayCluster(ray, workers, gpus, retries)
    if submitit is not None:
        from wsam.lab import records
        from wsam.sweep.slurm import Submitit

        many = workers or (64 if submitit == "slurm" else len(devices))
        folder = records.work(out) / "submitit"
        return Submitit(folder, submitit, many, options.pairs(submitit_arg), retries)
    return Processes(devices, retries)


def _run_all(
    name: str, profile: Profile, jobs: JobFactory, executor: Executor, out: Path, as_json: bool
) -> None:
    from wsam.paper import find
    from wsam.sweep import sweep as sweep_jobs

    table = profile.table(find(name))
    outcomes = sweep_jobs(map(jobs, table.runs), executor)
    with pausing(lambda: shared.any_begun(table.runs, out)):
        done = shared.follow(outcomes, len(table.runs))
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
    columns = [column for column in grid.bases if _matches(column, pattern)]
    if not columns:
        raise ValueError(f"--only names none of the columns: {', '.join(grid.bases)}")
    seeds = profile.seeds or (0,)
    bests: list[dict[str, Any]] = []
    settled = True
    with pausing(lambda: shared.any_begun(_first_runs(grid, columns, seeds), out)):
        for column in columns:
            with closing(Search(grid, column, seeds, jobs, out, storage)) as search:
                for outcome in sweep_jobs(search.jobs(trials), executor):
                    print(shared.line(outcome), file=sys.stderr, flush=True)
                    search.tell(outcome)
                    settled = settled and outcome.status.value not in ("error", "lost")
                best = search.best()
            if best is not None:
                bests.append({"column": column, "best": best[0], "test_error": best[1]})
    if as_json:
        print(json.dumps(bests, allow_nan=False))
    for found in [] if as_json else bests:
        point = ", ".join(f"{axis} {value:g}" for axis, value in found["best"].items())
        print(f"{found['column']}: best at {point}: test error {found['test_error']:.2f}%")
    if not settled:
        raise typer.Exit(1)


def _first_runs(grid: Grid, columns: Sequence[str], seeds: Sequence[int]) -> Iterator[Run]:
    """Yield the runs that a search begins with: those of the grid's points."""
    from wsam.sweep.grid import repeated

    for column in columns:
        for point in grid.points():
            yield from repeated(grid.run(column, point), seeds)


def _matches(column: str, pattern: str) -> bool:
    from fnmatch import fnmatchcase

    return fnmatchcase(column.lower(), pattern.lower())
