"""Where the tensors of a list lie in memory, and how the programs of a kernel share them."""

import functools
import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wsam.block import PLAIN, Piece, is_dense

TILE = 2048
ALIGNED = 64
"""Copies in one piece begin at multiples of so many elements."""
DTYPE, DEVICE = operator.attrgetter("dtype"), operator.attrgetter("device")


class Known:
    """Tensors that were looked at, and where they were: the same ones in the same places fit still."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[Tensor]] = []
        self._places: list[int] = []

    def are(self, tensors: Sequence[Tensor], at: list[int]) -> bool:
        """Whether these are they."""
        known = [reference() for reference in self._references]
        return at == self._places and all(map(operator.is_, tensors, known))

    def remember(self, tensors: Sequence[Tensor], at: list[int]) -> None:
        """Let these be they, without keeping them alive."""
        self._references, self._places = list(map(weakref.ref, tensors)), at


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
        self._walkable = plain and self.programs > 0  # that is, if the weights are where they say
        self._known, self._histories = Known(), [Known(), Known()]
        self.follow(weights)

    def follow(self, weights: Sequence[Tensor]) -> bool:
        """Look where the weights are now; False if the plan is not for them any more."""
        self.weights = places(weights)
        if self._known.are(weights, self.weights):
            return True
        plain = PLAIN.issuperset(map(type, weights))
        self._fits = self._walkable and plain and are_aligned(self.weights)
        same = (weights[0].dtype, weights[0].device) == self._kind
        if not same or not self._are_laid_out(weights) or not self._are_as_large(weights):
            return False
        self._known.remember(weights, self.weights)
        return True

    def piece(self) -> Piece:
        """Return room for a copy of all weights."""
        return Piece(self._shapes, self._starts, self._room, self._kind[1])

    def gradients(self, tensors: Sequence[Any]) -> list[int] | None:
        """Return where gradients, or what was made of them, begin; None where kernels cannot walk.

        Their device is not looked at: torch holds a gradient to that of its parameter.
        """
        if not self._fits or not PLAIN.issuperset(map(type, tensors)):
            return None
        if not self._are_laid_out(tensors) or not self._are_as_large(tensors):
            self._known = Known()  # weights that changed their shape where they are have such ones
            return None
        if set(map(DTYPE, tensors)) != {torch.float32}:
            return None
        found = places(tensors)
        return found if are_aligned(found) else None

    def history(self, tensors: Sequence[Any], position: int) -> list[int] | None:
        """Return where one of the lists of the base's state begins; None where kernels cannot walk."""
        if not self._fits or not PLAIN.issuperset(map(type, tensors)):
            return None
        known, found = self._histories[position], places(tensors)
        if known.are(tensors, found):
            return found
        if set(map(DEVICE, tensors)) != {self._kind[1]} or self.gradients(tensors) is None:
            return None
        known.remember(tensors, found)
        return found

    def _are_laid_out(self, tensors: Sequence[Tensor]) -> bool:
        return list(map(Tensor.stride, tensors)) == self._strides

    def _are_as_large(self, tensors: Sequence[Tensor]) -> bool:
        return list(map(Tensor.numel, tensors)) == self.elements


def places(tensors: Sequence[Tensor]) -> list[int]:
    """Return where tensors begin in memory."""
    return list(map(Tensor.data_ptr, tensors))


def are_aligned(addresses: Sequence[int]) -> bool:
    """Whether kernels may read and write at the addresses by wide words."""
    return functools.reduce(operator.or_, addresses, 0) % 16 == 0
