"""How sharp the minimum of a finished run is: the top eigenvalue of the Hessian, and slices."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from wsam.lab import environment, records
from wsam.lab.files import write_atomic
from wsam.lab.means import Means
from wsam.lab.names import is_number
from wsam.lab.run import Run
from wsam.lab.subject import FixedBatches
from wsam.lab.train import restore
from wsam.paper import around

FORMAT = 1
BY_BATCHES, ON_TEST = "by_batches", "on_test"
"""Other readings of "the Hessian": BatchNorm in training mode, and the loss on test images."""
BATCH = 500
"""Images at a time."""
_IMAGES = 10_000  # the top eigenvalue of more of them costs in proportion
_TOLERANCE = 1e-2
"""Of the residual, relative: it bounds the eigenvalue's error, which is about its square."""


def path_of(out: Path, run: Run) -> Path:
    """Return where the measurement of a run's minimum lies: beside its record."""
    return out / f"{run.key}.minimum.json"


def read(out: Path, run: Run) -> dict[str, Any] | None:
    """Return what was measured at a run's minimum; None if nothing was.

    Slices (see `around`) may be missing: they are told from it by `around.read`.

    Raises:
        ValueError: What lies there is damaged, or of another run.
    """
    path = path_of(out, run)
    if not path.exists():
        return None
    try:
        found = records.read_json(path)
        key, value = found["key"], found["top_eigenvalue"]
        if found.get("format", FORMAT) != FORMAT:
            raise ValueError("of another format")
        for part in (around.SLICE, around.PLANE):
            around.read(found, part)
        for reading in (BY_BATCHES, ON_TEST):
            value_of(found, reading)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged; remove it to measure again") from error
    if key != run.key or not isinstance(value, float):
        raise ValueError(f"{path} is not a measurement of {run.key}; remove it to measure again")
    return dict(found)


def value_of(found: Mapping[str, Any], reading: str | None = None) -> float | None:
    """Return the top eigenvalue, of another reading if one is named; None if it was not measured."""
    if reading is not None and reading not in found:
        return None
    value = (found if reading is None else found[reading])["top_eigenvalue"]
    if not is_number(value):
        raise TypeError("an eigenvalue must be a number")
    return float(value)


def measure(
    run: Run, out: Path, means: Means, plane: bool = False, readings: bool = True
) -> dict[str, Any]:
    """Measure the minimum of a finished run: what was measured before is not measured again.

    The Hessian is that of the mean loss over the first 10,000 training images, as they are (no
    crops, no mirror images), with the labels that were trained on, in float32 (on a GPU with torch's
    defaults for convolutions, that is TF32), BatchNorm in evaluation. The slice is of the same loss.
    Two more readings of the eigenvalue are kept beside it, for the paper does not say which is its:
    with BatchNorm's statistics of each batch as large as the run's, and over test images.

    Args:
        run: A finished run whose weights were kept.
        out: The folder of the results.
        means: Says the device and where data is.
        plane: Take a slice along two directions, too, over the first 2,000 images.
        readings: Take the two more readings of the eigenvalue.

    Raises:
        FileNotFoundError: Nothing is measured yet, and its weights were not kept.
    """
    wanted = [*([BY_BATCHES, ON_TEST] if readings else []), around.SLICE]
    wanted += [around.PLANE] if plane else []
    found = read(out, run)
    if found is not None and all(part in found for part in wanted):
        return found
    if not records.weights_path(out, run).exists():
        if found is not None:
            return found  # measured elsewhere, or before slices were: it stays as it is
        raise FileNotFoundError(
            f"its weights were not kept; remove {records.record_path(out, run)} to train it again"
        )
    model, feed = restore(run, out, means)
    device = means.place()
    if found is None:
        named = {"format": FORMAT, "key": run.key, "title": run.title}
        found = {**named, **_sharpest(model, FixedBatches(feed, "train", _IMAGES, BATCH), device)}
    for part in (part for part in wanted if part not in found):
        if part == BY_BATCHES:
            batches = FixedBatches(feed, "train", _IMAGES, run.batch_size)
            found[part] = _sharpest(model, batches, device, mode="train")
        elif part == ON_TEST:
            batches = FixedBatches(feed, "test", _IMAGES, BATCH)
            found[part] = _sharpest(model, batches, device)
        else:
            count = around.PLANE_IMAGES if part == around.PLANE else _IMAGES
            batches = FixedBatches(feed, "train", count, BATCH)
            found[part] = around.look(part, model, batches, device)
    write_atomic(path_of(out, run), (json.dumps(found, indent=1, allow_nan=False) + "\n").encode())
    return found


def _sharpest(
    model: nn.Module,
    images: FixedBatches,
    device: torch.device,
    mode: Literal["eval", "train"] = "eval",
) -> dict[str, Any]:
    """Return the top eigenvalue and what it was computed from."""
    from wsam.curvature import hessian, top_eigenvalues

    begin = time.monotonic()
    curvature = hessian(model, cross_entropy, images, mode=mode)
    top = top_eigenvalues(curvature, tol=_TOLERANCE)
    info = curvature.info
    return {
        "top_eigenvalue": top.largest,
        "residual": float(top.residuals[0]),
        "converged": bool(top.converged[0]),
        "products": top.products,
        "loss": info.loss,
        "images": images.count,
        "batch": images.batch_size,
        "mode": info.mode,
        "dtype": info.dtype,
        "tf32": info.tf32,
        "seconds": time.monotonic() - begin,
        **environment.facts(device),
    }
