"""Who carries out jobs: this process, or processes of this machine; and the sweep over all jobs."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, cast

from wsam.lab.environment import cores
from wsam.lab.watch import Row, Watcher
from wsam.sweep.work import Job, Outcome, Status, perform

RETRIES = 2


class Executor(Protocol):
    """Carries out jobs. Everything that runs jobs somewhere else is one of these."""

    def carry_out(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Yield what became of each job, in the order in which they end.

        A job is taken from `jobs` only when there is room for it, so that a search can decide
        late. A job whose worker died is tried again a few times, then reported as lost.
        """
        ...


def sweep(jobs: Iterable[Job], executor: Executor, poll: float = 2.0) -> Iterator[Outcome]:
    """Go through jobs until each has been carried out, here or by another process.

    A job that another process is at is put off; once all others are done it is looked at again
    every `poll` seconds: by then it has its record, or the other process was killed and the job is
    taken over.

    Args:
        jobs: What is to be done.
        executor: Who does it.
        poll: Seconds between two looks at what others are doing.

    Raises:
        ValueError: A job was refused: its user must do something first.
        ModuleNotFoundError: The same: a library must be installed first.
    """
    pending: Iterable[Job] = jobs
    while True:
        busy: list[Job] = []
        for outcome in executor.carry_out(pending):
            if outcome.status is Status.BUSY:
                busy.append(outcome.job)
            elif outcome.status is Status.REFUSED:
                raise _refusal(outcome)
            else:
                yield outcome
        if not busy:
            return
        pending = busy
        time.sleep(poll)


def _refusal(outcome: Outcome) -> Exception:
    """Return what says it here as it would have been said where the job was refused."""
    if outcome.lacks is None:
        return ValueError(outcome.detail)
    return ModuleNotFoundError(outcome.detail, name=outcome.lacks)


class Here:
    """Carries out one job after the other in this process.

    Args:
        watchers: Makes those who watch a run, anew for each.
    """

    def __init__(self, watchers: Callable[[], Sequence[Watcher]] = tuple) -> None:
        self.watchers = watchers

    def carry_out(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Yield what became of each job."""
        for job in jobs:
            yield perform(job, self.watchers())


def local_devices(device: str = "auto", workers: int | None = None) -> list[str]:
    """Return the device of each worker on this machine.

    Args:
        device: ``auto`` (all GPUs, or else the CPU), or devices such as ``cuda:0,cuda:1``.
        workers: How many; None for one per GPU, or one per core where there is no GPU.

    Example:
        >>> local_devices("cuda:0,cuda:1", workers=3)
        ['cuda:0', 'cuda:1', 'cuda:0']
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    devices = [name.strip() for name in device.split(",")]
    if devices in (["auto"], ["cuda"]):
        import torch

        gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        devices = gpus or (["cpu"] if device == "auto" else devices)
    if workers is None:
        workers = cores() if devices == ["cpu"] else len(devices)
    return [devices[number % len(devices)] for number in range(workers)]


@dataclass
class _Worker:
    device: str
    process: Any
    pipe: Connection
    job: Job | None = None


@dataclass
class Processes:
    """Carries out jobs in processes of this machine, one job at a time in each.

    Each worker has a pipe of its own: unlike a shared queue, nothing is left locked when a worker
    is killed. A dead worker's job goes to a new one.

    Args:
        devices: The device of each worker; see `local_devices`.
        retries: How often a job whose worker died is tried again.
        say: Takes a message for the user.
    """

    devices: Sequence[str] = field(default_factory=local_devices)
    retries: int = RETRIES
    say: Callable[[str], None] = lambda message: print(message, file=sys.stderr)

    def carry_out(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Yield what became of each job, in the order in which they end."""
        waiting, again = iter(jobs), deque[Job]()
        deaths: Counter[str] = Counter()
        free = list(reversed(self.devices))
        idle: list[_Worker] = []
        busy: dict[Connection, _Worker] = {}
        try:
            while True:
                while idle or free:
                    job = again.popleft() if again else next(waiting, None)
                    if job is None:
                        break
                    worker = idle.pop() if idle else self._start(free.pop())
                    worker.job = job
                    busy[worker.pipe] = worker
                    _send(worker.pipe, job)
                if not busy:
                    return
                for pipe in wait(list(busy)):
                    worker = busy.pop(cast(Connection, pipe))
                    outcome = _receive(worker.pipe)
                    if outcome is not None:
                        idle.append(worker)
                        yield outcome
                        continue
                    free.append(worker.device)
                    lost = self._bury(worker, deaths)
                    if lost.status is Status.LOST:
                        yield lost
                    else:
                        again.append(lost.job)
        finally:
            self._stop(idle, list(busy.values()))

    def _start(self, device: str) -> _Worker:
        context = get_context("spawn")  # CUDA does not survive a fork
        ours, theirs = context.Pipe()
        threads = max(1, cores() // len(self.devices))
        process = context.Process(target=_serve, args=(theirs, device, threads))
        process.start()
        theirs.close()  # so that the worker's death ends the pipe
        return _Worker(device, process, ours)

    def _bury(self, worker: _Worker, deaths: Counter[str]) -> Outcome:
        """Take leave of a dead worker; its job is busy, to be taken up again, or lost."""
        worker.process.join()
        worker.pipe.close()
        job = worker.job
        assert job is not None
        deaths[job.run.key] += 1
        code = worker.process.exitcode
        how = f"a worker on {worker.device} died (exit status {code}) at {job.run.title}"
        if deaths[job.run.key] > self.retries:
            return Outcome(job, Status.LOST, how)
        self.say(f"{how}; its run is taken up again")
        return Outcome(job, Status.BUSY, how)

    @staticmethod
    def _stop(idle: Sequence[_Worker], busy: Sequence[_Worker]) -> None:
        for worker in idle:
            worker.pipe.close()
        for worker in busy:  # the sweep was abandoned: what they do goes on from checkpoints later
            worker.process.terminate()
        for worker in (*idle, *busy):
            worker.process.join()
            worker.pipe.close()


def _send(pipe: Connection, job: Job) -> None:
    with suppress(OSError):  # it died while idle: reading from its pipe will tell
        pipe.send(job)


def _receive(pipe: Connection) -> Outcome | None:
    """Return what a worker says of its job; None if it died."""
    try:
        return cast(Outcome, pipe.recv())
    except (EOFError, OSError):
        return None


class _Orphaned(Watcher):
    """Ends a worker whose sweep was killed, after the epoch it is at."""

    def __init__(self, parent: int) -> None:
        self.parent = parent

    def epoch(self, row: Row) -> None:
        if os.getppid() != self.parent:
            raise SystemExit(1)


def _serve(pipe: Connection, device: str, threads: int) -> None:
    """Carry out jobs until the pipe ends."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the sweep itself ends its workers
    if device == "cpu":  # OMP_NUM_THREADS may ask for fewer
        torch.set_num_threads(min(threads, torch.get_num_threads()))
    watcher = _Orphaned(os.getppid())
    while True:
        try:
            job: Job = pipe.recv()
        except EOFError:
            return
        placed = replace(job, means=replace(job.means, device=device))
        outcome = perform(placed, [watcher])
        try:
            pipe.send(replace(outcome, job=job))
        except OSError:
            return  # nobody is there to hear it; the record is written
