"""Output folders: checked before any work, and filled all at once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wsam.lab.files import make_dirs

UNFINISHED = ".unfinished-"


def check_output_folder(folder: Path | None) -> Path | None:
    """Check, as a typer callback, that a folder is writable or can be created.

    Raises:
        ValueError: It is a file or below one, or there is no permission to write.
    """
    if folder is not None:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not existing.is_dir():
            raise ValueError(f"{existing} is a file, not a folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ValueError(f"no permission to write to {existing}")
    return folder


def check_results_folder(folder: Path | None) -> Path | None:
    """Check a folder of records as `check_output_folder` does; one that has records may be read-only.

    Its finished runs need no writing. A run that is not finished is refused when it starts.
    """
    from wsam.lab.records import is_named_by_key

    has_records = folder is not None and any(map(is_named_by_key, folder.glob("*.json")))
    return folder if has_records else check_output_folder(folder)


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Yield an empty staging folder whose files are moved to `folder` on success.

    Ctrl-C or an exception leaves the files of `folder` unchanged.

    Args:
        folder: The output folder; it is created if needed.
    """
    make_dirs(folder)
    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=folder) as staging:
        yield Path(staging)
        for path in sorted(Path(staging).iterdir()):
            path.replace(folder / path.name)
