"""Memory traffic: how many parameter-sized tensors a step reads and writes.

Only the optimizer is counted: the traffic of a step of a `SyntheticModel`, less that of its passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wsam._core.param_blocks import Block
from wsam.accel.triton_backend import TritonBackend
from wsam.bench.cases import Case, two_passes
from wsam.bench.timing import Timer
from wsam.bench.workload import synthetic_workload

NUMEL = 7919  # elements of a counted tensor; no other tensor has as many
TENSORS = 3
WRITE_ONLY_OPS = ("copy_", "_foreach_copy_", "zero_", "_foreach_zero_", "fill_")
ALLOCATION_OPS = ("empty", "new_empty")


@dataclass(frozen=True)
class Traffic:
    """Number of parameter-sized tensors read and written, per parameter."""

    reads: float
    writes: float

    def __sub__(self, other: Traffic) -> Traffic:
        """Return the difference."""
        return Traffic(self.reads - other.reads, self.writes - other.writes)

    def __mul__(self, factor: float) -> Traffic:
        """Return a multiple."""
        return Traffic(factor * self.reads, factor * self.writes)

    @property
    def total(self) -> float:
        """Sum of reads and writes."""
        return self.reads + self.writes


class TrafficCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the tensors with `NUMEL` elements that operations read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads = self.writes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count its arguments and results by its schema."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = func._schema
        name = schema.name.removeprefix("aten::")
        # Neither allocations nor views read the elements of their arguments.
        allocates = name.startswith(ALLOCATION_OPS)
        views = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
        for position, argument in enumerate(schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            count = _count_tensors(value)
            # By its schema a fused base writes gradients; it does so only with a GradScaler.
            only_scaler = name.startswith("_fused_") and argument.name == "grads"
            written = argument.alias_info is not None and argument.alias_info.is_write
            self.writes += count * (written and not only_scaler)
            only_written = written and (name in WRITE_ONLY_OPS or argument.is_out)
            self.reads += count * (not (only_written or views or allocates))
        made = [r for r in schema.returns if r.alias_info is None]
        if made and not allocates:
            self.writes += _count_tensors(result)
        return result


def _count_tensors(value: object) -> int:
    return sum(isinstance(x, Tensor) and x.numel() == NUMEL for x in tree_leaves(value))


def optimizer_traffic(case: Case, device: torch.device) -> Traffic:
    """Return the traffic of the optimizer in a case's step, the mean over a period.

    The second period is counted: the first one creates the optimizer's state, and a captured step is
    captured later.
    """
    workload = synthetic_workload(TENSORS, TENSORS * NUMEL, device)
    floor = _step_traffic(two_passes(workload, "eager"), 1) * (case.passes / 2)
    return _step_traffic(case.build(workload), case.period) - floor


def _step_traffic(step: Any, period: int) -> Traffic:
    for _ in range(period):
        step()
    counter = TrafficCounter()
    with counter, count_fused_kernels(counter):
        for _ in range(period):
            step()
    return Traffic(counter.reads, counter.writes) * (1 / (TENSORS * period))


@contextmanager
def count_fused_kernels(counter: TrafficCounter) -> Iterator[None]:
    """Count the traffic of our fused kernels, which bypass torch's dispatcher."""
    norm, add, finish = (
        TritonBackend._scales,
        TritonBackend._save_and_add,
        TritonBackend._finish_block,
    )
    begin_lean, end_lean = TritonBackend._begin_lean_block, TritonBackend._end_lean_block
    inner = TritonBackend._products

    def scales(self: TritonBackend, blocks: Any, plans: Any, lists: Any, final: bool) -> Any:
        made = norm(self, blocks, plans, lists, final)
        if made is not None:
            counter.reads += sum(len(tensors) for tensors in lists)
        return made

    def save_and_add(self: TritonBackend, block: Block, *rest: Any) -> Any:
        done = add(self, block, *rest)
        if done:  # reads w and the direction, writes w and its copy
            counter.reads += 2 * len(block.params)
            counter.writes += 2 * len(block.params)
        return done

    def products(self: TritonBackend, found: Any) -> Any:
        counter.reads += 2 * sum(len(block.params) for block, _, _ in found)
        return inner(self, found)

    def finish_block(
        self: TritonBackend, block: Block, plan: Any, lists: Any, history: Any, kept: Any
    ) -> None:
        count = len(block.params)  # lists: see TritonBackend._lists_of_two_passes
        counter.reads += count * (len(lists) - 1 + len(history))
        counter.writes += count * (1 + len(history) + bool(kept))
        finish(self, block, plan, lists, history, kept)

    def begin(self: TritonBackend, block: Block, lists: Any, scale: Any, history: Any) -> None:
        count = len(block.params)  # lists: w, g0 and the direction, which may be g0 itself
        counter.reads += count * (2 + (lists[2] != lists[1]) + len(history))
        counter.writes += count * (2 + len(history))
        begin_lean(self, block, lists, scale, history)

    def end(self: TritonBackend, block: Block, lists: Any) -> None:
        counter.reads += 2 * len(block.params)  # the result less g1, and g1
        counter.writes += len(block.params)
        end_lean(self, block, lists)

    with mock.patch.multiple(
        TritonBackend,
        _scales=scales,
        _save_and_add=save_and_add,
        _products=products,
        _finish_block=finish_block,
        _begin_lean_block=begin,
        _end_lean_block=end,
    ):
        yield


def copy_bandwidth(timer: Timer, nbytes: int | None = None) -> float:
    """Return the bytes per second that a large copy reads and writes, the best of eight trials."""
    on_gpu = timer.device.type == "cuda"
    size = nbytes or (1 << 30 if on_gpu else 1 << 27)
    source = torch.ones(size // 4, device=timer.device)
    target = torch.empty_like(source)
    best = min(timer.time(lambda: target.copy_(source), 1) for _ in range(8))
    return 2 * size / best


def bandwidth_share(
    traffic: Traffic, weights: int, seconds: float, bandwidth: float
) -> float | None:
    """Return the optimizer's memory bandwidth as a share of the bandwidth of a copy.

    Args:
        traffic: Of the case.
        weights: Number of weights, of four bytes each.
        seconds: Time of the optimizer alone.
        bandwidth: Bytes per second of a copy.

    Returns:
        The share; None if the time was too short to be measured.
    """
    if seconds <= 0:
        return None
    return traffic.total * 4 * weights / seconds / bandwidth
