"""Train with WSAM on several processes with DistributedDataParallel.

    torchrun --nproc_per_node 2 examples/torchrun_ddp.py [local]

Each process uses one GPU if there are GPUs, otherwise the CPU.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import wsam


def main(local: bool) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")

    torch.manual_seed(0)  # the same data and weights on all ranks
    x = torch.randn(2048, 20)
    y = (x[:, 0] * x[:, 1] > 0).long()
    sampler = DistributedSampler(TensorDataset(x, y))
    loader = DataLoader(sampler.dataset, batch_size=64, sampler=sampler)

    network = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    model = DistributedDataParallel(network, gradient_as_bucket_view=True)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = wsam.WSAM(base, rho=0.05, gamma=0.8, model=model, local=local)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    train_step = wsam.train_step(optimizer, lambda x, y: cross_entropy(model(x), y))

    for epoch in range(8):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss, _ = train_step(*(tensor.to(device) for tensor in batch))
        scheduler.step()
        dist.all_reduce(loss, dist.ReduceOp.SUM)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item() / dist.get_world_size():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(local="local" in sys.argv[1:])
