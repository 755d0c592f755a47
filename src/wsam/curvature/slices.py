"""The loss along one or two directions through weight space.

A direction is a dictionary of tensors named like the model's parameters (and, between two
checkpoints, its buffers). Directions come from `random_direction`, from an eigenvector by
`Operator.split`, or from two checkpoints by `between`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn

from wsam._format import json_safe
from wsam.curvature.objective import LossFunction, Objective, ObjectiveOptions
from wsam.curvature.progress import Progress, Report

__all__ = ["Landscape", "between", "landscape", "normalised", "random_direction"]

Direction = Mapping[str, Tensor]


@dataclass(frozen=True)
class Landscape:
    """Losses on a line or on a grid.

    Attributes:
        coordinates: where the loss was taken: one list of numbers a direction.
        losses: a list, or for two directions a list of rows, one a value of the first coordinate.
            A loss that is not finite is kept as it came.
        labels: what each direction is.
        info: what the loss was computed from.
        note: how many losses are not finite and, where it is known, why; empty if all are.
    """

    coordinates: list[list[float]]
    losses: list[Any]
    labels: list[str]
    info: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def dimensions(self) -> int:
        """One or two."""
        return len(self.coordinates)

    def as_dict(self) -> dict[str, Any]:
        """Return everything, fit for JSON: a loss that is not finite becomes None."""
        found: dict[str, Any] = json_safe(asdict(self))
        return found

    def save(self, path: str | Path, *, log: bool | None = None) -> Path:
        """Write a picture (.png, .svg, .pdf), an interactive page (.html) or the numbers (.json).

        Args:
            path: the suffix says what to write; the folder is made.
            log: logarithmic loss; default where the losses span more than a factor of 30.
        """
        from wsam.curvature.render import save_landscape

        save_landscape(self, path, log)
        return Path(path)


def random_direction(
    model: nn.Module, *, seed: int = 0, normalise: Literal["filter", "unit"] = "filter"
) -> dict[str, Tensor]:
    """Draw a Gaussian direction, by default with the size of each filter of the model.

    `d_ij <- d_ij * norm(w_ij) / norm(d_ij)` for filter j of layer i, which removes the freedom to
    rescale layers that makes raw slices incomparable. Biases and normalisation weights, which are
    no filters, stay as they are.

    Args:
        model: any module.
        seed: of the direction; the same on every device.
        normalise: "filter", or "unit" for a direction of length one over all weights.

    Example:
        >>> model = nn.Linear(2, 3)
        >>> direction = random_direction(model)
        >>> torch.allclose(direction["weight"].norm(dim=1), model.weight.norm(dim=1))
        True
        >>> direction["bias"].tolist()
        [0.0, 0.0, 0.0]

    Reference: Li et al., Visualizing the loss landscape of neural nets, NeurIPS 2018.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = {
        name: torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    if not drawn:
        raise ValueError("the model has no parameters to move")
    return normalised(model, drawn, normalise)


def normalised(
    model: nn.Module, direction: Direction, normalise: Literal["filter", "unit"] = "filter"
) -> dict[str, Tensor]:
    """Scale a direction: to the model's filters, or to length one over all of it.

    Args:
        model: whose filters give the sizes.
        direction: tensors named like the model's parameters; a tied one comes back by its first
            name alone.
        normalise: "filter" or "unit".
    """
    direction = _untied(model, direction)
    if normalise == "unit":
        length = math.sqrt(sum(float((d.double() ** 2).sum()) for d in direction.values()))
        if length == 0:
            raise ValueError("a direction of zeros has no length to scale")
        return {name: d / length for name, d in direction.items()}
    if normalise != "filter":
        raise ValueError(f"normalise must be 'filter' or 'unit', not {normalise!r}")
    weights = dict(model.named_parameters())
    return {name: _like_filters(d, weights[name].detach()) for name, d in direction.items()}


def between(
    first: Mapping[str, Tensor], second: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the origin and the direction of the line from one checkpoint (0) to another (1).

    `w(t) = first + t (second - first)`, running statistics of BatchNorm included.

    Args:
        first: a state dict.
        second: a state dict of the same model.

    Example:
        >>> a, b = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> origin, direction = between(a.state_dict(), b.state_dict())
        >>> torch.allclose(origin["weight"] + direction["weight"], b.weight)
        True
    """
    if first.keys() != second.keys():
        odd = sorted(first.keys() ^ second.keys())[0]
        raise ValueError(f"the two checkpoints are of different models: only one has {odd!r}")
    for name, tensor in first.items():
        if tensor.shape != second[name].shape:
            raise ValueError(
                f"the two checkpoints are of different models: {name!r} is "
                f"{tuple(tensor.shape)} in one and {tuple(second[name].shape)} in the other"
            )
    moving = [name for name, tensor in first.items() if tensor.is_floating_point()]
    origin = {name: first[name].detach() for name in moving}
    return origin, {name: second[name].detach().to(origin[name]) - origin[name] for name in moving}


def landscape(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    directions: Direction | Sequence[Direction],
    coordinates: Sequence[float] | Sequence[Sequence[float]] | None = None,
    *,
    origin: Mapping[str, Tensor] | None = None,
    labels: Sequence[str] | None = None,
    report: Report | None = None,
    **options: Unpack[ObjectiveOptions],
) -> Landscape:
    """Evaluate `L(origin + a d1 [+ b d2])` on a line or a grid; the model stays as it is.

    Each batch is read once and evaluated at every point, after the readings that `check` compares.

    Args:
        model: any module.
        loss_fn: mean loss of a batch.
        batches: a list or a loader.
        directions: one direction or two.
        coordinates: values of a (and of b); default 41 (for two: 21 each) from -1 to 1.
        origin: tensors to start from, named like parameters or buffers; default the model's own.
        labels: names of the directions.
        report: called with a `Progress` after every evaluation.
        **options: mode, params, dtype, reduction, size, check: see `Objective`.

    Example:
        >>> model = nn.Linear(1, 1, bias=False).double()
        >>> _ = nn.init.zeros_(model.weight)
        >>> data = [(torch.ones(1, 1).double(), torch.zeros(1, 1).double())]
        >>> line = {"weight": torch.ones(1, 1).double()}
        >>> landscape(model, nn.functional.mse_loss, data, line, [-1.0, 0.0, 2.0]).losses
        [1.0, 0.0, 4.0]
    """
    several = [directions] if isinstance(directions, Mapping) else list(directions)
    if len(several) not in (1, 2):
        raise ValueError(f"a landscape has one direction or two, not {len(several)}")
    axes = _axes(coordinates, len(several))
    options.setdefault("params", lambda _name: True)  # nothing is differentiated: frozen ones too
    objective = Objective(model, loss_fn, batches, **options)
    several = [_untied(objective.model, direction) for direction in several]
    start = _start(objective, several, _untied(objective.model, origin or {}))
    lines = [
        {name: d.to(start[name].device, start[name].dtype) for name, d in direction.items()}
        for direction in several
    ]
    points = list(itertools.product(*axes))
    objective.read_again()  # none of the points need be the model's own weights
    sums, count, done = [0.0] * len(points), 0.0, 0
    with objective.ready(), torch.no_grad():
        for batch, size in objective.stream():
            for index, point in enumerate(points):
                tensors = _shifted(start, lines, point)
                sums[index] += size * objective.evaluate(tensors, batch, size)[0].item()
                done += 1
                if report is not None:
                    limit = len(points) * objective.batch_count
                    report(Progress(done, max(limit, done), math.nan))
            count += size
    means = [total / count for total in sums]
    rows = len(axes[-1])
    grid = means if len(axes) == 1 else [means[i : i + rows] for i in range(0, len(means), rows)]
    names = list(labels or [f"direction {i + 1}" for i in range(len(axes))])
    lost = [point for point, mean in zip(points, means, strict=True) if not math.isfinite(mean)]
    used = objective.mode == "eval"  # a batch's own variances are never negative
    negative = sum(used and _has_negative_variance(start, lines, point) for point in lost)
    note = _note_of(len(lost), len(points), negative)
    return Landscape(axes, grid, names, objective.describe(), note)


def _has_negative_variance(
    start: Mapping[str, Tensor], lines: Sequence[Direction], point: Sequence[float]
) -> bool:
    """Tell whether a running variance falls below zero: beyond two checkpoints it may."""

    def variances(tensors: Direction) -> dict[str, Tensor]:
        return {n: t for n, t in tensors.items() if n.rpartition(".")[2] == "running_var"}

    there = _shifted(variances(start), [variances(line) for line in lines], point)
    return any(bool((variance < 0).any()) for variance in there.values())


def _note_of(lost: int, points: int, negative: int) -> str:
    if not lost:
        return ""
    where = "there" if negative == lost else f"at {negative} of them"
    why = f" (a variance of BatchNorm is negative {where})" if negative else ""
    return f"{lost} of {points} points {'has' if lost == 1 else 'have'} no finite loss{why}"


def _axes(
    coordinates: Sequence[float] | Sequence[Sequence[float]] | None, dimensions: int
) -> list[list[float]]:
    if coordinates is None:
        return [torch.linspace(-1, 1, 41 if dimensions == 1 else 21).tolist()] * dimensions
    given: list[Any] = list(coordinates)
    if dimensions == 1 and not isinstance(given[0] if given else None, Sequence):
        given = [given]
    axes = [[float(value) for value in axis] for axis in given]
    if len(axes) != dimensions or any(not axis for axis in axes):
        raise ValueError(f"{dimensions} direction(s) need as many non-empty lists of coordinates")
    return axes


def _start(
    objective: Objective, directions: Sequence[Direction], origin: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Everything that moves or is replaced, at the origin, in the objective's precision."""
    own = {**dict(objective.model.named_parameters()), **dict(objective.model.named_buffers())}
    names = dict.fromkeys([*origin, *(name for d in directions for name in d)])
    start = {}
    for name in names:
        if name not in own:
            raise ValueError(f"the model has no parameter or buffer named {name!r}")
        tensor = origin.get(name, own[name]).detach()
        given = [tensor, *(d[name] for d in directions if name in d)]
        if any(t.shape != own[name].shape for t in given):
            raise ValueError(f"the model's {name!r} is of shape {tuple(own[name].shape)}")
        dtype = objective.dtype if tensor.is_floating_point() else tensor.dtype
        start[name] = tensor.to(own[name].device, dtype)
    return start


def _untied(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by the first of their names: a state dict names a tied weight twice."""
    first: dict[Tensor, str] = {}
    named: Iterable[tuple[str, Tensor]] = itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    of_name = {name: first.setdefault(tensor, name) for name, tensor in named}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        kept = found.setdefault(of_name.get(name, name), tensor)
        if kept is not tensor and not torch.equal(kept, tensor):
            raise ValueError(
                f"the model's {of_name[name]!r} and {name!r} are one tensor: they cannot differ"
            )
    return found


def _shifted(
    start: Mapping[str, Tensor], lines: Sequence[Direction], point: Sequence[float]
) -> dict[str, Tensor]:
    tensors = dict(start)
    for amount, line in zip(point, lines, strict=True):
        for name, step in line.items():
            tensors[name] = tensors[name] + amount * step
    return tensors


def _like_filters(direction: Tensor, weights: Tensor) -> Tensor:
    if weights.ndim < 2:
        return torch.zeros_like(direction)
    rows, sizes = direction.flatten(1), weights.flatten(1).norm(dim=1, keepdim=True)
    scaled: Tensor = rows * (sizes / rows.norm(dim=1, keepdim=True).clamp_min(1e-30))
    return scaled.reshape(direction.shape)
