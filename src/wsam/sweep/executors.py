"""Executors that run jobs in this process or in processes of this machine, and `sweep`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, cast

from wsam.lab import attempts
from wsam.lab.callbacks import Callback, Metrics
from wsam.lab.environment import available_cores
from wsam.sweep.jobs import Job, Outcome, Status, run_job

RETRIES = 2


class Executor(Protocol):
    """Runs jobs."""

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Yield the outcome of each job, in the order in which they end.

        A job is taken from `jobs` when a worker is free, so that a search can choose it by the
        outcomes so far. A job whose worker died is retried a few times, then reported as lost.
        """
        ...


def sweep(
    jobs: Iterable[Job], executor: Executor, poll: float = 2.0, *, stop_if_refused: bool = True
) -> Iterator[Outcome]:
    """Run jobs until each has ended, in this sweep or in another process.

    A job that another process is training is deferred. After all others ended, it is tried again
    every `poll` seconds, until it has a record or the other process died and its run resumes here.

    Args:
        jobs: The jobs.
        executor: Runs them.
        poll: Seconds between two attempts at deferred jobs.
        stop_if_refused: Raise an error if a job is refused; otherwise yield its outcome.

    Raises:
        ValueError: A job was refused; the user must act first.
        ModuleNotFoundError: A job was refused because a library is not installed.
    """
    while True:
        busy: list[Job] = []
        for outcome in executor.run(jobs):
            if outcome.status is Status.BUSY:
                busy.append(outcome.job)
                continue
            if outcome.status is Status.REFUSED and stop_if_refused:
                raise _refusal(outcome)
            if outcome.status is Status.LOST:
                attempts.write(outcome.job.out, outcome.job.run, outcome.detail)
            yield outcome
        if not busy:
            return
        jobs = busy
        time.sleep(poll)


def _refusal(outcome: Outcome) -> Exception:
    """Return the exception for a refused job, as raised in its worker."""
    if outcome.missing_module is None:
        return ValueError(outcome.detail)
    return ModuleNotFoundError(outcome.detail, name=outcome.missing_module)


