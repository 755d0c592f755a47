"""The same jobs on Ray and by submitit: same records, same resume, deaths survived."""

import json
import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import sweeping
import torch
from command import error_of

from wsam.lab import records
from wsam.sweep import Outcome, Status, sweep
from wsam.sweep.ray_cluster import RayCluster
from wsam.sweep.slurm import Submitit, Task


def plain(record):
    """Return what of a record does not depend on where and when it was made."""
    return {
        "settings": record["settings"],
        "curve": [row | {"seconds": 0} for row in record["curve"]],
    }


def check(outcomes, out, tmp_path):
    """All jobs have their record, equal to the one of a run in this process."""
    done = {outcome.job.run.seed: outcome for outcome in outcomes}
    assert sorted(done) == [0, 1]
    assert all(outcome.settled for outcome in done.values()), [o.detail for o in done.values()]
    assert (out / f"{done[0].job.run.key}.died").exists(), "one worker was killed"
    here = [sweeping.perform(job) for job in sweeping.jobs(tmp_path / "here", 2)]
    for outcome in here:
        run = outcome.job.run
        assert plain(records.read(out, run)) == plain(records.read(tmp_path / "here", run))


@pytest.fixture
def like_here(monkeypatch):
    """Let workers import the functions of tests, and compute on as many threads as this process."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("like_here")
def test_ray_with_two_workers(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray keeps its cluster's token there
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")  # else it kills where memory is short
    out = tmp_path / "out"
    jobs = sweeping.jobs(out, 2)
    jobs[0] = replace(jobs[0], after=sweeping.die_once)
    # A folder of its own, with a short name: the paths of sockets may not be long.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        check(sweep(jobs, RayCluster("local", workers=2)), out, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("like_here")
def test_submitit_s_local_executor(tmp_path):
    out = tmp_path / "out"
    jobs = sweeping.jobs(out, 2)
    jobs[0] = replace(jobs[0], after=sweeping.die_once)
    executor = Submitit(tmp_path / "submitit", "local", 2, {"timeout_min": 5})
    check(sweep(jobs, executor), out, tmp_path)


def test_a_preempted_slurm_job_asks_for_itself_again(tmp_path):
    (job,) = sweeping.jobs(tmp_path, 1)
    task = Task()
    again = task.checkpoint(job)
    assert again.function is task
    assert again.args == (job,)
    assert task(job).status is Status.FINISHED


def test_room_on_a_cluster():
    here = {"CPU": 16.0, "GPU": 2.0}
    assert RayCluster()._room(here) == 16
    assert RayCluster(workers=4)._room(here) == 4
    assert RayCluster(gpus=1)._room(here) == 2
    assert RayCluster(gpus=0.5)._room(here) == 4
    with pytest.raises(ValueError, match="a run wants 1 GPUs, the cluster has 0"):
        RayCluster(gpus=1)._room({"CPU": 2.0})


class PretendRay:
    """Carries out a task at once, on a cluster with a GPU."""

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


def test_gpus_of_a_cluster_are_asked_for_or_left_alone(tmp_path):
    """Else every task would take the first GPU of its node."""
    on_cpu = sweeping.jobs(tmp_path, 2)
    anywhere = [replace(job, means=replace(job.means, device="auto")) for job in on_cpu]
    with_gpus, without = PretendRay(CPU=4.0, GPU=2.0), PretendRay(CPU=4.0)
    with pytest.raises(ValueError, match="--gpus 1 or --device cpu"):
        list(RayCluster()._carry_out(with_gpus, iter(anywhere)))
    for cluster, ray, jobs in (
        (RayCluster(gpus=1), with_gpus, anywhere),
        (RayCluster(), with_gpus, on_cpu),
        (RayCluster(), without, anywhere),
    ):
        assert [outcome.job for outcome in cluster._carry_out(ray, iter(jobs))] == jobs


@pytest.mark.parametrize(
    ("module", "executor", "extra"),
    [
        ("ray", RayCluster(), "ray"),
        ("submitit", Submitit(Path("x"), "local"), "slurm"),
    ],
)
def test_missing_engines_say_what_to_install(monkeypatch, tmp_path, module, executor, extra):
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(ValueError, match=rf"pip install 'wsam\[{extra}\]'"):
        next(executor.carry_out(sweeping.jobs(tmp_path)))


def test_nobody_at_an_address_is_said_at_once(tmp_path, monkeypatch):
    with socket.socket() as taken:  # bound, but nobody listens there
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}", "127.0.0.1:99999999"):
            with pytest.raises(ValueError, match="no Ray cluster answers at '"):
                next(RayCluster(address).carry_out(sweeping.jobs(tmp_path)))


def test_what_is_no_address_names_the_option(tmp_path):
    words = ("sweep", "cifar", "--smoke", "--ray", "foo", "--device", "cpu", "--out", tmp_path)
    line = error_of(*words)
    assert line.startswith("wsam: --ray foo: ")
    assert "it takes local, auto, HOST:PORT or ray://HOST:PORT" in line


def test_bad_submitit_settings_are_named(tmp_path):
    jobs = sweeping.jobs(tmp_path)
    with pytest.raises(ValueError, match="unknown cluster 'pbs'; known: slurm, local"):
        next(Submitit(tmp_path, "pbs").carry_out(jobs))
    with pytest.raises(ValueError, match=r"submitit: .*nope"):
        next(Submitit(tmp_path, "local", parameters={"nope": 1}).carry_out(jobs))


def test_jobs_travel():
    """A job is pickled on its way to a worker, and is the same there."""
    import pickle

    (job,) = sweeping.jobs("/out", 1)
    copy = pickle.loads(pickle.dumps(job))
    assert copy == job
    assert json.dumps(copy.run.to_dict()) == json.dumps(job.run.to_dict())
