"""Executors and the sweep: every run once, whoever dies on the way."""

import errno
import multiprocessing
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import sweeping
from recorded import recorded
from sweeping import CPU, TINY

from wsam.lab import records
from wsam.lab.run import Run
from wsam.lab.train import checkpoints
from wsam.sweep import Here, Job, Outcome, Processes, Status, local_devices, perform, sweep


def workers():
    """Return the processes of this one, without daemons: those serve the tests of several ranks."""
    return [child for child in multiprocessing.active_children() if not child.daemon]


def statuses(outcomes):
    return {outcome.job.run.seed: str(outcome.status) for outcome in outcomes}


def test_perform_finishes_then_skips(tmp_path):
    (job,) = sweeping.jobs(tmp_path, 1)
    first, second = perform(job), perform(job)
    assert (first.status, second.status) == (Status.FINISHED, Status.SKIPPED)
    assert first.settled
    assert second.settled
    assert first.error == second.error == records.final_error(records.read(tmp_path, job.run))


def test_perform_leaves_a_busy_run_alone(tmp_path, monkeypatch):
    """Without loading its data: it is looked at again and again until it is free."""
    monkeypatch.setattr("wsam.lab.train.make_feed", lambda *_: pytest.fail("loaded"))
    (job,) = sweeping.jobs(tmp_path, 1)
    with records.claim(tmp_path, job.run):
        assert perform(job).status is Status.BUSY
    assert not records.record_path(tmp_path, job.run).exists()


def test_perform_tells_failure_refusal_and_defect_apart(tmp_path, capsys):
    wild = TINY.replace(method="vanilla", base_args={"lr": 1e30}, epochs=2)
    failed = perform(Job(wild, tmp_path, CPU))
    assert failed.status is Status.FAILED
    assert "loss became" in failed.detail
    refused = perform(Job(TINY.replace(hyper={"rho": -1.0}), tmp_path, CPU))
    assert refused.status is Status.REFUSED
    assert "rho" in refused.detail
    (tmp_path / "file").touch()
    nowhere = perform(Job(TINY, tmp_path / "file" / "runs", CPU))
    assert nowhere.status is Status.REFUSED
    assert nowhere.detail.startswith(f"{TINY.title}: the folder {tmp_path / 'file' / 'runs'}")
    assert nowhere.detail.endswith("cannot be made: there is a file in its way")
    defect = perform(Job(TINY, tmp_path, CPU, sweeping.explode))
    assert (defect.status, defect.detail) == (Status.ERROR, "RuntimeError: a defect")
    mistaken = perform(Job(TINY, tmp_path, CPU, lambda *_: len(3)))
    assert mistaken.status is Status.ERROR, "a wrong type on the way is no mistake of the user's"
    assert "Traceback" in capsys.readouterr().err


class Scripted:
    """Reports a job as busy a few times before it finishes it."""

    def __init__(self, busy):
        self.busy = dict(busy)
        self.rounds = []

    def carry_out(self, jobs):
        jobs = list(jobs)
        self.rounds.append([job.run.seed for job in jobs])
        for job in jobs:
            left = self.busy.get(job.run.seed, 0)
            self.busy[job.run.seed] = left - 1
            yield Outcome(job, Status.BUSY if left > 0 else Status.FINISHED)


def test_busy_jobs_are_looked_at_again(tmp_path):
    executor = Scripted({1: 2, 2: 1})
    done = list(sweep(sweeping.jobs(tmp_path, 4), executor, poll=0))
    assert [outcome.job.run.seed for outcome in done] == [0, 3, 2, 1]
    assert executor.rounds == [[0, 1, 2, 3], [1, 2], [1]]


def test_a_refused_job_stops_the_sweep(tmp_path):
    jobs = sweeping.jobs(tmp_path, 3)
    jobs[1] = replace(jobs[1], run=Run(data="cifar10", train_limit=10))
    source = replace(CPU.source, folder=tmp_path / "none", download=False)
    jobs[1] = replace(jobs[1], means=replace(CPU, source=source))
    done = []
    with pytest.raises(ValueError, match=r"cifar10 cnn wsam .*cifar-10-binary.tar.gz is not in"):
        done.extend(sweep(jobs, Here()))
    assert len(recorded(tmp_path)) == 1


def spoil_record(out, run):
    records.record_path(out, run).write_text("{")


def hide_record(out, run):
    records.record_path(out, run).mkdir()


def spoil_checkpoint(out, run):
    checkpoints(run, out).save(1, {"run": "another"})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_record, "KEY.json is not valid JSON; remove it to run again"),
        (hide_record, "KEY.json is a folder; a file is wanted"),
        (spoil_checkpoint, "KEY/checkpoints holds a checkpoint of another run"),
    ],
)
def test_a_damaged_file_is_its_own_job_s_affair(tmp_path, spoil, message, capsys):
    jobs = sweeping.jobs(tmp_path, 3)
    spoil(tmp_path, jobs[1].run)
    done = list(sweep(jobs, Here()))
    assert statuses(done) == {0: "finished", 1: "error", 2: "finished"}
    assert done[1].detail.endswith(message.replace("KEY", jobs[1].run.key))
    assert capsys.readouterr().err == "", "no defect: it has no traceback"


def full_when_written(monkeypatch, out):
    monkeypatch.setattr(os, "fsync", lambda _: refuse_space())


def full_when_locked(monkeypatch, out):
    path = records.work_folder(out, TINY) / "lock"
    monkeypatch.setattr("wsam.lab.records.claim", lambda *_: refuse_space(str(path)))


def refuse_space(*path):
    raise OSError(errno.ENOSPC, "No space left on device", *path)


@pytest.mark.parametrize("fill", [full_when_written, full_when_locked])
def test_a_full_disk_stops_the_sweep(tmp_path, monkeypatch, fill):
    """Though the message names a file of the first job: the others would fare no better."""
    fill(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match=rf"(?i){TINY.key}.*no space left on device"):
        list(sweep(sweeping.jobs(tmp_path, 2), Here()))


def test_jobs_are_taken_only_when_there_is_room(tmp_path):
    """A search decides late: what a job is may depend on what became of those before."""
    seen = []

    def late():
        for job in sweeping.jobs(tmp_path, 3):
            seen.append(len(recorded(tmp_path)))
            yield job

    assert statuses(sweep(late(), Here())) == {0: "finished", 1: "finished", 2: "finished"}
    assert seen == [0, 1, 2]


@pytest.mark.slow
def test_a_job_that_kills_every_worker_is_lost_and_the_others_are_not(tmp_path):
    said = []
    jobs = sweeping.jobs(tmp_path, 3)
    jobs[0] = replace(jobs[0], after=sweeping.die)
    done = list(sweep(jobs, Processes(["cpu"], retries=1, say=said.append)))
    assert statuses(done) == {0: "lost", 1: "finished", 2: "finished"}
    assert len(recorded(tmp_path)) == 3
    assert len(said) == 1
    assert "exit status -9" in said[0]
    assert "taken up again" in said[0]
    assert "died (exit status -9) at digits cnn sam" in done[0].detail
    assert not workers()


def test_an_abandoned_sweep_ends_its_workers(tmp_path):
    def interrupted():
        yield from sweeping.jobs(tmp_path, 1)
        assert len(workers()) == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(Processes(["cpu", "cpu"]).carry_out(interrupted()))
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
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        local_devices("cpu", 0)


def test_workers_share_the_cores_that_the_sweep_may_use(monkeypatch):
    """Not those of the machine: a batch system may lend a job only a few of them."""
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
    assert started == [4, 32], "where the system does not tell, the machine's"
