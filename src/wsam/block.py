"""Parameters that are handled together, and the few list operations a step is made of.

A `Block` is what one call of `torch._foreach_*` can take: parameters of one group, one device, one
dtype and, where they are sharded, one mesh. Element-wise work is done on local shards; only the
norm looks across ranks, in `global_squares`, the one place that communicates.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Scalar = float | Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor; does not import torch.distributed.tensor to find out."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the local shards; a plain tensor is its own shard."""
    return [t.to_local() if is_sharded(t) else t for t in tensors]  # type: ignore[attr-defined]


@dataclass
class Block:
    """Parameters of one group that move together, with the scratch of a step in flight."""

    group: dict[str, Any]
    params: list[Tensor]
    numbers: list[int]
    """Position of each parameter among all parameters, the same on every rank."""
    names: list[str] | None = None
    sharded: bool = False
    saved: list[Tensor] = field(default_factory=list, repr=False)
    """The weights w, or in the lean plan the weights the step ends at, less the second gradient."""
    first: list[Tensor] | None = field(default=None, repr=False)
    """g0 of each parameter (as `p.grad` was), where the rule keeps it."""

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.params[0].device

    @property
    def direction(self) -> float:
        """+1 where the objective is minimised, -1 where the base maximises it."""
        return -1.0 if self.group.get("maximize") else 1.0

    def weights(self) -> list[Tensor]:
        """Return the local shards of the parameters."""
        return local(self.params) if self.sharded else self.params

    def shards(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the local shards of gradients that belong to this block."""
        return local(tensors) if self.sharded else tensors

    def subset(self, keep: Sequence[bool]) -> "Block | None":
        """Return the block of the chosen parameters, None if there are none."""
        chosen = [i for i, yes in enumerate(keep) if yes]
        if not chosen:
            return None
        if len(chosen) == len(self.params):
            return Block(self.group, self.params, self.numbers, self.names, self.sharded)
        names = [self.names[i] for i in chosen] if self.names else None
        params, numbers = [self.params[i] for i in chosen], [self.numbers[i] for i in chosen]
        return Block(self.group, params, numbers, names, self.sharded)


def blocks_of(groups: list[dict[str, Any]], names: dict[Tensor, str]) -> list[Block]:
    """Sort all parameters into blocks."""
    blocks: dict[Any, Block] = {}
    number = 0
    for index, group in enumerate(groups):
        own_names = group.get("param_names")
        for position, p in enumerate(group["params"]):
            sharded = is_sharded(p)
            layout = (p.device_mesh, p.placements) if sharded else None
            key = (index, p.device, p.dtype, layout)
            if key not in blocks:
                blocks[key] = Block(group, [], [], [], sharded)
            block = blocks[key]
            block.params.append(p)
            block.numbers.append(number)
            name = own_names[position] if own_names else names.get(p)
            if name is None:
                block.names = None
            elif block.names is not None:
                block.names.append(name)
            number += 1
    return list(blocks.values())


def at_least_float32(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype to accumulate in, None for the tensor's own."""
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None


def global_squares(blocks: Sequence[Block], lists: Sequence[list[Tensor]]) -> Tensor:
    """Return the sum of squares over all tensors, shards and ranks, as a 0-d tensor.

    The only reduction across ranks that a step makes for its own sake. Sums are kept per layout, so
    that a replicated parameter is counted once and a sharded one over the ranks that hold its parts.
    """
    totals: dict[Any, Tensor] = {}
    home: torch.device | None = None
    for block, tensors in zip(blocks, lists, strict=True):
        if not tensors:
            continue
        norms = torch._foreach_norm(tensors, 2, dtype=at_least_float32(tensors[0]))
        square = torch.stack(norms).square().sum()
        home = home or square.device
        p = block.params[0]
        layout = (p.device_mesh, p.placements) if block.sharded else None  # type: ignore[attr-defined]
        square = square.to(home)
        totals[layout] = totals[layout] + square if layout in totals else square
    if home is None:
        return torch.zeros(())
    parts = [_over_ranks(total, layout) for layout, total in totals.items()]
    result = parts[0]
    for part in parts[1:]:
        result = result + part
    return result


def _over_ranks(total: Tensor, layout: Any) -> Tensor:
    if layout is None:
        return total
    import torch.distributed as dist

    mesh, placements = layout
    for dimension, placement in enumerate(placements):
        if placement.is_shard():
            dist.all_reduce(total, group=mesh.get_group(dimension))
    return total


def average_over_ranks(blocks: Sequence[Block], process_group: Any) -> None:
    """Average g0 over the ranks of a process group: one reduction a dtype, not one a tensor."""
    import torch.distributed as dist

    lists: dict[Any, list[Tensor]] = {}
    for block in blocks:
        for g in block.first or []:
            lists.setdefault((g.dtype, g.device), []).append(g)
    for tensors in lists.values():
        flat = torch.cat([t.reshape(-1) for t in tensors])
        dist.all_reduce(flat, group=process_group)
        flat /= dist.get_world_size(process_group)
        parts = torch.split(flat, [t.numel() for t in tensors])
        shaped = [part.view_as(t) for part, t in zip(parts, tensors, strict=True)]
        torch._foreach_copy_(tensors, shaped)


def copies(tensors: list[Tensor]) -> list[Tensor]:
    """Return bit-exact copies, made by one launch where the device has such a kernel."""
    fresh = [torch.empty_like(t) for t in tensors]
    torch._foreach_copy_(fresh, tensors)
    return fresh


CHUNK_BYTES = 1 << 26
"""What a temporary copy may cost; a single tensor may cost more."""


def chunks(tensors: list[Tensor]) -> Iterator[slice]:
    """Yield slices of at most `CHUNK_BYTES`, or of one tensor."""
    start = 0
    while start < len(tensors):
        stop, size = start, 0
        while stop < len(tensors) and (stop == start or size + tensors[stop].nbytes <= CHUNK_BYTES):
            size += tensors[stop].nbytes
            stop += 1
        yield slice(start, stop)
        start = stop


def add_scaled(into: list[Tensor], tensors: list[Tensor], scale: Scalar, spend: bool) -> None:
    """`into += scale * tensors`; with `spend` the tensors may be overwritten to save memory."""
    if not isinstance(scale, Tensor):
        torch._foreach_add_(into, tensors, alpha=scale)
        return
    if spend:
        torch._foreach_mul_(tensors, scale)
        torch._foreach_add_(into, tensors)
        return
    for part in chunks(tensors):
        torch._foreach_add_(into[part], torch._foreach_mul(tensors[part], scale))


def on_device(value: Scalar, device: torch.device) -> Scalar:
    """Return a scalar where tensors of `device` can use it without a copy."""
    if isinstance(value, Tensor) and value.device != device:
        return value.to(device)
    return value
