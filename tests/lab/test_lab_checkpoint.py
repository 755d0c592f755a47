"""Checkpoints survive kill -9, damage and a full disk, and never execute code."""

import errno
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wsam.lab import checkpoint, files
from wsam.lab.checkpoint import Checkpoints, DamagedError, load_state, save_state


def state(number):
    return {"number": number, "weights": torch.full((2000,), float(number)), "curve": [{"a": None}]}


@pytest.fixture
def messages():
    return []


@pytest.fixture
def checkpoints(tmp_path, messages):
    return Checkpoints(tmp_path / "checkpoints", log=messages.append)


def newest(checkpoints):
    return max(checkpoints.folder.glob("*.pt"))


def test_the_newest_two_are_kept(checkpoints, messages):
    assert checkpoints.load() is None
    assert checkpoints.newest is None
    for number in (1, 2, 3):
        checkpoints.save(number, state(number))
    loaded = checkpoints.load()
    assert loaded["number"] == checkpoints.newest == 3
    assert torch.equal(loaded["weights"], state(3)["weights"])
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == [
        "000002.json",
        "000002.pt",
        "000003.json",
        "000003.pt",
    ]
    assert messages == []


def test_the_manifest_contains_the_sha256(checkpoints):
    checkpoints.save(1, state(1))
    path = newest(checkpoints)
    manifest = json.loads(path.with_suffix(".json").read_text())
    assert manifest == {
        "file": path.name,
        "bytes": path.stat().st_size,
        "sha256": files.file_sha256(path),
    }


@pytest.mark.parametrize(
    "damage", ["truncated", "flipped", "missing", "no manifest", "bad manifest"]
)
def test_a_damaged_checkpoint_falls_back_to_the_previous_one(checkpoints, messages, damage):
    checkpoints.save(1, state(1))
    checkpoints.save(2, state(2))
    path = newest(checkpoints)
    data = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(data[:-100])
    elif damage == "flipped":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "missing":
        path.unlink()
    elif damage == "no manifest":
        path.with_suffix(".json").unlink()
    else:
        path.with_suffix(".json").write_text('{"bytes": ')
    assert checkpoints.load()["number"] == 1
    if damage != "no manifest":  # without a manifest it is not a checkpoint
        assert len(messages) == 1
        assert "000002" in messages[0]
        assert "falling back" in messages[0]


def test_two_damaged_checkpoints_restart_the_run(checkpoints, messages):
    checkpoints.save(1, state(1))
    checkpoints.save(2, state(2))
    for path in checkpoints.folder.glob("*.pt"):
        path.write_bytes(b"")
    files = sorted(checkpoints.folder.iterdir())
    assert checkpoints.load() is None
    assert ["000002" in messages[0], "000001" in messages[1]] == [True, True]
    assert [message.rpartition("; ")[2] for message in messages] == [
        "falling back to the previous one",
        "restarting the run",
    ]
    assert sorted(checkpoints.folder.iterdir()) == files, "loading changes no files"


def numbers(checkpoints):
    return sorted(int(path.stem) for path in checkpoints.folder.glob("*.json"))


def damaged(folder, *, intact=()):
    """Save checkpoints 8 and 9 and damage those that are not in `intact`."""
    checkpoints = Checkpoints(folder)
    for number in (8, 9):
        checkpoints.save(number, state(number))
        if number not in intact:
            newest(checkpoints).write_bytes(b"hello")
    return checkpoints


def test_a_restarted_run_progresses_past_damaged_checkpoints(tmp_path):
    damaged(tmp_path)
    for number, kept in ((1, [1]), (2, [1, 2]), (3, [2, 3]), (4, [3, 4])):
        reopened = Checkpoints(tmp_path)
        found = reopened.load()
        assert (found and found["number"]) == (number - 1 or None)
        reopened.save(number, state(number))
        assert numbers(reopened) == kept
    assert len(list(tmp_path.iterdir())) == 4


