"""Parameters grouped into blocks, sharded parameters, and norms across ranks.

A `Block` is what one call of `torch._foreach_*` accepts: parameters of one parameter group, device
and dtype, and of one mesh where they are DTensors. Element-wise work uses local shards. Norms are
summed across the ranks that hold shards.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from wsam._core.mix import Scalar
from wsam._core.tensor_ops import accumulation_dtype, on_device

EPSILON = 1e-12
"""Keeps d finite where g0 vanishes."""


class SavedWeights(Protocol):
    """The weights of a block as they were before the perturbation."""

    def restore(self, weights: Sequence[Tensor]) -> None:
        """Write them back into the block's weights, bit for bit."""


@dataclass
class CopiedWeights:
    """Copies of weights."""

    tensors: list[Tensor]

    def restore(self, weights: Sequence[Tensor]) -> None:
        """Copy them back."""
        torch._foreach_copy_(list(weights), self.tensors)


@dataclass
class Block:
    """Parameters that are processed together, and their buffers during a step."""

    group: dict[str, Any]
    params: list[Tensor]
    indices: list[int]
    """Position of each parameter among all parameters. The same on every rank."""
    names: list[str] | None = None
    sharded: bool = False
    shard_groups: tuple[Any, tuple[int, ...]] | None = None
    """The device mesh and its dimensions along which parameters are split; None if they are whole."""
    saved: SavedWeights | None = field(default=None, repr=False)
    """The weights w; with `lean=True` the updated weights without the term of g1."""
    g0: list[Tensor] = field(default_factory=list, repr=False)
    """The first gradient of each parameter; empty where the rule does not need it any more."""
    denominators: list[Tensor] | None = field(default=None, repr=False)
    """The base's denominators, while a geometry that uses them computes its metric."""

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.params[0].device

    @property
    def sign(self) -> float:
        """+1 where the objective is minimized, -1 where the base maximizes it."""
        return sign_of(self.group)

    def weights(self) -> list[Tensor]:
        """Return the local shards of the parameters."""
        return local_shards(self.params) if self.sharded else self.params

    def shards(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the local shards of gradients of this block."""
        return local_shards(tensors) if self.sharded else tensors

    def norms(self, tensors: list[Tensor]) -> Tensor:
        """Return the norm of each tensor, over all of its shards, in one tensor."""
        norms = torch.stack(torch._foreach_norm(tensors, 2, dtype=accumulation_dtype(tensors[0])))
        if self.shard_groups is None:
            return norms
        squares = norms.square()
        _sum_over_shards(squares, self.shard_groups)
        return squares.sqrt()

    def part(self, chosen: Sequence[int]) -> "Block":
        """Return a block of the parameters at these positions of the block, with their g0."""
        if len(chosen) == len(self.params):
            return replace(self, saved=None)

        lists = {name: getattr(self, name) for name in ("params", "indices", "names", "g0")}
        parts: Any = {name: [x[i] for i in chosen] if x else x for name, x in lists.items()}
        return replace(self, **parts, saved=None)


@dataclass
class DecoupledTerm:
    """`scale * tensors`, to be subtracted with the group's learning rate."""

    block: Block
    tensors: list[Tensor]
    scale: Scalar

    def factor(self) -> Scalar:
        """Return the factor of `tensors` in the update: -lr * scale, +lr * scale to maximize."""
        signed_lr = -self.block.sign * on_device(self.block.group["lr"], self.block.device)
        return signed_lr * on_device(self.scale, self.block.device)


def subsets(blocks: Sequence[Block], selected: Callable[[Tensor, int], bool]) -> list[Block]:
    """Return blocks of the parameters for which `selected(parameter, index)` is True."""
    parts = []
    for block in blocks:
        pairs = zip(block.params, block.indices, strict=True)
        chosen = [i for i, pair in enumerate(pairs) if selected(*pair)]
        if chosen:
            parts.append(block.part(chosen))
    return parts


def sign_of(group: dict[str, Any]) -> float:
    """Return +1 for a parameter group that is minimized, -1 for one that is maximized."""
    return -1.0 if group.get("maximize") else 1.0


def is_sharded(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor. Does not import torch.distributed.tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def find_sharded_modules(model: nn.Module | None) -> list[Any]:
    """Return the modules to which `fully_shard` (FSDP2) was applied."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if model is None or fsdp is None:
        return []
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def local_shards(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the local shards; a plain tensor is its own shard."""
    return [t.to_local() if is_sharded(t) else t for t in tensors]  # type: ignore[attr-defined]


def build_blocks(groups: list[dict[str, Any]], names: dict[Tensor, str]) -> list[Block]:
    """Sort all parameters into blocks; `names` are for groups that have no "param_names"."""
    blocks: dict[Any, Block] = {}
    index = 0
    for position, group in enumerate(groups):
        own_names = group.get("param_names")
        for i, p in enumerate(group["params"]):
            sharded = is_sharded(p)
            placement = (p.device_mesh, p.placements) if sharded else None
            key = (position, p.device, p.dtype, placement)
            if key not in blocks:
                blocks[key] = Block(group, [], [], [], sharded, _shard_groups(placement))
            block = blocks[key]
            block.params.append(p)
            block.indices.append(index)
            name = own_names[i] if own_names else names.get(p)
            if name is None:
                block.names = None
            elif block.names is not None:
                block.names.append(name)
            index += 1
    return list(blocks.values())


def _shard_groups(placement: Any) -> tuple[Any, tuple[int, ...]] | None:
    if placement is None:
        return None
    mesh, placements = placement
    # Not `is_shard`, which is False for the strided shards of FSDP2 with tensor parallelism.
    dimensions = tuple(i for i, kind in enumerate(placements) if not kind.is_replicate())
    return (mesh, dimensions) if dimensions else None


def collect_gradients(blocks: Sequence[Block]) -> list[Block]:
    """Return blocks of the parameters that have gradients, with these as g0."""
    align_gradients(blocks)
    found = subsets(blocks, lambda p, _: p.grad is not None)
    for block in found:
        block.g0 = [p.grad for p in block.params if p.grad is not None]
        if {g.layout for g in block.g0} != {torch.strided}:
            raise TypeError(
                "sharpness-aware steps need dense gradients and a parameter has a sparse one: "
                "use sparse=False in nn.Embedding"
            )
    return found


def align_gradients(all_blocks: Sequence[Block]) -> None:
    """Redistribute DTensor gradients to the placements of their parameters.

    Tensor parallelism leaves the gradient of a replicated parameter as partial sums, which
    element-wise work on local shards would not add up.
    """
    for p in (p for block in all_blocks if block.sharded for p in block.params):
        g: Any = p.grad
        if g is not None and g.placements != p.placements:  # type: ignore[attr-defined]
            p.grad = g.redistribute(placements=p.placements)  # type: ignore[attr-defined]


def sum_over_ranks(tensor: Tensor, process_group: Any) -> None:
    """Sum a tensor over ranks in place. All communication of a step goes through this function."""
    import torch.distributed as dist

    dist.all_reduce(tensor, group=process_group)


def _sum_over_shards(tensor: Tensor, shard_groups: tuple[Any, tuple[int, ...]] | None) -> None:
    """Sum a tensor in place over the ranks that hold the shards of a block."""
    if shard_groups is not None:
        mesh, dimensions = shard_groups
        for dimension in dimensions:
            sum_over_ranks(tensor, mesh.get_group(dimension))


def squared_norm(blocks: Sequence[Block], lists: Sequence[list[Tensor]]) -> Tensor:
    """Return the sum of squares over all tensors, shards and ranks as a 0-d tensor.

    Accumulates in at least float32. A replicated parameter counts once, a sharded one is summed over
    the ranks that hold its shards.
    """
    totals: dict[Any, Tensor] = {}
    for block, tensors in zip(blocks, lists, strict=True):
        if not tensors:
            continue
        norms = torch._foreach_norm(tensors, 2, dtype=accumulation_dtype(tensors[0]))
        square = torch.stack(norms).square().sum()
        key = (block.shard_groups, square.device)
        totals[key] = totals[key] + square if key in totals else square
    for (shard_groups, _), total in totals.items():
        _sum_over_shards(total, shard_groups)
    if not totals:
        return torch.zeros(())
    result, *others = totals.values()
    for other in others:
        result = result + other.to(result.device)
    return result


def squared_norm_of_g0(blocks: Sequence[Block]) -> Tensor:
    """Return norm(g0)^2."""
    return squared_norm(blocks, [block.shards(block.g0) for block in blocks])
