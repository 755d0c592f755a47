"""What stands in for the host while a step is recorded into a graph.

A recorded step cannot read numbers, masks or generator states from the host. Each class here keeps
one of them on the device, writes it there before a replay, and lends it to the optimizer while the
step is recorded.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wsam import state as saving
from wsam.bases import OF_BASE
from wsam.block import Block
from wsam.geometry import Geometry, Masked
from wsam.optimizer import SharpnessAware


class Scalars:
    """Learning rates, radii and weights of all groups as views of one small device tensor."""

    def __init__(self, opt: Optimizer, device: torch.device) -> None:
        self._opt = opt
        self._keys = [[k for k, v in g.items() if self._moves(k, v)] for g in opt.param_groups]
        count = sum(len(keys) for keys in self._keys)
        self._values = torch.zeros(count, device=device)
        self._written: list[float] | None = None

    @staticmethod
    def _moves(key: str, value: Any) -> bool:
        ours = key.startswith(saving.PREFIX) and key != saving.STEP
        return (key == "lr" or ours) and not isinstance(value, Tensor)

    def are_plain(self) -> bool:
        """Whether all learning rates are numbers; a tensor of the user's is read on the device."""
        return not any(isinstance(group["lr"], Tensor) for group in self._opt.param_groups)

    def write(self) -> None:
        """Copy the groups' present values to the device, if they have changed."""
        groups = self._opt.param_groups
        if len(groups) != len(self._keys):
            raise RuntimeError("there are other parameter groups than at capture: capture again")
        values = [float(g[k]) for g, keys in zip(groups, self._keys, strict=True) for k in keys]
        if values != self._written:
            self._values.copy_(torch.tensor(values), non_blocking=True)
            self._written = values

    def fixed(self) -> tuple[Any, ...]:
        """Return the groups' other values: a recording is made for them.

        Of numbers that our kernels read on the device only whether they are zero.
        """
        kept = []
        for group, keys in zip(self._opt.param_groups, self._keys, strict=True):
            left_out = {"params", "param_names", saving.STEP, "initial_lr", *keys}
            values = ((k, v) for k, v in group.items() if k not in left_out)
            kept.append(tuple((k, bool(v) if k in OF_BASE else repr(v)) for k, v in values))
        return tuple(kept)

    def of_base(self) -> tuple[Any, ...]:
        """Return the base's numbers, which a recording contains if the base itself has stepped."""
        return tuple(repr(group.get(name)) for group in self._opt.param_groups for name in OF_BASE)

    @contextlib.contextmanager
    def in_groups(self) -> Iterator[None]:
        """Put the device tensors into the groups for the time of a step."""
        groups = self._opt.param_groups
        plain = [{k: g[k] for k in keys} for g, keys in zip(groups, self._keys, strict=True)]
        schedules = getattr(self._opt, "_schedules", None)
        position = 0
        for group, keys in zip(groups, self._keys, strict=True):
            for key in keys:
                group[key] = self._values[position]
                position += 1
        if schedules is not None:
            self._opt._schedules = [{} for _ in schedules]  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for group, values in zip(self._opt.param_groups, plain, strict=True):
                group.update(values)
            if schedules is not None:
                self._opt._schedules = schedules  # type: ignore[attr-defined]


class DeviceMask(Geometry):
    """`Masked` with its choice in a device tensor: 1 for a chosen tensor, 0 for the others."""

    def __init__(self, values: Tensor, boost: float) -> None:
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_boost", boost)

    @property
    def boost(self) -> float:
        """Return 1/beta."""
        boost: float = self._boost  # type: ignore[attr-defined]
        return boost

    def root(self, block: Block, first: list[Tensor]) -> list[Tensor]:
        """Return 0-d tensors of 0 or 1."""
        return [self._values[number] for number in block.numbers]  # type: ignore[attr-defined]


class Masks:
    """Writes the choice of tensors of each step where the graph reads it."""

    def __init__(self, sharp: SharpnessAware | None, device: torch.device) -> None:
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
        """Let the optimizer read the mask from the device for the time of a step."""
        if self._geometry is None or self._sharp is None:
            yield
            return
        own, self._sharp.geometry = self._sharp.geometry, self._geometry
        try:
            yield
        finally:
            self._sharp.geometry = own


class Rewind:
    """Lets a recorded second pass draw what the first drew.

    A graph advances each generator state that is registered with it by what was drawn from it. The
    second pass draws from a copy of the state, aligned with the original before each replay.
    """

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._begins = True
        self._generator = torch.cuda.default_generators[index]
        self._first = self._generator.graphsafe_get_state()
        self._second = self._generator.clone_state()

    def register(self, graph: torch.cuda.CUDAGraph) -> None:
        """Register the copy; the original is registered by torch."""
        self.align()
        graph.register_generator_state(self._second)

    def align(self) -> None:
        """Give the copy the seed and offset of the original."""
        self._second.manual_seed(self._first.initial_seed())
        self._second.set_offset(self._first.get_offset())

    def read(self) -> str:
        """Stand in for `RandomStates.read` while recording: name the state of now."""
        return "first"

    def write(self, state: Any) -> None:
        """Stand in for `RandomStates.write`: the first call begins pass two, the next ends it."""
        self._generator.graphsafe_set_state(self._second if self._begins else self._first)
        self._begins = not self._begins

    @contextlib.contextmanager
    def installed(self, sharp: SharpnessAware | None) -> Iterator[None]:
        """Stand in for the optimizer's own handling of generators while recording."""
        if sharp is None:
            yield
            return
        own, sharp._random = sharp._random, self  # type: ignore[assignment]
        self._begins = True
        try:
            yield
        finally:
            sharp._random = own
            self._generator.graphsafe_set_state(self._first)
