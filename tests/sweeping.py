"""Small jobs for tests of sweeps, some of which kill their worker. Workers import this module."""

import os
import signal
from pathlib import Path

from wsam.lab.execution import ExecutionConfig
from wsam.lab.run import Run
from wsam.sweep import Job

CPU = ExecutionConfig(device="cpu", checkpoint_seconds=0)
TINY = Run(method="sam", epochs=1, train_limit=128, test_limit=64, batch_size=64)


def make_jobs(out, count=3, after=None):
    return [Job(TINY.replace(seed=seed), Path(out), CPU, after) for seed in range(count)]


def die(run, out, execution):
    """Kill the worker."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_once(run, out, execution):
    """Kill the worker the first time; a file records that."""
    marker = Path(out) / f"{run.key}.died"
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def raise_bug(run, out, execution):
    raise RuntimeError("a bug")
