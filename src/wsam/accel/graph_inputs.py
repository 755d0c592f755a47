"""Inputs of a recorded step: numbers, masks and generator states on the device.

A CUDA graph cannot read them from the host. Each class here keeps one of them on the device, updates
it before a replay, and installs it in the optimizer while the step is recorded.
"""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
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


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes within a `with` block, and restore them after it."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


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
        context: Any = contextlib.nullcontext()
        if sharp is not None:  # schedules would overwrite the tensors
            context = replaced(sharp._values, schedules=[{} for _ in groups])
        values = iter(self._values.unbind())
        try:
            for group, keys in zip(groups, self._keys, strict=True):
                group.update({key: next(values) for key in keys})
            with context:
                yield
        finally:
            for group, own in zip(self._opt.param_groups, numbers, strict=True):
                group.update(own)


@dataclass(frozen=True, eq=False)
class DeviceMask(Geometry):
    """`Masked` with its selection in a device tensor.

    Args:
        values: 1 for each tensor that is selected, 0 for the others.
        beta: the probability of a tensor.
    """

    values: Tensor
    beta: float

    @property
    def boost(self) -> float:
        """Return 1/beta."""
        return 1.0 / self.beta

    def sqrt_metric(self, block: Block, g0: list[Tensor]) -> list[Tensor]:
        """Return 0-d tensors of 0 or 1."""
        return [self.values[index] for index in block.indices]


class GraphMask:
    """The selection of tensors of each step, where the graph reads it."""

    def __init__(self, sharp: "SharpnessAware | None", device: torch.device) -> None:
        self._sharp = sharp
        self._geometry: DeviceMask | None = None
        if sharp is not None and isinstance(sharp.geometry, Masked):
            tensors = sum(len(g["params"]) for g in sharp.param_groups)
            self._geometry = DeviceMask(torch.ones(tensors, device=device), sharp.geometry.beta)

    def write(self) -> None:
        """Copy this step's mask to the device."""
        if self._geometry is not None and self._sharp is not None:
            mask = torch.tensor(self._sharp._mask(), dtype=torch.float32)
            self._geometry.values.copy_(mask, non_blocking=True)

    def installed(self) -> AbstractContextManager[None]:
        """Make the optimizer read the mask from the device during a step."""
        if self._geometry is None:
            return contextlib.nullcontext()
        return replaced(self._sharp, geometry=self._geometry)


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
        self._next_is_second = True
        try:
            with replaced(sharp, _rng=self):
                yield
        finally:
            self._generator.graphsafe_set_state(self._first)
