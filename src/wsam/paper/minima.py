"""Measurements at the minimum of a finished run: top Hessian eigenvalue and slices of the loss.

The directions of the slices are random and filter-normalized. Every run uses the same seed, so that
slices of one architecture can be drawn in one plot.

Reference:
    Li et al., Visualizing the loss landscape of neural nets, NeurIPS 2018.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from wsam.lab import environment, records
from wsam.lab.execution import ExecutionConfig
from wsam.lab.files import write_atomic
from wsam.lab.loaded_model import FixedBatches, restore
from wsam.lab.run import Run
from wsam.lab.values import is_number

if TYPE_CHECKING:
    from wsam.curvature import Landscape, Operator

FORMAT = 1
BATCH_SIZE = 500
TRAIN_MODE, TEST_IMAGES = "by_batches", "on_test"
"""Keys of two more eigenvalues: BatchNorm in training mode, and the loss on test images."""
READINGS = "readings"
"""Key of the eigenvalues that `wsam.paper.hessian` measures, by their measure."""
SLICE, PLANE = "slice", "plane"
"""Keys of the loss along one direction and along two."""
_IMAGES = 10_000  # the cost of an eigenvalue is proportional to it
_PLANE_IMAGES = 2_000
TOLERANCE = 1e-2
"""Relative residual of an eigenvalue; its relative error is about the square."""
_POINTS = {SLICE: 21, PLANE: 11}  # per direction
_DIRECTIONS = {SLICE: 1, PLANE: 2}
_DIRECTION_SEED = 0


def measurement_path(out: Path, run: Run) -> Path:
    """Return the file of a run's measurement, in the folder of its record."""
    return out / f"{run.key}.minimum.json"


