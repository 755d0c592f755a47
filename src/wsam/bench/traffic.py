"""How many parameter-sized tensors a step reads and writes, counted operation by operation.

The count is of the optimizer's own part: what a step of a `Bag` moves beyond its passes.
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

from wsam.bench.cases import Case, two_passes
from wsam.bench.problem import bag_problem
from wsam.bench.timing import Visitor
from wsam.block import Block
from wsam.kernels import Kernels

ODD = 7919  # no other tensor has so many elements
TENSORS = 3
WRITES_ONLY = ("copy_", "_foreach_copy_", "zero_", "_foreach_zero_", "fill_")
MAKES_NOTHING = ("empty", "new_empty")


@dataclass(frozen=True)
class Traffic:
    """Parameter-sized tensors that are read and written, for each parameter."""

    reads: float
    writes: float

    def __sub__(self, other: Traffic) -> Traffic:
        """Return what is left."""
        return Traffic(self.reads - other.reads, self.writes - other.writes)

    def __mul__(self, factor: float) -> Traffic:
        """Return several times as much."""
        return Traffic(factor * self.reads, factor * self.writes)

    @property
    def total(self) -> float:
        """Reads and writes."""
        return self.reads + self.writes


class Moved(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts tensors of the odd size that operations read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads = self.writes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count its arguments and results by its schema."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = func._schema
        name = schema.name.removeprefix("aten::")
        for position, argument in enumerate(schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            count = _odd(value)
            # A fused base is allowed to scale gradients in place; it does so for a GradScaler only.
            scales = name.startswith("_fused_") and argument.name == "grads"
            written = argument.alias_info is not None and argument.alias_info.is_write
            self.writes += count * (written and not scales)
            only_written = written and (name in WRITES_ONLY or argument.is_out)
            self.reads += count * (not only_written) * _is_read(func)
        made = [r for r in schema.returns if r.alias_info is None]
        if made and not name.startswith(MAKES_NOTHING):
            self.writes += _odd(result)
        return result


def _odd(value: object) -> int:
    return sum(isinstance(x, Tensor) and x.numel() == ODD for x in tree_leaves(value))


def _is_read(func: Any) -> bool:
    """Whether an operation looks at its arguments' elements: a view and an empty copy do not."""
    name = func._schema.name.removeprefix("aten::")
    views = any(
        r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
    )
    return not views and not name.startswith(MAKES_NOTHING)


def count(case: Case, device: torch.device) -> Traffic:
    """Return what the optimizer's own part of a case's step reads and writes.

    It is the second step: the first makes the base's state, and a captured step is recorded later.
    """
    problem = bag_problem(TENSORS, TENSORS * ODD, device)
    floor = _moved(two_passes(problem, "eager")) * (case.passes / 2)
    return _moved(case.build(problem)) - floor


def _moved(step: Any) -> Traffic:
    step()
    counter = Moved()
    with counter, fused_kernels(counter):
        step()
    return Traffic(counter.reads / TENSORS, counter.writes / TENSORS)


@contextmanager
def fused_kernels(counter: Moved) -> Iterator[None]:
    """Count what our own fused kernels move: torch's dispatcher does not see them."""
    norm, add, finish = Kernels.scales, Kernels.save_and_add, Kernels._finish_block
    begin_lean, end_lean = Kernels._begin_lean, Kernels._end_lean
    inner = Kernels._products

    def scales(self: Kernels, blocks: Any, lists: Any, *final: bool) -> Any:
        made = norm(self, blocks, lists, *final)
        if made is not None:
            counter.reads += sum(len(tensors) for tensors in lists)
        return made

    def save_and_add(self: Kernels, block: Block, *rest: Any) -> Any:
        done = add(self, block, *rest)
        if done:  # reads w and the direction, writes w and its copy
            counter.reads += 2 * len(block.params)
            counter.writes += 2 * len(block.params)
        return done

    def products(self: Kernels, blocks: Any, gradients: Any) -> Any:
        counter.reads += 2 * sum(len(block.params) for block in blocks)
        return inner(self, blocks, gradients)

    def finish_block(self: Kernels, block: Block, lists: Any, history: Any, *rest: Any) -> None:
        count = len(block.params)  # lists: the copy of w, w, g1 and, where it was kept, g0
        counter.reads += count * (len(lists) - 1 + len(history))
        counter.writes += count * (1 + len(history))
        finish(self, block, lists, history, *rest)

    def begin(self: Kernels, block: Block, lists: Any, scale: Any, history: Any) -> None:
        count = len(block.params)  # lists: w, g0 and the direction, which may be g0 itself
        counter.reads += count * (2 + (lists[2] != lists[1]) + len(history))
        counter.writes += count * (2 + len(history))
        begin_lean(self, block, lists, scale, history)

    def end(self: Kernels, block: Block, lists: Any) -> None:
        counter.reads += 2 * len(block.params)  # the result less g1, and g1
        counter.writes += len(block.params)
        end_lean(self, block, lists)

    with mock.patch.multiple(
        Kernels,
        scales=scales,
        save_and_add=save_and_add,
        _products=products,
        _finish_block=finish_block,
        _begin_lean=begin,
        _end_lean=end,
    ):
        yield


def copy_bandwidth(visitor: Visitor, nbytes: int | None = None) -> float:
    """Return the bytes per second that a large copy reads and writes here, at best of some tries."""
    on_gpu = visitor.device.type == "cuda"
    size = nbytes or (1 << 30 if on_gpu else 1 << 27)
    source = torch.ones(size // 4, device=visitor.device)
    target = torch.empty_like(source)
    best = min(visitor.visit(lambda: target.copy_(source), 1) for _ in range(8))
    return 2 * size / best


def share_of_bandwidth(
    traffic: Traffic, weights: int, seconds: float, bandwidth: float
) -> float | None:
    """Return the share of the copy bandwidth that the optimizer's own part reaches.

    Args:
        traffic: Of the case.
        weights: How many, of four bytes each.
        seconds: Of the optimizer's own part.
        bandwidth: Of a copy.

    Returns:
        The share; None where the part was too short to be measured.
    """
    if seconds <= 0:
        return None
    return traffic.total * 4 * weights / seconds / bandwidth
