"""Processes that form a gloo group and run tasks, one after the other.

Starting a process and importing torch takes seconds, a task milliseconds, so all tests use the same
processes. A task is a function that the processes can import. Every rank calls it with the same
arguments; the results are returned in the order of ranks.
"""

import atexit
import contextlib
import functools
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

TIMEOUT = 240.0
"""Seconds a task may take on a busy machine. It usually takes less than one; the first task also waits
for the processes to start."""
GRACE = 20.0
"""Seconds to wait for the other ranks after one has failed."""


def serve(rank: int, size: int, timeout: float, store: str, pipe: Connection) -> None:
    """Join the group as a rank, and run tasks until the pipe closes."""
    import wsam

    torch.set_num_threads(1)
    warnings.simplefilter("error", wsam.WsamWarning)
    warnings.filterwarnings("ignore", "WSAM over", wsam.WsamWarning)
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", f"file://{store}", timeout=limit, rank=rank, world_size=size)
    while True:
        try:
            task, args, kwargs = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            return
        try:
            torch.manual_seed(0)
            answer = (True, task(*args, **kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
        with contextlib.suppress(BrokenPipeError):
            pipe.send_bytes(pickle.dumps(answer))  # `send` would share memory


class ProcessGroup:
    """Processes that are started at the first task, and again after a task has failed."""

    def __init__(self, size: int = 2, timeout: float = TIMEOUT) -> None:
        self.size, self.timeout = size, timeout
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        atexit.register(self.close)

    def run(self, task: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call the task on every rank; return the results, or fail with the tracebacks."""
        answers = self.try_run(task, *args, **kwargs)
        if not all(succeeded for succeeded, _ in answers):
            errors = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers)]
            raise AssertionError("\n".join(errors))
        return [result for _, result in answers]

    def try_run(
        self, task: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> list[tuple[bool, Any]]:
        """Return for each rank whether it succeeded, and its result or its traceback."""
        if not self._processes:
            self._start()
        message = pickle.dumps((task, args, kwargs))
        for pipe in self._pipes:
            pipe.send_bytes(message)
        found = dict(self._answers())
        answers = [found.get(rank, (False, "no answer")) for rank in range(self.size)]
        if not all(succeeded for succeeded, _ in answers):
            self.close()  # the ranks may be in different collectives
        return answers

    def _answers(self) -> Iterator[tuple[int, tuple[bool, Any]]]:
        """Yield ranks with their answers, until all have answered or the time is over."""
        deadline = time.monotonic() + TIMEOUT
        waiting = list(self._pipes)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(waiting, left):
                waiting.remove(pipe)
                try:
                    answer = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    answer = (False, "died")
                if not answer[0]:
                    deadline = min(deadline, time.monotonic() + GRACE)
                yield self._pipes.index(pipe), answer

    def _start(self) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(
                target=serve, args=(rank, self.size, self.timeout, store, there), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(0.2)
            if process.is_alive():
                process.kill()
                process.join()
        if self._processes:
            self._folder.cleanup()
        self._pipes, self._processes = [], []


@functools.cache
def process_group(size: int = 2) -> ProcessGroup:
    """Return the process group of this size, which all tests share."""
    return ProcessGroup(size)
