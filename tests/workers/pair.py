"""A few processes that form one gloo group and do what they are told, task after task.

Starting a process and importing torch takes seconds, a task milliseconds: so the processes live as
long as the tests do. A task is a function of a module that the processes can import; every rank
calls it with the same arguments, and what they return comes back in the order of ranks.
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
import torch.multiprocessing as processes

TIMEOUT = 240.0
"""Seconds a task may take on a busy machine; it should take less than one.

The first task waits for the processes to start, too: some seconds.
"""
GRACE = 20.0
"""Seconds the others get to fail, too, once one rank has."""


def serve(rank: int, size: int, timeout: float, store: str, pipe: Connection) -> None:
    """The life of a rank: join the group, then run tasks until the pipe closes."""
    import wsam

    torch.set_num_threads(1)
    warnings.simplefilter("error", wsam.WsamWarning)
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
            pipe.send_bytes(pickle.dumps(answer))  # not `send`: no memory is to be shared


class Team:
    """Processes started when first needed, and again after a task has failed."""

    def __init__(self, size: int = 2, timeout: float = TIMEOUT) -> None:
        self.size, self.timeout = size, timeout
        self._pipes: list[Connection] = []
        self._members: list[Any] = []
        atexit.register(self.close)

    def run(self, task: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Let every rank call the task; return their results, or fail with their tracebacks."""
        answers = self.ask(task, *args, **kwargs)
        if not all(fine for fine, _ in answers):
            said = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers)]
            raise AssertionError("\n".join(said))
        return [result for _, result in answers]

    def ask(self, task: Callable[..., Any], *args: Any, **kwargs: Any) -> list[tuple[bool, Any]]:
        """Return for each rank whether all went well, and its result or what went wrong."""
        if not self._members:
            self._start()
        message = pickle.dumps((task, args, kwargs))
        for pipe in self._pipes:
            pipe.send_bytes(message)
        said = dict(self._answers())
        answers = [said.get(rank, (False, "no answer")) for rank in range(self.size)]
        if not all(fine for fine, _ in answers):
            self.close()  # the ranks may be out of step with each other
        return answers

    def _answers(self) -> Iterator[tuple[int, tuple[bool, Any]]]:
        """Yield what ranks answer, until all have or none will."""
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
        context = processes.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        for rank in range(self.size):
            here, there = context.Pipe()
            member = context.Process(
                target=serve, args=(rank, self.size, self.timeout, store, there), daemon=True
            )
            member.start()
            there.close()
            self._pipes.append(here)
            self._members.append(member)

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for member in self._members:
            member.join(0.2)
            if member.is_alive():
                member.kill()
                member.join()
        if self._members:
            self._folder.cleanup()
        self._pipes, self._members = [], []


@functools.cache
def team(size: int = 2) -> Team:
    """The one team of this size in this process."""
    return Team(size)
