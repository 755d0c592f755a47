"""Perturbation per micro-batch: each micro-batch has its own d, and their gradients are summed."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from wsam._core.param_blocks import Block, is_sharded, local_shards, subsets
from wsam._core.step import blocks_without_g0, clear_gradients, owned
from wsam._core.step_state import Action, StepState


class GradAccumulator:
    """Sums g0 and g1 over micro-batches."""

    def __init__(self) -> None:
        self._g0: dict[Tensor, Tensor] = {}
        self._g1: dict[Tensor, Tensor] = {}
        self._actions: set[Action] = set()

    def add(self, state: StepState, all_blocks: Sequence[Block]) -> None:
        """Add the gradients of a micro-batch whose passes are done, with the weights restored."""
        state.require_gradients()
        self._actions.add(state.action)
        for block in state.blocks:
            _accumulate(self._g0, zip(block.params, block.g0 or [], strict=False))
        if not state.is_one_pass:
            self._add_second(state, all_blocks)
        clear_gradients(all_blocks)

    def _add_second(self, state: StepState, all_blocks: Sequence[Block]) -> None:
        for block in state.blocks:
            _accumulate(self._g1, ((p, p.grad) for p in block.params))
            for p, g0 in zip(block.params, block.g0 or [], strict=False):
                if p.grad is None:  # it gets no sharpness term
                    _accumulate(self._g1, [(p, g0.clone())])
        for block in blocks_without_g0(all_blocks, state.blocks):
            _accumulate(self._g1, ((p, p.grad) for p in block.params))

    def fill(self, state: StepState, all_blocks: Sequence[Block]) -> None:
        """Make the sums the two gradients of one step."""
        state.blocks = subsets(all_blocks, lambda p, _: p in self._g0)
        for block in state.blocks:
            block.g0 = [self._g0[p] for p in block.params]
        for p, g in self._g1.items():
            p.grad = g
        if Action.SKIP in self._actions:
            state.action = Action.SKIP
        elif len(self._actions) == 1:
            (state.action,) = self._actions


def _accumulate(sums: dict[Tensor, Tensor], pairs: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    known, fresh = [], []
    for p, g in pairs:
        if g is None:
            continue
        if p in sums:
            known.append(sums[p])
            fresh.append(g)
        else:
            (sums[p],) = owned([g], is_sharded(g))  # the next backward pass may overwrite a view
    if known:
        torch._foreach_add_(local_shards(known), local_shards(fresh))
