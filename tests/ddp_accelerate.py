"""Run by test_accelerate as a program of its own: two processes train as one would."""

import os
import socket
import sys

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.multiprocessing
from framework_helpers import net, wsam_over_sgd
from test_accelerate import Run


def work(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    run = Run(
        lambda params: wsam_over_sgd(params, max_norm=0.3),
        every=2,
        size=2,
        model=net(torch.float64),
    )
    run.scheduler.step = lambda: None  # it would step once for each process
    run.epochs()
    assert run.accelerator.num_processes == 2
    for p in run.body.parameters():
        both = run.accelerator.gather(p.detach()[None])
        assert torch.equal(both[0], both[1]), "replicas differ"
    if rank == 0:
        torch.save(run.body.state_dict(), f"{folder}/two.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(
        work, args=(port, sys.argv[1]), nprocs=2, start_method="fork"
    )
