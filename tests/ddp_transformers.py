"""Run by test_transformers as a program of its own: two processes train as one would."""

import os
import socket
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.multiprocessing
from transformers_helpers import bert, train


def work(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    model = bert()
    trainer = train(
        model,
        Path(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.3,
        ddp_backend="gloo",
    )
    assert trainer.accelerator.num_processes == 2
    for p in model.parameters():
        both = trainer.accelerator.gather(p.detach()[None])
        assert torch.equal(both[0], both[1]), "replicas differ"
    if rank == 0:
        torch.save((trainer.state.global_step, model.state_dict()), f"{folder}/two.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(
        work, args=(port, sys.argv[1]), nprocs=2, start_method="fork"
    )
