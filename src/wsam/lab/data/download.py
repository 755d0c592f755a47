"""Downloads with checksums, progress and resumption."""

from __future__ import annotations

import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from wsam.lab.files import file_sha256, fsync_folder, make_dirs

_CHUNK = 1 << 18
_TIMEOUT = 30.0

Progress = Callable[[int, int], None]
"""Called with the bytes received so far and the total."""


@dataclass(frozen=True)
class RemoteFile:
    """URL, size and SHA-256 of a published file."""

    url: str
    bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """The file name: the last part of the URL."""
        return self.url.rpartition("/")[2]


def download(remote: RemoteFile, folder: Path, progress: Progress | None = None) -> Path:
    """Return the path of a published file in `folder`; download it if it does not exist.

    A partial download is kept as ``NAME.part`` and resumed by an HTTP range request. The file gets
    its final name after its SHA-256 is verified.

    Args:
        remote: The file.
        folder: Where to store it.
        progress: Called with (bytes received, total bytes).

    Raises:
        OSError: The download failed.
        ValueError: The existing or downloaded file is not the published one.
    """
    path = folder / remote.name
    if path.exists():
        check_file(path, remote)
        return path
    make_dirs(folder)
    part = path.with_name(path.name + ".part")
    try:
        _download(remote, part, progress)
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise OSError(
            f"cannot download {remote.url} ({_reason(error)}); run again to resume, or copy "
            f"{remote.name} to {folder}"
        ) from error
    try:
        check_file(part, remote)
    except ValueError:
        part.unlink()  # resuming from damaged bytes would fail again
        raise
    part.replace(path)
    fsync_folder(folder)
    return path


def check_file(path: Path, remote: RemoteFile) -> None:
    """Check the size and SHA-256 of a file.

    Raises:
        ValueError: They are not those of the published file.
    """
    size = path.stat().st_size
    if size != remote.bytes:
        problem = f"{size} bytes, expected {remote.bytes}"
    elif file_sha256(path) != remote.sha256:
        problem = "its SHA-256 is not the published one"
    else:
        return
    raise ValueError(f"{path} is damaged: {problem}; remove it and run again to download it")


def extract_archive(archive: Path, folder: Path) -> None:
    """Extract a tar archive with ``filter="data"``, which rejects paths outside the folder.

    Raises:
        ValueError: The archive is damaged or contains something other than regular data.
    """
    make_dirs(folder)
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"cannot extract {archive}: {error}") from error


def _download(remote: RemoteFile, part: Path, progress: Progress | None) -> None:
    received = part.stat().st_size if part.exists() else 0
    if received > remote.bytes:
        part.unlink()
        received = 0
    if received == remote.bytes:
        return
    request = urllib.request.Request(remote.url, headers={"User-Agent": "wsam"})
    if received:
        request.add_header("Range", f"bytes={received}-")
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
        resumed = received > 0 and response.status == 206
        received = received if resumed else 0
        with part.open("ab" if resumed else "wb") as file:
            while chunk := response.read(_CHUNK):
                received += file.write(chunk)
                if progress is not None:
                    progress(received, remote.bytes)
    if part.stat().st_size < remote.bytes:
        raise ConnectionError("the connection was closed early")


def _reason(error: BaseException) -> str:
    reason = getattr(error, "reason", None)
    return str(reason or error or type(error).__name__)
