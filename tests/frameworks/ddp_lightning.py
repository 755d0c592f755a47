"""Program of test_lightning: train in two processes, check that replicas agree, save the weights."""

import os
import sys
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import ddp_pair
import torch
from framework_helpers import samples
from lightning.pytorch.strategies import DDPStrategy
from lightning_helpers import Net, trainer
from torch.utils.data import DataLoader, DistributedSampler


class Replica(Net):
    def train_dataloader(self) -> DataLoader[Any]:
        data = samples(dtype=torch.float64)
        sampler = DistributedSampler(data, 2, self.global_rank, shuffle=False)
        return DataLoader(data, 2, sampler=sampler)

    def on_train_end(self) -> None:
        for p in self.parameters():
            both = self.all_gather(p.detach())
            assert torch.equal(both[0], both[1]), "replicas differ"
        if self.global_rank == 0:
            path = f"{sys.argv[1]}/{self.trainer.accumulate_grad_batches}.pt"
            torch.save((self.global_step, self.state_dict()), path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for accumulate, clip in [(1, None), (2, 0.3)]:
        module, store = Replica(dtype=torch.float64), ddp_pair.open_store()
        runner = trainer(
            devices=2,
            strategy=DDPStrategy(process_group_backend="gloo", start_method="fork"),
            accumulate_grad_batches=accumulate,
            gradient_clip_val=clip,
            use_distributed_sampler=False,
            default_root_dir=sys.argv[1],
        )
        runner.fit(module)
        del store  # must exist until both processes have finished
