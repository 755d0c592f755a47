"""The loss around the trained weights: sharpness, and a slice along a random direction.

Radius and direction are the same for all methods.

Reference:
    Li et al., Visualizing the loss landscape of neural nets, NeurIPS 2018.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from wsam._utils.text import json_safe
from wsam.lab import records
from wsam.lab.execution import ExecutionConfig
from wsam.lab.files import write_atomic
from wsam.lab.loaded_model import FixedBatches, restore
from wsam.lab.run import Run

RADIUS = 0.1
_SAMPLES = 1000
"""At most: of smaller training data, all are used."""
DISTANCES = tuple(step / 5 for step in range(-5, 6))
"""Points of the slice. At distance 1 every filter is displaced by its own norm."""
_SLICE_SAMPLES = 500
_BATCH_SIZE = 250


@dataclass(frozen=True)
class Surroundings:
    """The training loss around the trained weights.

    Args:
        sharpness: Its increase within `RADIUS`; None if it could not be measured.
        slice: The loss at each of `DISTANCES`; None where it is not finite. Empty if it could not be
            measured.
        samples: Number of samples on which the sharpness was measured; None if unknown.
        slice_samples: The same for the slice.
    """

    sharpness: float | None = None
    slice: tuple[float | None, ...] = ()
    samples: float | None = None
    slice_samples: float | None = None


def measure_sharpness(run: Run, out: Path, execution: ExecutionConfig) -> None:
    """Measure the training loss around the weights of a finished run and write it.

    A problem is written instead of a value: the run itself is finished.
    """
    path = sharpness_path(out, run)
    if path.exists():
        return
    from wsam.curvature import landscape, random_direction, sharpness

    found: dict[str, object] = {"key": run.key, "radius": RADIUS, "value": None, "slice": []}
    try:
        model, feed = restore(run, out, execution)
        fixed = FixedBatches(feed, "train", _SAMPLES, _BATCH_SIZE)
        batches = list(fixed)  # a loader of the user's own may shuffle
        increase = sharpness(model, fixed.loss, batches, RADIUS)
        found |= {"value": float(increase.value), "samples": increase.info["samples"]}
        few = batches[: _SLICE_SAMPLES // _BATCH_SIZE]
        line = landscape(model, fixed.loss, few, random_direction(model), DISTANCES)
        found |= {"slice": line.losses, "slice_samples": line.info["samples"]}
    except Exception as error:  # any error of the user's model or loss
        found["problem"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    write_atomic(path, f"{json.dumps(json_safe(found))}\n".encode())


def sharpness_path(out: Path, run: Run) -> Path:
    """Return the file with the measurements of a run's weights."""
    return out / f"{run.key}.sharpness.json"


def read_sharpness(out: Path, run: Run) -> Surroundings:
    """Return the measurements; empty ones if the file is missing or damaged."""
    try:
        found = records.read_json(sharpness_path(out, run))
    except (OSError, ValueError):
        return Surroundings()
    counts = found.get("samples"), found.get("slice_samples")
    return Surroundings(found["value"], tuple(found["slice"]), *counts)
