"""Where the tensors of a list lie in memory, and how the programs of a kernel share them."""

import functools
import operator
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wsam.block import Piece, is_dense

TILE = 2048
ALIGNED = 64
"""Copies in one piece begin at multiples of so many elements."""
PLAIN = frozenset((Tensor, nn.Parameter))
"""A tensor of another class need not lie at its own address."""


class Plan:
    """Which program of a kernel does which part of which tensor."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        where, offset, self.starts, self.room = [], [], [], 0
        for index, tensor in enumerate(tensors):
            for start in range(0, tensor.numel(), TILE):
                where.append(index)
                offset.append(start)
            self.starts.append(self.room)
            self.room += -(-tensor.numel() // ALIGNED) * ALIGNED
        self.programs = len(where)
        self.where = torch.tensor(where, dtype=torch.int32, device=device)
        self.offset = torch.tensor(offset, dtype=torch.int64, device=device)
        self.sizes = torch.tensor([t.numel() for t in tensors], dtype=torch.int64, device=device)
        self._layout = _layout(tensors)
        self._shapes = [(t.shape, t.stride()) for t in tensors]
        self._device = device
        plain = all(t.dtype == torch.float32 and is_dense(t) for t in tensors)
        self._walkable = plain and self.programs > 0

    def is_for(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the tensors lie in memory as those of the plan did."""
        return _layout(tensors) == self._layout

    def piece(self) -> Piece:
        """Return room for a copy of all tensors."""
        return Piece(self._shapes, self.starts, self.room, self._device)

    def addresses(
        self, tensors: Sequence[Any] | Piece, known: Container[list[int]] = ()
    ) -> list[int] | None:
        """Return where the tensors begin; None where kernels may not walk them as plain memory.

        Args:
            tensors: as many as the plan is for, or copies of them in one piece.
            known: what was returned for tensors that are still alive, and need not be looked at twice.
        """
        if isinstance(tensors, Piece):
            return tensors.addresses()
        if not self._walkable or not PLAIN.issuperset(map(type, tensors)):
            return None
        found = places(tensors)
        if found in known:
            return found
        return found if self.is_for(tensors) and are_aligned(found) else None


def places(tensors: Sequence[Tensor]) -> list[int]:
    """Return where tensors begin in memory."""
    return list(map(Tensor.data_ptr, tensors))


def are_aligned(addresses: Sequence[int]) -> bool:
    """Whether kernels may read and write at the addresses by wide words."""
    return functools.reduce(operator.or_, addresses, 0) % 16 == 0


def _layout(tensors: Sequence[Tensor]) -> list[Any]:
    return [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]
