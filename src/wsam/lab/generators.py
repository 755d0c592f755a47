"""The generators that dropout draws from, as a checkpoint keeps them: one entry a process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Generators = dict[str, Tensor]
"""The states of one process's generators: ``cpu`` and, where it trains on one, ``cuda``."""


def states(device: torch.device) -> Generators:
    """Return the states of this process's generators."""
    found = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def put_back(checkpoint: Mapping[str, Any], rank: int, device: torch.device) -> None:
    """Set this process's generators as they were; one that was not there then stays as it is.

    Args:
        checkpoint: Holds ``generators``, or in older ones those of the first process alone.
        rank: Which process this is.
        device: Where it trains.
    """
    older = {"cpu": checkpoint.get("random"), "cuda": checkpoint.get("cuda_random")}
    everyone: list[Mapping[str, Tensor | None]] = checkpoint.get("generators", [older])
    own = everyone[rank] if rank < len(everyone) else {}
    if (state := own.get("cpu")) is not None:
        torch.set_rng_state(state)
    if device.type == "cuda" and (state := own.get("cuda")) is not None:
        torch.cuda.set_rng_state(state, device)
