"""Jobs on a Ray cluster: `pip install 'wsam[ray]'`."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from wsam.sweep.executors import RETRIES
from wsam.sweep.work import Job, Outcome, Status, perform

LOCAL = "local"
_PATIENCE = 10.0


@dataclass(frozen=True)
class RayCluster:
    """Carries out jobs as Ray tasks. Ray itself starts a task again whose worker died.

    The folders of results and data must be shared by all nodes, and wsam installed on them.

    Args:
        address: Of a cluster (``auto``, ``HOST:PORT``, ``ray://...``), or ``local`` to start one
            on this machine.
        workers: Tasks at a time; None for as many as the cluster's GPUs or cores allow.
        gpus: GPUs of a task; a fraction lets tasks share one. 0 is for runs on the CPU, or for a
            cluster without GPUs.
        retries: How often Ray starts a task again whose worker died.
    """

    address: str = LOCAL
    workers: int | None = None
    gpus: float = 0.0
    retries: int = RETRIES

    def carry_out(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Yield what became of each job, in the order in which they end."""
        ray = _ray()
        ours = not ray.is_initialized()
        if ours:
            self._connect(ray)
        try:
            yield from self._carry_out(ray, iter(jobs))
        finally:
            if ours:
                ray.shutdown()

    def _connect(self, ray: Any) -> None:
        if self.address == LOCAL:
            ray.init(num_cpus=self.workers, include_dashboard=False, log_to_driver=False)
            return
        _knock(self.address)
        try:
            ray.init(address=self.address, log_to_driver=False)
        except ConnectionError as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"no Ray cluster at {self.address!r}: {reason}") from error
        except ValueError as error:  # Ray does not know which option its address came from
            raise ValueError(
                f"--ray {self.address}: {error}; it takes local, auto, HOST:PORT or ray://HOST:PORT"
            ) from error

    def _carry_out(self, ray: Any, jobs: Iterator[Job]) -> Iterator[Outcome]:
        task = ray.remote(perform).options(
            num_cpus=1, num_gpus=self.gpus, max_retries=self.retries, name="wsam"
        )
        resources = ray.cluster_resources()
        room = self._room(resources)
        at_work: dict[Any, Job] = {}
        while True:
            while len(at_work) < room and (job := next(jobs, None)) is not None:
                self._check_place(job, resources)
                at_work[task.remote(job)] = job
            if not at_work:
                return
            done, _ = ray.wait(list(at_work))
            for reference in done:
                job = at_work.pop(reference)
                try:
                    yield ray.get(reference)
                except ray.exceptions.RayError as error:
                    reason = str(error).strip().rpartition("\n")[2]  # below the traceback
                    yield Outcome(job, Status.LOST, reason)

    def _check_place(self, job: Job, resources: dict[str, float]) -> None:
        """Refuse a job that would look for a GPU of its own: all of them would take the first."""
        if not self.gpus and resources.get("GPU", 0.0) and job.means.device != "cpu":
            raise ValueError(
                "the cluster has GPUs, and Ray shares them out: --gpus 1 or --device cpu"
            )

    def _room(self, resources: dict[str, float]) -> int:
        """Return how many tasks the cluster has room for."""
        room = int(resources.get("CPU", 1))
        if self.gpus:
            there = resources.get("GPU", 0.0)
            if there < self.gpus:
                raise ValueError(f"a run wants {self.gpus:g} GPUs, the cluster has {there:g}")
            room = min(room, int(there / self.gpus))
        return max(1, min(room, self.workers or room))


def _knock(address: str) -> None:
    """See whether anybody answers: Ray itself would go on asking for minutes.

    Raises:
        ValueError: Nobody does.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return  # "auto", or a name that Ray knows what to do with
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PATIENCE).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"no Ray cluster answers at {address!r}: {reason}") from error


def _ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ValueError("--ray needs Ray: pip install 'wsam[ray]'") from error
    return ray
