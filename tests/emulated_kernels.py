"""The Triton kernels in plain torch, so that the host code around them runs without a GPU.

The emulated kernels read and write the addresses that they receive, as the real ones do. So tests on a
CPU cover tables, numbers, branches and launches. The arithmetic of the real kernels is tested by
Triton's interpreter and on CUDA.
"""

import ctypes
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import wsam
from wsam import accel
from wsam.accel.base_optimizers import (
    ADAM,
    DECAY,
    DECOUPLED_DECAY,
    HAS_G0,
    KEEP,
    MOMENTUM,
    NESTEROV,
    PRECONDITION,
    REUSE,
)
from wsam.accel.triton_backend import EagerTritonBackend, TritonBackend

CPU = torch.device("cpu")


class Kernel:
    """Is launched like a Triton kernel, `kernel[grid](...)`, and counts its launches."""

    def __init__(self, run: Callable[..., None]) -> None:
        self.run, self.launches = run, 0

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*given: Any, **constants: Any) -> None:
            self.launches += 1
            self.run(*given, **constants)

        return launch


def install(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the Triton kernels by emulated ones and return these."""
    runs = (squares, products, scales, save_and_add, finish, begin_lean, end_lean)
    kernels = SimpleNamespace(**{run.__name__: Kernel(run) for run in runs})
    monkeypatch.setitem(sys.modules, "wsam.accel.triton_kernels", kernels)
    monkeypatch.setattr(accel, "triton_kernels", kernels, raising=False)
    allow_cpu(monkeypatch)
    return kernels


def allow_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `EagerTritonBackend` accept the CPU as the current device."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CPU.index)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def attach(opt: wsam.SharpnessAware) -> EagerTritonBackend:
    """Make an optimizer on the CPU use kernels in eager steps, as one on CUDA does."""
    backend = opt._backend = EagerTritonBackend(CPU)
    return backend


def backend_of(opt: wsam.SharpnessAware) -> TritonBackend:
    """Return a backend for direct calls, ready to begin a step."""
    backend = TritonBackend(CPU, opt.base, opt.rule, opt.geometry.boost)
    backend.begin(recording=False)
    backend.write_numbers()
    return backend


# The kernels ----------------------------------------------------------------------------------------


def memory(address: int, size: int) -> Tensor:
    """Return the float32 numbers at an address as a tensor that shares their memory."""
    if not size:
        return torch.empty(0)
    return torch.frombuffer((ctypes.c_float * size).from_address(address), dtype=torch.float32)


def tensors(table: Tensor, sizes: Tensor, n: int) -> list[tuple[Tensor, ...]]:
    """Return the tensors of each parameter, one of each list. List 6 holds step counts."""
    rows = table.view(-1, n).tolist()
    return [
        tuple(memory(row[i], 1 if position == 6 else size) for position, row in enumerate(rows))
        for i, size in enumerate(sizes.tolist())
    ]


def tiles(
    table: Tensor, where: Tensor, offset: Tensor, sizes: Tensor, n: int, block: int
) -> list[tuple[Tensor, ...]]:
    """Return the part of a parameter's tensors that each program processes."""
    every = tensors(table, sizes, n)
    parts = zip(where.tolist(), offset.tolist(), strict=True)
    return [tuple(x[start : start + block] for x in every[index]) for index, start in parts]


def squares(
    table: Tensor,
    where: Tensor,
    offset: Tensor,
    sizes: Tensor,
    partial: Tensor,
    first: int,
    n: int,
    **constants: Any,
) -> None:
    parts = tiles(table, where, offset, sizes, n, constants["BLOCK"])
    for place, (_, z, *_) in enumerate(parts, first):
        partial[place] = z.square().sum()


def products(
    table: Tensor,
    where: Tensor,
    offset: Tensor,
    sizes: Tensor,
    partial: Tensor,
    first: int,
    count: int,
    n: int,
    **constants: Any,
) -> None:
    assert partial.shape == (3, count)
    parts = tiles(table, where, offset, sizes, n, constants["BLOCK"])
    for place, (g1, g0) in enumerate(parts, first):
        for row, x in zip(partial, (g0, g1, g1 - g0), strict=True):
            row[place] = x.square().sum()


def scales(
    partial: Tensor, count: int, numbers: Tensor, result: Tensor, groups: int, **constants: Any
) -> None:
    norm = partial[:count].sum().sqrt()
    assert numbers.shape == (groups, constants["COLUMNS"])
    rows = result.view(groups, constants["STRIDE"])
    rows[:, 0] = numbers[:, 0].float() / (norm + constants["EPSILON"]) + (norm - norm)


def save_and_add(
    table: Tensor,
    where: Tensor,
    offset: Tensor,
    sizes: Tensor,
    scale: Tensor,
    n: int,
    **constants: Any,
) -> None:
    for w, direction, saved in tensors(table, sizes, n):
        saved.copy_(w)
        w.add_(scale * direction)


def times(weight: Tensor, x: Tensor) -> Tensor:
    return weight * x if weight else torch.zeros_like(x)


def base_step(
    w: Tensor,
    grad: Tensor,
    decoupled: Tensor,
    state: tuple[Tensor, ...],
    numbers: Tensor,
    branches: int,
) -> Tensor:
    """Return the weights after the base's step; for the numbers see `base_optimizers.numbers_of`."""
    lr, decay, a, b, eps = (float(x) for x in numbers[5:10])
    if branches & DECAY and not branches & DECOUPLED_DECAY:
        grad = grad + decay * w
    if not branches & ADAM:
        if branches & MOMENTUM:
            state[0].mul_(a).add_(grad, alpha=1 - b)
            grad = grad + a * state[0] if branches & NESTEROV else state[0]
        return w - lr * grad
    if branches & DECAY and branches & DECOUPLED_DECAY:
        w = w * (1 - lr * decay)
    mean, square, count = state
    mean.lerp_(grad, 1 - a)
    term = decoupled if branches & PRECONDITION else torch.zeros_like(grad)
    square.mul_(b).add_((1 - b) * (grad * grad + term * term))
    steps = float(count) + 1
    first, second = (1 - float(torch.exp(steps * numbers[i])) for i in (10, 11))
    return w - (lr / first * mean + lr * term) / (square.sqrt() / second**0.5 + eps)


def finish(
    table: Tensor,
    where: Tensor,
    offset: Tensor,
    sizes: Tensor,
    numbers: Tensor,
    n: int,
    **constants: Any,
) -> None:
    loss, sharp, decoupled_loss, decoupled_sharp = numbers[1:5].float()
    branches = constants["BRANCHES"]
    for saved, w, g1, g0, *state in tensors(table, sizes, n):
        grad, decoupled = g1, torch.zeros_like(g1)
        if branches & HAS_G0:
            first, change = (g1, g0) if branches & REUSE else (g0, g1 - g0)
            grad = times(loss, first) + times(sharp, change)
            decoupled = times(decoupled_loss, first) + times(decoupled_sharp, change)
            if branches & KEEP:
                state.pop().copy_(change)
        new = base_step(saved, grad, decoupled, tuple(state), numbers, branches)
        w.copy_(new if branches & PRECONDITION else new - float(numbers[5]) * decoupled)


def begin_lean(
    table: Tensor,
    where: Tensor,
    offset: Tensor,
    sizes: Tensor,
    numbers: Tensor,
    scale: Tensor,
    n: int,
    **constants: Any,
) -> None:
    for w, g0, direction, saved, *state in tensors(table, sizes, n):
        grad = times(numbers[1].float(), g0)
        none = torch.zeros_like(grad)
        new = base_step(w, grad, none, tuple(state), numbers, constants["BRANCHES"])
        weight = (numbers[3] - numbers[4]).float()
        saved.copy_(new - float(numbers[5]) * times(weight, g0))
        w.add_(scale * direction)


def end_lean(
    table: Tensor,
    where: Tensor,
    offset: Tensor,
    sizes: Tensor,
    numbers: Tensor,
    n: int,
    **constants: Any,
) -> None:
    for saved, w, g1 in tensors(table, sizes, n):
        w.copy_(saved - float(numbers[5]) * times(numbers[4].float(), g1))
