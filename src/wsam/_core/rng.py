"""Random generators: both passes draw the same numbers, so that g1 - g0 does not measure noise."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class RngState:
    """Reads and sets the default generators of the CPU and of the parameters' devices."""

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        accelerators = {d for d in devices if d.type != "cpu" and hasattr(torch, d.type)}
        self._devices = sorted(accelerators, key=str)

    def read(self) -> tuple[Any, ...]:
        """Return the current states."""
        return (torch.get_rng_state(), *map(_read, self._devices))

    def write(self, states: tuple[Any, ...]) -> None:
        """Set the generators to states that `read` returned."""
        torch.set_rng_state(states[0])
        for device, state in zip(self._devices, states[1:], strict=True):
            _write(device, state)

    def is_at(self, states: tuple[Any, ...]) -> bool:
        """Whether the generators are in these states."""
        return all(map(_equal, self.read(), states))


def _read(device: torch.device) -> Any:
    if device.type == "cuda":
        # Seed and offset: torch.cuda.get_rng_state would build a tensor of them.
        generator = _cuda_generator(device)
        return generator.initial_seed(), generator.get_offset()
    return getattr(torch, device.type).get_rng_state(*_device_argument(device))


def _write(device: torch.device, state: Any) -> None:
    if device.type == "cuda":
        generator, (seed, offset) = _cuda_generator(device), state
        if generator.initial_seed() != seed:
            generator.manual_seed(seed)
        generator.set_offset(offset)
    else:
        getattr(torch, device.type).set_rng_state(state, *_device_argument(device))


def _cuda_generator(device: torch.device) -> torch.Generator:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def _device_argument(device: torch.device) -> tuple[torch.device, ...]:
    """Return the argument that selects a device. torch.mps has one device, and torch 2.6 takes none."""
    return () if device.type == "mps" else (device,)


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)
