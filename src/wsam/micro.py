"""Perturbation per micro-batch: each has its own d; their gradients are summed, the base steps once.

And what their closures return: losses, whose rise is the sharpness.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wsam.block import Block, is_sharded, local
from wsam.update import Flight, apart, latecomers, own_gradients


class Sums:
    """Sums of g0 and of g1 over micro-batches, by the parameter they belong to."""

    def __init__(self) -> None:
        self._first: dict[Tensor, Tensor] = {}
        self._second: dict[Tensor, Tensor] = {}
        self._plain = True
        self._skip = False

    def add(self, flight: Flight | None, layout: Sequence[Block]) -> None:
        """Take the gradients of a micro-batch whose two passes are done and weights restored."""
        assert flight is not None
        flight.refuse_one_pass()
        self._plain = self._plain and flight.plain
        self._skip = self._skip or flight.skip
        seen: tuple[set[int], set[int]] = set(), set()  # groups may share a gradient
        for block in flight.blocks:
            firsts = zip(block.params, block.first or [], strict=False)
            _accumulate(self._first, firsts, seen[0])
            if flight.plain:
                continue
            kept: Sequence[Tensor | None] = block.first or [None] * len(block.params)
            _accumulate(
                self._second,
                (
                    (p, f.clone() if p.grad is None and f is not None else p.grad)
                    for p, f in zip(block.params, kept, strict=True)
                ),
                seen[1],
            )
            for p in block.params:
                p.grad = None
        if not flight.plain:  # what had its first gradient in the second pass
            for block in latecomers(layout, flight.blocks):
                _accumulate(self._second, ((p, p.grad) for p in block.params), seen[1])
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


def _accumulate(sums: dict[Tensor, Tensor], pairs: object, seen: set[int]) -> None:
    known, fresh = [], []
    for p, g in pairs:  # type: ignore[attr-defined]
        if g is None:
            continue
        if p in sums:
            known.append(sums[p])
            fresh.append(g)
        else:
            kept = own_gradients([g], is_sharded(g))  # or the next backward pass may overwrite it
            (sums[p],) = kept if is_sharded(g) else apart(kept, seen)
    if known:
        torch._foreach_add_(local(known), local(fresh))


NUMBER = (int, float, Tensor)


def detached(value: Any) -> Any:
    """Return what a closure returned without its graph: a loss, or a tuple that begins with it."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, tuple):
        parts = map(detached, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def rise(second: Any, first: Any) -> Any:
    """Return the rise of the loss; NaN unless closures return a number, or one first in a tuple."""
    if isinstance(second, tuple) and isinstance(first, tuple) and second and first:
        second, first = second[0], first[0]
    if _is_loss(second) and _is_loss(first):
        return torch.as_tensor(second - first)
    return torch.full((), torch.nan)


def _is_loss(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.is_floating_point()
    return isinstance(value, NUMBER)


def total(values: list[Any]) -> Any:
    """Return the sum of numbers; anything else, which only its maker can add up, as it is or None."""
    if all(isinstance(value, NUMBER) for value in values):
        return sum(values[1:], values[0])
    return values[0] if len(values) == 1 else None
