"""`wsam sweep` and kill -9: no run is trained twice or lost; interrupted runs resume."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from recorded import recorded

from wsam.lab.execution import ExecutionConfig
from wsam.paper import find
from wsam.sweep import Job, Status, run_job

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="reads /proc")

SLOW = """
[run]
method = "sam"
epochs = 30
train_limit = 500
[grid]
rho = [0.05]
"""


@pytest.fixture
def grid(tmp_path):
    def make(text):
        path = tmp_path / "grid.toml"
        path.write_text(text)
        return path

    return make


def start(grid, out, seeds, workers=1):
    words = [sys.executable, "-m", "wsam", "sweep", str(grid), "--out", str(out)]
    words += [
        "--seeds",
        seeds,
        "--device",
        "cpu",
        "--workers",
        str(workers),
        "--checkpoint-seconds",
        "0",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


def workers_of(process):
    """Return the ids of the processes that run jobs."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children if b"spawn_main" in command_of(child)]


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait_for(condition, process=None, seconds=240):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "took too long"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.05)
    return found


def stop_worker(process, out):
    """Send SIGSTOP to a worker whose run has a checkpoint, and return its id."""
    worker = worker_with_checkpoint(process, out)
    if worker is None:
        return None
    os.kill(worker, signal.SIGSTOP)
    if worker_with_checkpoint(process, out) == worker:
        return worker
    os.kill(worker, signal.SIGCONT)  # it had just finished that run
    return None


def worker_with_checkpoint(process, out):
    """Return a worker whose run has a checkpoint, identified by its open lock file."""
    locks = {str(path.parents[1] / "lock") for path in out.glob("work/*/checkpoints/*.json")}
    for worker in workers_of(process):
        try:
            held = {str(path.readlink()) for path in Path(f"/proc/{worker}/fd").iterdir()}
        except OSError:
            continue  # the process ended or closed a file
        if held & locks:
            return worker
    return None


def finish(process):
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, out + err
    return err


def finished_seeds(*logs):
    return Counter(seed for log in logs for seed in re.findall(r"\] finished .*seed (\d+)", log))


def curves(out):
    """Return the curves by seed, without timings."""
    return {
        record["settings"]["seed"]: [row | {"seconds": 0} for row in record["curve"]]
        for record in recorded(out)
    }


@pytest.mark.slow
def test_two_sweeps_share_a_folder_and_one_worker_is_killed(tmp_path, grid):
    path, out = grid(SLOW), tmp_path / "out"
    both = [start(path, out, "0,1,2")]
    victim = wait_for(lambda: stop_worker(both[0], out), both[0])
    both.append(start(path, out, "0,1,2"))  # started later, or it could finish all runs alone
    wait_for(lambda: workers_of(both[1]), both[1])
    os.kill(victim, signal.SIGKILL)
    logs = [finish(process) for process in both]
    assert logs[0].count("died (exit status -9)") == 1
    assert finished_seeds(*logs) == {"0": 1, "1": 1, "2": 1}, "every run once"
    assert sorted(record["resumed"] for record in recorded(out)) == [0, 0, 1]
    assert [len(curve) for curve in curves(out).values()] == [30] * 3
    for log in logs:
        assert log.count("] finished") + log.count("] skipped") == 3


@pytest.mark.slow
def test_another_sweep_resumes_the_runs_of_a_killed_one(tmp_path, grid):
    path, out = grid(SLOW), tmp_path / "out"
    first = start(path, out, "0,1")
    worker = wait_for(lambda: stop_worker(first, out), first)
    first.kill()  # the sweep only: its worker must detect that and exit
    first.wait()
    os.kill(worker, signal.SIGCONT)
    first.communicate()
    wait_for(lambda: b"spawn_main" not in command_of(worker), seconds=90)
    assert not recorded(out)
    log = finish(start(path, out, "0,1"))
    assert finished_seeds(log) == {"0": 1, "1": 1}
    resumed = {r["settings"]["seed"]: r["resumed"] for r in recorded(out)}
    assert resumed == {0: 1, 1: 0}
    whole = run_job(Job(find(str(path)).runs[0], tmp_path / "whole", ExecutionConfig(device="cpu")))
    assert whole.status is Status.FINISHED
    assert curves(out)[0] == curves(tmp_path / "whole")[0]
