"""Whether there is a Triton that makes kernels here, and how they are launched."""

import functools
import importlib.util

import torch

from wsam.bases import ADAM, COLUMNS, DECAY, DECOUPLED, KEPT
from wsam.checks import warn
from wsam.plan import TILE, Plan, places

WARPS = 8
TILES = {"BLOCK": TILE, "num_warps": WARPS}


@functools.cache
def available() -> bool:
    """Whether Triton is there to make the kernels."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def work_on(device: torch.device) -> bool:
    """Whether Triton can make a kernel for the device: it needs a compiler and a GPU it knows."""
    if not available():
        return False
    rows, partial = torch.ones(7, 4, device=device), torch.zeros(1, device=device)
    numbers = torch.full((COLUMNS,), -0.5, dtype=torch.float64, device=device)  # whatever they are
    plan = Plan([rows[0]], device)
    table = torch.tensor(places(rows.unbind()), device=device)
    shape = (plan.where, plan.offset, plan.sizes)
    try:
        from wsam import _triton

        _triton.squares[(1,)](table, *shape, partial, 1, **TILES)
        richest = KEPT | DECAY | ADAM | DECOUPLED
        _triton.finish[(1,)](table, *shape, numbers, 1, BRANCHES=richest, **TILES)
    except Exception as error:  # whatever it is, training goes on without
        warn(f"Triton is installed and cannot make kernels, so steps go without: {error}")
        return False
    return float(partial) == 4.0
