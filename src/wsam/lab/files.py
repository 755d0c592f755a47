"""Files that are whole or absent, whatever happens in between."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TEMPORARY = ".tmp"
_CHUNK = 1 << 20


def make_folder(folder: Path) -> None:
    """Make a folder and those it lies in, unless they are there.

    Raises:
        OSError: It cannot be made; the message names it and says why.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(error.errno, f"the folder {folder} cannot be made: {why(error)}") from error


def why(error: OSError) -> str:
    """Say why a file or folder could not be made, in words that follow a colon."""
    if isinstance(error, FileNotFoundError):  # its parent is there: a system's folder, like /proc
        return "the system does not allow it"
    if isinstance(error, FileExistsError | NotADirectoryError):
        return "there is a file in its way"
    return (error.strerror or str(error)).lower()


def sentence(error: Exception) -> str:
    """Say in words what an error says, of a file without the number of the error.

    Example:
        >>> sentence(FileNotFoundError(2, "No such file or directory", "runs.json"))
        'there is no runs.json'
    """
    if not isinstance(error, OSError):
        return str(error)
    if error.filename is None:
        return error.strerror or str(error)
    name = str(error.filename)
    if isinstance(error, FileNotFoundError):
        return f"there is no {name}"
    if isinstance(error, FileExistsError | NotADirectoryError):
        return f"{name} cannot be a folder: there is a file of that name"
    if isinstance(error, IsADirectoryError):
        return f"{name} is a folder; a file is wanted"
    return f"{name}: {(error.strerror or str(error)).lower()}"


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that at every moment either the old or the new one is there, complete.

    The data goes to a temporary file, is forced to the disk, and takes the final name in one
    step; then the folder is forced to the disk too. On any error, a full disk included, the
    temporary file is removed and the old file is as it was. Two writers of one path must hold
    `claimed` first.

    Args:
        path: The file; its folder is made if it is not there.
        data: All of its contents.

    Raises:
        OSError: It could not be written; the message names the file.
    """
    make_folder(path.parent)
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        reason = error.strerror or str(error)
        kept = "; the one before is kept" if path.exists() else ""
        raise OSError(error.errno, f"cannot write {path}: {reason}{kept}") from error
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Force a folder's list of names to the disk, where the system can."""
    if os.name == "nt":
        return  # there, a folder cannot be opened
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(data: bytes) -> str:
    """Return the SHA-256 of bytes in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal, read piece by piece."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def quiet(message: str) -> None:
    """Say nothing: stands where a message would go."""


class BusyError(OSError):
    """Another process works on this run."""


@contextmanager
def claimed(lock: Path) -> Iterator[None]:
    """Hold a run alone; the system lets go of it when the process ends, by kill -9 too.

    Args:
        lock: The lock's file. It stays there afterwards: removing it would let two in.

    Raises:
        BusyError: Another process holds it.
    """
    make_folder(lock.parent)
    with lock.open("a+b") as file:
        if not _try_lock(file.fileno()):
            raise BusyError(f"another process works on this run (it holds {lock})")
        yield  # closing the file lets go of it


def _try_lock(handle: int) -> bool:
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        import msvcrt

        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError:
            return False
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
