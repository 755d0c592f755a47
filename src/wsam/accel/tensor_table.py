"""How kernels find their tensors: work plans, and tables of addresses on the device."""

import functools
import operator
import weakref
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from wsam._core.tensor_ops import PLAIN_TYPES, is_dense

TILE = 2048
"""Elements that one program of a kernel processes."""
ALIGNMENT = 64
"""In a `WeightBuffer`, each copy starts at a multiple of this many elements."""
STATE_LISTS = 3
"""The largest number of state lists: two of Adam, and the kept vector."""
PATTERNS = 8
"""How many tables are kept for each position in a step."""
Rows = list[list[int]]
"""Addresses of the tensors of several lists."""

_DTYPE, _DEVICE = operator.attrgetter("dtype"), operator.attrgetter("device")


def data_ptrs(tensors: Sequence[Tensor]) -> list[int]:
    """Return the addresses of the first elements."""
    return list(map(Tensor.data_ptr, tensors))


def are_aligned(addresses: Sequence[int]) -> bool:
    """Whether all addresses are multiples of 16 bytes, as vectorized loads and stores need."""
    return functools.reduce(operator.or_, addresses, 0) % 16 == 0


def no_overlap(addresses: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether no two memory ranges, given by address and size in bytes, overlap."""
    end = 0
    for start, size in sorted(zip(addresses, sizes, strict=True)):
        if size and start < end:
            return False
        end = max(end, start + size)
    return True


class WeightBuffer:
    """Copies of many float32 weights in one allocation, which saves host time.

    Args:
        shapes: shape and strides of each copy.
        starts: where each copy starts, in elements.
        size: of the allocation, in elements.
        device: of the allocation.
    """

    def __init__(
        self,
        shapes: list[tuple[torch.Size, tuple[int, ...]]],
        starts: list[int],
        size: int,
        device: torch.device,
    ) -> None:
        self._shapes, self._starts = shapes, starts
        self._memory = torch.empty(size, dtype=torch.float32, device=device)

    def __len__(self) -> int:
        """Return the number of copies."""
        return len(self._shapes)

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the copies as tensors."""
        for (shape, strides), start in zip(self._shapes, self._starts, strict=True):
            yield self._memory.as_strided(shape, strides, start)

    def addresses(self) -> list[int]:
        """Return the address of each copy."""
        begin = self._memory.data_ptr()
        return [begin + 4 * start for start in self._starts]

    def restore(self, weights: Sequence[Tensor]) -> None:
        """Copy the saved values back into the weights."""
        torch._foreach_copy_(list(weights), list(self))


class WorkPlan:
    """Which program of a kernel processes which part of which tensor.

    Args:
        weights: tensors of one dtype.
        device: their device.
    """

    def __init__(self, weights: Sequence[Tensor], device: torch.device) -> None:
        where, offset, self._starts, self._size = [], [], [], 0
        for index, weight in enumerate(weights):
            for start in range(0, weight.numel(), TILE):
                where.append(index)
                offset.append(start)
            self._starts.append(self._size)
            self._size += -(-weight.numel() // ALIGNMENT) * ALIGNMENT
        self.programs = len(where)
        self.where = torch.tensor(where, dtype=torch.int32, device=device)
        self.offset = torch.tensor(offset, dtype=torch.int64, device=device)
        self.elements = list(map(Tensor.numel, weights))
        self.sizes = torch.tensor(self.elements, dtype=torch.int64, device=device)
        self._strides = list(map(Tensor.stride, weights))
        self._shapes = [(w.shape, w.stride()) for w in weights]
        self._kind = (weights[0].dtype, weights[0].device)
        dense = all(w.dtype == torch.float32 and is_dense(w) for w in weights)
        self._supported = dense and self.programs > 0
        self._checked: list[tuple[list[weakref.ref[Any]], list[int]]] = []
        self.weights: list[int] = []
        """Addresses of the weights when they were last checked."""
        self.fits(weights)

    def fits(self, weights: Sequence[Tensor]) -> bool:
        """Whether the plan fits these weights.

        At known addresses their strides are not compared: if these have changed, those of the gradients
        have, too, which `gradient_addresses` finds.
        """
        if not self._has_sizes(weights):
            return False
        addresses = data_ptrs(weights)
        if addresses == self.weights:
            return True
        if (weights[0].dtype, weights[0].device) != self._kind or not self._has_strides(weights):
            return False
        plain = PLAIN_TYPES.issuperset(map(type, weights))
        self._usable = self._supported and plain and are_aligned(addresses)
        self.weights = addresses
        return True

    def buffer(self) -> WeightBuffer:
        """Return memory for copies of all weights."""
        return WeightBuffer(self._shapes, self._starts, self._size, self._kind[1])

    def gradient_addresses(self, tensors: Sequence[Any]) -> list[int] | None:
        """Return the addresses of gradients; None if kernels cannot process them."""
        if not self._usable or not PLAIN_TYPES.issuperset(map(type, tensors)):
            return None
        if set(map(_DTYPE, tensors)) != {torch.float32} or not self._has_sizes(tensors):
            return None
        if not self._has_strides(tensors):
            return None
        found = data_ptrs(tensors)
        return found if are_aligned(found) else None

    def state_addresses(self, tensors: Sequence[Any]) -> list[int] | None:
        """Return the addresses of state tensors; None if kernels cannot process them.

        State tensors are the same at each step, so a result is reused while they do not move.
        """
        plain = self._usable and PLAIN_TYPES.issuperset(map(type, tensors))
        for known, at in self._checked if plain else ():
            same = all(map(operator.is_, [ref() for ref in known], tensors))
            if same and data_ptrs(tensors) == at:
                return at
        found = self.gradient_addresses(tensors)
        if found is None or set(map(_DEVICE, tensors)) != {self._kind[1]}:
            return None
        latest = ([weakref.ref(t) for t in tensors], found)
        self._checked = [*self._checked[1 - STATE_LISTS :], latest]
        return found

    def _has_strides(self, tensors: Sequence[Tensor]) -> bool:
        return list(map(Tensor.stride, tensors)) == self._strides

    def _has_sizes(self, tensors: Sequence[Tensor]) -> bool:
        return list(map(Tensor.numel, tensors)) == self.elements


def upload(into: Tensor, numbers: array) -> None:  # type: ignore[type-arg]
    """Copy numbers to the device asynchronously, through pinned memory."""
    host = torch.frombuffer(numbers, dtype=into.dtype)
    if into.is_cuda:
        host = host.pin_memory()
    into.copy_(host.view(into.shape), non_blocking=True)


class AddressTables:
    """Tables of addresses on a device.

    Steps request tables in the same order; `begin` starts again with the first. torch's allocator
    returns memory in few recurring patterns, so recent tables are kept for each position, and an eager
    step uploads only new ones. While a step is recorded into a CUDA graph, nothing can be allocated or
    uploaded: the last eager step must have requested all tables of the recording, and the addresses are
    uploaded afterwards by `recorded`.

    Args:
        device: of the tables.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[int, dict[tuple[int, ...], Tensor]] = {}
        self._next = 0
        self._pending: list[tuple[Tensor, tuple[int, ...]]] | None = None

    @property
    def recording(self) -> bool:
        """Whether the current step is being recorded."""
        return self._pending is not None

    def begin(self, recording: bool) -> None:
        """Begin a step."""
        self._next = 0
        self._pending = [] if recording else None

    def recorded(self) -> None:
        """Upload the addresses of the recorded step."""
        pending, self._pending = self._pending or [], None
        self._tables = {place: {key: table} for place, (table, key) in enumerate(pending)}
        for table, addresses in pending:
            upload(table, array("q", addresses))

    def table(self, rows: Sequence[list[int]]) -> Tensor:
        """Return a table on the device with one row for each list of tensors."""
        addresses = tuple(chain.from_iterable(rows))
        known = self._tables.setdefault(self._next, {})
        self._next += 1
        if self._pending is not None:
            fitting = [table for table in known.values() if table.numel() == len(addresses)]
            assert fitting, "a recorded step requests other tables than an eager one"
            self._pending.append((fitting[-1], addresses))
            return fitting[-1]
        table = known.get(addresses)
        if table is None:
            oldest = known.pop(next(iter(known))) if len(known) == PATTERNS else None
            if oldest is None or oldest.numel() != len(addresses):
                oldest = torch.zeros(len(addresses), dtype=torch.int64, device=self._device)
            upload(oldest, array("q", addresses))
            table = known[addresses] = oldest  # last, so that an interrupted upload is repeated
        return table
