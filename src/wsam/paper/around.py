"""The loss around a minimum: a line and, on request, a plane through its weights.

Directions are random and filter-normalised, drawn from the same seed for every run, so that the
slices of one model trained in several ways can be laid over each other.

Reference:
    Li et al., Visualizing the loss landscape of neural nets, NeurIPS 2018.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from wsam.lab import environment

if TYPE_CHECKING:
    from wsam.curvature import Landscape
    from wsam.lab.batches import Batch

SLICE, PLANE = "slice", "plane"
"""What a measurement calls them; it may lack either."""
PLANE_IMAGES = 2_000
_POINTS = {SLICE: 21, PLANE: 11}
_DIRECTIONS = {SLICE: 1, PLANE: 2}
_SEED = 0


def look(part: str, model: nn.Module, images: Iterable[Batch], device: torch.device) -> Any:
    """Return the loss along one direction (`SLICE`) or two (`PLANE`), as plain data.

    Args:
        part: `SLICE` or `PLANE`.
        model: The trained model.
        images: Read once; every point is evaluated on each batch.
        device: Where the model is.
    """
    from wsam.curvature import landscape, random_direction

    begin = time.monotonic()
    count, points = _DIRECTIONS[part], _POINTS[part]
    lines = [random_direction(model, seed=_SEED + number) for number in range(count)]
    axis = [2 * number / (points - 1) - 1 for number in range(points)]
    labels = [f"filter-normalised direction {number + 1}" for number in range(count)]
    found = landscape(model, cross_entropy, images, lines, [axis] * count, labels=labels)
    taken = {"seconds": time.monotonic() - begin, **environment.facts(device)}
    return {**found.as_dict(), "seed": _SEED, **taken}


def read(found: dict[str, Any], part: str) -> Landscape | None:
    """Return a slice out of a measurement; None if it was not taken.

    Raises:
        ValueError: What is there is none.
    """
    from wsam.curvature import Landscape

    if part not in found:
        return None
    try:
        given = found[part]
        axes = [[float(value) for value in axis] for axis in given["coordinates"]]
        losses = _numbers(given["losses"], [len(axis) for axis in axes])
        labels = [str(label) for label in given["labels"]]
        info = dict(given["info"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its {part} is damaged") from error
    if not len(axes) == len(labels) == _DIRECTIONS[part]:
        raise ValueError(f"its {part} is damaged")
    return Landscape(axes, losses, labels, info)


def _numbers(losses: Any, shape: Sequence[int]) -> list[Any]:
    """Return losses of the given shape; what JSON cannot hold was written as null."""
    if not isinstance(losses, list) or len(losses) != shape[0]:
        raise ValueError("not as many losses as coordinates")
    if len(shape) > 1:
        return [_numbers(row, shape[1:]) for row in losses]
    return [math.inf if loss is None else float(loss) for loss in losses]
