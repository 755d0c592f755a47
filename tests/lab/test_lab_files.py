"""Files that are whole or absent; runs that are held by one process."""

import errno
import os
import resource
import signal
import time

import pytest

from wsam.lab import files


def full_disk(handle):
    raise OSError(errno.ENOSPC, "No space left on device")


def in_child(work):
    """Run `work` in a forked child and return how it ended."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def test_write_replaces_the_whole_file(tmp_path):
    path = tmp_path / "new" / "file"
    files.write_atomic(path, b"one")
    files.write_atomic(path, b"three")
    assert path.read_bytes() == b"three"
    assert [p.name for p in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "a"), "permission denied"),
        (FileNotFoundError(errno.ENOENT, "No such file", "a"), "the system does not allow it"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "a"), "there is a file in its way"),
    ],
)
def test_a_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch, error, reason):
    def refuse(*given, **named):
        raise error

    monkeypatch.setattr(files.Path, "mkdir", refuse)
    path = tmp_path / "runs" / "file"
    with pytest.raises(type(error)) as caught:
        files.write_atomic(path, b"new")
    expected = f"the folder {path.parent} cannot be made: {reason}"
    assert files.sentence(caught.value) == expected


def test_full_disk_keeps_the_old_and_leaves_no_temporary_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    files.write_atomic(path, b"old")
    monkeypatch.setattr(files.os, "fsync", full_disk)
    with pytest.raises(
        OSError, match=r"cannot write .*file: No space left.*the one before is kept"
    ):
        files.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_limit_of_the_system_keeps_the_old(tmp_path):
    path = tmp_path / "file"
    files.write_atomic(path, b"old")

    def write_too_much():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            files.write_atomic(path, bytes(100_000))
        except OSError as error:
            os._exit(7 if error.errno == errno.EFBIG else 8)

    assert os.waitstatus_to_exitcode(in_child(write_too_much)) == 7
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_ctrl_c_leaves_no_temporary_file(tmp_path, monkeypatch):
    def interrupted(handle):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.write_atomic(tmp_path / "file", b"new")
    assert list(tmp_path.iterdir()) == []


def test_one_process_at_a_time(tmp_path):
    lock = tmp_path / "run" / "lock"

    def try_it():
        try:
            with files.claimed(lock):
                pass
        except files.BusyError:
            os._exit(9)

    with files.claimed(lock):
        assert os.waitstatus_to_exitcode(in_child(try_it)) == 9
    assert os.waitstatus_to_exitcode(in_child(try_it)) == 0


def test_a_killed_process_lets_go(tmp_path):
    lock = tmp_path / "lock"
    child = os.fork()
    if child == 0:
        try:
            with files.claimed(lock):
                (tmp_path / "held").touch()
                time.sleep(600)
        finally:
            os._exit(1)  # it must never go on as a second run of the tests
    while not (tmp_path / "held").exists():
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        time.sleep(0.005)
    with pytest.raises(files.BusyError, match="another process"), files.claimed(lock):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with files.claimed(lock):
        pass
