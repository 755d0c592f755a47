"""The last attempt to train a run that has no record: its settings and why it failed.

A report shows them. Training does not depend on the file, so nothing is raised if it cannot be
written.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from wsam.lab import files, records
from wsam.lab.run import Run
from wsam.lab.values import check_mapping

FILE_NAME = "attempt.json"
"""In the work folder of the run."""


def write(out: Path, run: Run, failure: str | None = None) -> None:
    """Write that a run is being trained, or why that failed.

    Args:
        out: The results folder.
        run: The run.
        failure: Type and message of an exception in one line; None while it is trained.
    """
    attempt = {"settings": run.to_dict(), "failure": failure}
    with suppress(OSError):
        path = records.work_folder(out, run) / FILE_NAME
        files.write_atomic(path, json.dumps(attempt, allow_nan=False).encode())


def read(work: Path) -> tuple[Run, str | None] | None:
    """Return the run of a work folder and why its last attempt failed; None if there is none.

    Raises:
        TypeError: The file is damaged.
        ValueError: Likewise.
    """
    path = work / FILE_NAME
    if not path.exists():
        return None
    found = check_mapping("the attempt", records.read_json(path))
    run = Run.from_dict(check_mapping("settings", found.get("settings")))
    failure = found.get("failure")
    return run, None if failure is None else " ".join(str(failure).split())


def remove(out: Path, run: Run) -> None:
    """Remove the file, if there is one."""
    with suppress(OSError):
        (records.work_folder(out, run) / FILE_NAME).unlink()