class InProcess:
    """Runs one job after the other in this process.

    Args:
        callbacks: Returns the callbacks of a run; called once per run.
    """

    parallel = 1
    keeps_workers = True

    def __init__(self, callbacks: Callable[[], Sequence[Callback]] = tuple) -> None:
        self.callbacks = callbacks

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Yield the outcome of each job."""
        for job in jobs:
            yield run_job(job, self.callbacks())


def local_devices(device: str = "auto", workers: int | None = None) -> list[str]:
    """Return the device of each worker on this machine.

    Args:
        device: ``auto`` (all GPUs, or else the CPU), or devices such as ``cuda:0,cuda:1``.
        workers: Number of workers; None: one per GPU, or one per core without GPUs.

    Example:
        >>> local_devices("cuda:0,cuda:1", workers=3)
        ['cuda:0', 'cuda:1', 'cuda:0']
    """
    devices = [name.strip() for name in device.split(",")]
    if devices in (["auto"], ["cuda"]):
        import torch

        gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        devices = gpus or (["cpu"] if device == "auto" else devices)
    if workers is None:
        workers = available_cores() if devices == ["cpu"] else len(devices)
    return [devices[index % len(devices)] for index in range(workers)]


class JobQueue:
    """The jobs that have no worker: new ones, and those whose worker died.

    Args:
        jobs: The new jobs.
        retries: How often a job is retried.
    """

    def __init__(self, jobs: Iterable[Job], retries: int) -> None:
        self.new, self.retries = iter(jobs), retries
        self.again: deque[Job] = deque()
        self.deaths: Counter[str] = Counter()

    def take(self) -> Job | None:
        """Return the next job; None if there is none."""
        return self.again.popleft() if self.again else next(self.new, None)

    def retry(self, job: Job) -> bool:
        """Queue a job whose worker died; return False if its workers died too often."""
        self.deaths[job.run.key] += 1
        if self.deaths[job.run.key] > self.retries:
            return False
        self.again.append(job)
        return True


@dataclass
class _Worker:
    device: str
    process: Any
    pipe: Connection


@dataclass
class Processes:
    """Runs jobs in processes of this machine, one job at a time in each.

    Each worker has its own pipe: unlike a shared queue, it cannot stay locked when a worker is
    killed. The job of a dead worker is given to a new one.

    Args:
        devices: The device of each worker; see `local_devices`.
        retries: How often a job is retried after its worker died.
        log: Called with messages for the user.
        keep: Keep idle workers for the next call of `run`, until `close`.
    """

    devices: Sequence[str] = field(default_factory=local_devices)
    retries: int = RETRIES
    log: Callable[[str], None] = lambda message: print(message, file=sys.stderr)
    keep: bool = False
    _kept: list[_Worker] = field(default_factory=list, init=False, repr=False)

    @property
    def parallel(self) -> int:
        """How many jobs run at a time."""
        return len(self.devices)

    @property
    def keeps_workers(self) -> bool:
        """Whether a worker runs the jobs of several calls of `run`."""
        return self.keep

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Yield the outcome of each job, in the order in which they end."""
        queue = JobQueue(jobs, self.retries)
        idle, self._kept = self._kept, []
        free_devices = list(reversed(self.devices))
        for worker in idle:
            free_devices.remove(worker.device)
        busy: dict[Connection, tuple[_Worker, Job]] = {}
        try:
            while True:
                while (idle or free_devices) and (job := queue.take()) is not None:
                    worker = idle.pop() if idle else self._start(free_devices.pop())
                    busy[worker.pipe] = worker, job
                    _send(worker.pipe, job)
                if not busy:
                    return
                for pipe in wait(list(busy)):
                    worker, job = busy.pop(cast(Connection, pipe))
                    outcome = _receive(worker.pipe)
                    if outcome is not None:
                        idle.append(worker)
                        yield outcome
                        continue
                    free_devices.append(worker.device)
                    detail = f"{_describe_death(worker)} at {job.run.title}"
                    if queue.retry(job):
                        self.log(f"{detail}; retrying its run")
                    else:
                        yield Outcome(job, Status.LOST, detail)
        finally:
            if self.keep:
                idle, self._kept = [], idle
            self._stop(idle, [worker for worker, _ in busy.values()])

    def close(self) -> None:
        """End the workers that were kept."""
        idle, self._kept = self._kept, []
        self._stop(idle, ())

    def _start(self, device: str) -> _Worker:
        """Start a worker on a device."""
        context = get_context("spawn")  # CUDA cannot be used after a fork
        ours, theirs = context.Pipe()
        threads = max(1, available_cores() // len(self.devices))
        process = context.Process(target=_serve, args=(theirs, device, threads))
        with _ignored_ctrl_c():
            process.start()
        theirs.close()  # so that the pipe ends when the worker dies
        return _Worker(device, process, ours)

    @staticmethod
    def _stop(idle: Sequence[_Worker], busy: Sequence[_Worker]) -> None:
        """End workers: idle ones when their pipe ends, busy ones at once."""
        for worker in idle:
            worker.pipe.close()
        for worker in busy:  # the sweep was interrupted; their runs resume from checkpoints
            worker.process.terminate()
        for worker in (*idle, *busy):
            worker.process.join()
            worker.pipe.close()


@contextmanager
def _ignored_ctrl_c() -> Iterator[None]:
    """Ignore Ctrl-C here, and in processes that are started meanwhile, from their first import on."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python sets signal handlers in the main thread only
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _describe_death(worker: _Worker) -> str:
    """Return how a dead worker ended."""
    worker.process.join()
    worker.pipe.close()
    return f"a worker on {worker.device} died (exit status {worker.process.exitcode})"


def _send(pipe: Connection, job: Job) -> None:
    with suppress(OSError):  # the worker died while idle; `_receive` will notice
        pipe.send(job)


def _receive(pipe: Connection) -> Outcome | None:
    """Return the outcome a worker sends; None if it died."""
    try:
        return cast(Outcome, pipe.recv())
    except (EOFError, OSError):
        return None


class _ExitIfOrphaned(Callback):
    """Ends a worker at the end of an epoch if its parent process died."""

    def __init__(self, parent: int) -> None:
        self.parent = parent

    def on_epoch_end(self, metrics: Metrics) -> None:
        if os.getppid() != self.parent:
            raise SystemExit(1)


def _serve(pipe: Connection, device: str, threads: int) -> None:
    """Run jobs until the pipe ends."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent ends its workers
    if device == "cpu":  # OMP_NUM_THREADS may be smaller
        torch.set_num_threads(min(threads, torch.get_num_threads()))
    callback = _ExitIfOrphaned(os.getppid())
    while True:
        try:
            job: Job = pipe.recv()
        except (EOFError, OSError):
            return
        on_device = replace(job, execution=replace(job.execution, device=device))
        outcome = run_job(on_device, [callback])
        try:
            pipe.send(replace(outcome, job=job))
        except OSError:
            return  # the parent died; the record is written
