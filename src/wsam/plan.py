"""Where the tensors of a list lie in memory, and how the programs of a kernel share them."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wsam.block import Piece, is_dense

TILE = 2048
ALIGNED = 64
"""Copies in one piece begin at multiples of so many elements."""


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
        plain = all(t.dtype == torch.float32 and is_dense(t) for t in tensors)
        self._walkable = plain and self.programs > 0

    def is_for(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the tensors lie in memory as those of the plan did."""
        return _layout(tensors) == self._layout

    def addresses(self, tensors: Sequence[Any] | Piece) -> list[int] | None:
        """Return where the tensors begin; None where kernels may not walk them as plain memory."""
        if isinstance(tensors, Piece):
            return tensors.addresses()
        if not self._walkable or any(t is None for t in tensors) or not self.is_for(tensors):
            return None
        found = [t.data_ptr() for t in tensors]
        return None if functools.reduce(operator.or_, found) % 16 else found


def _layout(tensors: Sequence[Tensor]) -> list[Any]:
    return [(t.stride(), t.numel(), t.dtype) for t in tensors]
