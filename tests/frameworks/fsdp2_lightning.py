"""Program of test_lightning: two processes that shard the model (FSDP2) save whole weights."""

import os
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import ddp_pair
import torch
from framework_helpers import samples, wsam_over_adamw, wsam_over_sgd
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_helpers import Net, trainer
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler


class Sharded(Net):
    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.body[0], self.body[2], self.body):
            fully_shard(layer, mesh=mesh)

    def train_dataloader(self) -> DataLoader[Any]:
        data = samples(dtype=torch.float64)
        sampler = DistributedSampler(data, 2, self.global_rank, shuffle=False)
        return DataLoader(data, 2, sampler=sampler)


def fit(make: Any, folder: str, checkpoint: str | None = None, **options: Any) -> Any:
    """Train; return the Trainer and the weights."""
    module = Sharded(make, dtype=torch.float64)
    runner = trainer(
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        use_distributed_sampler=False,
        default_root_dir=folder,
        **options,
    )
    runner.fit(module, ckpt_path=checkpoint)
    return runner, {key: shard.full_tensor() for key, shard in module.state_dict().items()}


def resumed(folder: str) -> bool:
    """Whether a run that is loaded from a checkpoint ends with the weights of one that went on."""
    first, _ = fit(wsam_over_adamw, folder, max_epochs=1)
    first.save_checkpoint(f"{folder}/checkpoint")
    second, other = fit(wsam_over_adamw, folder, f"{folder}/checkpoint", max_epochs=2)
    assert second.optimizers[0].param_groups[0]["sam_step"] == 12
    _, whole = fit(wsam_over_adamw, folder, max_epochs=2)
    return same(whole, other)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[key], other[key]) for key in one)


def work(rank: int, folder: str) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    clipped = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}
    found = {
        "sgd": fit(wsam_over_sgd, folder, **clipped)[1],
        "adamw": fit(wsam_over_adamw, folder)[1],
        "resumed": resumed(folder),
    }
    if rank == 0:
        torch.save(found, f"{folder}/two.pt")


if __name__ == "__main__":
    ddp_pair.start(work)
