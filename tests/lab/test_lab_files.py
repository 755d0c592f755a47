"""Atomic writes and locks."""

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
    """Run `work` in a forked child and return its status."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def test_write_replaces_the_file(tmp_path):
    path = tmp_path / "new" / "file"
    files.write_atomic(path, b"one")
    files.write_atomic(path, b"three")
    assert path.read_bytes() == b"three"
    assert [p.name for p in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FileNotFoundError(2, "No such file", "a.json"), "a.json does not exist"),
        (FileExistsError(17, "File exists", "a"), "a is a file, expected a folder"),
        (IsADirectoryError(21, "Is a directory", "a"), "a is a folder, expected a file"),
        (PermissionError(13, "Permission denied", "a"), "a: permission denied"),
        (OSError(28, "cannot write a: no space"), "cannot write a: no space"),
        (OSError("another process is working"), "another process is working"),
    ],
)
def test_messages_of_file_errors(error, message):
    assert files.format_os_error(error) == message


def test_a_full_disk_keeps_the_old_file_and_leaves_no_temporary_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    files.write_atomic(path, b"old")
    monkeypatch.setattr(files.os, "fsync", full_disk)
    with pytest.raises(
        OSError, match=r"cannot write .*file: No space left.*the previous file is kept"
    ):
        files.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_file_size_limit_keeps_the_old_file(tmp_path):
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


def test_a_lock_is_held_by_one_process(tmp_path):
    lock = tmp_path / "run" / "lock"

    def try_lock():
        try:
            with files.exclusive_lock(lock):
                pass
        except files.BusyError:
            os._exit(9)

    with files.exclusive_lock(lock):
        assert os.waitstatus_to_exitcode(in_child(try_lock)) == 9
    assert os.waitstatus_to_exitcode(in_child(try_lock)) == 0


def test_kill_9_releases_a_lock(tmp_path):
    lock = tmp_path / "lock"
    child = os.fork()
    if child == 0:
        try:
            with files.exclusive_lock(lock):
                (tmp_path / "held").touch()
                time.sleep(600)
        finally:
            os._exit(1)  # never continue as a second test session
    while not (tmp_path / "held").exists():
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        time.sleep(0.005)
    with pytest.raises(files.BusyError, match="another process"), files.exclusive_lock(lock):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with files.exclusive_lock(lock):
        pass


def test_a_planted_link_is_not_followed(tmp_path, monkeypatch):
    """The name of the temporary file is unpredictable, and an existing one is not opened."""
    victim, path = tmp_path / "victim", tmp_path / "report.html"
    victim.write_bytes(b"mine")
    (tmp_path / "report.html.tmp").symlink_to(victim)
    files.write_atomic(path, b"page")
    assert (victim.read_bytes(), path.read_bytes()) == (b"mine", b"page")
    monkeypatch.setattr(files.secrets, "token_hex", lambda count: "0")
    (tmp_path / "report.html.0.tmp").symlink_to(victim)
    with pytest.raises(OSError, match="cannot write"):
        files.write_atomic(path, b"new")
    assert victim.read_bytes() == b"mine"
