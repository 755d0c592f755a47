"""Perturbation per micro-batch: each has its own d; their gradients are summed, the base steps once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from wsam.block import Block, is_sharded, local
from wsam.update import Flight, own_gradients


class Sums:
    """Sums of g0 and of g1 over micro-batches, by the parameter they belong to."""

    def __init__(self) -> None:
        self._first: dict[Tensor, Tensor] = {}
        self._second: dict[Tensor, Tensor] = {}
        self._plain = True
        self._skip = False

    def add(self, flight: Flight | None) -> None:
        """Take the gradients of a micro-batch whose two passes are done and weights restored."""
        assert flight is not None
        self._plain = self._plain and flight.plain
        self._skip = self._skip or flight.skip
        for block in flight.blocks:
            firsts = zip(block.params, block.first or [], strict=False)
            _accumulate(self._first, firsts)
            if flight.plain:
                continue
            _accumulate(self._second, ((p, p.grad) for p in block.params))
            for p in block.params:
                p.grad = None

    def flight(self, layout: Sequence[Block]) -> Flight:
        """Return the sums as the two gradients of one step."""
        blocks = []
        for block in layout:
            part = block.subset([p in self._first for p in block.params])
            if part is not None:
                part.first = [self._first[p] for p in part.params]
                blocks.append(part)
        for p, g in self._second.items():
            p.grad = g
        return Flight(blocks, plain=self._plain, skip=self._skip)


def _accumulate(sums: dict[Tensor, Tensor], pairs: object) -> None:
    known, fresh = [], []
    for p, g in pairs:  # type: ignore[attr-defined]
        if g is None:
            continue
        if p in sums:
            known.append(sums[p])
            fresh.append(g)
        else:
            (sums[p],) = own_gradients(
                [g], is_sharded(g)
            )  # or the next backward pass may overwrite it
    if known:
        torch._foreach_add_(local(known), local(fresh))
