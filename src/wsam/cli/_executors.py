"""Where the runs of `wsam sweep` and `wsam compare` are trained: options, and the executor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wsam.cli import _options as options

if TYPE_CHECKING:
    from wsam.sweep import Executor

Device = Annotated[
    str, typer.Option(help="auto (all GPUs, otherwise the CPU), cpu, or cuda:0,cuda:1.")
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Parallel runs. [default: one per GPU, otherwise per core]"),
]
Retries = Annotated[int, typer.Option(min=0, help="Retries of a run whose worker died.")]


def config_device(device: str) -> str:
    """Return the device of the execution settings; each worker replaces a list by its own device."""
    return "auto" if "," in device else device


def make_executor(
    out: Path,
    device: str,
    workers: int | None,
    retries: int,
    *,
    ray: str | None,
    gpus: float,
    submitit: str | None,
    submitit_args: list[str],
) -> Executor:
    """Return the executor of a verb, given its options: Ray, submitit or processes."""
    from wsam.sweep import Processes, local_devices

    if gpus and ray is None:
        raise ValueError("--gpus needs Ray; with submitit, use --submitit-arg gpus_per_node=1")
    if submitit_args and submitit is None:
        raise ValueError("--submitit-arg needs submitit")
    if ray is not None:
        from wsam.sweep.ray_cluster import RayCluster

        return RayCluster(ray, workers, gpus, retries)
    devices = local_devices(device, workers)
    if submitit is not None:
        from wsam.lab import records
        from wsam.sweep.slurm import Submitit

        parallel = workers or (64 if submitit == "slurm" else len(devices))
        folder = records.work_root(out) / "submitit"
        return Submitit(folder, submitit, parallel, options.parse_pairs(submitit_args), retries)
    return Processes(devices, retries)


@contextmanager
def kept_workers(executor: Executor) -> Iterator[Executor]:
    """Yield the executor with workers that run the jobs of several calls, if it can keep them."""
    from wsam.sweep import Processes
    from wsam.sweep.ray_cluster import RayCluster

    if isinstance(executor, Processes):
        with closing(replace(executor, keep=True)) as kept:
            yield kept
    elif isinstance(executor, RayCluster):
        with executor.connected():
            yield executor
    else:
        yield executor
