"""Perturbation per micro-batch: each micro-batch has its own d, and their gradients are summed."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from wsam._core.param_blocks import Block, is_sharded, local_shards, subsets
from wsam._core.step import blocks_without_g0, clear_gradients, owned, second_gradients
from wsam._core.step_state import Action, StepState


class GradAccumulator:
    """Sums g0 and g1 of micro-batches, multiplied by their weights."""

    def __init__(self) -> None:
        self._g0: dict[Tensor, Tensor] = {}
        self._g1: dict[Tensor, Tensor] = {}
        self._actions: set[Action] = set()

    def add(self, state: StepState, all_blocks: Sequence[Block], weight: float) -> None:
        """Add the gradients of a micro-batch whose passes are done, with the weights restored."""
        state.require_gradients(all_blocks)
        self._actions.add(state.action)
        first: list[tuple[Tensor, Tensor]] = []
        second: list[tuple[Tensor, Tensor]] = []
        for block in state.blocks:
            if block.g0:
                first += zip(block.params, block.g0, strict=True)
        if not state.is_one_pass:
            for block in [*state.blocks, *blocks_without_g0(all_blocks, state.blocks)]:
                grads = second_gradients(block, state.rule.keeps_g0)
                second += zip(block.params, grads, strict=True)
        _accumulate(self._g0, first, weight)
        _accumulate(self._g1, second, weight)
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


def _accumulate(
    sums: dict[Tensor, Tensor], pairs: Iterable[tuple[Tensor, Tensor]], weight: float
) -> None:
    """Add weight * gradient to the sum of each parameter. The gradients may be overwritten."""
    known, added, new = [], [], []
    for p, g in pairs:
        if p in sums:
            known.append(sums[p])
            added.append(g)
        else:
            (sums[p],) = owned([g], is_sharded(g))  # the next backward pass may overwrite a view
            new.append(sums[p])
    if new and weight != 1.0:
        torch._foreach_mul_(local_shards(new), weight)
    if known:
        torch._foreach_add_(local_shards(known), local_shards(added), alpha=weight)
