"""Atomic writes, reads, file locks, checksums, messages for operating system errors."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

TEMPORARY = ".tmp"


def make_dirs(folder: Path) -> None:
    """Create a folder and its parents if they do not exist.

    Raises:
        OSError: The folder cannot be created; the message contains its path and the reason.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot create the folder {folder}: {error.strerror}"
        raise OSError(error.errno, message) from error


def format_os_error(error: Exception) -> str:
    """Return an error's message; for an operating system error, without the error number.

    Example:
        >>> format_os_error(FileNotFoundError(2, "No such file or directory", "runs.json"))
        'runs.json does not exist'
    """
    if not isinstance(error, OSError):
        return str(error)
    if error.filename is None:
        return error.strerror or str(error)
    name = str(error.filename)
    if isinstance(error, FileNotFoundError):
        return f"{name} does not exist"
    if isinstance(error, FileExistsError | NotADirectoryError):
        return f"{name} is a file, expected a folder"
    if isinstance(error, IsADirectoryError):
        return f"{name} is a folder, expected a file"
    return f"{name}: {(error.strerror or str(error)).lower()}"


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file's contents atomically.

    The data is written to a temporary file, synced to disk and renamed; then the folder is synced.
    On any error, including a full disk, the temporary file is removed and the old file is kept. Each
    call creates a temporary file of its own, so that no existing file or link is written through.

    Args:
        path: The file; its folder is created if necessary.
        data: The new contents.

    Raises:
        OSError: The file could not be written; the message contains its path.
    """
    make_dirs(path.parent)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if not isinstance(error, OSError):
            raise
        kept = "; the previous file is kept" if path.exists() else ""
        message = f"cannot write {path}: {error.strerror or error}{kept}"
        raise OSError(error.errno, message) from error
    fsync_folder(path.parent)


def read_regular(path: Path) -> bytes:
    """Return the contents of a file. Reading a pipe or device may not end, so they are refused.

    Raises:
        ValueError: It is a pipe or device. The message is a predicate without the path.
        OSError: The file cannot be read.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError("is not a regular file")
    return path.read_bytes()


def fsync_folder(folder: Path) -> None:
    """Sync a folder's entries to disk; does nothing on Windows, which cannot open folders."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(data: bytes) -> str:
    """Return the SHA-256 of bytes in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def no_op(message: str) -> None:
    """No-op callback for log messages."""


class BusyError(OSError):
    """Another process holds the lock of a run."""


@contextmanager
def exclusive_lock(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock file exclusively.

    The operating system releases the lock when the process ends, even by ``kill -9``. The file
    itself remains.

    Args:
        path: The lock file; its folder is created if necessary.
        wait: Wait until the lock is free instead of raising.

    Raises:
        BusyError: Another process holds the lock.
    """
    make_dirs(path.parent)
    try:
        acquired = FileLock(path).acquire(timeout=-1 if wait else 0)
    except Timeout as error:
        raise BusyError(f"another process is working on this run (it holds {path})") from error
    with acquired:
        yield
