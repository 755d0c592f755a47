"""The lean step: the base steps between the passes, which saves one parameter-sized buffer.

Where the base receives g0 alone, it does not have to wait for g1. It steps right after the first
pass. One buffer then holds all of the result except the term of g1,

    A = w + u - lr (c - e) g0,        u the base's update, decoupled = c g0 + e (g1 - g0),

while the weights are at w + d. The step ends with w = A - lr e g1. The result is exact to rounding,
but the step cannot be undone once the base has stepped.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from wsam._core.mix import Mix, is_exactly
from wsam._core.param_blocks import Block, CopiedWeights, DecoupledTerm, collect_gradients, subsets
from wsam._core.param_groups import rule_values
from wsam._core.step import directions, masked
from wsam._core.step_state import StepState
from wsam._core.tensor_ops import PLAIN_TYPES, add_scaled, chunks, copies, on_device

CHUNK_BYTES = 1 << 22
"""Weights are saved and moved in chunks of this size, so that only one chunk is stored twice."""


def begin(state: StepState, *, guard_g0: bool) -> bool:
    """Step the base, move the weights to w + d and save A in `block.saved`.

    Args:
        state: the step.
        guard_g0: copy g0 first. Needed until it is known that the base does not write into gradients.

    Returns:
        Whether the base wrote into gradients.
    """
    blocks = state.moved = state.blocks
    _reject_shared_storage(blocks)
    perturbed = _perturbed_copies(state)
    g0s = [block.shards(block.g0) for block in blocks]
    guards = [copies(g0) for g0 in g0s] if guard_g0 else g0s
    versions = _versions(g0s)
    state.step_base()
    state.base_stepped = True
    written = _versions(g0s) != versions
    if written and not guard_g0:
        raise RuntimeError("the base optimizer writes into p.grad: use lean=False with it")
    for block, g0, tensors in zip(blocks, guards if written else g0s, perturbed, strict=True):
        weights, part = block.weights(), _mix(state, block).decoupled
        lr = on_device(block.group["lr"], block.device)
        if not is_exactly(weight := part.g0 - part.difference, 0.0):
            add_scaled(weights, g0, -block.sign * lr * on_device(weight, block.device))
        _save_and_move(block, tensors)
        block.g0 = []
    return written


def finish(state: StepState, all_blocks: Sequence[Block]) -> None:
    """Set the term that remains once A is restored: lr * e * g1."""
    missing = subsets(state.blocks, lambda p, _: p.grad is None)
    if missing:
        raise RuntimeError(
            f"parameter {missing[0].indices[0]} has a gradient in the first pass and none in the "
            "second, which a lean step cannot undo: use lean=False"
        )
    for block in collect_gradients(all_blocks):
        weight = _mix(state, block).decoupled.difference
        if not is_exactly(weight, 0.0):
            tensors = block.shards(block.g0)
            state.decoupled.append(DecoupledTerm(block, tensors, weight))


def _mix(state: StepState, block: Block) -> Mix:
    return state.rule.mix(rule_values(block.group, state.rule), None)


def _perturbed_copies(state: StepState) -> list[list[Tensor]]:
    """Return w + d of all blocks in new tensors."""
    perturbed = [copies(block.weights()) for block in state.blocks]
    indices = (index for block in state.blocks for index in block.indices)
    by_index = dict(zip(indices, chain.from_iterable(perturbed), strict=True))
    parts = masked(state)
    for part, direction in zip(parts, directions(state, parts), strict=True):
        add_scaled([by_index[index] for index in part.indices], *direction)
    return perturbed


def _save_and_move(block: Block, perturbed: list[Tensor]) -> None:
    """Save A in `block.saved` and move the weights to `perturbed`, which is freed chunk by chunk."""
    weights = block.weights()
    saved = list(weights)  # restoring a weight that is not copied yet copies it onto itself
    block.saved = CopiedWeights(saved)
    for part in chunks(weights, CHUNK_BYTES):
        saved[part] = copies(weights[part])
        torch._foreach_copy_(weights[part], perturbed[part])
        perturbed[part] = saved[part]


def _versions(lists: Sequence[list[Tensor]]) -> list[int]:
    return [t._version for tensors in lists for t in tensors]


def _reject_shared_storage(blocks: Sequence[Block]) -> None:
    """Reject parameters that begin at the same address: each would receive only its own part of A."""
    if torch.compiler.is_compiling():
        return
    weights = [w for block in blocks for w in block.weights() if type(w) in PLAIN_TYPES]
    addresses = [address for w in weights if (address := w.data_ptr())]  # 0: empty, or on "meta"
    if len(set(addresses)) < len(addresses):
        raise RuntimeError("two parameters share memory, which lean=True does not support")
