"""Several processes on one run: what `torchrun -m wsam train` starts.

Every process holds all data and draws the same order; of each batch it takes its own part, so the
batch size is that of the whole team. The first process alone tests, saves and writes the record.
BatchNorm looks at each process's part of a batch, as DistributedDataParallel has it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """The processes of a run, seen from one of them."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the first process."""
        return self.rank == 0

    def part(self, batch: Tensor) -> Tensor:
        """Return this process's part of a batch."""
        return batch if self.size == 1 else batch.chunk(self.size)[self.rank]

    def check(self, batch_size: int) -> None:
        """Raise unless every process gets as many images as the others."""
        if batch_size % self.size:
            raise ValueError(
                f"a batch of {batch_size} images cannot be shared evenly by {self.size} processes"
            )

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model with its gradients averaged over the team."""
        if self.size == 1:
            return model
        return nn.parallel.DistributedDataParallel(model)

    def mean(self, values: tuple[float, ...], device: torch.device) -> tuple[float, ...]:
        """Return the averages of figures over the team."""
        if self.size == 1:
            return values
        import torch.distributed as dist

        sums = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(sums)
        return tuple((sums / self.size).tolist())

    def gathered(self, value: T) -> list[T]:
        """Return every process's value, in the order of their ranks."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        found: list[T | None] = [None] * self.size
        dist.all_gather_object(found, value)
        return cast(list[T], found)

    def from_first(self, find: Callable[[], T]) -> T:
        """Return what the first process finds; the others wait for it, or fail as it does."""
        if self.size == 1:
            return find()
        import torch.distributed as dist

        box: list[Any] = [None, None]
        if self.leads:
            try:
                box[0] = find()
            except Exception as error:
                box[1] = error
        dist.broadcast_object_list(box, src=0)
        if box[1] is not None:
            raise box[1]
        found: T = box[0]
        return found


@contextmanager
def joined(wanted: str) -> Iterator[tuple[Team, str]]:
    """Join the processes that torchrun has started, if any; yield the team and this one's device.

    Args:
        wanted: The device's name as the user gave it.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Team(), wanted
        return
    import torch.distributed as dist

    cuda = torch.cuda.is_available() if wanted == "auto" else wanted.startswith("cuda")
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield Team(dist.get_rank(), size), device
    finally:
        dist.destroy_process_group()
