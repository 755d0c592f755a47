"""Executors and sweeps: every run is trained once, even if workers die."""

import errno
import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import sweeping
import torch
from recorded import recorded
from sweeping import CPU, TINY

from wsam.lab import records
from wsam.lab.run import Run
from wsam.lab.trainer import run_checkpoints
from wsam.report import gather
from wsam.sweep import InProcess, Job, Outcome, Processes, Status, local_devices, run_job, sweep
from wsam.sweep.executors import _serve


def workers():
    """Return the child processes except daemons, which belong to the distributed tests."""
    return [child for child in multiprocessing.active_children() if not child.daemon]


def statuses(outcomes):
    return {outcome.job.run.seed: str(outcome.status) for outcome in outcomes}


def test_a_job_finishes_then_skips(tmp_path):
    (job,) = sweeping.make_jobs(tmp_path, 1)
    first, second = run_job(job), run_job(job)
    assert (first.status, second.status) == (Status.FINISHED, Status.SKIPPED)
    assert first.has_record
    assert second.has_record
    assert first.error == second.error == records.final_error(records.read(tmp_path, job.run))


def test_a_locked_run_is_busy(tmp_path, monkeypatch):
    """Its data is not loaded, since a sweep tries it repeatedly."""
    monkeypatch.setattr("wsam.lab.trainer.make_problem", lambda *_: pytest.fail("loaded"))
    (job,) = sweeping.make_jobs(tmp_path, 1)
    with records.lock_run(tmp_path, job.run):
        assert run_job(job).status is Status.BUSY
    assert not records.record_path(tmp_path, job.run).exists()


def test_failed_refused_and_erroneous_jobs(tmp_path, capsys):
    diverging = TINY.replace(method="vanilla", base_args={"lr": 1e30}, epochs=2)
    failed = run_job(Job(diverging, tmp_path, CPU))
    assert failed.status is Status.FAILED
    assert "loss became" in failed.detail
    refused = run_job(Job(TINY.replace(hyper={"rho": -1.0}), tmp_path, CPU))
    assert refused.status is Status.REFUSED
    assert "rho" in refused.detail
    (tmp_path / "file").touch()
    no_folder = run_job(Job(TINY, tmp_path / "file" / "runs", CPU))
    assert no_folder.status is Status.REFUSED
    folder = tmp_path / "file" / "runs"
    expected = f"{TINY.title}: cannot create the folder {folder}"
    assert no_folder.detail.startswith(expected)
    assert no_folder.detail.endswith(": Not a directory")
    bug = run_job(Job(TINY, tmp_path, CPU, sweeping.raise_bug))
    assert (bug.status, bug.detail) == (Status.ERROR, "RuntimeError: a bug")
    type_error = run_job(Job(TINY, tmp_path, CPU, lambda *_: len(3)))
    assert type_error.status is Status.ERROR
    assert "Traceback" in capsys.readouterr().err


class SometimesBusy:
    """Reports a job as busy a given number of times before it finishes."""

    def __init__(self, busy):
        self.busy = dict(busy)
        self.rounds = []

    def run(self, jobs):
        jobs = list(jobs)
        self.rounds.append([job.run.seed for job in jobs])
        for job in jobs:
            remaining = self.busy.get(job.run.seed, 0)
            self.busy[job.run.seed] = remaining - 1
            yield Outcome(job, Status.BUSY if remaining > 0 else Status.FINISHED)


def raise_out_of_memory(run, out, execution, callbacks):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has")


def test_out_of_memory_is_one_line(tmp_path, capsys):
    """It concerns this run, and is not reported as a bug. `task` is called instead of `train`."""
    outcome = run_job(Job(TINY, tmp_path, CPU, task=raise_out_of_memory))
    assert outcome.status is Status.ERROR
    assert outcome.detail == "out of memory: CUDA out of memory"
    assert capsys.readouterr().err == ""


def test_busy_jobs_are_tried_again(tmp_path):
    executor = SometimesBusy({1: 2, 2: 1})
    done = list(sweep(sweeping.make_jobs(tmp_path, 4), executor, poll=0))
    assert [outcome.job.run.seed for outcome in done] == [0, 3, 2, 1]
    assert executor.rounds == [[0, 1, 2, 3], [1, 2], [1]]


def test_a_refused_job_stops_the_sweep(tmp_path):
    jobs = sweeping.make_jobs(tmp_path, 3)
    jobs[1] = replace(jobs[1], run=Run(data="cifar10", train_limit=10))
    source = replace(CPU.source, folder=tmp_path / "none", download=False)
    jobs[1] = replace(jobs[1], execution=replace(CPU, source=source))
    done = []
    with pytest.raises(ValueError, match=r"cifar10 cnn wsam .*cifar-10-binary.tar.gz is not in"):
        done.extend(sweep(jobs, InProcess()))
    assert len(recorded(tmp_path)) == 1
    done = list(sweep(jobs, InProcess(), stop_if_refused=False))
    assert [str(outcome.status) for outcome in done] == ["skipped", "refused", "finished"]


def damage_record(out, run):
    records.record_path(out, run).write_text("{")


def make_record_a_folder(out, run):
    records.record_path(out, run).mkdir()


def replace_checkpoint(out, run):
    run_checkpoints(run, out).save(1, {"run": "another"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_record, "KEY.json is not valid JSON; remove it to run again"),
        (make_record_a_folder, "KEY.json is a folder, expected a file"),
        (replace_checkpoint, "KEY/checkpoints contains a checkpoint of another run"),
    ],
)
def test_a_damaged_file_affects_its_own_job_only(tmp_path, damage, message, capsys):
    jobs = sweeping.make_jobs(tmp_path, 3)
    damage(tmp_path, jobs[1].run)
    done = list(sweep(jobs, InProcess()))
    assert statuses(done) == {0: "finished", 1: "error", 2: "finished"}
    assert done[1].detail.endswith(message.replace("KEY", jobs[1].run.key))
    assert capsys.readouterr().err == "", "no traceback"


