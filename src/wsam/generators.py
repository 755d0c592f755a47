"""Random masks that must not differ between the passes: else g1 - g0 would measure noise."""

from collections.abc import Iterable
from typing import Any

import torch


class RandomStates:
    """Lets the second pass draw the same random numbers as the first, and advances them once."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = sorted({d for d in devices if d.type == "cuda"}, key=str)

    def _generators(self) -> list[torch.Generator]:
        every, current = torch.cuda.default_generators, torch.cuda.current_device
        return [every[current() if d.index is None else d.index] for d in self._devices]

    def read(self) -> tuple[Any, ...]:
        """Return the states of the CPU's and the devices' default generators."""
        # A device's state is a seed and a count; torch.cuda.get_rng_state makes a tensor of them.
        states = [(g.initial_seed(), g.get_offset()) for g in self._generators()]
        return (torch.get_rng_state(), *states)

    def write(self, states: tuple[Any, ...]) -> None:
        """Set the generators to states that `read` returned."""
        torch.set_rng_state(states[0])
        for generator, (seed, offset) in zip(self._generators(), states[1:], strict=True):
            if generator.initial_seed() != seed:
                generator.manual_seed(seed)
            generator.set_offset(offset)