def test_a_damaged_checkpoint_does_not_displace_an_intact_one(tmp_path):
    damaged(tmp_path, intact=[8])
    assert Checkpoints(tmp_path).load()["number"] == 8
    reopened = Checkpoints(tmp_path)
    reopened.load()
    reopened.save(10, state(10))
    assert numbers(reopened) == [8, 10]


def test_a_checkpoint_that_cannot_be_loaded_is_skipped_and_removed(tmp_path, monkeypatch, messages):
    damaged(tmp_path, intact=[8, 9])
    read = Path.open

    def fail_for_9(path, *given, **named):
        if path.name == "000009.pt":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read(path, *given, **named)

    monkeypatch.setattr(Path, "open", fail_for_9)
    reopened = Checkpoints(tmp_path, log=messages.append)
    assert reopened.load()["number"] == 8
    assert "cannot be read: Permission denied" in messages[0]
    reopened.save(10, state(10))
    assert numbers(reopened) == [8, 10]


@given(st.data())
def test_every_flipped_bit_is_detected(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("flip") / "state.pt"
    save_state(path, {"weights": torch.arange(5.0)})
    contents = bytearray(path.read_bytes())
    bit = data.draw(st.integers(0, 8 * len(contents) - 1))
    contents[bit // 8] ^= 1 << bit % 8
    path.write_bytes(contents)
    with pytest.raises(DamagedError, match="SHA-256"):
        load_state(path)


class Evil:
    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return (Path.touch, (self.trace,))


def test_code_in_a_pickle_is_not_executed(checkpoints, messages, tmp_path):
    checkpoints.save(1, state(1))
    trace = tmp_path / "executed"
    save_state(checkpoints.folder / "000002.pt", {"weights": Evil(trace)})
    assert checkpoints.load()["number"] == 1
    assert "tensors and primitives" in messages[0]
    assert not trace.exists()


def test_full_disk_keeps_the_old_and_leaves_no_temporary_file(checkpoints, monkeypatch):
    checkpoints.save(1, state(1))
    checkpoints.save(2, state(2))

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.save(3, state(3))
    monkeypatch.undo()
    assert checkpoints.load()["number"] == 2
    assert not list(checkpoints.folder.glob("*.tmp"))


def fork(work):
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


def test_kill_9_at_random_moments_leaves_a_loadable_checkpoint(checkpoints, messages):
    rng = random.Random(0)
    checkpoints.save(0, state(0))
    last = 0

    def save_forever():
        for number in range(last + 1, last + 10_000):
            checkpoints.save(number, state(number))

    for turn in range(25):
        child = fork(save_forever)
        time.sleep(rng.uniform(0.001, 0.04))
        while turn == 24 and checkpoints.newest == 0:
            time.sleep(0.005)  # wait for the first save on a slow disk
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        loaded = checkpoints.load()
        number = loaded["number"]
        assert torch.equal(loaded["weights"], state(number)["weights"])
        assert number >= last
        last = number
    assert last > 0
    assert messages == []


def killed_before(fatal_call, work):
    """Run `work` in a child that dies before its n-th fsync, rename or removal; return its status."""

    def dying():
        calls = 0

        def counted(call):
            def wrapper(*args, **kwargs):
                nonlocal calls
                calls += 1
                if calls == fatal_call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)

            return wrapper

        os.fsync = counted(os.fsync)
        Path.replace = counted(Path.replace)
        Path.unlink = counted(Path.unlink)
        work()

    return os.waitpid(fork(dying), 0)[1]


@pytest.mark.parametrize(("intact", "number"), [((), 1), ((8,), 9), ((8, 9), 10)])
def test_kill_9_while_damaged_checkpoints_are_replaced(tmp_path, intact, number):
    """An intact checkpoint is removed only after the new one is complete."""
    for fatal_call in range(1, 100):
        folder = tmp_path / str(fatal_call)
        damaged(folder, intact=intact)

        def resume(folder=folder):
            reopened = Checkpoints(folder)
            reopened.load()
            reopened.save(number, state(number))

        status = killed_before(fatal_call, resume)
        loaded = Checkpoints(folder).load()
        saved = loaded is not None and loaded["number"] == number
        assert saved or (loaded and loaded["number"]) == (max(intact, default=None))
        assert saved or status
        after = Checkpoints(folder)
        after.load()
        after.save(number + 1, state(number + 1))
        assert after.load()["number"] == number + 1
        if status == 0:
            break
    assert status == 0
    assert fatal_call > 6  # a save writes, renames and syncs two files


def test_kill_9_before_every_system_call_of_a_save(checkpoints, messages):
    checkpoints.save(1, state(1))
    checkpoints.save(2, state(2))
    survived = []
    for fatal_call in range(1, 100):

        def save():
            number = checkpoints.load()["number"] + 1
            checkpoints.save(number, state(number))

        status = killed_before(fatal_call, save)
        loaded = checkpoints.load()
        assert torch.equal(loaded["weights"], state(loaded["number"])["weights"])
        survived.append(loaded["number"])
        if status == 0:
            break
    assert survived[0] == 2  # died before the first fsync
    assert survived[-1] > 2
    assert len(survived) >= 8
    assert survived == sorted(survived)
    assert messages == []


def test_clear_removes_partial_files_of_a_killed_process(checkpoints):
    checkpoints.save(1, state(1))
    (checkpoints.folder / "000002.pt").write_bytes(b"half")
    (checkpoints.folder / "000003.pt.tmp").write_bytes(b"half")
    checkpoints.clear()
    assert not checkpoints.folder.exists()
    checkpoints.clear()


def test_save_removes_temporary_files_of_a_killed_process(checkpoints):
    checkpoints.save(1, state(1))
    (checkpoints.folder / "000002.pt.0123.tmp").write_bytes(b"half")
    checkpoints.save(2, state(2))
    assert not list(checkpoints.folder.glob("*.tmp"))


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{}"])
def test_an_unusable_manifest_is_damage(checkpoints, messages, text):
    checkpoints.save(1, state(1))
    newest(checkpoints).with_suffix(".json").write_text(text)
    assert checkpoints.load() is None
    (message,) = messages
    assert "or its manifest is missing or damaged; restarting the run" in message


def test_checkpoints_of_this_process_are_not_read_again(checkpoints, monkeypatch):
    for number in (1, 2):
        checkpoints.save(number, state(number))
    reads = []
    monkeypatch.setattr(
        checkpoint, "load_state", lambda path: reads.append(path) or load_state(path)
    )
    again = Checkpoints(checkpoints.folder)
    again.load()
    for number in (3, 4):
        again.save(number, state(number))
    assert [path.name for path in reads] == ["000002.pt"]


def test_a_checkpoint_whose_data_is_missing_is_removed(checkpoints):
    checkpoints.save(1, state(1))
    newest(checkpoints).unlink()
    Checkpoints(checkpoints.folder).save(2, state(2))
    assert numbers(checkpoints) == [2]


def test_other_files_are_not_checkpoints(checkpoints):
    checkpoints.save(1, state(1))
    (checkpoints.folder / "config.json").write_text("{}")
    assert checkpoints.load()["number"] == checkpoints.newest == 1
    checkpoints.clear()
    assert [path.name for path in checkpoints.folder.iterdir()] == ["config.json"]


@pytest.mark.parametrize("suffix", [".pt", ".json"])
def test_a_pipe_is_damage(checkpoints, messages, suffix):
    checkpoints.save(1, state(1))
    path = newest(checkpoints).with_suffix(suffix)
    path.unlink()
    os.mkfifo(path)
    assert checkpoints.load() is None
    assert "damaged" in messages[0]
