"""Where the tensors of a list lie in memory, and how the programs of a kernel share them."""

import functools
import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wsam.block import DEVICE, DTYPE, PLAIN, Piece, is_dense, places

TILE = 2048
ALIGNED = 64
"""Copies in one piece begin at multiples of so many elements."""
LISTS = 2
"""How many a base's state has at most: Adam's."""


class Plan:
    """Which program of a kernel does which part of which tensor.

    Args:
        weights: of one dtype.
        device: where they are.
    """

    weights: list[int]
    """Where the weights began in memory when somebody last looked."""

    def __init__(self, weights: Sequence[Tensor], device: torch.device) -> None:
        where, offset, self._starts, self._room = [], [], [], 0
        for index, weight in enumerate(weights):
            for start in range(0, weight.numel(), TILE):
                where.append(index)
                offset.append(start)
            self._starts.append(self._room)
            self._room += -(-weight.numel() // ALIGNED) * ALIGNED
        self.programs = len(where)
        self.where = torch.tensor(where, dtype=torch.int32, device=device)
        self.offset = torch.tensor(offset, dtype=torch.int64, device=device)
        self.elements = list(map(Tensor.numel, weights))
        self.sizes = torch.tensor(self.elements, dtype=torch.int64, device=device)
        self._strides = list(map(Tensor.stride, weights))
        self._shapes = [(w.shape, w.stride()) for w in weights]
        self._kind = (weights[0].dtype, weights[0].device)
        plain = all(w.dtype == torch.float32 and is_dense(w) for w in weights)
        self._right: list[tuple[list[weakref.ref[Any]], list[int]]] = []
        self._walkable = plain and self.programs > 0  # that is, if the weights are where they say
        self.follow(weights)

    def follow(self, weights: Sequence[Tensor]) -> bool:
        """Look where the weights are now; False if the plan is not for them any more."""
        self.weights = places(weights)
        plain = PLAIN.issuperset(map(type, weights))
        self._fits = self._walkable and plain and are_aligned(self.weights)
        same = (weights[0].dtype, weights[0].device) == self._kind
        return same and self._are_laid_out(weights) and self._are_as_large(weights)

    def still_serves(self, weights: Sequence[Tensor]) -> bool:
        """`follow` in the same step, where weights have hardly ever got other memory."""
        return places(weights) == self.weights or self.follow(weights)

    def piece(self) -> Piece:
        """Return room for a copy of all weights."""
        return Piece(self._shapes, self._starts, self._room, self._kind[1])

    def gradients(self, tensors: Sequence[Any]) -> list[int] | None:
        """Return where gradients, or what was made of them, begin; None where kernels cannot walk.

        Their device is not looked at: torch holds a gradient to that of its parameter.
        """
        if not self._fits or not PLAIN.issuperset(map(type, tensors)):
            return None
        if set(map(DTYPE, tensors)) != {torch.float32} or not self._are_as_large(tensors):
            return None
        if not self._are_laid_out(tensors):
            return None
        found = places(tensors)
        return found if are_aligned(found) else None

    def addresses(self, tensors: Sequence[Any]) -> list[int] | None:
        """Return where tensors begin; None where they do not lie in memory as the weights do.

        They are the base's state, the same from step to step: what was found right is not looked at
        again where it still is.
        """
        plain = self._fits and PLAIN.issuperset(map(type, tensors))
        for known, at in self._right if plain else ():
            if all(map(operator.is_, [ref() for ref in known], tensors)) and places(tensors) == at:
                return at
        found = self.gradients(tensors)
        if found is None or set(map(DEVICE, tensors)) != {self._kind[1]}:
            return None
        self._right = [*self._right[1 - LISTS :], ([weakref.ref(t) for t in tensors], found)]
        return found

    def _are_laid_out(self, tensors: Sequence[Tensor]) -> bool:
        return list(map(Tensor.stride, tensors)) == self._strides

    def _are_as_large(self, tensors: Sequence[Tensor]) -> bool:
        return list(map(Tensor.numel, tensors)) == self.elements


def are_apart(begins: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether no two pieces of memory share a byte."""
    end = 0
    for begin, size in sorted(zip(begins, sizes, strict=True)):
        if size and begin < end:
            return False
        end = max(end, begin + size)
    return True


def are_aligned(addresses: Sequence[int]) -> bool:
    """Whether kernels may read and write at the addresses by wide words."""
    return functools.reduce(operator.or_, addresses, 0) % 16 == 0
