"""Peak memory of a step, in bytes and in copies of the weights more than the plain base needs.

On CUDA it is the peak of torch's allocator. On a CPU it is the sum of all live storages after each
operation; temporary buffers inside an operation are not counted.
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

from wsam.accel.cuda_graph import EAGER_CALLS
from wsam.bench.cases import BASE, Case
from wsam.bench.timing import gc_paused
from wsam.bench.workload import Workload

COUNTED_BY = {
    "cuda": "torch.cuda.max_memory_allocated",
    "cpu": "bytes of live storages, counted after each operation",
}


class LiveBytesCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums the sizes of all live storages after each operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, tuple[Any, int]] = {}
        self.peak = 0

    def live(self) -> int:
        """Return the bytes of all live storages."""
        alive = {k: (ref, n) for k, (ref, n) in self._storages.items() if not ref.expired()}
        self._storages = alive
        return sum(size for _, size in alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and add its results."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._storages[storage.data_ptr()] = (reference, storage.nbytes())
        self.peak = max(self.peak, self.live())
        return result


def peak_bytes(workload: Workload, case: Case) -> int:
    """Return the peak of one step: weights, state, gradients, activations and temporary buffers.

    Earlier steps have created the optimizer's state. A captured step is measured during capture.
    """
    warmup = EAGER_CALLS if case.form == "captured" else 2
    if workload.device.type == "cuda":
        torch.cuda.synchronize(workload.device)
        before = torch.cuda.memory_allocated(workload.device)
        step = case.build(workload)
        for _ in range(warmup):
            step()
        torch.cuda.synchronize(workload.device)
        torch.cuda.reset_peak_memory_stats(workload.device)
        step()
        torch.cuda.synchronize(workload.device)
        return torch.cuda.max_memory_allocated(workload.device) - before
    counter = LiveBytesCounter()
    with counter:  # from the start, to count what is alive when the step begins
        step = case.build(workload)
        for _ in range(warmup):
            step()
        counter.peak = 0
        step()
    return counter.peak


def measure_peaks(
    workload: Workload, cases: Iterable[Case], weight_bytes: int
) -> list[dict[str, Any]]:
    """Return the peak of each case, also as copies of the weights more than the base in its form."""
    rows: list[dict[str, Any]] = []
    base_bytes: dict[str, int] = {}
    with gc_paused():
        for case in cases:
            peak = peak_bytes(workload, case)
            gc.collect()  # frees the case before the next one is built
            if case.kind == BASE:
                base_bytes[case.form] = peak
            rows.append({**case.identity(), "peak_bytes": peak})
    for row in rows:
        if row["form"] in base_bytes:
            extra = row["peak_bytes"] - base_bytes[row["form"]]
            row["copies_beyond_base"] = extra / weight_bytes
    return rows
