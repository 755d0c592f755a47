"""Records: the result of a run as JSON, named by the run's key.

``OUT/KEY.json`` is the record. Its work folder, ``work/KEY`` in OUT, holds checkpoints, the lock,
TensorBoard events, the final weights, if they are kept, and the last attempt of a run without a
record. Numbers that are not finite are written as null, so a record is valid JSON.
"""

from __future__ import annotations

import json
import math
import re
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean, median_high
from typing import Any

from wsam._utils.text import json_safe, printable
from wsam.lab import files
from wsam.lab.run import Run
from wsam.lab.titles import figure_column, figure_name, format_figure
from wsam.lab.values import check_mapping, is_number

Record = dict[str, Any]
FORMAT = 1
FINISHED, FAILED = "finished", "failed"
WEIGHTS = "weights.pt"
NOT_FINITE = "contain values that are not finite"
"""In the failure of a run whose data is the cause."""
_KEY = re.compile("[0-9a-f]{12}")
_REQUIRED = ("format", "key", "title", "status", "settings", "final", "curve", "seconds")
_MAPPINGS = ("metric", "execution", "hardware", "versions", "data")
"""Entries that a record may lack."""
_ROW = ("epoch", "train_loss")
"""Entries of every epoch."""
METRIC = {"name": "error", "unit": "%", "lower_is_better": True, "split": "test"}
"""Entry ``metric`` of records that have none. ``split`` is the one evaluated after each epoch."""
_ADVICE = "remove it to run again"


# Paths ------------------------------------------------------------------------------------------


def record_path(out: Path, run: Run) -> Path:
    """Return the path of a run's record."""
    return out / f"{run.key}.json"


def work_root(out: Path) -> Path:
    """Return the folder of everything but records: work folders of runs and files of sweeps."""
    return out / "work"


def work_folder(out: Path, run: Run) -> Path:
    """Return the folder of a run's checkpoints, lock, events and weights."""
    return work_root(out) / run.key


def checkpoints_folder(work_folder: Path) -> Path:
    """Return the folder of the checkpoints within a run's work folder."""
    return work_folder / "checkpoints"


def weights_path(out: Path, run: Run) -> Path:
    """Return the path of the final weights, which exist only if they were kept."""
    return work_folder(out, run) / WEIGHTS


def is_named_by_key(path: Path) -> bool:
    """Return whether the stem of a path has the form of a run's key."""
    return _KEY.fullmatch(path.stem) is not None


# Locks ------------------------------------------------------------------------------------------


def lock_run(out: Path, run: Run) -> AbstractContextManager[None]:
    """Return a context that holds the lock of a run.

    Raises:
        BusyError: On entry, if another process holds the lock.
    """
    return files.exclusive_lock(_lock_path(out, run))


def check_unlocked(out: Path, run: Run) -> None:
    """Raise if another process holds the lock of a run; creates no files.

    Raises:
        BusyError: Another process is working on this run.
    """
    path = _lock_path(out, run)
    if path.exists():
        with files.exclusive_lock(path):
            pass


def _lock_path(out: Path, run: Run) -> Path:
    return work_folder(out, run) / "lock"


# Writing and reading ----------------------------------------------------------------------------


def write(out: Path, run: Run, record: Record) -> Path:
    """Write a record atomically and return its path."""
    path = record_path(out, run)
    files.write_atomic(path, _format(json_safe(record)).encode())
    return path


def _format(record: Record) -> str:
    """Return JSON with one line per entry and one line per epoch."""

    def line(value: Any) -> str:
        return json.dumps(value, allow_nan=False, ensure_ascii=False)

    rows = ",\n".join(f"  {line(row)}" for row in record["curve"])
    entries = [
        f" {line(name)}: " + (f"[\n{rows}\n ]" if name == "curve" else line(value))
        for name, value in record.items()
    ]
    return "{\n" + ",\n".join(entries) + "\n}\n"


def read(out: Path, run: Run) -> Record | None:
    """Return the record of a run, finished or failed, or None if it does not exist.

    Raises:
        ValueError: The file is not a record of this run.
    """
    path = record_path(out, run)
    return read_named(path) if path.exists() else None


def read_named(path: Path) -> Record:
    """Read a record whose file must be named by its key.

    Raises:
        ValueError: The file is not a record, or its key differs from its name.
    """
    record = read_file(path)
    if record["key"] != path.stem:
        raise ValueError(
            f"{path} is the record of another run, {record['key']}; move it away to run again"
        )
    return record


def read_file(path: Path) -> Record:
    """Read a record and check its format.

    Raises:
        ValueError: The file is damaged or not a record; the message contains its path.
    """
    try:
        record = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path} {error}; {_ADVICE}") from error
    if problem := _find_problem(record):
        raise ValueError(f"{path} {problem}; {_ADVICE}")
    return dict(record)


def read_json(path: Path) -> Any:
    """Read a JSON file; see `parse_json`.

    Raises:
        ValueError: The file is not such JSON. The message is a predicate without the path.
        OSError: The file cannot be read.
    """
    return parse_json(files.read_regular(path))


def parse_json(data: str | bytes) -> Any:
    """Parse JSON in which every number must be finite as a float.

    Control characters in strings are escaped, so that texts can be printed.

    Raises:
        ValueError: The data is not such JSON. The message is a predicate.
    """
    try:
        return _with_printable_text(
            json.loads(data, parse_constant=_finite, parse_float=_finite, parse_int=_parse_int)
        )
    except (RecursionError, ValueError) as error:
        raise ValueError("is not valid JSON") from error


