"""Acceleration on a CPU: fewer passes over memory.

The second pass uses a separate copy of the weights: w + d is written into a buffer, and the
parameters point to that buffer until the weights are restored. This saves two passes over memory and
leaves w untouched. And the base steps by torch's fused code, which needs no temporary tensors.
"""

import contextlib
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from wsam._core import lean, step
from wsam._core.param_blocks import Block
from wsam._core.step_state import Action, Phase, StepState
from wsam._core.tensor_ops import PLAIN_TYPES, are_dense
from wsam.accel.base_optimizers import can_step_fused, is_base_only

_KIND = attrgetter("dtype", "shape")


class SwappedWeights:
    """The original storage of parameters that point to a buffer.

    Args:
        weights: the parameters.
        buffers: the storage that they are about to use.
    """

    def __init__(self, weights: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        self._original = [w.data for w in weights]
        self._buffers = [buffer.data_ptr() for buffer in buffers]

    def restore(self, weights: Sequence[Tensor]) -> None:
        """Point the parameters to their original storage. May be called twice."""
        for w, original, buffer in zip(weights, self._original, self._buffers, strict=True):
            if w.data_ptr() == buffer:
                w.data = original
            elif w.data_ptr() != original.data_ptr():  # the closure assigned other storage
                w.copy_(original)
        increment_version(weights)


class CpuBackend:
    """Swaps weights instead of copying them, and steps the base by torch's fused code."""

    def __init__(self) -> None:
        self._buffers: dict[int, Tensor] = {}

    def perturb(self, state: StepState) -> bool:
        """Move the weights to w + d in separate buffers, block by block."""
        if torch.compiler.is_compiling():
            return False
        if state.lean:
            return self._begin_lean(state)
        blocks = state.moved = step.masked(state)
        for block, direction in zip(blocks, step.directions(state, blocks), strict=True):
            if can_swap(block, direction[0]):
                self._swap(block, *direction)
            else:
                step.save_and_move(block, direction)
        return True

    def _begin_lean(self, state: StepState) -> bool:
        """Step the base by fused code between the passes."""
        with fused_base(state) as groups:
            if not groups:
                return False
            lean.begin(state, guard_g0=False)  # these bases do not write into gradients
        return True

    def _swap(self, block: Block, direction: Sequence[Tensor], scale: Tensor) -> None:
        buffers = [self._buffer(i, w) for i, w in zip(block.indices, block.params, strict=True)]
        for w, d, buffer in zip(block.params, direction, buffers, strict=True):
            torch.addcmul(w, d, scale, out=buffer)
        block.saved = SwappedWeights(block.params, buffers)  # before the loop, for interrupts in it
        for w, buffer in zip(block.params, buffers, strict=True):
            w.data = buffer
        increment_version(block.params)

    def _buffer(self, index: int, w: Tensor) -> Tensor:
        """Return memory for a perturbed weight, reused from step to step: new pages are expensive."""
        known, form = self._buffers.get(index), (w.shape, w.dtype, w.stride())
        fits = known is not None and (known.shape, known.dtype, known.stride()) == form
        if known is None or not fits or known.data_ptr() == w.data_ptr():  # it became the weight
            with torch.inference_mode(False):
                known = self._buffers[index] = torch.empty_like(w)
        return known

    def finish(self, state: StepState) -> bool:
        """Step the base by fused code, and apply the decoupled term."""
        if state.phase is not Phase.READY:
            return False
        with fused_base(state):
            step.update(state)
        return True


def can_swap(block: Block, direction: Sequence[Tensor]) -> bool:
    """Whether the block's weights can be replaced by buffers during the second pass.

    Only if nothing else references their storage: a view or alias would still show w.
    """
    weights = block.params
    if _use_count is None or block.sharded or not PLAIN_TYPES.issuperset(map(type, weights)):
        return False
    if weights[0].dtype not in (torch.float32, torch.float64):
        return False
    if len(set(map(id, weights))) < len(weights):  # a parameter that is listed twice moves twice
        return False
    if [w for w in weights if w.requires_grad and not w.is_leaf] or not are_dense(weights):
        return False
    if [*map(_KIND, direction)] != [*map(_KIND, weights)]:
        return False
    storages = [w.untyped_storage() for w in weights]
    owned = {s.resizable() and not s.is_shared() for s in storages}
    return owned == {True} and {_use_count(s._cdata) for s in storages} == {UNSHARED}


_use_count: Any = getattr(torch._C, "_storage_Use_Count", None)
"""None in the CPU builds of torch 2.6 and 2.7, where the weights are copied instead."""


def _use_count_of_a_single_tensor() -> int | None:
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()  # the second reference, as in `can_swap`
    return None if _use_count is None else _use_count(storage._cdata)


UNSHARED = _use_count_of_a_single_tensor()
"""The use count of a storage that only one tensor references; None if torch does not count."""


@contextlib.contextmanager
def fused_base(state: StepState) -> Iterator[list[dict[str, Any]]]:
    """Let the base step by torch's fused code, in groups where the user left that open.

    Groups in which the step is the base's own are left out, because they must equal it bit for bit.

    Yields:
        The groups that step by fused code.
    """
    reuses = state.action is Action.REUSE
    groups = [
        group
        for group in state.base.param_groups
        if not is_base_only(group, state.rule, reuses) and can_step_fused(state.base, group)
    ]
    try:
        for group in groups:
            group["fused"] = True
        yield groups
    finally:
        for group in groups:
            group["fused"] = None
