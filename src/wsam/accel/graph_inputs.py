"""Inputs of a recorded step: numbers, masks and generator states on the device.

A CUDA graph cannot read them from the host. Each class here keeps one of them on the device, updates
it before a replay, and installs it in the optimizer while the step is recorded.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wsam._core.param_blocks import Block
from wsam._core.param_groups import PREFIX, STEP
from wsam.accel.base_optimizers import BASE_NUMBERS
from wsam.geometry import Geometry, Masked

if TYPE_CHECKING:
    from wsam.optimizer import SharpnessAware


def sharpness_aware(opt: Any) -> "SharpnessAware | None":
    """Return `opt` if it is a `SharpnessAware`, None if it is a plain optimizer."""
    return opt if hasattr(opt, "_step_state") else None


class GraphScalars:
    """Learning rates and hyperparameters of all groups as views of one small device tensor."""

    def __init__(self, opt: Optimizer, device: torch.device) -> None:
        self._opt = opt
        self._keys = [[k for k, v in g.items() if self._is_input(k, v)] for g in opt.param_groups]
        count = sum(len(keys) for keys in self._keys)
        self._values = torch.zeros(count, device=device)
        self._written: list[float] | None = None

    @staticmethod
    def _is_input(key: str, value: Any) -> bool:
        own = key.startswith(PREFIX) and key != STEP
        return (key == "lr" or own) and not isinstance(value, Tensor)

    def are_numbers(self) -> bool:
        """Whether all learning rates are numbers: kernels do not read a user's tensor."""
        return not any(isinstance(group["lr"], Tensor) for group in self._opt.param_groups)

    def write(self) -> None:
        """Copy the groups' current values to the device, if they have changed."""
        groups = self._opt.param_groups
        if len(groups) != len(self._keys):
            raise RuntimeError("the number of parameter groups has changed: capture again")
        values = [float(g[k]) for g, keys in zip(groups, self._keys, strict=True) for k in keys]
        if values != self._written:
            self._values.copy_(torch.tensor(values), non_blocking=True)
            self._written = values

    def constants(self) -> tuple[Any, ...]:
        """Return the groups' other values, which are constants of a recording.

        Of the numbers that kernels read on the device, only whether they are zero is constant.
        """
        settings = []
        for group, keys in zip(self._opt.param_groups, self._keys, strict=True):
            left_out = {"params", "param_names", STEP, "initial_lr", *keys}
            values = ((k, v) for k, v in group.items() if k not in left_out)
            settings.append(
                tuple((k, bool(v) if k in BASE_NUMBERS else repr(v)) for k, v in values)
            )
        return tuple(settings)

    def base_numbers(self) -> tuple[Any, ...]:
        """Return the base's numbers, which are constants of a recording if the base steps by itself."""
        groups = self._opt.param_groups
        return tuple(repr(group.get(name)) for group in groups for name in BASE_NUMBERS)

    @contextlib.contextmanager
    def in_groups(self) -> Iterator[None]:
        """Replace the groups' numbers by device tensors during a step."""
        groups = self._opt.param_groups
        numbers = [{k: g[k] for k in keys} for g, keys in zip(groups, self._keys, strict=True)]
        sharp = sharpness_aware(self._opt)
        values = sharp._values if sharp is not None else None
        schedules = values.schedules if values is not None else []
        position = 0
        for group, keys in zip(groups, self._keys, strict=True):
            for key in keys:
                group[key] = self._values[position]
                position += 1
        if values is not None:
            values.schedules = [{} for _ in schedules]
        try:
            yield
        finally:
            for group, own in zip(self._opt.param_groups, numbers, strict=True):
                group.update(own)
            if values is not None:
                values.schedules = schedules


class DeviceMask(Geometry):
    """`Masked` with its selection in a device tensor: 1 for a selected tensor, 0 for the others."""

    def __init__(self, values: Tensor, boost: float) -> None:
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_boost", boost)

    @property
    def boost(self) -> float:
        """Return 1/beta."""
        boost: float = self._boost  # type: ignore[attr-defined]
        return boost

    def sqrt_metric(self, block: Block, g0: list[Tensor]) -> list[Tensor]:
        """Return 0-d tensors of 0 or 1."""
        return [self._values[index] for index in block.indices]  # type: ignore[attr-defined]


class GraphMask:
    """The selection of tensors of each step, where the graph reads it."""

    def __init__(self, sharp: "SharpnessAware | None", device: torch.device) -> None:
        self._sharp = sharp
        self._geometry: DeviceMask | None = None
        if sharp is not None and isinstance(sharp.geometry, Masked):
            self._tensors = sum(len(g["params"]) for g in sharp.param_groups)
            self._values = torch.ones(self._tensors, device=device)
            self._geometry = DeviceMask(self._values, sharp.geometry.boost)

    def write(self) -> None:
        """Copy this step's mask to the device."""
        if self._geometry is not None and self._sharp is not None:
            mask = self._sharp._mask()
            self._values.copy_(torch.tensor(mask, dtype=torch.float32), non_blocking=True)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Make the optimizer read the mask from the device during a step."""
        if self._geometry is None or self._sharp is None:
            yield
            return
        own, self._sharp.geometry = self._sharp.geometry, self._geometry
        try:
            yield
        finally:
            self._sharp.geometry = own


class GraphRng:
    """Makes the recorded second pass draw the numbers of the first.

    A replay advances each generator state that is registered with the graph. The second pass draws from
    a copy of the state, which is synchronized with the original before each replay. It replaces
    `RngState` in the optimizer while a step is recorded.
    """

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._next_is_second = True
        self._generator = torch.cuda.default_generators[index]
        self._first = self._generator.graphsafe_get_state()
        self._second = self._generator.clone_state()

    def register(self, graph: torch.cuda.CUDAGraph) -> None:
        """Register the copy. torch registers the original."""
        self.align()
        graph.register_generator_state(self._second)

    def align(self) -> None:
        """Give the copy the seed and offset of the original."""
        self._second.manual_seed(self._first.initial_seed())
        self._second.set_offset(self._first.get_offset())

    def follow(self, devices: Any) -> None:
        """Do nothing: a recorded step has one device."""

    def read(self) -> str:
        """Return a placeholder for the current state."""
        return "first"

    def write(self, state: Any) -> None:
        """Switch to the copy in the first call, which begins the second pass, and back in the next."""
        self._generator.graphsafe_set_state(self._second if self._next_is_second else self._first)
        self._next_is_second = not self._next_is_second

    @contextlib.contextmanager
    def installed(self, sharp: "SharpnessAware | None") -> Iterator[None]:
        """Replace the optimizer's `RngState` while a step is recorded."""
        if sharp is None:
            yield
            return
        own, sharp._rng = sharp._rng, self  # type: ignore[assignment]
        self._next_is_second = True
        try:
            yield
        finally:
            sharp._rng = own
            self._generator.graphsafe_set_state(self._first)
