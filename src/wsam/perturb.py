"""From w to w + d: the perturbation, made of a geometry and one global norm.

    d = rho * S g0 / (sqrt(<g0, S g0>) + eps)

Nothing here waits for the device.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from wsam.aside import save_weights, step_aside
from wsam.block import (
    Block,
    add_scaled,
    at_least_float32,
    global_squares,
    on_device,
    widened,
)
from wsam.geometry import EPSILON, Geometry
from wsam.kernels import Kernels
from wsam.state import PREFIX
from wsam.update import Flight, squares_of_first


def chosen_blocks(blocks: Sequence[Block], mask: list[bool] | None) -> list[Block]:
    """Return what the mask leaves of the blocks, with their g0."""
    if mask is None:
        return list(blocks)
    left = []
    for block in blocks:
        keep = [mask[number] for number in block.numbers]
        part = block.subset(keep)
        if part is not None:
            assert block.first is not None
            part.first = [g for g, yes in zip(block.first, keep, strict=True) if yes]
            left.append(part)
    return left


def perturb(
    flight: Flight,
    mask: list[bool] | None,
    geometry: Geometry,
    *,
    spend: bool,
    fused: Kernels | None = None,
) -> None:
    """Move the weights to w + d and keep w in `block.saved`; with `spend`, g0 is overwritten.

    d = rho * boost * S g0 / (sqrt(<g0, S g0>) + eps).
    """
    blocks = flight.moved = chosen_blocks(flight.blocks, mask)
    if not blocks:
        _stay(flight)
        return
    everything = flight.blocks if mask is not None else None
    fused = fused if mask is None else None  # every step another choice: no plan would serve twice
    directions = perturbations(blocks, geometry, spend=spend, everything=everything, fused=fused)
    for block, (direction, scale, own) in zip(blocks, directions, strict=True):
        if fused is not None and fused.save_and_add(block, direction, scale):
            continue
        if step_aside(block, direction, scale):
            continue
        save_weights(block)
        add_scaled(block.weights(), direction, scale, spend=own)


def _stay(flight: Flight) -> None:
    """Move by 0 * g0: nobody was chosen, but the second pass must see an overflow all the same."""
    flight.moved = flight.blocks
    poison = 0.0 * squares_of_first(flight.blocks)
    for block in flight.blocks:
        save_weights(block)
        scale = on_device(poison, block.device)
        add_scaled(block.weights(), block.shards(block.first or []), scale, spend=False)


def perturbations(
    blocks: Sequence[Block],
    geometry: Geometry,
    *,
    spend: bool,
    everything: Sequence[Block] | None = None,
    fused: Kernels | None = None,
) -> list[tuple[list[Tensor], Tensor, bool]]:
    """Return for each block S g0, the scale that makes it d, and whether S g0 may be overwritten.

    `everything` are all blocks with gradients, where `blocks` are only some of them.
    """
    firsts = [block.shards(block.first or []) for block in blocks]
    roots = [geometry.root(block, first) for block, first in zip(blocks, firsts, strict=True)]
    whitened = []
    for first, root in zip(firsts, roots, strict=True):
        if root is None:
            whitened.append(first)
        elif spend and not at_least_float32(first[0]):
            torch._foreach_mul_(first, root)
            whitened.append(first)
        else:
            whitened.append(list(torch._foreach_mul(widened(first), root)))
    final = all(root is None for root in roots)
    scales = fused.scales(blocks, whitened, final) if fused is not None else None
    if scales is None:
        scales = _scales(blocks, whitened, geometry.boost, everything)
    result = []
    for z, root, scale in zip(whitened, roots, scales, strict=True):
        if root is not None:
            torch._foreach_mul_(z, root)
        result.append((z, scale, spend or root is not None))
    return result


def _scales(
    blocks: Sequence[Block],
    whitened: Sequence[list[Tensor]],
    boost: float,
    everything: Sequence[Block] | None,
) -> list[Tensor]:
    norm = global_squares(blocks, whitened).sqrt()
    # An infinite norm would make d zero for most weights and hide the overflow from the second
    # pass; 0 * norm makes d NaN everywhere instead, and whoever checks g1 will see it.
    poison = 0.0 * (norm if everything is None else squares_of_first(everything))
    scales = []
    for block in blocks:
        radius = block.direction * block.group[PREFIX + "rho"] * boost
        scale = on_device(radius / (norm + EPSILON) + poison, block.device)
        assert isinstance(scale, Tensor)
        scales.append(scale)
    return scales
