"""Train with SAM over AdamW on several processes, each with a shard of the model (FSDP2), and save it.

    torchrun --nproc_per_node 2 examples/fsdp2.py [FOLDER]

Each process uses one GPU if there are GPUs, otherwise the CPU.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import wsam


def main(folder: str | None) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")

    torch.manual_seed(0)  # the same weights on all ranks
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    base = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = wsam.SAM(base, rho=0.05, model=model)  # after fully_shard
    train_step = wsam.train_step(optimizer, lambda x, y: cross_entropy(model(x), y))

    torch.manual_seed(dist.get_rank())  # different samples on each rank
    for step in range(100):
        inputs = torch.randn(64, 20, device=device)
        labels = (inputs[:, 0] * inputs[:, 1] > 0).long()
        loss, _ = train_step(inputs, labels)
        if step % 25 == 24 and dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    if folder is not None:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:] or [None])
