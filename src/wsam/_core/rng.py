"""Random generators: both passes draw the same numbers, so that g1 - g0 does not measure noise."""

from collections.abc import Iterable
from typing import Any

import torch


class RngState:
    """Reads and sets the default generators of the CPU and of the parameters' CUDA devices."""

    def __init__(self) -> None:
        self._devices: list[torch.device] = []

    def follow(self, devices: Iterable[torch.device]) -> None:
        """Use the generators of these devices. Parameters may have moved since the last step."""
        self._devices = sorted({d for d in devices if d.type == "cuda"}, key=str)

    def _generators(self) -> list[torch.Generator]:
        generators, current = torch.cuda.default_generators, torch.cuda.current_device
        return [generators[current() if d.index is None else d.index] for d in self._devices]

    def read(self) -> tuple[Any, ...]:
        """Return the current states."""
        # Seed and offset: torch.cuda.get_rng_state would build a tensor of them.
        states = [(g.initial_seed(), g.get_offset()) for g in self._generators()]
        return (torch.get_rng_state(), *states)

    def write(self, states: tuple[Any, ...]) -> None:
        """Set the generators to states that `read` returned."""
        torch.set_rng_state(states[0])
        for generator, (seed, offset) in zip(self._generators(), states[1:], strict=True):
            if generator.initial_seed() != seed:
                generator.manual_seed(seed)
            generator.set_offset(offset)

    def is_at(self, states: tuple[Any, ...]) -> bool:
        """Whether the generators are in these states."""
        now = self.read()
        return torch.equal(now[0], states[0]) and now[1:] == states[1:]
