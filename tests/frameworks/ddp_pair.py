"""Two processes of one program, as torchrun would start them."""

import os
import sys
from collections.abc import Callable

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.multiprocessing
from torch.distributed import TCPStore

Work = Callable[[int, str], None]


def open_store() -> TCPStore:
    """Open the rendezvous store on a free port, as torchrun does. Keep a reference to it.

    A free port that is looked up first and opened by rank 0 later may be taken in between.
    """
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_ATTEMPT="0",
    )
    return store


def _join(rank: int, folder: str, work: Work) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    work(rank, folder)
    torch.distributed.destroy_process_group()


def start(work: Work) -> None:
    """Run `work(rank, folder)` in both processes; the folder is the program's argument."""
    store = open_store()
    torch.multiprocessing.start_processes(
        _join, args=(sys.argv[1], work), nprocs=2, start_method="fork"
    )
    del store  # must exist until both processes have finished
