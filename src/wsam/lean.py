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

import torch
from torch import Tensor

from wsam.block import PLAIN, Block, add_scaled, chunks, copies, is_dense, on_device, places
from wsam.geometry import Geometry
from wsam.kernels import Kernels
from wsam.perturb import chosen_blocks, perturbations
from wsam.plan import are_apart
from wsam.rule import Mix, is_number
from wsam.schedule import Scalar
from wsam.update import Beside, Flight

EXCHANGE_BYTES = 1 << 22
"""What an exchange may cost in temporary memory: the lean plan is there to save it."""


_ADDRESSED = ("cpu", "cuda")
"""Devices on which tensors say where they begin in memory."""


class SpoiledGradientError(RuntimeError):
    """The base wrote into the gradients that the lean plan still needs."""


def begin(
    flight: Flight,
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
    blocks = flight.blocks
    if fused is not None and mask is None and _begin_by_kernel(flight, geometry, fused):
        return False
    _refuse_shared_memory(blocks)
    # Kept apart until the base has stepped: whoever is interrupted puts back what is in `saved`.
    moved = _moved(blocks, mask, geometry)
    firsts = [block.shards(block.first or []) for block in blocks]
    guards = [copies(first) for first in firsts] if guarded else firsts
    before = _versions(firsts)
    base_step()
    flight.stepped = True
    spoiled = _versions(firsts) != before
    if spoiled and not guarded:
        raise SpoiledGradientError("the base optimizer writes into p.grad; use lean=False with it")
    for block, first, tensors in zip(blocks, guards if spoiled else firsts, moved, strict=True):
        weights = block.weights()
        part_beside = mix(block.group).beside
        lr = on_device(block.group["lr"], block.device)
        if not is_number(weight := part_beside.loss - part_beside.sharp, 0.0):
            step = -block.direction * lr * on_device(weight, block.device)
            add_scaled(weights, first, step, spend=True)
        exchange(block, tensors)
        block.first = None
    return spoiled


def _refuse_shared_memory(blocks: Sequence[Block]) -> None:
    """Refuse weights that share memory: in A each would have its own half of the step."""
    if torch.compiler.is_compiling():
        return
    weights = [w for block in blocks if block.device.type in _ADDRESSED for w in block.weights()]
    if not PLAIN.issuperset(map(type, weights)):
        return  # wherever their elements are, it is not where they say
    begins = places(weights)
    if are_apart(begins, [w.nbytes for w in weights]):
        return
    # Columns of one matrix, say, begin one after the other and share nothing.
    if not are_apart(begins, [w.nbytes if is_dense(w) else w.element_size() for w in weights]):
        raise RuntimeError("two parameters share memory, which lean=True cannot step: lean=False")


def _begin_by_kernel(flight: Flight, geometry: Geometry, fused: Kernels) -> bool:
    if not fused.knows_base:
        return False
    directions = perturbations(flight.blocks, geometry, spend=False, fused=fused)
    if not fused.begin_lean(flight, directions):
        return False
    for block in flight.blocks:
        block.first = None
    return True


def _moved(
    blocks: Sequence[Block], mask: list[bool] | None, geometry: Geometry
) -> list[list[Tensor]]:
    """Return w + d of all blocks; nothing else of the perturbation is left."""
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
    return moved


def exchange(block: Block, moved: list[Tensor]) -> None:
    """Put w + d into the weights and keep in `block.saved` what they were, by chunks.

    The temporary copy is small. Whoever is interrupted finds the weights as they were.
    """
    weights, done, open_part = block.weights(), slice(0), None
    try:
        for part in chunks(weights, EXCHANGE_BYTES):
            open_part = (part, copies(weights[part]))
            torch._foreach_copy_(weights[part], moved[part])
            torch._foreach_copy_(moved[part], open_part[1])
            done = slice(part.stop)
        block.saved = moved
    except BaseException:
        parts = [(done, moved[done]), *([open_part] if open_part else [])]
        for part, kept in parts:
            if kept:
                torch._foreach_copy_(weights[part], kept)
        raise


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
            if not is_number(sharp, 0.0):
                beside.append(Beside(part, part.shards(grads), sharp, spend=False))
    return beside
