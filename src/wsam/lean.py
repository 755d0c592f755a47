"""The lean plan: the base steps between the passes, and one buffer is enough.

Where the base is fed g0 alone it need not wait for g1. It steps right after the first pass; one
buffer then holds everything of the result but g1,

    A = w + u - lr (loss - sharp) g0,        u the base's update,

while the live weights are at w + d, and the step ends with w = A - lr * sharp * g1. Exact to
rounding, with one parameter-sized buffer instead of two. There is no way back once the base has
stepped: this is a plan one chooses.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from wsam.block import Block, Scalar, add_scaled, copies, on_device
from wsam.geometry import Geometry
from wsam.kernels import Kernels
from wsam.perturb import chosen_blocks, perturbations
from wsam.rule import Mix
from wsam.update import Beside, swap


class SpoiledGradientError(RuntimeError):
    """The base wrote into the gradients that the lean plan still needs."""


def begin(
    blocks: Sequence[Block],
    mask: list[bool] | None,
    geometry: Geometry,
    mix: Callable[[dict[str, Any]], Mix],
    base_step: Callable[[], object],
    guarded: bool,
    fused: Kernels | None = None,
) -> bool:
    """Step the base, move the live weights to w + d and keep A in `block.saved`.

    With `guarded` a copy of g0 is held while the base steps, in case it writes into the gradients
    (Muon does); the answer is whether it did. Unguarded, such a write raises `SpoiledGradientError`.
    `fused` does it all in one pass, the base's step included, or nothing.
    """
    if fused is not None and mask is None:
        directions = perturbations(blocks, geometry, spend=False, fused=fused)
        if fused.begin_lean(blocks, directions):
            for block in blocks:
                block.first = None
            return False
    # Kept apart until the base has stepped: whoever is interrupted puts back what is in `saved`.
    moved = [copies(block.weights()) for block in blocks]
    at = {
        number: m
        for block, tensors in zip(blocks, moved, strict=True)
        for number, m in zip(block.numbers, tensors, strict=True)
    }
    parts = chosen_blocks(blocks, mask)
    everything = blocks if mask is not None else None
    for part, (direction, scale, own) in zip(
        parts, perturbations(parts, geometry, spend=False, everything=everything), strict=True
    ):
        add_scaled([at[number] for number in part.numbers], direction, scale, spend=own)
    firsts = [block.shards(block.first or []) for block in blocks]
    guards = [copies(first) for first in firsts] if guarded else firsts
    before = _versions(firsts)
    base_step()
    spoiled = _versions(firsts) != before
    if spoiled and not guarded:
        raise SpoiledGradientError("the base optimizer writes into p.grad; use lean=False with it")
    for block, first, tensors in zip(blocks, guards if spoiled else firsts, moved, strict=True):
        weights = block.weights()
        part_beside = mix(block.group).beside
        lr = on_device(block.group["lr"], block.device)
        weight = on_device(part_beside.loss - part_beside.sharp, block.device)
        add_scaled(weights, first, -block.direction * lr * weight, spend=True)
        swap(weights, tensors)
        block.saved, block.first = tensors, None
    return spoiled


def _versions(lists: Sequence[list[Tensor]]) -> list[int]:
    return [t._version for tensors in lists for t in tensors]


def finish(
    layout: Sequence[Block], blocks: Sequence[Block], mix: Callable[[dict[str, Any]], Mix]
) -> list[Beside]:
    """Return what is left to apply once A has been put back: lr * sharp * g1."""
    begun = {number for block in blocks for number in block.numbers}
    beside = []
    for block in layout:
        gone = [n for p, n in zip(block.params, block.numbers, strict=True) if p.grad is None]
        if begun.intersection(gone):
            raise RuntimeError(
                f"parameter number {min(begun.intersection(gone))} had a gradient in the first pass "
                "and none in the second, which the lean plan cannot undo: use lean=False"
            )
        part = block.subset([p.grad is not None for p in block.params])
        if part is not None:
            grads = [p.grad for p in part.params if p.grad is not None]
            sharp: Scalar = mix(block.group).beside.sharp
            beside.append(Beside(part, part.shards(grads), sharp, spend=False))
    return beside
