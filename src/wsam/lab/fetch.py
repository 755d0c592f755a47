"""Downloads that are checked, show progress, and go on where they stopped."""

from __future__ import annotations

import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from wsam.lab.files import file_sha256, make_folder, sync_folder

_CHUNK = 1 << 18
_TIMEOUT = 30.0

Progress = Callable[[int, int], None]
"""Takes the bytes there are and the bytes there will be."""


@dataclass(frozen=True)
class Remote:
    """A published file: where it is, how large, and its SHA-256."""

    url: str
    bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """The file's name, the last part of its address."""
        return self.url.rpartition("/")[2]


def fetch(remote: Remote, folder: Path, progress: Progress | None = None) -> Path:
    """Return a published file in `folder`, downloaded unless it is there already.

    What was downloaded before an interruption is kept in ``NAME.part`` and gone on from by an
    HTTP range request. Only a file with the right SHA-256 ever gets its final name.

    Args:
        remote: The file.
        folder: Where it goes.
        progress: Called with (bytes there, bytes in all) as it goes.

    Raises:
        OSError: It could not be downloaded; what to do instead is said.
        ValueError: What was there or came is not the published file.
    """
    path = folder / remote.name
    if path.exists():
        check(path, remote)
        return path
    make_folder(folder)
    part = path.with_name(path.name + ".part")
    try:
        _download(remote, part, progress)
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise OSError(
            f"cannot download {remote.url} ({_reason(error)}); run again to go on, or put "
            f"{remote.name} into {folder} yourself"
        ) from error
    try:
        check(part, remote)
    except ValueError:
        part.unlink()  # going on from damaged bytes would never end well
        raise
    part.replace(path)
    sync_folder(folder)
    return path


def check(path: Path, remote: Remote) -> None:
    """Check the size and SHA-256 of a published file.

    Raises:
        ValueError: It is another file, or damaged.
    """
    size = path.stat().st_size
    if size != remote.bytes:
        problem = f"{size} bytes instead of {remote.bytes}"
    elif file_sha256(path) != remote.sha256:
        problem = "its SHA-256 is not the published one"
    else:
        return
    raise ValueError(f"{path} is damaged: {problem}; remove it and run again to download it anew")


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a tar archive; members that would leave the folder are refused.

    Raises:
        ValueError: The archive is damaged, or holds what an archive of data must not.
    """
    make_folder(folder)
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"cannot unpack {archive}: {error}") from error


def _download(remote: Remote, part: Path, progress: Progress | None) -> None:
    have = part.stat().st_size if part.exists() else 0
    if have > remote.bytes:
        part.unlink()
        have = 0
    if have == remote.bytes:
        return
    request = urllib.request.Request(remote.url, headers={"User-Agent": "wsam"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
        resumed = have > 0 and answer.status == 206
        have = have if resumed else 0
        with part.open("ab" if resumed else "wb") as file:
            _copy(answer, file, have, remote.bytes, progress)
    if part.stat().st_size < remote.bytes:
        raise ConnectionError("the connection ended early")


def _copy(
    answer: IO[bytes], file: IO[bytes], have: int, total: int, progress: Progress | None
) -> None:
    while piece := answer.read(_CHUNK):
        have += len(piece)
        if have > total:
            raise OSError(f"the server sent more than the {total} bytes of the published file")
        file.write(piece)
        if progress is not None:
            progress(have, total)


def _reason(error: BaseException) -> str:
    reason = getattr(error, "reason", None)
    return str(reason or error or type(error).__name__)