def read_measurement(out: Path, run: Run) -> dict[str, Any] | None:
    """Read the measurement at a run's minimum; None if there is none.

    Slices are optional; see `read_slice`.

    Raises:
        ValueError: The file is damaged, or belongs to another run.
    """
    path = measurement_path(out, run)
    if not path.exists():
        return None
    try:
        measurement = records.read_json(path)
        key, value = measurement["key"], measurement["top_eigenvalue"]
        if measurement.get("format", FORMAT) != FORMAT:
            raise ValueError("unknown format")
        for part in (SLICE, PLANE):
            read_slice(measurement, part)
        for variant in (TRAIN_MODE, TEST_IMAGES):
            read_eigenvalue(measurement, variant)
        for name in measurement.get(READINGS, {}):
            read_eigenvalue(measurement, READINGS, name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged; remove it to measure again") from error
    if key != run.key or not isinstance(value, float):
        raise ValueError(f"{path} is not a measurement of {run.key}; remove it to measure again")
    return dict(measurement)


def write_measurement(out: Path, run: Run, measurement: Mapping[str, Any]) -> None:
    """Write the measurement at a run's minimum."""
    text = json.dumps(measurement, indent=1, allow_nan=False) + "\n"
    write_atomic(measurement_path(out, run), text.encode())


def read_eigenvalue(measurement: Mapping[str, Any], *keys: str) -> float | None:
    """Return a top eigenvalue from a measurement; None if it was not measured.

    Args:
        measurement: As `read_measurement` returns it.
        *keys: Keys of the eigenvalue: `TRAIN_MODE`, `TEST_IMAGES`, or `READINGS` and a measure.
            Without keys it is that of the training images with BatchNorm in evaluation mode.

    Raises:
        TypeError: The value is not a number.
    """
    entry: Any = measurement
    for key in keys:
        if key not in entry:
            return None
        entry = entry[key]
    value = entry["top_eigenvalue"]
    if not is_number(value):
        raise TypeError("an eigenvalue must be a number")
    return float(value)


def read_slice(measurement: Mapping[str, Any], part: str) -> Landscape | None:
    """Return the loss along one direction (`SLICE`) or two (`PLANE`); None if it was not measured.

    Raises:
        ValueError: The entry is malformed.
    """
    from wsam.curvature import Landscape

    if part not in measurement:
        return None
    try:
        entry = measurement[part]
        axes = [[float(value) for value in axis] for axis in entry["coordinates"]]
        losses = _read_losses(entry["losses"], [len(axis) for axis in axes])
        labels = [str(label) for label in entry["labels"]]
        info = dict(entry["info"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its {part} is damaged") from error
    if not len(axes) == len(labels) == _DIRECTIONS[part]:
        raise ValueError(f"its {part} is damaged")
    return Landscape(axes, losses, labels, info)


def _read_losses(losses: Any, shape: Sequence[int]) -> list[Any]:
    """Return losses of the given shape; null is an infinite loss, which JSON cannot represent."""
    if not isinstance(losses, list) or len(losses) != shape[0]:
        raise ValueError("the number of losses and of coordinates differ")
    if len(shape) > 1:
        return [_read_losses(row, shape[1:]) for row in losses]
    return [math.inf if loss is None else float(loss) for loss in losses]


def measure(run: Run, out: Path, execution: ExecutionConfig, plane: bool = False) -> dict[str, Any]:
    """Measure the minimum of a finished run; parts measured before are kept.

    The Hessian is that of the mean loss over the first 10,000 training images without augmentation,
    with the labels used in training, in float32 (TF32 convolutions on a GPU, torch's default), with
    BatchNorm in evaluation mode. The slice uses the same loss. The paper does not state how it
    computes the Hessian, so two more eigenvalues are stored: with BatchNorm in training mode, over
    the same images in batches of the run's batch size; and in evaluation mode over test images.

    Args:
        run: A finished run whose weights were kept.
        out: Folder of the results.
        execution: Device and data folder.
        plane: Also measure the loss along two directions, over the first 2,000 images.

    Raises:
        FileNotFoundError: There is no measurement yet, and the weights were not kept.
    """
    wanted = [TRAIN_MODE, TEST_IMAGES, SLICE, *([PLANE] if plane else [])]
    measurement = read_measurement(out, run)
    if measurement is not None and all(part in measurement for part in wanted):
        return measurement
    if not records.weights_path(out, run).exists():
        if measurement is not None:
            return measurement  # cannot be completed without the weights
        raise FileNotFoundError(
            f"its weights were not kept; remove {records.record_path(out, run)} to train it again"
        )
    model, feed = restore(run, out, execution)
    device = execution.resolve_device()
    if measurement is None:
        batches = FixedBatches(feed, "train", _IMAGES, BATCH_SIZE)
        header = {"format": FORMAT, "key": run.key, "title": run.title}
        measurement = {**header, **_measure_eigenvalue(model, batches, device)}
    for part in (part for part in wanted if part not in measurement):
        if part == TRAIN_MODE:
            batches = FixedBatches(feed, "train", _IMAGES, run.batch_size)
            measurement[part] = _measure_eigenvalue(model, batches, device, mode="train")
        elif part == TEST_IMAGES:
            batches = FixedBatches(feed, "test", _IMAGES, BATCH_SIZE)
            measurement[part] = _measure_eigenvalue(model, batches, device)
        else:
            count = _PLANE_IMAGES if part == PLANE else _IMAGES
            batches = FixedBatches(feed, "train", count, BATCH_SIZE)
            measurement[part] = _measure_slice(part, model, batches, device)
    write_measurement(out, run, measurement)
    return measurement


def _measure_eigenvalue(
    model: nn.Module,
    batches: FixedBatches,
    device: torch.device,
    mode: Literal["eval", "train"] = "eval",
) -> dict[str, Any]:
    """Return the top eigenvalue of the Hessian and how it was computed."""
    from wsam.curvature import hessian

    begin = time.monotonic()
    operator = hessian(model, batches.loss, batches, mode=mode)
    info = operator.info
    return {
        **top_eigenvalue(operator),
        "images": batches.count,
        "batch": batches.batch_size,
        "mode": info.mode,
        "dtype": info.dtype,
        "tf32": info.tf32,
        "seconds": time.monotonic() - begin,
        **environment.describe_environment(device),
    }


def top_eigenvalue(operator: Operator) -> dict[str, Any]:
    """Return the top eigenvalue of a Hessian, to a relative residual of `TOLERANCE`."""
    from wsam.curvature import top_eigenvalues

    top = top_eigenvalues(operator, tol=TOLERANCE)
    return {
        "top_eigenvalue": top.largest,
        "residual": float(top.residuals[0]),
        "converged": bool(top.converged[0]),
        "products": top.products,
        "loss": operator.info.loss,
    }


def _measure_slice(
    part: str, model: nn.Module, batches: FixedBatches, device: torch.device
) -> dict[str, Any]:
    """Return the loss along one direction (`SLICE`) or two (`PLANE`) as plain data."""
    from wsam.curvature import landscape, random_direction

    begin = time.monotonic()
    count, points = _DIRECTIONS[part], _POINTS[part]
    directions = [random_direction(model, seed=_DIRECTION_SEED + i) for i in range(count)]
    axis = [2 * i / (points - 1) - 1 for i in range(points)]
    labels = [f"filter-normalized direction {i + 1}" for i in range(count)]
    losses = landscape(model, batches.loss, batches, directions, [axis] * count, labels=labels)
    origin = {"seconds": time.monotonic() - begin, **environment.describe_environment(device)}
    return {**losses.as_dict(), "seed": _DIRECTION_SEED, **origin}
