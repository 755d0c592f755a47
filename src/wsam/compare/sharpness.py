"""Sharpness of the trained weights, at the same radius for all methods."""

from __future__ import annotations

import json
from pathlib import Path

from wsam._format import json_safe
from wsam.lab import records
from wsam.lab.execution import ExecutionConfig
from wsam.lab.files import write_atomic
from wsam.lab.loaded_model import FixedBatches
from wsam.lab.run import Run
from wsam.lab.train import restore

RADIUS = 0.1
SAMPLES = 1000
_BATCH_SIZE = 250


def measure_sharpness(run: Run, out: Path, execution: ExecutionConfig) -> None:
    """Measure the increase of the training loss within `RADIUS` and write it.

    A problem is written instead of the value: the run itself is finished.
    """
    path = sharpness_path(out, run)
    if path.exists():
        return
    from wsam.curvature import sharpness

    found: dict[str, object] = {"key": run.key, "radius": RADIUS, "value": None}
    try:
        model, feed = restore(run, out, execution)
        fixed = FixedBatches(feed, "train", SAMPLES, _BATCH_SIZE)
        batches = list(fixed)  # a loader of the user's own may shuffle
        found["value"] = float(sharpness(model, fixed.loss, batches, RADIUS).value)
    except Exception as error:  # any error of the user's model or loss
        found["problem"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    write_atomic(path, f"{json.dumps(json_safe(found))}\n".encode())


def sharpness_path(out: Path, run: Run) -> Path:
    """Return the file with the sharpness of a run's weights."""
    return out / f"{run.key}.sharpness.json"


def read_sharpness(out: Path, run: Run) -> float | None:
    """Return the measured sharpness; None if it is unknown."""
    try:
        value = records.read_json(sharpness_path(out, run))["value"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return float(value) if isinstance(value, float | int) else None
