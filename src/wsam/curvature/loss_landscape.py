"""The loss along one or two directions through weight space."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from wsam._utils.text import json_safe
from wsam.curvature.directions import Direction, merge_tied
from wsam.curvature.objective import LossFunction, Objective, ObjectiveOptions
from wsam.curvature.plot_landscape import save_landscape
from wsam.curvature.progress import Progress, ProgressCallback


@dataclass(frozen=True)
class Landscape:
    """Losses on a line or on a grid.

    Attributes:
        coordinates: Coordinates of the points, one list per direction.
        losses: A list, or for two directions a list of rows, one per value of the first coordinate.
            Losses that are not finite are kept.
        labels: Names of the directions.
        info: Data, mode and precision of the loss.
        note: Number of losses that are not finite and, if known, the reason; else empty.
    """

    coordinates: list[list[float]]
    losses: list[Any]
    labels: list[str]
    info: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def dimensions(self) -> int:
        """Number of directions, one or two."""
        return len(self.coordinates)

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as a dictionary for JSON; a loss that is not finite becomes None."""
        found: dict[str, Any] = json_safe(asdict(self))
        return found

    def save(self, path: str | Path, *, log: bool | None = None, ends: bool = False) -> Path:
        """Write a figure (.png, .svg, .pdf), an interactive page (.html) or the numbers (.json).

        Args:
            path: Its suffix selects the format; the folder is created.
            log: Logarithmic loss, if all are positive. Default: if they span more than a factor of 30.
            ends: Mark both ends of a line between two checkpoints, 0 and 1, instead of the origin.

        Returns:
            The path.
        """
        save_landscape(self, path, log, ends)
        return Path(path)


def landscape(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    directions: Direction | Sequence[Direction],
    coordinates: Sequence[float] | Sequence[Sequence[float]] | None = None,
    *,
    origin: Mapping[str, Tensor] | None = None,
    labels: Sequence[str] | None = None,
    report: ProgressCallback | None = None,
    **options: Unpack[ObjectiveOptions],
) -> Landscape:
    """Evaluate the loss on a line or on a grid; the model does not change.

    Equation, for directions d1 and d2::

        f(a) = L(origin + a d1)        or        f(a, b) = L(origin + a d1 + b d2)

    Each batch is read once and evaluated at every point. `check` adds one pass over the data.

    Args:
        model: Any module.
        loss_fn: Mean loss of a batch.
        batches: A list or a loader.
        directions: One direction or two.
        coordinates: Values of a (and of b). Default: 41 values (21 each for two directions) from -1
            to 1.
        origin: Tensors to start from, named like parameters or buffers. Default: the model's own.
        labels: Names of the directions.
        report: Called with a `Progress` after every evaluation.
        **options: mode, params, dtype, reduction, size and check of `Objective`.

    Returns:
        The losses with their coordinates.

    Raises:
        KeyError: If a tensor has an unknown name.
        ValueError: If there are no or more than two directions, or a tensor has another shape than
            the model's.

    Example:
        >>> model = nn.Linear(1, 1, bias=False).double()
        >>> _ = nn.init.zeros_(model.weight)
        >>> data = [(torch.ones(1, 1).double(), torch.zeros(1, 1).double())]
        >>> line = {"weight": torch.ones(1, 1).double()}
        >>> landscape(model, nn.functional.mse_loss, data, line, [-1.0, 0.0, 2.0]).losses
        [1.0, 0.0, 4.0]
    """
    given = [directions] if isinstance(directions, Mapping) else list(directions)
    if len(given) not in (1, 2):
        raise ValueError(f"a landscape needs one direction or two, got {len(given)}")
    axes = _coordinate_lists(coordinates, len(given))
    names = list(labels or [f"direction {i + 1}" for i in range(len(axes))])
    options.setdefault("params", lambda _name: True)  # frozen parameters may be moved, too
    objective = Objective(model, loss_fn, batches, **options)
    given = [merge_tied(objective.model, direction) for direction in given]
    start = _start_tensors(objective, given, merge_tied(objective.model, origin or {}))
    moves = [
        {name: d.to(start[name].device, start[name].dtype) for name, d in direction.items()}
        for direction in given
    ]
    points = list(itertools.product(*axes))
    objective.read_again()  # the points need not include the model's own weights
    means = _mean_losses(objective, points, start, moves, report)
    columns = len(axes[-1])
    rows = [means[i : i + columns] for i in range(0, len(means), columns)]
    failed = [point for point, mean in zip(points, means, strict=True) if not math.isfinite(mean)]
    # In train mode BatchNorm does not use running variances.
    suspects = failed if objective.mode == "eval" else []
    negative = sum(_has_negative_variance(point, start, moves) for point in suspects)
    note = _failure_note(len(failed), len(points), negative)
    return Landscape(axes, means if len(axes) == 1 else rows, names, objective.describe(), note)


