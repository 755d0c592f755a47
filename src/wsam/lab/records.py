"""Records: what came of a run, as JSON named by the run's key.

``OUT/KEY.json`` is the record. A folder of the same key, see `work`, holds what a run needs on its way
(checkpoints, lock, TensorBoard events) and weights that were asked for, see `work_folder`.
Numbers that are not finite are written as null, so that every reader of JSON can read a record.
"""

from __future__ import annotations

import json
import math
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from wsam._format import json_safe
from wsam.lab import files
from wsam.lab.names import is_number, mapping
from wsam.lab.run import Run

Record = dict[str, Any]
FORMAT = 1
FINISHED, FAILED = "finished", "failed"
WEIGHTS = "weights.pt"
_KEY = re.compile("[0-9a-f]{12}")
_NEEDED = ("format", "key", "title", "status", "settings", "final", "curve", "seconds")
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
    files.write_atomic(path, _text(json_safe(record)).encode())
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
    return read_named(path) if path.exists() else None


def read_named(path: Path) -> Record:
    """Read a record that must have its key for its name.

    Raises:
        ValueError: It is no record, or one of another run than its name says.
    """
    record = read_file(path)
    if record["key"] != path.stem:
        raise ValueError(
            f"{path} is the record of another run, {record['key']}; move it away to run again"
        )
    return record


def read_file(path: Path) -> Record:
    """Read a record and check that it is one: all that others rely on is there and of its kind.

    Raises:
        ValueError: Damaged, or something else; the message names the file.
    """
    try:
        record = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} {error}; {_ADVICE}") from error
    if wrong := _damage(record):
        raise ValueError(f"{path} {wrong}; {_ADVICE}")
    return dict(record)


def read_json(path: Path) -> Any:
    """Read JSON as records are written in: every number is finite, and fits into a float.

    Raises:
        ValueError: Something else; the message says what the file is or holds, without its name.
    """
    try:
        return json.loads(
            path.read_text(encoding="utf-8"),
            parse_constant=_finite,
            parse_float=_finite,
            parse_int=_whole,
        )
    except _NotFiniteError:
        raise
    except (ValueError, RecursionError) as error:  # the latter where it is nested without end
        raise ValueError("is not valid JSON") from error


class _NotFiniteError(ValueError):
    """A number that no reader can compute with."""


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _NotFiniteError(f"holds a number that is not finite, {text[:20]}")
    return value


def _whole(text: str) -> int:
    _finite(text)
    return int(text)


def _damage(record: Any) -> str | None:
    """Say what is wrong with data that should be a record; None where nothing is."""
    if not isinstance(record, dict) or any(name not in record for name in _NEEDED):
        return f"is not a record: it needs {', '.join(_NEEDED)}"
    if record["format"] != FORMAT:
        return f"has format {record['format']!r}: this version reads format {FORMAT}"
    if record["status"] not in (FINISHED, FAILED):
        return f"has status {record['status']!r}: it must be {FINISHED} or {FAILED}"
    return _damaged_figures(record) or _damaged_words(record) or _foreign_settings(record)


def _damaged_figures(record: Record) -> str | None:
    curve, final = record["curve"], record["final"]
    if not isinstance(curve, list) or not curve:
        return "holds no epoch"
    if not all(map(_is_epoch, curve)):
        return "holds an epoch that is damaged"
    if not _is_epoch(final):
        return "holds final figures that are damaged"
    if is_finished(record) and any(
        row[name] is None for row in (curve[-1], final) for name in _FIGURES
    ):
        return "is of a finished run, but lacks figures of its last epoch"
    return None if is_number(record["seconds"]) else "does not hold its seconds as a number"


def _damaged_words(record: Record) -> str | None:
    """Look at what people are told besides figures; some of it may be missing."""
    for name, value in (("title", record["title"]), ("failure", record.get("failure") or "")):
        if not isinstance(value, str):
            return f"does not hold its {name} as text"
    told = record.get("execution") or {}
    return None if isinstance(told, dict) else "does not hold its execution as names and values"


def _foreign_settings(record: Record) -> str | None:
    """Say why a record's settings are not those that its key was made of."""
    try:
        key = Run.from_dict(mapping("settings", record["settings"])).key
    except (TypeError, ValueError) as error:
        return f"holds settings of no run: {error}"
    return None if key == record["key"] else f"is damaged: its settings are those of {key}"


def _is_epoch(row: Any) -> bool:
    """Tell whether a row of a curve has its figures; null stands for one that is not finite."""
    if not isinstance(row, dict) or any(name not in row for name in _FIGURES):
        return False
    numbered = isinstance(row["epoch"], int)
    return numbered and all(value is None or is_number(value) for value in row.values())


def is_finished(record: Record | None) -> bool:
    """Tell whether a record is there and its run went to the end."""
    return record is not None and record["status"] == FINISHED


def failure_of(record: Record) -> str:
    """Return why a run failed, in words."""
    return str(record.get("failure") or "no reason was recorded")


def final_error(record: Record) -> float | None:
    """Return the test error of the last epoch in percent; None if the run failed."""
    value = record["curve"][-1]["test_error"] if is_finished(record) else None
    return None if value is None else float(value)
