"""Jobs for the tests of sweeps: small runs, and ways to die. Workers import this file by name."""

import os
import signal
from pathlib import Path

from wsam.lab.means import Means
from wsam.lab.run import Run
from wsam.sweep import Job, perform

__all__ = ["CPU", "TINY", "die", "die_once", "explode", "jobs", "perform"]

CPU = Means(device="cpu", checkpoint_seconds=0)
TINY = Run(method="sam", epochs=1, train_limit=128, test_limit=64, batch_size=64)


def jobs(out, count=3, after=None):
    return [Job(TINY.replace(seed=seed), Path(out), CPU, after) for seed in range(count)]


def die(run, out, means):
    """Kill the worker, always."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_once(run, out, means):
    """Kill the worker the first time; leave a mark, so that the second time it lives."""
    mark = Path(out) / f"{run.key}.died"
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def explode(run, out, means):
    """Be a defect."""
    raise RuntimeError("a defect")