def disk_full_on_write(monkeypatch, out):
    monkeypatch.setattr(os, "fsync", lambda _: raise_disk_full())


def disk_full_on_lock(monkeypatch, out):
    path = records.work_folder(out, TINY) / "lock"
    monkeypatch.setattr("wsam.lab.records.lock_run", lambda *_: raise_disk_full(str(path)))


def raise_disk_full(*path):
    raise OSError(errno.ENOSPC, "No space left on device", *path)


@pytest.mark.parametrize("fill", [disk_full_on_write, disk_full_on_lock])
def test_a_full_disk_stops_the_sweep(tmp_path, monkeypatch, fill):
    """Although the message contains a file of the first job, it affects all jobs."""
    fill(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match=rf"(?i){TINY.key}.*no space left on device"):
        list(sweep(sweeping.make_jobs(tmp_path, 2), InProcess()))


def test_jobs_are_requested_when_a_worker_is_free(tmp_path):
    """A search chooses a job by the outcomes so far."""
    seen = []

    def lazy_jobs():
        for job in sweeping.make_jobs(tmp_path, 3):
            seen.append(len(recorded(tmp_path)))
            yield job

    assert statuses(sweep(lazy_jobs(), InProcess())) == {
        0: "finished",
        1: "finished",
        2: "finished",
    }
    assert seen == [0, 1, 2]


def test_a_report_lists_a_lost_run(tmp_path):
    (job,) = sweeping.make_jobs(tmp_path, 1)
    lost = Outcome(job, Status.LOST, "a worker on cpu died (exit status -9)")
    assert list(sweep([job], SimpleNamespace(run=lambda jobs: iter([lost])))) == [lost]
    (trouble,) = gather(tmp_path).troubles
    assert (trouble.kind, trouble.what, trouble.why) == ("failed", job.run.title, lost.detail)


@pytest.mark.slow
def test_a_job_that_kills_every_worker_is_lost_and_the_others_finish(tmp_path):
    messages = []
    jobs = sweeping.make_jobs(tmp_path, 3)
    jobs[0] = replace(jobs[0], after=sweeping.die)
    done = list(sweep(jobs, Processes(["cpu"], retries=1, log=messages.append)))
    assert statuses(done) == {0: "lost", 1: "finished", 2: "finished"}
    assert len(recorded(tmp_path)) == 3
    (message,) = messages
    assert "exit status -9" in message
    assert "retrying its run" in message
    assert "died (exit status -9) at digits cnn sam" in done[0].detail
    assert not workers()


def test_an_interrupted_sweep_ends_its_workers(tmp_path):
    def interrupted():
        yield from sweeping.make_jobs(tmp_path, 1)
        assert len(workers()) == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(Processes(["cpu", "cpu"]).run(interrupted()))
    assert not workers()


@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_a_worker_that_starts_ignores_ctrl_c():
    """A terminal sends it to all processes, also while they import torch; the sweep ends them."""
    before = signal.getsignal(signal.SIGINT)
    worker = Processes(["cpu"])._start("cpu")
    assert signal.getsignal(signal.SIGINT) is before
    os.kill(worker.process.pid, signal.SIGINT)
    worker.pipe.close()
    worker.process.join()
    assert worker.process.exitcode == 0


def test_workers_start_in_another_thread():
    """Python handles signals in the main thread only."""
    executor = Processes(["cpu"])
    with ThreadPoolExecutor(1) as pool:
        worker = pool.submit(executor._start, "cpu").result()
    executor._stop([worker], [])
    assert worker.process.exitcode == 0


@pytest.mark.slow
def test_kept_workers_run_the_next_jobs(tmp_path):
    executor = Processes(["cpu"], keep=True)
    jobs = sweeping.make_jobs(tmp_path, 2)
    list(executor.run(jobs[:1]))
    (first,) = workers()
    (outcome,) = executor.run(jobs[1:])
    assert outcome.status is Status.FINISHED
    assert workers() == [first]
    executor.close()
    assert not workers()


def test_local_devices(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 7}, raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert local_devices() == ["cpu"] * 3
    assert local_devices("cpu", 2) == ["cpu", "cpu"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert local_devices() == ["cuda:0", "cuda:1"]
    assert local_devices("auto", 3) == ["cuda:0", "cuda:1", "cuda:0"]
    assert local_devices("cuda:1") == ["cuda:1"]


def test_workers_share_the_available_cores(monkeypatch):
    """A batch system may restrict a job to some cores of the machine."""
    started = []

    class Context:
        Pipe = staticmethod(multiprocessing.Pipe)

        def Process(self, target, args):
            started.append(args[2])
            return SimpleNamespace(start=lambda: None)

    monkeypatch.setattr("wsam.sweep.executors.get_context", lambda _: Context())
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    Processes(["cpu", "cpu"])._start("cpu").pipe.close()
    monkeypatch.delattr(os, "sched_getaffinity")
    Processes(["cpu", "cpu"])._start("cpu").pipe.close()
    assert started == [4, 32]


def test_a_worker_ends_quietly_after_its_parent_was_killed():
    """With an outcome that the parent had not read, the pipe is reset instead of ended."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    theirs.send("unread")
    worker = context.Process(target=_serve, args=(theirs, "cpu", 1))
    worker.start()
    theirs.close()
    ours.close()
    worker.join()
    assert worker.exitcode == 0
