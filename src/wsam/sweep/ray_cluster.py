"""Runs jobs on a Ray cluster: `pip install 'wsam[ray]'`."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from wsam.sweep.executors import RETRIES
from wsam.sweep.jobs import Job, Outcome, Status, run_job

LOCAL = "local"
_CONNECT_TIMEOUT = 10.0


@dataclass(frozen=True)
class RayCluster:
    """Runs each job as a Ray task. Ray itself restarts a task whose worker died.

    All nodes must share the results and data folders and have wsam installed.

    Args:
        address: Address of a cluster (``auto``, ``HOST:PORT``, ``ray://...``), or ``local`` to start
            one on this machine.
        workers: Maximum number of concurrent tasks; None: as the cluster's GPUs or cores allow.
        gpus: GPUs per task; a fraction lets tasks share one. Use 0 for runs on the CPU, or for a
            cluster without GPUs.
        retries: How often Ray restarts a task whose worker died.
    """

    address: str = LOCAL
    workers: int | None = None
    gpus: float = 0.0
    retries: int = RETRIES

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Yield the outcome of each job, in the order in which they end."""
        with self.connected() as ray:
            yield from self._run_tasks(ray, iter(jobs))

    @property
    def parallel(self) -> int:
        """How many tasks the cluster runs at a time."""
        with self.connected() as ray:
            return self._max_tasks(ray.cluster_resources())

    @property
    def keeps_workers(self) -> bool:
        """Whether a worker runs several jobs. Ray starts a process for each task on a GPU."""
        import ray

        return ray.is_initialized() and not self.gpus

    @contextmanager
    def connected(self) -> Iterator[Any]:
        """Return Ray, connected to the cluster until the end of the block.

        Without it, each call of `run` connects on its own and starts new workers.
        """
        import ray

        connects = not ray.is_initialized()
        if connects:
            self._connect(ray)
        try:
            yield ray
        finally:
            if connects:
                ray.shutdown()

    def _connect(self, ray: Any) -> None:
        """Connect to the cluster, or start a local one."""
        if self.address == LOCAL:
            ray.init(num_cpus=self.workers, include_dashboard=False, log_to_driver=False)
            return
        _check_reachable(self.address)
        try:
            ray.init(address=self.address, log_to_driver=False)
        except (ConnectionError, ValueError) as error:  # Ray's message may not name the address
            reason = str(error).partition("\n")[0]
            raise ValueError(f"no Ray cluster at {self.address!r}: {reason}") from error

    def _run_tasks(self, ray: Any, jobs: Iterator[Job]) -> Iterator[Outcome]:
        """Yield the outcome of each job, with as many concurrent tasks as the cluster allows."""
        task = ray.remote(run_job).options(
            num_cpus=1, num_gpus=self.gpus, max_retries=self.retries, name="wsam"
        )
        resources = ray.cluster_resources()
        max_tasks = self._max_tasks(resources)
        running: dict[Any, Job] = {}
        while True:
            while len(running) < max_tasks and (job := next(jobs, None)) is not None:
                self._check_device(job, resources)
                running[task.remote(job)] = job
            if not running:
                return
            done, _ = ray.wait(list(running))
            for reference in done:
                job = running.pop(reference)
                try:
                    yield ray.get(reference)
                except ray.exceptions.RayError as error:
                    reason = str(error).strip().rpartition("\n")[2]  # after the traceback
                    yield Outcome(job, Status.LOST, reason)

    def _check_device(self, job: Job, resources: dict[str, float]) -> None:
        """Refuse jobs that would choose a GPU themselves: all tasks would choose the first."""
        if not self.gpus and resources.get("GPU", 0.0) and job.execution.device != "cpu":
            raise ValueError("the cluster has GPUs: use --gpus 1 or --device cpu")

    def _max_tasks(self, resources: dict[str, float]) -> int:
        """Return how many tasks run concurrently."""
        tasks = int(resources.get("CPU", 1))
        if self.gpus:
            available = resources.get("GPU", 0.0)
            if available < self.gpus:
                raise ValueError(f"a run needs {self.gpus:g} GPUs, the cluster has {available:g}")
            tasks = min(tasks, int(available / self.gpus))
        return max(1, min(tasks, self.workers or tasks))


def _check_reachable(address: str) -> None:
    """Connect to an address; Ray itself would retry for minutes.

    Raises:
        ValueError: Nothing listens there.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return  # "auto", or a name that Ray resolves
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"no Ray cluster at {address!r}: {reason}") from error
