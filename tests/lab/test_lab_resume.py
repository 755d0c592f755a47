"""An interrupted and resumed run ends with the same record as an uninterrupted one."""

import copy
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from training import CPU, SHORT, Stop, StopAfter, curve

from wsam.lab import models, records, trainer
from wsam.lab.callbacks import Callback
from wsam.lab.checkpoint import Checkpoints, load_state, save_state
from wsam.lab.errors import RunError
from wsam.lab.files import BusyError
from wsam.lab.rng import rank_states, set_rng_states
from wsam.lab.train import train

RUN = SHORT.replace(train_limit=144, test_limit=48, batch_size=32)  # four steps an epoch


@pytest.mark.parametrize(
    ("method", "hyper"),
    [
        ("wsam", {}),
        ("esam", {}),
        pytest.param("vanilla", {}, marks=pytest.mark.slow),
        pytest.param("gsam", {"rho": 0.2, "rho_min": 0.01}, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_ends_with_the_same_record(tmp_path, method, hyper):
    run = RUN.replace(method=method, hyper=hyper, epochs=4)
    uninterrupted = train(run, tmp_path / "uninterrupted", CPU)
    for stop in (StopAfter(steps=6), StopAfter(epochs=2), StopAfter(steps=7)):
        with pytest.raises(Stop):
            train(run, tmp_path / "resumed", CPU, [stop])
    callback = StopAfter()
    resumed = train(run, tmp_path / "resumed", CPU, [callback])
    assert curve(resumed) == curve(uninterrupted)
    assert resumed["final"] == uninterrupted["final"]
    assert resumed["settings"] == uninterrupted["settings"]
    assert (uninterrupted["resumed"], resumed["resumed"]) == (0, 2)
    assert callback.messages == ["resuming after epoch 2 of 4"]


@pytest.mark.parametrize("older", [False, True], ids=["current", "older format"])
def test_dropout_masks_resume(tmp_path, monkeypatch, older):
    def with_dropout(task):
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, task.outputs))

    monkeypatch.setitem(models._BUILDERS, "mlp", with_dropout)
    run = RUN.replace(model="mlp")
    uninterrupted = train(run, tmp_path / "uninterrupted", CPU)
    with pytest.raises(Stop):
        train(run, tmp_path / "resumed", CPU, [StopAfter(epochs=3)])
    if older:
        checkpoints = Checkpoints(records.work_folder(tmp_path / "resumed", run) / "checkpoints")
        state = checkpoints.load()
        (own,) = state.pop("generators")
        checkpoints.save(2, {**state, "random": own["cpu"]})
    assert curve(train(run, tmp_path / "resumed", CPU)) == curve(uninterrupted)


def test_an_additional_process_keeps_its_initial_generator():
    older = {"random": torch.get_rng_state()}
    for checkpoint in (older, {"generators": [{"cpu": older["random"]}]}):
        torch.manual_seed(3)
        before = torch.get_rng_state()
        set_rng_states(rank_states(checkpoint, 1), torch.device("cpu"))
        assert torch.equal(torch.get_rng_state(), before)
        set_rng_states(rank_states(checkpoint, 0), torch.device("cpu"))
        assert torch.equal(torch.get_rng_state(), older["random"])


def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(tmp_path):
    run = RUN.replace(epochs=4)
    uninterrupted = train(run, tmp_path / "uninterrupted", CPU)
    with pytest.raises(Stop):
        train(run, tmp_path / "resumed", CPU, [StopAfter(epochs=3)])
    newest = max((tmp_path / "resumed").glob("work/*/checkpoints/*.pt"))
    newest.write_bytes(newest.read_bytes()[:-1])
    callback = StopAfter()
    assert curve(train(run, tmp_path / "resumed", CPU, [callback])) == curve(uninterrupted)
    assert "is damaged" in callback.messages[0]
    assert "resuming after epoch 1" in callback.messages[1]


@pytest.mark.slow
def test_a_run_recovers_from_damage_to_all_checkpoints(tmp_path):
    run = RUN.replace(epochs=4)
    uninterrupted = train(run, tmp_path / "uninterrupted", CPU)
    out = tmp_path / "resumed"
    with pytest.raises(Stop):
        train(run, out, CPU, [StopAfter(epochs=4)])
    for path in out.glob("work/*/checkpoints/*.pt"):
        path.write_bytes(b"hello")
    messages = []
    for epoch in (2, 3, 4):
        callback = StopAfter(epochs=epoch)
        with pytest.raises(Stop):
            train(run, out, CPU, [callback])
        messages.append(callback.messages[-1])
    assert messages[0].endswith("restarting the run")
    assert messages[1:] == ["resuming after epoch 1 of 4", "resuming after epoch 2 of 4"]
    assert curve(train(run, out, CPU)) == curve(uninterrupted)


def test_the_record_lists_earlier_environments_that_differ(tmp_path, monkeypatch):
    run, commits = RUN.replace(epochs=6), ["a", "b", "a", "b", "a"]
    for epoch, commit in enumerate(commits, 2):
        monkeypatch.setenv("WSAM_COMMIT", commit)
        with pytest.raises(Stop):
            train(run, tmp_path, CPU, [StopAfter(epochs=epoch)])
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    record = train(run, tmp_path, CPU)
    hardware = {**record["hardware"], "threads": threads}
    assert (record["commit"], record["hardware"]["threads"]) == ("a", threads + 1)
    assert record["earlier"] == [
        {"hardware": hardware, "commit": "b", "epochs": 2},
        {"hardware": hardware, "epochs": 3},
    ]
    assert records.read(tmp_path, run) == record


@pytest.mark.parametrize("older", [False, True], ids=["current", "older format"])
def test_equal_environments_are_not_listed(tmp_path, older):
    with pytest.raises(Stop):
        train(RUN, tmp_path, CPU, [StopAfter(epochs=3)])
    if older:
        checkpoints = Checkpoints(records.work_folder(tmp_path, RUN) / "checkpoints")
        state = checkpoints.load()
        assert state.pop("sessions")[0]["epochs"] == 2
        checkpoints.save(2, state)
    record = train(RUN, tmp_path, CPU)
    assert (record["resumed"], record["earlier"]) == (1, [])


@pytest.mark.slow
def test_kill_9_in_the_middle(tmp_path):
    """A killed process's run resumes and ends with the same record."""
    run = RUN.replace(epochs=25)
    out = tmp_path / "killed"
    code = (
        "import sys, json, pathlib, time, torch\n"
        "from wsam.lab.run import Run\n"
        "from wsam.lab.execution import ExecutionConfig\n"
        "from wsam.lab.train import train\n"
        "from wsam.lab.callbacks import Callback\n"
        "torch.set_num_threads(int(sys.argv[3]))\n"
        "run, out = Run.from_dict(json.loads(sys.argv[1])), pathlib.Path(sys.argv[2])\n"
        "class Slow(Callback):\n"
        "    steps = 0\n"
        "    def on_step_end(self, metrics):\n"
        "        self.steps += 1\n"
        "        if self.steps == 30:\n"  # in the middle of an epoch
        "            (out / 'waiting').touch()\n"
        "            time.sleep(600)\n"
        "train(run, out, ExecutionConfig(device='cpu', checkpoint_seconds=0), [Slow()])\n"
    )
    threads = str(torch.get_num_threads())
    command = [sys.executable, "-c", code, json.dumps(run.to_dict()), str(out), threads]
    with subprocess.Popen(command) as process:
        folder = records.work_folder(out, run) / "checkpoints"
        while not (out / "waiting").exists():
            assert process.poll() is None
            time.sleep(0.005)
        assert len(list(folder.glob("*.json"))) == 2
        with pytest.raises(BusyError):
            train(run, out, CPU)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not records.record_path(out, run).exists()
    resumed = train(run, out, CPU)
    assert resumed["resumed"] == 1
    assert curve(resumed) == curve(train(run, tmp_path / "uninterrupted", CPU))


def test_a_full_disk_ends_the_run_and_keeps_its_checkpoints(tmp_path, monkeypatch):
    run = RUN.replace(epochs=4)
    with pytest.raises(Stop):
        train(run, tmp_path, CPU, [StopAfter(epochs=3)])

    def fail(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left on device"):
        train(run, tmp_path, CPU)
    monkeypatch.undo()
    assert not list(tmp_path.rglob("*.tmp"))
    assert curve(train(run, tmp_path, CPU)) == curve(train(run, tmp_path / "uninterrupted", CPU))


REMOVED = object()


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A run with a checkpoint after its first epoch, and that checkpoint."""
    out, run = tmp_path_factory.mktemp("interrupted"), RUN.replace(epochs=3)
    with pytest.raises(Stop):
        train(run, out, CPU, [StopAfter(epochs=2)])
    path = max((records.work_folder(out, run) / "checkpoints").glob("*.pt"))
    return out, run, path, load_state(path)


def changed(state, keys, value):
    state = copy.deepcopy(state)
    *parents, last = keys
    inner = state
    for key in parents:
        inner = inner[key]
    if value is REMOVED:
        del inner[last]
    else:
        inner[last] = value
    return state


@pytest.mark.parametrize(
    ("keys", "value", "reason"),
    [
        (("run",), REMOVED, "a checkpoint of another run"),
        (("model",), {}, r'resuming from .* Missing key\(s\) in state_dict: "0\.weight"'),
        (("model",), {"0.weight": torch.zeros(2)}, "resuming from"),
        (("optimizer",), "text", "resuming from"),
        (("optimizer", "param_groups"), [], "resuming from"),
        (("optimizer", "state", 0, "momentum_buffer"), torch.zeros(7, 7), "resuming from"),
        (("order",), torch.zeros(3), "resuming from"),
        (("generators",), 3, "resuming from"),
    ],
    ids=lambda value: "removed" if value is REMOVED else str(value)[:40],
)
def test_contents_that_do_not_fit_are_refused(interrupted, keys, value, reason):
    """The manifest fits: the file was not damaged but written so."""
    out, run, path, state = interrupted
    save_state(path, changed(state, keys, value))
    with pytest.raises(ValueError, match=reason) as raised:
        train(run, out, CPU)
    assert str(path.parent) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_checkpoints_of_a_finished_run_are_removed(tmp_path, monkeypatch):
    """They are left if the process is killed between writing the record and removing them."""

    def killed(checkpoints):
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "clear", killed)
        with pytest.raises(Stop):
            train(RUN, tmp_path, CPU)
    folder = records.work_folder(tmp_path, RUN) / "checkpoints"
    assert list(folder.iterdir())
    with records.lock_run(tmp_path, RUN):  # another process is about to remove them
        train(RUN, tmp_path, CPU)
        assert list(folder.iterdir())
    assert train(RUN, tmp_path, CPU)["status"] == "finished"
    assert not folder.exists()


def test_a_finished_run_that_cannot_be_cleaned_up_is_returned(tmp_path, monkeypatch):
    train(RUN, tmp_path, CPU)
    folder = records.work_folder(tmp_path, RUN) / "checkpoints"
    folder.mkdir()
    (folder / "000001.pt").touch()

    def read_only(*given, **named):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(type(folder), "unlink", read_only)
    assert train(RUN, tmp_path, CPU)["status"] == "finished"


class Clock(Callback):
    """A step takes one second, ten in the first epoch, and an evaluation five."""

    now = 0.0

    def on_train_start(self, run, steps, done, batch_size):
        self.epoch = done

    def on_step_end(self, metrics):
        self.now += 1 if self.epoch else 10

    def on_epoch_end(self, metrics):
        self.epoch += 1
        self.now += 5


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_times_of_a_resumed_run(tmp_path, clock):
    run = RUN.replace(epochs=2)
    with pytest.raises(Stop):
        train(run, tmp_path, CPU, [clock, StopAfter(epochs=2)])
    record = train(run, tmp_path, CPU, [clock])
    assert [row["seconds"] for row in record["curve"]] == [40, 4]
    assert record["seconds"] == 45 + 9  # without the epoch that was lost
    assert record["epoch_seconds"] == 4  # without the first epoch
    assert record["images_per_second"] == 32


def test_time_between_checkpoints(tmp_path, clock, monkeypatch):
    saved = []
    monkeypatch.setattr(Checkpoints, "save", lambda _, number, state: saved.append(number))
    execution = replace(CPU, checkpoint_seconds=12)
    train(RUN.replace(epochs=6), tmp_path, execution, [clock])  # 45 seconds, then 9 per epoch
    assert saved == [1, 3, 5]


def test_too_little_memory_to_resume_is_no_fault_of_the_checkpoint(tmp_path, monkeypatch):
    with pytest.raises(Stop):
        train(RUN, tmp_path, CPU, [StopAfter(epochs=2)])

    def load_state_dict(model, state):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(nn.Module, "load_state_dict", load_state_dict)
    with pytest.raises(RunError, match="ran out of memory at batch size 32"):
        train(RUN, tmp_path, CPU)
