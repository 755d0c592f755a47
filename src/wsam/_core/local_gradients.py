"""`local=True`: under DistributedDataParallel, each rank perturbs by its own gradient (m-sharpness).

The first pass does not reduce gradients over the ranks. What all ranks must agree on is averaged here:
squared norms, and g0 where the update needs it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wsam._core.param_blocks import Block, subsets, sum_over_ranks


def check_model(model: Any) -> None:
    """Raise unless `model` is a DistributedDataParallel whose first reduction can be omitted."""
    if not hasattr(model, "require_backward_grad_sync"):
        raise ValueError("local=True needs model=, wrapped in DistributedDataParallel")
    # Under no_sync, torch still tracks used parameters for a reduction that does not happen.
    for option in ("find_unused_parameters", "static_graph"):
        if getattr(model, option):
            raise ValueError(f"local=True needs a first pass without reduction: set {option}=False")


def check_pass(model: Any) -> None:
    """Raise if the last pass averaged its gradients, or a rank may run out of batches."""
    if getattr(getattr(model, "_join_config", None), "enable", False):
        raise RuntimeError("local=True inside join(): give every rank as many batches")
    if model.require_forward_param_sync:  # set by a forward pass whose gradients will be reduced
        raise RuntimeError(
            "local=True perturbs by each rank's own gradient, but those of this pass were averaged: "
            "run its forward and backward pass under `with model.no_sync():`"
        )


def average(tensor: Tensor, model: Any) -> None:
    """Average a tensor over the ranks of a DistributedDataParallel, in place."""
    tensor /= model.process_group.size()  # before the sum, as torch does
    sum_over_ranks(tensor, model.process_group)


def average_g0(all_blocks: Sequence[Block], blocks: Sequence[Block], model: Any) -> list[Block]:
    """Return blocks of all trained parameters with g0 averaged over ranks, by a reduction per dtype.

    A gradient that this rank lacks counts as zero, since other ranks may have it.
    """
    own = {i: g for block in blocks for i, g in zip(block.indices, block.g0, strict=True)}
    trained = subsets(all_blocks, lambda p, _: p.requires_grad)
    lists: dict[Any, list[Tensor]] = {}
    for block in trained:
        pairs = zip(block.indices, block.params, strict=True)
        block.g0 = [own[i] if i in own else torch.zeros_like(p) for i, p in pairs]
        for g in block.g0:
            lists.setdefault((g.dtype, g.device), []).append(g)
    for tensors in lists.values():
        flat = torch.cat([t.reshape(-1) for t in tensors])
        average(flat, model)
        pieces = torch.split(flat, [t.numel() for t in tensors])
        shaped = [piece.view_as(t) for piece, t in zip(pieces, tensors, strict=True)]
        torch._foreach_copy_(tensors, shaped)
    return trained
