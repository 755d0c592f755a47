"""Peak memory of a step, in bytes and in copies of the weights beyond the plain base's.

On CUDA it is what torch's allocator says. Elsewhere the storages that operations have returned are
added up while they are alive, after each operation: scratch within an operation is not seen.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wsam.bench.cases import BASE, Case
from wsam.bench.problem import Problem
from wsam.bench.timing import no_collections
from wsam.graph import EAGER_CALLS

HOW = {
    "cuda": "torch.cuda.max_memory_allocated",
    "cpu": "bytes of live storages, counted after each operation",
}


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages that are alive, after each operation."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, tuple[Any, int]] = {}
        self.peak = 0
        for tensor in known:
            self._note(tensor)

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        alive = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._storages[storage.data_ptr()] = (alive, storage.nbytes())

    def live(self) -> int:
        """Return the bytes that are alive now."""
        alive = {k: (ref, n) for k, (ref, n) in self._storages.items() if not ref.expired()}
        self._storages = alive
        return sum(size for _, size in alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at what it has returned."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        self.peak = max(self.peak, self.live())
        return result


def peak_bytes(problem: Problem, case: Case) -> int:
    """Return the peak of one step of a case: weights, state, gradients, activations, scratch.

    The steps before it have made the base's state; a captured step is measured as it is recorded.
    """
    warmup = EAGER_CALLS if case.form == "captured" else 2
    if problem.device.type == "cuda":
        torch.cuda.synchronize(problem.device)
        before = torch.cuda.memory_allocated(problem.device)
        step = case.build(problem)
        for _ in range(warmup):
            step()
        torch.cuda.synchronize(problem.device)
        torch.cuda.reset_peak_memory_stats(problem.device)
        step()
        torch.cuda.synchronize(problem.device)
        return torch.cuda.max_memory_allocated(problem.device) - before
    counter = LiveBytes(())
    with counter:  # from the start: what is alive when the step begins must be known
        step = case.build(problem)
        for _ in range(warmup):
            step()
        counter.peak = 0
        step()
    return counter.peak


def peaks(problem: Problem, cases: Iterable[Case], weight_bytes: int) -> list[dict[str, Any]]:
    """Return each case's peak, and how many copies of the weights it lies above its form's base."""
    rows: list[dict[str, Any]] = []
    plain: dict[str, int] = {}
    with no_collections():
        for case in cases:
            found = peak_bytes(problem, case)
            gc.collect()  # the case is gone before the next one is built
            if case.kind == BASE:
                plain[case.form] = found
            row: dict[str, Any] = {
                "name": case.name,
                "form": case.form,
                "kind": case.kind,
                "peak_bytes": found,
            }
            rows.append(row)
    for row in rows:
        if row["form"] in plain:
            beyond = row["peak_bytes"] - plain[row["form"]]
            row["copies_beyond_base"] = beyond / weight_bytes
    return rows
