"""The default random number generators of this process: those of torch, Python and numpy.

Dropout draws from torch's, and the user's own data may draw from all of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

RngStates = dict[str, Any]
"""States of one process: ``cpu`` and, if it trains on one, ``cuda``; ``python`` and ``numpy``."""


def seed_generators(seed: int) -> None:
    """Seed all default generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the default generators of the CPU, and restore their states at the end."""
    before = rng_states(torch.device("cpu"))
    seed_generators(seed)
    try:
        yield
    finally:
        set_rng_states(before, torch.device("cpu"))


def rng_states(device: torch.device) -> RngStates:
    """Return the states of the default generators as tensors and primitives."""
    numpy = np.random.get_state(legacy=False)
    states: RngStates = {
        "cpu": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rng_states(states: RngStates, device: torch.device) -> None:
    """Restore the default generators; those without a state are unchanged."""
    if (state := states.get("cpu")) is not None:
        torch.set_rng_state(state)
    if device.type == "cuda" and (state := states.get("cuda")) is not None:
        torch.cuda.set_rng_state(state, device)
    if (state := states.get("python")) is not None:
        random.setstate(state)
    if (state := states.get("numpy")) is not None:
        np.random.set_state(state)


def rank_states(checkpoint: Mapping[str, Any], rank: int) -> RngStates:
    """Return the states of one process in a checkpoint; empty if there are none.

    Args:
        checkpoint: Has ``generators``, one entry per rank. Checkpoints of version 0.1 have ``random``
            and ``cuda_random`` of rank 0 instead.
        rank: The rank of the process.
    """
    older = {"cpu": checkpoint.get("random"), "cuda": checkpoint.get("cuda_random")}
    by_rank: list[RngStates] = checkpoint.get("generators", [older])
    return by_rank[rank] if rank < len(by_rank) else {}
