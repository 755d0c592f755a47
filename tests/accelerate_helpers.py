"""Helpers of the Accelerate tests: a training program."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from framework_helpers import net, samples, wsam_over_sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import wsam
from wsam.integrations.accelerate import TwoPasses

Make = Callable[..., wsam.SharpnessAware]


def shard_on_cpu(accelerator: Accelerator, parallelism: Any = None, **options: Any) -> None:
    """Let Accelerate shard models with FSDP2. On CPUs it ignores the plugin."""
    plugin = FullyShardedDataParallelPlugin(**{"fsdp_version": 2, **options})
    accelerator.state.fsdp_plugin = plugin
    for state in (accelerator.state, PartialState()):
        state.distributed_type = DistributedType.FSDP
    if parallelism is not None:
        accelerator.state.parallelism_config = parallelism
        accelerator.state.device_mesh = parallelism.get_device_mesh("cpu")
    assert accelerator.is_fsdp2


class Run:
    """A training program: `prepare`, then the loop of docs/frameworks/accelerate.md."""

    def __init__(
        self,
        make: Make = wsam_over_sgd,
        *,
        accumulate: int = 1,
        scaler: Any = None,
        count: int = 24,
        model: nn.Module | None = None,
        size: int = 4,
        setup: Callable[[Accelerator], Any] = lambda accelerator: None,
        **options: Any,
    ) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **options)
        setup(self.accelerator)
        if scaler is not None:  # Accelerate creates a scaler only for float16 on CUDA
            self.accelerator.scaler = scaler
        self.body = net() if model is None else model
        optimizer = make(self.body.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        data = samples(count, next(self.body.parameters()).dtype)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            self.body, optimizer, DataLoader(data, size), scheduler
        )
        self.passes = TwoPasses(self.accelerator, self.model, self.optimizer)
        self.losses: list[float] = []
        self.calls = 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        losses = cross_entropy(self.model(x), y, reduction="none")
        return self.passes.optimizer.select(losses)

    def epochs(self, count: int = 1) -> "Run":
        for _ in range(count):
            for x, y in self.loader:
                with self.accelerator.accumulate(self.model):
                    self.losses.append(float(self.passes.backward(self.loss, x, y)))
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
        return self
