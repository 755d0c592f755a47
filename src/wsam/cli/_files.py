"""Files that a verb writes: they appear all together, complete, or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import typer

from wsam.lab.files import make_folder, why

PREFIX = ".unfinished-"


def as_folder(value: Path | None) -> Path | None:
    """Refuse, before any work is done, a folder that cannot be written to or made."""
    if value is not None:
        try:
            check_writable(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    return value


def to_read(value: Path | None) -> Path | None:
    """Refuse, before any work is done, a folder to read from that is none, or is not there."""
    for path in () if value is None else (value, *value.parents):
        if is_there(path) and not path.is_dir():
            raise typer.BadParameter(f"{path} is a file; name a folder")
    if value is not None and not value.is_dir():
        raise typer.BadParameter(f"there is no folder {value}")
    return value


def check_writable(folder: Path) -> None:
    """Look whether files can be written into a folder, by making one in it or where it would be.

    Asking for permissions is not enough: they say nothing of a disk that is full or read-only.

    Raises:
        ValueError: They cannot; the message names the folder and says why.
    """
    nearest = next((path for path in (folder, *folder.parents) if is_there(path)), folder)
    if not nearest.is_dir():
        raise ValueError(f"{nearest} is a file; name a folder")
    try:
        Path(tempfile.mkdtemp(prefix=PREFIX, dir=nearest)).rmdir()
    except OSError as error:
        raise ValueError(_refusal(folder, nearest, error)) from error


def is_there(path: Path) -> bool:
    """Tell whether there is something of that name; what may not be looked at is not."""
    try:
        return path.exists() or path.is_symlink()
    except OSError:
        return False


def _refusal(folder: Path, nearest: Path, error: OSError) -> str:
    if nearest == folder:
        return f"nothing can be written into {folder}: {why(error)}"
    return f"{folder} cannot be made: nothing can be written into {nearest}: {why(error)}"


@contextmanager
def together(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to write into; at the end its files move into `folder`.

    Ctrl-C or an error in between leaves `folder` as it was.

    Args:
        folder: Where the files shall be; made if it is not there.

    Yields:
        The folder to write into, on the same disk.
    """
    made = _missing(folder)
    make_folder(folder)
    try:
        staging = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))
    except OSError as error:
        raise OSError(error.errno, _refusal(folder, folder, error)) from error
    try:
        yield staging
        for path in sorted(staging.iterdir()):
            path.replace(folder / path.name)
        made = []
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        with suppress(OSError):  # it holds something by now
            for path in made:
                path.rmdir()


def _missing(folder: Path) -> list[Path]:
    """Return the folders that must be made, the innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]
