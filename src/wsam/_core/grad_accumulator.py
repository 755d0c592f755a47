"""Perturbation per micro-batch: each micro-batch has its own d, and their gradients are summed."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from wsam._core.param_blocks import Block, is_sharded, local_shards, subsets
from wsam._core.step import blocks_without_g0, clear_gradients, owned, second_gradients
from wsam._core.step_state import Action, StepState


class GradAccumulator:
    """Sums g0 and g1 over micro-batches."""

    def __init__(self) -> None:
        self._g0: dict[Tensor, Tensor] = {}
        self._g1: dict[Tensor, Tensor] = {}
        self._actions: set[Action] = set()

    def add(self, state: StepState, all_blocks: Sequence[Block]) -> None:
        """Add the gradients of a micro-batch whose passes are done, with the weights restored."""
        state.require_gradients(all_blocks)
        self._actions.add(state.action)
        for block in state.blocks:
            if block.g0:
                _accumulate(self._g0, zip(block.params, block.g0, strict=True))
        if not state.is_one_pass:
            for block in [*state.blocks, *blocks_without_g0(all_blocks, state.blocks)]:
                grads = second_gradients(block, state.rule.keeps_g0)
                _accumulate(self._g1, zip(block.params, grads, strict=True))
        clear_gradients(all_blocks)

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


def _accumulate(sums: dict[Tensor, Tensor], pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    known, fresh = [], []
    for p, g in pairs:
        if p in sums:
            known.append(sums[p])
            fresh.append(g)
        else:
            (sums[p],) = owned([g], is_sharded(g))  # the next backward pass may overwrite a view
    if known:
        torch._foreach_add_(local_shards(known), local_shards(fresh))