def _mean_losses(
    objective: Objective,
    points: Sequence[Sequence[float]],
    start: Mapping[str, Tensor],
    moves: Sequence[Direction],
    report: ProgressCallback | None,
) -> list[float]:
    """Return the mean loss over all batches at each point."""
    sums, samples, done = [0.0] * len(points), 0.0, 0
    with objective.ready(), torch.no_grad():
        for batch, size in objective.stream():
            for index, point in enumerate(points):
                tensors = _tensors_at(point, start, moves)
                sums[index] += size * objective.evaluate(tensors, batch, size)[0].item()
                done += 1
                if report is not None:
                    limit = len(points) * objective.batch_count
                    report(Progress(done, max(limit, done), math.nan))
            samples += size
    return [total / samples for total in sums]


def _coordinate_lists(
    coordinates: Sequence[float] | Sequence[Sequence[float]] | None, dimensions: int
) -> list[list[float]]:
    if coordinates is None:
        half = 20 if dimensions == 1 else 10
        return [[step / half for step in range(-half, half + 1)]] * dimensions
    given: list[Any] = list(coordinates)
    is_flat = all(torch.as_tensor(value).ndim == 0 for value in given)
    axes = [[float(value) for value in axis] for axis in ([given] if is_flat else given)]
    if len(axes) != dimensions or not all(axes):
        raise ValueError(
            f"coordinates need a list for each of the directions, with at least one number: there are "
            f"{dimensions} directions, got {coordinates!r}"
        )
    return axes


def _start_tensors(
    objective: Objective, directions: Sequence[Direction], origin: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return all tensors of the origin and the directions at the origin, in the right precision."""
    own = {**dict(objective.model.named_parameters()), **dict(objective.model.named_buffers())}
    names = dict.fromkeys([*origin, *(name for d in directions for name in d)])
    start = {}
    for name in names:
        tensor, expected = origin.get(name, own[name]).detach(), tuple(own[name].shape)
        for given in (tensor, *(d[name] for d in directions if name in d)):
            if given.shape != expected:
                shape = tuple(given.shape)
                raise ValueError(f"the model's {name!r} is of shape {expected}, got {shape}")
        dtype = objective.dtype if tensor.is_floating_point() else tensor.dtype
        start[name] = tensor.to(own[name].device, dtype)
    return start


def _tensors_at(
    point: Sequence[float], start: Mapping[str, Tensor], moves: Sequence[Direction]
) -> dict[str, Tensor]:
    """Return `start + sum_i point_i moves_i`."""
    tensors = dict(start)
    for amount, move in zip(point, moves, strict=True):
        for name, step in move.items():
            tensors[name] = tensors[name] + amount * step
    return tensors


def _has_negative_variance(
    point: Sequence[float], start: Mapping[str, Tensor], moves: Sequence[Direction]
) -> bool:
    """Return whether a running variance is negative, as may happen beyond two checkpoints."""

    def variances(tensors: Direction) -> dict[str, Tensor]:
        return {n: t for n, t in tensors.items() if n.rpartition(".")[2] == "running_var"}

    moved = _tensors_at(point, variances(start), [variances(move) for move in moves])
    return any(bool((variance < 0).any()) for variance in moved.values())


def _failure_note(failed: int, points: int, negative: int) -> str:
    """Return how many points have no finite loss, and at how many a variance is negative."""
    if not failed:
        return ""
    where = "there" if negative == failed else f"at {negative} of them"
    reason = f" (a variance of BatchNorm is negative {where})" if negative else ""
    return f"{failed} of {points} points {'has' if failed == 1 else 'have'} no finite loss{reason}"
