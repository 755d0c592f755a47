"""Training one run in several processes, as started by ``torchrun -m wsam train``.

Every process loads all data and draws the same order; of each batch it trains on its own shard, so
the batch size is that of all processes together. Rank 0 alone evaluates, saves and writes the
record. BatchNorm statistics are those of each process's shard, as in DistributedDataParallel.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from wsam._core.pytree import map_tensors

T = TypeVar("T")


@dataclass(frozen=True)
class DistributedContext:
    """Rank and world size of this process, and the collectives that training needs."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def shard(self, batch: Any) -> Any:
        """Return this process's shard of a batch: of a tensor, or of each tensor in a container."""
        if self.world_size == 1:
            return batch
        return map_tensors(lambda tensor: tensor.chunk(self.world_size)[self.rank], batch)

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return the model in DistributedDataParallel if there are several processes."""
        return model if self.world_size == 1 else nn.parallel.DistributedDataParallel(model)

    def mean(self, values: tuple[float, ...], device: torch.device) -> tuple[float, ...]:
        """Return the means of values over all processes."""
        if self.world_size == 1:
            return values
        sums = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(sums)
        return tuple((sums / self.world_size).tolist())

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all processes, ordered by rank."""
        if self.world_size == 1:
            return [value]
        found: list[T | None] = [None] * self.world_size
        dist.all_gather_object(found, value)
        return cast(list[T], found)

    def run_on_main(self, function: Callable[[], T]) -> T:
        """Call a function on rank 0; all ranks return its value or raise its exception."""
        if self.world_size == 1:
            return function()
        result: list[Any] = [None, None]  # value, exception
        if self.is_main:
            try:
                result[0] = function()
            except Exception as error:
                result[1] = error
        dist.broadcast_object_list(result, src=0)
        if result[1] is not None:
            raise result[1]
        return cast(T, result[0])


@contextmanager
def init_distributed(device: str) -> Iterator[tuple[DistributedContext, str]]:
    """Initialize the process group if torchrun started several processes.

    At the end the group is destroyed. Its worker threads end with its last reference, so a model of
    `DistributedContext.wrap_model` must not be used after that.

    Args:
        device: The device's name as given by the user.

    Yields:
        The context and the name of this process's device.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield DistributedContext(), device
        return
    # Gloo's worker threads release tensors a little after a collective has returned. One that does
    # so while the interpreter exits aborts the process, so the threads must have ended before: the
    # group must have no reference left. The functions of this module keep one in their default
    # arguments if it is imported (by DistributedDataParallel) while there is a group.
    import_module("torch.distributed.nn.functional")

    cuda = torch.cuda.is_available() if device == "auto" else device.startswith("cuda")
    local = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield DistributedContext(dist.get_rank(), world_size), local
    finally:
        dist.destroy_process_group()
        gc.collect()  # models in reference cycles, which refer to the group
