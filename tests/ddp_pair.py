"""Two processes of one program, as torchrun would start them."""

import os
import socket
import sys
from collections.abc import Callable

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.multiprocessing

Work = Callable[[int, str], None]


def _join(rank: int, port: int, folder: str, work: Work) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    work(rank, folder)
    torch.distributed.destroy_process_group()


def start(work: Work) -> None:
    """Run `work(rank, folder)` in both; the folder is the program's argument."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(
        _join, args=(port, sys.argv[1], work), nprocs=2, start_method="fork"
    )
