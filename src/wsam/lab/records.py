"""Records: what came of a run, as JSON named by the run's key.

``OUT/KEY.json`` is the record. A folder of the same key, see `work`, holds what a run needs on its way
(checkpoints, lock, TensorBoard events) and weights that were asked for, see `work_folder`.
Numbers that are not finite are written as null, so that every reader of JSON can read a record.
"""

from __future__ import annotations

import json
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from wsam.lab import files
from wsam.lab.names import is_number
from wsam.lab.run import Run
from wsam.numbers import plain

Record = dict[str, Any]
FINISHED, FAILED = "finished", "failed"
WEIGHTS = "weights.pt"
_KEY = re.compile("[0-9a-f]{12}")
_NEEDED = ("key", "status", "settings", "curve")
_FIGURES = ("epoch", "train_loss", "test_error")
_ADVICE = "remove it to run again"


def record_path(out: Path, run: Run) -> Path:
    """Return where the record of a run lies."""
    return out / f"{run.key}.json"


def work(out: Path) -> Path:
    """Return the folder of all that is no record: work folders of runs, and what sweeps keep."""
    return out / "work"


def work_folder(out: Path, run: Run) -> Path:
    """Return the folder of a run's checkpoints, events and weights."""
    return work(out) / run.key


def checkpoints_folder(of_run: Path) -> Path:
    """Return where the checkpoints lie in the work folder of a run."""
    return of_run / "checkpoints"


def weights_path(out: Path, run: Run) -> Path:
    """Return where the final weights lie, if they were kept."""
    return work_folder(out, run) / WEIGHTS


def is_named_by_key(path: Path) -> bool:
    """Tell whether a file or folder has a run's key for its name, as records and their work have."""
    return _KEY.fullmatch(path.stem) is not None


def claim(out: Path, run: Run) -> AbstractContextManager[None]:
    """Hold a run for this process alone; see `files.claimed`."""
    return files.claimed(_lock(out, run))


def check_free(out: Path, run: Run) -> None:
    """Raise where another process holds a run; unlike `claim`, make nothing on the disk.

    Raises:
        BusyError: Another process works on this run.
    """
    lock = _lock(out, run)
    if lock.exists():
        with files.claimed(lock):
            pass


def _lock(out: Path, run: Run) -> Path:
    return work_folder(out, run) / "lock"


def write(out: Path, run: Run, record: Record) -> Path:
    """Write a record: atomically, and valid for any reader of JSON."""
    path = record_path(out, run)
    files.write_atomic(path, _text(plain(record)).encode())
    return path


def _text(record: Record) -> str:
    """Return JSON with one line per entry and one per epoch, which reads and compares well."""

    def line(value: Any) -> str:
        return json.dumps(value, allow_nan=False, ensure_ascii=False)

    rows = ",\n".join(f"  {line(row)}" for row in record["curve"])
    entries = [
        f" {line(name)}: " + (f"[\n{rows}\n ]" if name == "curve" else line(value))
        for name, value in record.items()
    ]
    return "{\n" + ",\n".join(entries) + "\n}\n"


def read(out: Path, run: Run) -> Record | None:
    """Return the record of a run, finished or failed; None if there is none.

    Raises:
        ValueError: What lies there is no record, or one of another run.
    """
    path = record_path(out, run)
    if not path.exists():
        return None
    record = read_file(path)
    if record["key"] != run.key:
        raise ValueError(
            f"{path} is the record of another run, {record['key']}; move it away to run again"
        )
    return record


def read_file(path: Path) -> Record:
    """Read a record and check that it is one.

    Raises:
        ValueError: Damaged, or something else; the message names the file.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON; {_ADVICE}") from error
    if wrong := _damage(record):
        raise ValueError(f"{path} {wrong}; {_ADVICE}")
    return dict(record)


def _damage(record: Any) -> str | None:
    """Say what is wrong with data that should be a record; None where nothing is."""
    if not isinstance(record, dict) or any(name not in record for name in _NEEDED):
        return f"is not a record: it needs {', '.join(_NEEDED)}"
    if record["status"] not in (FINISHED, FAILED):
        return f"has status {record['status']!r}: it must be {FINISHED} or {FAILED}"
    curve = record["curve"]
    if not isinstance(curve, list) or not curve:
        return "holds no epoch"
    return None if all(map(_is_epoch, curve)) else "holds an epoch that is damaged"


def _is_epoch(row: Any) -> bool:
    """Tell whether a row of a curve has its figures; null stands for one that is not finite."""
    if not isinstance(row, dict) or any(name not in row for name in _FIGURES):
        return False
    return all(value is None or is_number(value) for value in row.values())


def is_finished(record: Record | None) -> bool:
    """Tell whether a record is there and its run went to the end."""
    return record is not None and record["status"] == FINISHED


def final_error(record: Record) -> float | None:
    """Return the test error of the last epoch in percent; None if the run failed."""
    value = record["curve"][-1]["test_error"] if is_finished(record) else None
    return None if value is None else float(value)
