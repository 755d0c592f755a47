"""Numbers that a kernel finds on the device: tables of addresses, and how they get there."""

from array import array
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

Rows = list[list[int]]
"""Addresses of the tensors of some lists."""


def upload(into: Tensor, numbers: array) -> None:  # type: ignore[type-arg]
    """Copy numbers to the device without waiting for it.

    A copy out of ordinary memory would wait until the device has done all that was asked of it
    before. Out of pinned memory it is made later, and torch's allocator keeps that memory until then.
    """
    host = torch.frombuffer(numbers, dtype=into.dtype)
    if into.is_cuda:
        host = host.pin_memory()
    into.copy_(host.view(into.shape), non_blocking=True)


class Tables:
    """Tables of addresses on a device.

    Steps ask for tables in the same order: `begin` starts again with the first. An eager step writes
    the addresses that have changed. While a step is recorded into a CUDA graph nothing may be made or
    copied from the host: the last eager step must have asked for all that the recording asks for, and
    the addresses are written once it has been recorded. After that there are no more eager steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[int, tuple[Tensor, list[int]]] = {}
        self._next = 0
        self._pending: list[tuple[Tensor, list[int]]] | None = None

    @property
    def recording(self) -> bool:
        """Whether the step is being recorded."""
        return self._pending is not None

    def begin(self, recording: bool) -> None:
        """Say that a step begins, and whether it is being recorded."""
        self._next = 0
        self._pending = [] if recording else None

    def recorded(self) -> None:
        """Write the addresses of the step that has been recorded."""
        for table, addresses in self._pending or []:
            upload(table, array("q", addresses))
        self._pending = None

    def table(self, rows: Sequence[list[int]]) -> Tensor:
        """Return a table on the device, one row a list of tensors."""
        addresses = list(chain.from_iterable(rows))
        position, self._next = self._next, self._next + 1
        table, written = self._tables.get(position, (None, []))
        if table is None or table.numel() != len(addresses):
            assert self._pending is None, "a recorded step asks for other tables than an eager one"
            table = torch.zeros(len(addresses), dtype=torch.int64, device=self._device)
            written = []
        if self._pending is not None:
            self._pending.append((table, addresses))
        elif written != addresses:
            self._tables[position] = (table, [])  # whoever is interrupted writes again
            upload(table, array("q", addresses))
            self._tables[position] = (table, addresses)
        return table
