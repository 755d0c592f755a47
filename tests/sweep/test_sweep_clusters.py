"""Jobs on Ray and with submitit: same records, and dead workers are replaced."""

import json
import socket
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import sweeping
import torch
from command import error_of

from wsam.lab import records
from wsam.sweep import Outcome, Status, run_job, sweep
from wsam.sweep.ray_cluster import RayCluster
from wsam.sweep.slurm import Submitit, Task


def reproducible(record):
    """Return the parts of a record that do not depend on time and machine."""
    return {
        "settings": record["settings"],
        "curve": [row | {"seconds": 0} for row in record["curve"]],
    }


def check(outcomes, out, tmp_path):
    """Require that all jobs have the record that this process would have made."""
    done = {outcome.job.run.seed: outcome for outcome in outcomes}
    assert sorted(done) == [0, 1]
    assert all(outcome.has_record for outcome in done.values()), [o.detail for o in done.values()]
    assert (out / f"{done[0].job.run.key}.died").exists(), "one worker was killed"
    local = [run_job(job) for job in sweeping.make_jobs(tmp_path / "local", 2)]
    for outcome in local:
        run = outcome.job.run
        assert reproducible(records.read(out, run)) == reproducible(
            records.read(tmp_path / "local", run)
        )


@pytest.fixture
def worker_environment(monkeypatch):
    """Let workers import test modules, and use one thread as this process does."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("worker_environment")
def test_ray_with_two_workers(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")  # never kill for lack of memory
    out = tmp_path / "out"
    jobs = sweeping.make_jobs(out, 2)
    jobs[0] = replace(jobs[0], after=sweeping.die_once)
    # A short folder name: the length of socket paths is limited.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        check(sweep(jobs, RayCluster("local", workers=2)), out, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("worker_environment")
def test_the_local_executor_of_submitit(tmp_path):
    out = tmp_path / "out"
    jobs = sweeping.make_jobs(out, 2)
    jobs[0] = replace(jobs[0], after=sweeping.die_once)
    executor = Submitit(tmp_path / "submitit", "local", 2, {"timeout_min": 5})
    check(sweep(jobs, executor), out, tmp_path)


@pytest.mark.slow
def test_a_preempted_slurm_job_is_submitted_again(tmp_path):
    (job,) = sweeping.make_jobs(tmp_path, 1)
    task = Task()
    again = task.checkpoint(job)
    assert again.function is task
    assert again.args == (job,)
    assert task(job).status is Status.FINISHED


def test_max_tasks_on_a_cluster():
    resources = {"CPU": 16.0, "GPU": 2.0}
    assert RayCluster()._max_tasks(resources) == 16
    assert RayCluster(workers=4)._max_tasks(resources) == 4
    assert RayCluster(gpus=1)._max_tasks(resources) == 2
    assert RayCluster(gpus=0.5)._max_tasks(resources) == 4
    with pytest.raises(ValueError, match="a run needs 1 GPUs, the cluster has 0"):
        RayCluster(gpus=1)._max_tasks({"CPU": 2.0})


class FakeRay:
    """Finishes each task at once."""

    def __init__(self, **resources):
        self.cluster_resources = lambda: resources

    def remote(self, function):
        self.function = function
        return self

    def options(self, **_):
        return SimpleNamespace(remote=lambda job: job)

    def wait(self, references):
        return references, []

    def get(self, reference):
        return Outcome(reference, Status.FINISHED)


def test_jobs_on_a_cluster_with_gpus_must_request_them(tmp_path):
    """Otherwise every task would use the first GPU of its node."""
    on_cpu = sweeping.make_jobs(tmp_path, 2)
    anywhere = [replace(job, execution=replace(job.execution, device="auto")) for job in on_cpu]
    with_gpus, without = FakeRay(CPU=4.0, GPU=2.0), FakeRay(CPU=4.0)
    with pytest.raises(ValueError, match="--gpus 1 or --device cpu"):
        list(RayCluster()._run_tasks(with_gpus, iter(anywhere)))
    for cluster, ray, jobs in (
        (RayCluster(gpus=1), with_gpus, anywhere),
        (RayCluster(), with_gpus, on_cpu),
        (RayCluster(), without, anywhere),
    ):
        assert [outcome.job for outcome in cluster._run_tasks(ray, iter(jobs))] == jobs


@pytest.mark.parametrize(
    ("library", "option", "extra"),
    [
        ("ray", "--ray local", "ray"),
        ("submitit", "--submitit local", "slurm"),
        ("optuna", "--optuna", "optuna"),
    ],
)
def test_missing_libraries(monkeypatch, tmp_path, library, option, extra):
    monkeypatch.setitem(sys.modules, library, None)
    line = error_of("sweep", "rho", "--smoke", *option.split(), "--out", tmp_path)
    assert line == f"wsam: this needs {library}: pip install 'wsam[{extra}]'\n"


def test_an_unreachable_ray_address(tmp_path):
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}", "127.0.0.1:99999999"):
            with pytest.raises(ValueError, match="no Ray cluster at '"):
                next(RayCluster(address).run(sweeping.make_jobs(tmp_path)))


def test_an_invalid_ray_address(tmp_path):
    words = ("sweep", "cifar", "--smoke", "--ray", "foo", "--device", "cpu", "--out", tmp_path)
    assert error_of(*words).startswith("wsam: no Ray cluster at 'foo': ")


def test_invalid_submitit_settings(tmp_path):
    jobs = sweeping.make_jobs(tmp_path)
    with pytest.raises(ValueError, match=r"submitit: .*nope"):
        next(Submitit(tmp_path, "local", parameters={"nope": 1}).run(jobs))


def test_jobs_can_be_pickled():
    import pickle

    (job,) = sweeping.make_jobs("/out", 1)
    copy = pickle.loads(pickle.dumps(job))
    assert copy == job
    assert json.dumps(copy.run.to_dict()) == json.dumps(job.run.to_dict())