def _with_printable_text(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(name): _with_printable_text(item) for name, item in value.items()}
    return [*map(_with_printable_text, value)] if isinstance(value, list) else value


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value


def _parse_int(text: str) -> int:
    _finite(text)
    return int(text)


# Checks -----------------------------------------------------------------------------------------


def _find_problem(record: Any) -> str | None:
    """Return what is wrong with a record as a predicate, or None."""
    if not isinstance(record, dict) or any(name not in record for name in _REQUIRED):
        return f"is not a record: it needs {', '.join(_REQUIRED)}"
    if record["format"] != FORMAT:
        return f"has format {record['format']!r}: this version reads format {FORMAT}"
    if problem := _find_wrong_entry(record):
        return problem
    try:
        key = Run.from_dict(check_mapping("settings", record["settings"])).key
    except (TypeError, ValueError) as error:
        return f"contains invalid settings: {error}"
    return None if key == record["key"] else f"is damaged: its settings have the key {key}"


def _find_wrong_entry(record: Record) -> str | None:
    """Return which entry besides the settings is invalid, as a predicate, or None."""
    if record["status"] not in (FINISHED, FAILED):
        return f"has status {record['status']!r}: it must be {FINISHED} or {FAILED}"
    for name in _MAPPINGS:
        if not isinstance(record.get(name) or {}, dict):
            return f"has {name} {record[name]!r}: it must be a mapping"
    if not is_number(record["seconds"]):
        return f"has seconds {record['seconds']!r}: they must be a number"
    curve = record["curve"]
    if (
        not isinstance(curve, list)
        or not curve
        or not all(map(_is_epoch, [*curve, record["final"]]))
    ):
        return "contains an invalid epoch, or none"
    needed = (*_ROW, figure_column(metric(record), "test"))
    last = [row.get(name) for row in (curve[-1], record["final"]) for name in needed]
    if is_finished(record) and None in last:
        return "is marked as finished, but lacks metrics of its last epoch"
    return None


def _is_epoch(row: Any) -> bool:
    """Return whether a row of a curve has all metrics; null means not finite."""
    if not isinstance(row, dict) or any(name not in row for name in _ROW):
        return False
    values_valid = all(value is None or is_number(value) for value in row.values())
    return isinstance(row["epoch"], int) and values_valid


# Contents ---------------------------------------------------------------------------------------


def is_finished(record: Record | None) -> bool:
    """Return whether a record exists and its run finished without failure."""
    return record is not None and record["status"] == FINISHED


def failure_reason(record: Record) -> str:
    """Return why a run failed."""
    return str(record.get("failure") or "no reason was recorded")


def failure_advice(record: Record) -> str:
    """Return what to change in a run that failed."""
    if NOT_FINITE in failure_reason(record):
        return "correct the data"
    return "reduce rho, gamma or the learning rate"


def final_error(record: Record) -> float | None:
    """Return the test error of the last epoch in percent; None if the run failed or has none."""
    return _last(record, "test_error")


def metric(record: Record) -> dict[str, Any]:
    """Return name, unit, direction and split of a run's metric.

    Returns:
        ``name``, ``unit`` (``%`` or empty), ``lower_is_better``, and ``split``: the one evaluated
        after each epoch, ``validation`` or ``test``. Older records have the test error.
    """
    return {**METRIC, **(record.get("metric") or {})}


def final_figure(record: Record, split: str = "test") -> float | None:
    """Return a run's metric on a split after the last epoch; None if the run failed or has none."""
    return _last(record, figure_column(metric(record), split))


def final_text(record: Record, split: str = "test") -> str:
    """Return `final_figure` with its name and unit: ``validation error 4.20%``."""
    found = metric(record)
    return f"{split} {found['name']} {format_figure(final_figure(record, split), found['unit'])}"


def objective(record: Record) -> float | None:
    """Return what a search minimizes; None if the run failed.

    That is the metric on the validation split if the run has one, else on the test set; negated if
    higher values are better.
    """
    found = metric(record)
    value = final_figure(record, found["split"])
    return value if value is None or found["lower_is_better"] else -value


def objective_name(record: Record) -> str:
    """Return the name of `objective`, such as ``validation error`` or ``negative test accuracy``."""
    found = metric(record)
    name = figure_name(found)
    return name if found["lower_is_better"] else f"negative {name}"


def has_own_device(record: Record) -> bool:
    """Whether no other program used the GPU during the run, so that its times can be compared."""
    return not (record.get("hardware") or {}).get("shared")


def training_seconds(record: Record) -> float:
    """Return the training time without compilation and evaluation.

    It is the number of epochs times the median time of an epoch, for each phase of the run: one with
    the option ``start`` has two. If the number of two-pass steps changes in each epoch (``threshold``),
    it is the mean of all epochs but the first.
    """
    seconds = [float(row["seconds"]) for row in record["curve"]]
    options = record["settings"].get("options") or {}
    if options.get("threshold") is not None:
        return len(seconds) * fmean(seconds[1:] or seconds)
    first = round(options.get("start", 0.0) * len(seconds))
    phases = [phase for phase in (seconds[:first], seconds[first:]) if phase]
    # The first epoch of a phase includes compilation or the recording of a graph.
    return sum(len(phase) * median_high(phase[1:] or phase) for phase in phases)


def _last(record: Record, column: str) -> float | None:
    """Return a figure of the last epoch; None if the run failed or has none."""
    value = record["curve"][-1].get(column) if is_finished(record) else None
    return None if value is None else float(value)
