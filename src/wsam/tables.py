"""Numbers that a kernel finds on the device: tables of addresses, and how they get there."""

from array import array
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

Rows = list[list[int]]
"""Addresses of the tensors of some lists."""
PATTERNS = 8
"""How many tables are kept for one place in a step."""


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

    Steps ask for tables in the same order: `begin` starts again with the first. torch's allocator
    gives memory in few patterns that recur, every other step often, so some of the addresses that were
    asked for in each place are kept, and an eager step writes only those that are new. While a step is
    recorded into a CUDA graph nothing may be made or copied from the host: the last eager step must
    have asked for all that the recording asks for, and the addresses are written once it has been
    recorded. After that there are no more eager steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[int, dict[tuple[int, ...], Tensor]] = {}
        self._next = 0
        self._pending: list[tuple[Tensor, tuple[int, ...]]] | None = None

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
        pending, self._pending = self._pending or [], None
        self._tables = {place: {key: table} for place, (table, key) in enumerate(pending)}
        for table, addresses in pending:
            upload(table, array("q", addresses))

    def table(self, rows: Sequence[list[int]]) -> Tensor:
        """Return a table on the device, one row a list of tensors."""
        addresses = tuple(chain.from_iterable(rows))
        known = self._tables.setdefault(self._next, {})
        self._next += 1
        if self._pending is not None:
            as_long = [table for table in known.values() if table.numel() == len(addresses)]
            assert as_long, "a recorded step asks for other tables than an eager one"
            self._pending.append((as_long[-1], addresses))
            return as_long[-1]
        table = known.get(addresses)
        if table is None:
            oldest = known.pop(next(iter(known))) if len(known) == PATTERNS else None
            if oldest is None or oldest.numel() != len(addresses):
                oldest = torch.zeros(len(addresses), dtype=torch.int64, device=self._device)
            upload(oldest, array("q", addresses))
            table = known[addresses] = oldest  # last: whoever is interrupted writes again
        return table
