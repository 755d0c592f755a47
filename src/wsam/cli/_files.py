"""Files that a verb writes: they appear all together, complete, or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import typer

PREFIX = ".unfinished-"


def as_folder(value: Path | None) -> Path | None:
    """Refuse, before any work is done, a folder's name that is a file's."""
    if value is None:
        return None
    for path in (value, *value.parents):
        if path.exists() and not path.is_dir():
            raise typer.BadParameter(f"{path} is a file; name a folder")
    return value


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
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))
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
