"""Parameters that are handled together, and the few list operations a step is made of.

A `Block` is what one call of `torch._foreach_*` can take: parameters of one group, one device, one
dtype and, where they are sharded, one mesh. Element-wise work is done on local shards; norms, and
with `local=True` g0, are summed across ranks, by `sum_over_ranks` alone.
"""

import operator
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from wsam.schedule import Scalar

DTYPE, DEVICE = operator.attrgetter("dtype"), operator.attrgetter("device")
BYTES, GRADIENT = operator.attrgetter("nbytes"), operator.attrgetter("grad")
LAYOUT = operator.attrgetter("layout")


def is_sharded(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor; does not import torch.distributed.tensor to find out."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the local shards; a plain tensor is its own shard."""
    return [t.to_local() if is_sharded(t) else t for t in tensors]  # type: ignore[attr-defined]


def direction_of(group: dict[str, Any]) -> float:
    """Return +1 where a group's objective is minimised, -1 where the base maximises it."""
    return -1.0 if group.get("maximize") else 1.0


@dataclass
class Block:
    """Parameters of one group that move together, with the scratch of a step in flight."""

    group: dict[str, Any]
    params: list[Tensor]
    numbers: list[int]
    """Position of each parameter among all parameters, the same on every rank."""
    names: list[str] | None = None
    sharded: bool = False
    ranks: tuple[Any, tuple[int, ...]] | None = None
    """The mesh, and its dimensions over which each parameter is in pieces; None if it is whole."""
    saved: "list[Tensor] | Piece | Aside" = field(default_factory=list, repr=False)
    """The weights w, or in the lean plan the weights the step ends at, less the second gradient."""
    first: list[Tensor] | None = field(default=None, repr=False)
    """g0 of each parameter (as `p.grad` was), where the rule keeps it."""
    spare: dict[int, Tensor] = field(default_factory=dict, repr=False)
    """Memory of copies from earlier steps, by the parameter's number; parts of a block share it."""

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.params[0].device

    @property
    def direction(self) -> float:
        """+1 where the objective is minimised, -1 where the base maximises it."""
        return direction_of(self.group)

    def weights(self) -> list[Tensor]:
        """Return the local shards of the parameters."""
        return local(self.params) if self.sharded else self.params

    def shards(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the local shards of gradients that belong to this block."""
        return local(tensors) if self.sharded else tensors

    def subset(self, keep: Sequence[bool]) -> "Block | None":
        """Return the block of the chosen parameters, None if there are none."""
        if all(keep) and keep:
            return replace(self, saved=[], first=None)
        chosen = [i for i, yes in enumerate(keep) if yes]
        if not chosen:
            return None
        names = [self.names[i] for i in chosen] if self.names else None
        params, numbers = [self.params[i] for i in chosen], [self.numbers[i] for i in chosen]
        return replace(self, params=params, numbers=numbers, names=names, saved=[], first=None)


class Piece:
    """Room for copies of many tensors, taken in one piece: the host saves many allocations.

    It is made into tensors only where somebody walks over it; a kernel needs the addresses alone.

    Args:
        shapes: the shape and strides of each copy.
        starts: where each copy begins, in elements.
        size: of the whole, in elements of 32 bits.
        device: where.
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
        """Return the number of tensors."""
        return len(self._shapes)

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the copies as tensors."""
        for (shape, strides), start in zip(self._shapes, self._starts, strict=True):
            yield self._memory.as_strided(shape, strides, start)

    def addresses(self) -> list[int]:
        """Return where each copy begins in memory."""
        begin = self._memory.data_ptr()
        return [begin + 4 * start for start in self._starts]


class Aside:
    """Where weights belong whose parameters are pointed elsewhere.

    Args:
        weights: the parameters, still where they belong.
        elsewhere: where they are about to be pointed.
    """

    def __init__(self, weights: Sequence[Tensor], elsewhere: Sequence[Tensor]) -> None:
        self._own = [w.data for w in weights]
        self._elsewhere = [room.data_ptr() for room in elsewhere]

    def put_back(self, weights: Sequence[Tensor]) -> None:
        """Point the parameters to where they belong; may be called twice.

        Those that somebody has given other memory meanwhile keep that, and get their values back.
        """
        for w, own, room in zip(weights, self._own, self._elsewhere, strict=True):
            if w.data_ptr() == room:
                w.data = own
            elif w.data_ptr() != own.data_ptr():
                w.copy_(own)
        increment_version(weights)


def places(tensors: Sequence[Tensor]) -> list[int]:
    """Return where tensors begin in memory."""
    return list(map(Tensor.data_ptr, tensors))


def align_gradients(layout: Sequence[Block]) -> None:
    """Lay gradients out over the ranks as their parameters are.

    Tensor parallelism leaves the gradient of a replicated parameter in parts that are still to be
    summed; torch's optimizers sum them when they add the two, element-wise work on shards would not.
    """
    for p in (p for block in layout if block.sharded for p in block.params):
        g: Any = p.grad
        if g is not None and g.placements != p.placements:  # type: ignore[attr-defined]
            p.grad = g.redistribute(placements=p.placements)  # type: ignore[attr-defined]


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
                blocks[key] = Block(group, [], [], [], sharded, _pieces(layout))
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


def _pieces(layout: Any) -> tuple[Any, tuple[int, ...]] | None:
    if layout is None:
        return None
    mesh, placements = layout
    # Not `is_shard`: the strided shards that FSDP2 makes of a tensor-parallel parameter deny it.
    dimensions = tuple(i for i, kind in enumerate(placements) if not kind.is_replicate())
    return (mesh, dimensions) if dimensions else None


def refuse_flat_shards(groups: list[dict[str, Any]]) -> None:
    """Refuse the flat shards of FSDP's first version: nothing says of which whole they are parts."""
    if any(getattr(p, "_fsdp_flattened", False) for group in groups for p in group["params"]):
        raise TypeError(
            "parameters of FullyShardedDataParallel are flat shards whose global norm cannot be "
            "known: shard the model by torch.distributed.fsdp.fully_shard"
        )


def at_least_float32(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype to accumulate in, None for the tensor's own."""
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None


def widened(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of half precision in single precision, whose range they may need; others as is."""
    return [t.float() if at_least_float32(t) else t for t in tensors]


def sum_over_ranks(tensor: Tensor, process_group: Any) -> None:
    """Sum a tensor over ranks in place. The one place where a step communicates for its own sake."""
    import torch.distributed as dist

    dist.all_reduce(tensor, group=process_group)


def global_squares(blocks: Sequence[Block], lists: Sequence[list[Tensor]]) -> Tensor:
    """Return the sum of squares over all tensors, shards and ranks, as a 0-d tensor.

    Sums are kept by the ranks that share the pieces, so that a replicated parameter is counted once
    and a sharded one over the ranks that hold its parts.
    """
    totals: dict[Any, Tensor] = {}
    for block, tensors in zip(blocks, lists, strict=True):
        if not tensors:
            continue
        norms = torch._foreach_norm(tensors, 2, dtype=at_least_float32(tensors[0]))
        square = torch.stack(norms).square().sum()
        key = (block.ranks, square.device)
        totals[key] = totals[key] + square if key in totals else square
    for (ranks, _), total in totals.items():
        if ranks is not None:
            for dimension in ranks[1]:
                sum_over_ranks(total, ranks[0].get_group(dimension))
    if not totals:
        return torch.zeros(())
    result, *others = totals.values()
    for other in others:
        result = result + other.to(result.device)
    return result


def average_over_ranks(
    layout: Sequence[Block], blocks: Sequence[Block], process_group: Any
) -> list[Block]:
    """Average g0 over the ranks of a process group: one reduction a dtype, not one a tensor.

    A gradient that this rank lacks counts as zero, for others may have it.
    """
    own = {n: g for block in blocks for n, g in zip(block.numbers, block.first or [], strict=True)}
    parts = [block.subset([p.requires_grad for p in block.params]) for block in layout]
    whole = [part for part in parts if part is not None]
    lists: dict[Any, list[Tensor]] = {}
    for block in whole:
        numbered = zip(block.numbers, block.params, strict=True)
        block.first = [own[n] if n in own else torch.zeros_like(p) for n, p in numbered]
        for g in block.first:
            lists.setdefault((g.dtype, g.device), []).append(g)
    for tensors in lists.values():
        flat = torch.cat([t.reshape(-1) for t in tensors])
        flat /= process_group.size()  # before the sum, as DistributedDataParallel does
        sum_over_ranks(flat, process_group)
        pieces = torch.split(flat, [t.numel() for t in tensors])
        shaped = [piece.view_as(t) for piece, t in zip(pieces, tensors, strict=True)]
        torch._foreach_copy_(tensors, shaped)
    return whole


FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def copies(tensors: list[Tensor]) -> list[Tensor]:
    """Return bit-exact copies, made by one launch where the device has such a kernel."""
    if tensors and tensors[0].is_cuda and tensors[0].dtype in FLOATS:
        # Times one: exact, and memory for all of them comes by a single call from the host.
        return list(torch._foreach_mul(tensors, 1.0))
    fresh = [torch.empty_like(t) for t in tensors]
    torch._foreach_copy_(fresh, tensors)
    return fresh


PLAIN = frozenset((Tensor, nn.Parameter))
"""A tensor of another class need not lie at its own address."""


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie side by side, in whatever order."""
    if tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last):
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def is_ordinary(weight: Tensor) -> bool:
    """Whether a weight lies on a CPU in one piece, in single or double precision."""
    if type(weight) not in PLAIN or weight.device.type != "cpu":
        return False
    return weight.dtype in (torch.float32, torch.float64) and is_dense(weight)


CHUNK_BYTES = 1 << 26
"""What a temporary copy may cost; a single tensor may cost more."""


def chunks(tensors: list[Tensor], limit: int) -> Iterator[slice]:
    """Yield slices of at most `limit` bytes, or of one tensor."""
    start = 0
    while start < len(tensors):
        stop, size = start, 0
        while stop < len(tensors) and (stop == start or size + tensors[stop].nbytes <= limit):
            size += tensors[stop].nbytes
            stop += 1
        yield slice(start, stop)
        start = stop


BROADCASTING = ("cpu",)
"""Devices with no launches to save, where a list times a 0-d tensor may go tensor by tensor."""


def add_scaled(into: list[Tensor], tensors: list[Tensor], scale: Scalar, spend: bool) -> None:
    """`into += scale * tensors`; with `spend` the tensors may be overwritten to save memory."""
    if not isinstance(scale, Tensor):
        torch._foreach_add_(into, tensors, alpha=scale)
        return
    if into and at_least_float32(into[0]):  # torch would round the scale first, or lose it to inf
        for part in chunks(tensors, CHUNK_BYTES):
            torch._foreach_add_(into[part], torch._foreach_mul(widened(tensors[part]), scale))
        return
    if into and into[0].device.type in BROADCASTING:
        torch._foreach_addcmul_(into, tensors, [scale] * len(into))
        return
    if into and into[0].is_cuda and can_fuse(into, tensors):
        # SGD's own kernel takes a learning rate from the device: w - (-scale) g, in one pass.
        torch._fused_sgd_(
            *(into, tensors, []),
            weight_decay=0.0,
            momentum=0.0,
            lr=-scale.to(torch.float32),
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )
        return
    if spend:
        torch._foreach_mul_(tensors, scale)
        torch._foreach_add_(into, tensors)
        return
    for part in chunks(tensors, CHUNK_BYTES):
        torch._foreach_add_(into[part], torch._foreach_mul(tensors[part], scale))


def can_fuse(into: list[Tensor], tensors: list[Tensor]) -> bool:
    """Whether SGD's kernel may walk both lists side by side."""
    if {t.dtype for t in (*into, *tensors)} != {torch.float32}:
        return False
    return [a.stride() for a in into] == [b.stride() for b in tensors] and all(map(is_dense, into))


def on_device(value: Scalar, device: torch.device) -> Scalar:
    """Return a scalar where tensors of `device` can use it without a copy."""
    if isinstance(value, Tensor) and value.device != device:
        return value.to(device)
    return value
