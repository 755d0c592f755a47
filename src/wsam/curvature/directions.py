"""Directions in weight space: dictionaries of tensors named like a model's parameters.

Between two checkpoints a direction also contains floating-point buffers, such as the running
statistics of BatchNorm. `Operator.split` makes a direction of an eigenvector.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from wsam.curvature.parameters import unwrap_model
from wsam.curvature.random_vectors import normal

Direction = Mapping[str, Tensor]


def random_direction(
    model: nn.Module, *, seed: int = 0, normalise: Literal["filter", "unit"] = "filter"
) -> dict[str, Tensor]:
    """Return a random Gaussian direction, by default with the norm of each filter of the model.

    Equation, for filter j of layer i::

        d_ij <- d_ij * norm(w_ij) / norm(d_ij)

    Filter normalization makes slices comparable although layers can be rescaled without changing the
    model's function. Biases and normalization weights, which are not filters, get a zero direction.

    Args:
        model: Any module. Wrappers of torch.compile and data parallelism are removed.
        seed: Seed of the direction; the result is equal on every device.
        normalise: "filter", or "unit" for length one over all weights.

    Returns:
        Tensors named and shaped like the parameters that require a gradient.

    Raises:
        ValueError: If no parameter requires a gradient.

    Example:
        >>> model = nn.Linear(2, 3)
        >>> direction = random_direction(model)
        >>> torch.allclose(direction["weight"].norm(dim=1), model.weight.norm(dim=1))
        True
        >>> direction["bias"].tolist()
        [0.0, 0.0, 0.0]

    References:
        Li et al., Visualizing the loss landscape of neural nets, NeurIPS 2018.
    """
    model = unwrap_model(model)
    generator = torch.Generator().manual_seed(seed)
    drawn = {
        name: normal(p.shape, generator).to(p.device, p.dtype)
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    if not drawn:
        raise ValueError("the model has no parameters that require a gradient")
    return normalised(model, drawn, normalise)


def normalised(
    model: nn.Module, direction: Direction, normalise: Literal["filter", "unit"] = "filter"
) -> dict[str, Tensor]:
    """Scale a direction to the norms of the model's filters, or to length one.

    Args:
        model: Its filters give the norms.
        direction: Tensors named like the model's parameters or buffers.
        normalise: "filter" or "unit".

    Returns:
        The scaled direction. Tied parameters appear once, under their first name.

    Raises:
        ValueError: If `normalise` is invalid, the direction is zero, or tied parameters differ.
    """
    model = unwrap_model(model)
    direction = merge_tied(model, direction)
    if normalise == "unit":
        length = math.sqrt(sum(float((d.double() ** 2).sum()) for d in direction.values()))
        if length == 0:
            raise ValueError("a direction of zeros cannot be scaled to length one")
        return {name: d / length for name, d in direction.items()}
    if normalise != "filter":
        raise ValueError(f"normalise must be 'filter' or 'unit', got {normalise!r}")
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: _scale_to_filters(d, weights[name].detach()) for name, d in direction.items()}


def between(
    first: Mapping[str, Tensor], second: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return origin and direction of the line from one checkpoint to another.

    Equation::

        w(t) = first + t (second - first)

    Running statistics of BatchNorm are interpolated, too.

    Args:
        first: State dict at t = 0.
        second: State dict of the same model at t = 1.

    Returns:
        The origin `first` and the direction `second - first`, floating-point tensors only.

    Raises:
        ValueError: If names or shapes differ.

    Example:
        >>> a, b = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> origin, direction = between(a.state_dict(), b.state_dict())
        >>> torch.allclose(origin["weight"] + direction["weight"], b.weight)
        True
    """
    ours, theirs = ({(name, tuple(t.shape)) for name, t in one.items()} for one in (first, second))
    for name, shape in sorted(ours ^ theirs):
        raise ValueError(
            "the two checkpoints are of different models: only one has a tensor "
            f"{name!r} of shape {shape}"
        )
    moving = [name for name, tensor in first.items() if tensor.is_floating_point()]
    origin = {name: first[name].detach() for name in moving}
    return origin, {name: second[name].detach().to(origin[name]) - origin[name] for name in moving}


def merge_tied(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under their first name: a state dict lists a tied weight twice."""
    first: dict[Tensor, str] = {}
    named: Iterable[tuple[str, Tensor]] = itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    first_name = {name: first.setdefault(tensor, name) for name, tensor in named}
    merged: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        kept = merged.setdefault(first_name.get(name, name), tensor)
        if kept is not tensor and not torch.equal(kept, tensor):
            raise ValueError(
                f"the model's {first_name[name]!r} and {name!r} are one tensor: their values must "
                "be equal"
            )
    return merged


def _scale_to_filters(direction: Tensor, weights: Tensor) -> Tensor:
    if weights.ndim < 2:
        return torch.zeros_like(direction)
    rows, norms = direction.flatten(1), weights.flatten(1).norm(dim=1, keepdim=True)
    scaled: Tensor = rows * (norms / rows.norm(dim=1, keepdim=True).clamp_min(1e-30))
    return scaled.reshape(direction.shape)
