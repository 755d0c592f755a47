"""`local=True`: under DistributedDataParallel, each rank perturbs by its own gradient (m-sharpness).

The first pass does not reduce gradients over the ranks. What all ranks must agree on is averaged here:
squared norms, and g0 where the update needs it.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from wsam._core.param_blocks import Block, sum_over_ranks, trained_blocks


def check_model(model: Any) -> None:
    """Raise unless `model` is a DistributedDataParallel whose first reduction can be omitted."""
    if not hasattr(model, "require_backward_grad_sync"):
        raise ValueError("local=True needs model=, wrapped in DistributedDataParallel")
    # Under no_sync, torch still tracks used parameters for a reduction that does not happen.
    for option in ("find_unused_parameters", "static_graph"):
        if getattr(model, option):
            raise ValueError(
                f"local=True omits the first reduction, which DistributedDataParallel with "
                f"{option}=True does not allow: set {option}=False, or local=False"
            )


@contextlib.contextmanager
def without_reduction(model: Any) -> Iterator[None]:
    """Keep the gradients of a pass local; raise if the pass has switched the reduction on again."""
    with model.no_sync():
        yield
        if model.require_backward_grad_sync:
            raise RuntimeError(
                "local=True: the closure sets require_backward_grad_sync, so that the first gradients "
                "were averaged over ranks: use `with model.no_sync():` for all micro-batches but the "
                "last, or local=False"
            )


def reject_join(model: Any) -> None:
    """Raise inside torch's `join()`, where a rank may run out of batches."""
    if getattr(getattr(model, "_join_config", None), "enable", False):
        raise RuntimeError(
            "local=True inside join(): a rank without batches would miss the average of g0; use "
            "local=False, or give every rank as many batches"
        )


def average(tensor: Tensor, model: Any) -> None:
    """Average a tensor over the ranks of a DistributedDataParallel, in place."""
    tensor /= model.process_group.size()  # before the sum, as torch does
    sum_over_ranks(tensor, model.process_group)


def average_g0(all_blocks: Sequence[Block], blocks: Sequence[Block], model: Any) -> list[Block]:
    """Return blocks of all trained parameters with g0 averaged over ranks, by a reduction per dtype.

    A gradient that this rank lacks counts as zero, since other ranks may have it.
    """
    own = {i: g for block in blocks for i, g in zip(block.indices, block.g0 or [], strict=True)}
    trained = trained_blocks(all_blocks)
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
