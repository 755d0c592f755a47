"""The kernels of `wsam._triton` in plain torch, by the addresses they are given.

What the host hands to a kernel (tables, numbers, marks, flags) can so be tried without Triton, and
without a GPU. The kernels' own arithmetic is tried by Triton's interpreter and on CUDA.
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
from wsam import bases, kernels


class Kernel:
    """Is launched like a kernel, `kernel[grid](...)`, and counts how often."""

    def __init__(self, run: Callable[..., None]) -> None:
        self.run, self.launches = run, 0

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*given: Any, **flags: Any) -> None:
            self.launches += 1
            self.run(*given, **flags)

        return launch


def install(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Let `wsam.kernels` find these kernels."""
    runs = (squares, products, scales, save_and_add, finish, begin_lean, end_lean)
    found = SimpleNamespace(**{run.__name__: Kernel(run) for run in runs})
    monkeypatch.setitem(sys.modules, "wsam._triton", found)
    monkeypatch.setattr(wsam, "_triton", found, raising=False)
    return found


def memory(address: int, size: int) -> Tensor:
    """Return what begins at an address, as a tensor that shares it."""
    return torch.frombuffer((ctypes.c_float * size).from_address(address), dtype=torch.float32)


def tensors(table: Tensor, sizes: Tensor, n: int) -> list[tuple[Tensor, ...]]:
    """Return for each parameter its tensors, one of each list."""
    rows = table.view(-1, n).tolist()
    return [
        tuple(memory(row[i], 1 if position == 6 else size) for position, row in enumerate(rows))
        for i, size in enumerate(sizes.tolist())
    ]


def tiles(
    table: Tensor, where: Tensor, offset: Tensor, sizes: Tensor, n: int, block: int
) -> list[tuple[Tensor, ...]]:
    """Return for each program its part of the tensors of one parameter."""
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
    **more: Any,
) -> None:
    parts = tiles(table, where, offset, sizes, n, more["BLOCK"])
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
    **more: Any,
) -> None:
    assert partial.shape == (3, count)
    parts = tiles(table, where, offset, sizes, n, more["BLOCK"])
    for place, (g1, g0) in enumerate(parts, first):
        for row, x in zip(partial, (g0, g1, g1 - g0), strict=True):
            row[place] = x.square().sum()


def scales(
    partial: Tensor, count: int, numbers: Tensor, result: Tensor, groups: int, **more: Any
) -> None:
    norm = partial[:count].sum().sqrt()
    assert numbers.shape == (groups, more["COLUMNS"])
    rows = result.view(groups, more["ROOM"])
    rows[:, 0] = numbers[:, 0].float() / (norm + more["EPSILON"]) + (norm - norm)
    rows[:, 1] = 0.0


def mark(scale: Tensor) -> None:
    scale.as_strided((), (), scale.storage_offset() + 1).fill_(1.0)


def save_and_add(
    table: Tensor, where: Tensor, offset: Tensor, sizes: Tensor, scale: Tensor, n: int, **more: Any
) -> None:
    mark(scale)
    for w, direction, saved in tensors(table, sizes, n):
        saved.copy_(w)
        w.add_(scale * direction)


def times(weight: Tensor, x: Tensor) -> Tensor:
    return weight * x if weight else torch.zeros_like(x)


def base(
    w: Tensor, fed: Tensor, history: tuple[Tensor, ...], numbers: Tensor, branches: int
) -> Tensor:
    """Return what the base makes of w; numbers as `wsam.bases.numbers_of` has them."""
    lr, decay, a, b, eps = (float(x) for x in numbers[5:10])
    if branches & bases.DECAY and not branches & bases.DECOUPLED:
        fed = fed + decay * w
    if not branches & bases.ADAM:
        if branches & bases.MOMENTUM:
            history[0].mul_(a).add_(fed, alpha=1 - b)
            fed = fed + a * history[0] if branches & bases.NESTEROV else history[0]
        return w - lr * fed
    if branches & bases.DECAY and branches & bases.DECOUPLED:
        w = w * (1 - lr * decay)
    mean, square, count = history
    mean.lerp_(fed, 1 - a)
    square.mul_(b).add_((1 - b) * fed * fed)
    steps = float(count) + 1
    first, second = (1 - float(torch.exp(steps * numbers[i])) for i in (10, 11))
    return w - lr / first * mean / (square.sqrt() / second**0.5 + eps)


def finish(
    table: Tensor,
    where: Tensor,
    offset: Tensor,
    sizes: Tensor,
    numbers: Tensor,
    n: int,
    **flags: Any,
) -> None:
    loss, sharp, beside_loss, beside_sharp = numbers[1:5].float()
    for saved, w, g1, g0, *history in tensors(table, sizes, n):
        fed, beside = g1, torch.zeros_like(g1)
        if flags["BRANCHES"] & bases.KEPT:
            fed = times(loss, g0) + times(sharp, g1 - g0)
            beside = times(beside_loss, g0) + times(beside_sharp, g1 - g0)
        new = base(saved, fed, tuple(history), numbers, flags["BRANCHES"])
        w.copy_(new - float(numbers[5]) * beside)


def begin_lean(
    table: Tensor,
    where: Tensor,
    offset: Tensor,
    sizes: Tensor,
    numbers: Tensor,
    scale: Tensor,
    n: int,
    **flags: Any,
) -> None:
    mark(scale)
    for w, g0, direction, kept, *history in tensors(table, sizes, n):
        new = base(w, times(numbers[1].float(), g0), tuple(history), numbers, flags["BRANCHES"])
        weight = (numbers[3] - numbers[4]).float()
        kept.copy_(new - float(numbers[5]) * times(weight, g0))
        w.add_(scale * direction)


def end_lean(
    table: Tensor,
    where: Tensor,
    offset: Tensor,
    sizes: Tensor,
    numbers: Tensor,
    n: int,
    **more: Any,
) -> None:
    for kept, w, g1 in tensors(table, sizes, n):
        w.copy_(kept - float(numbers[5]) * times(numbers[4].float(), g1))


def attach(opt: wsam.SharpnessAware) -> kernels.Kernels:
    """Let an optimizer on the CPU step by kernels, as one does on CUDA."""
    fused = kernels.Kernels(torch.device("cpu"), opt.base, opt.rule, opt.geometry.boost)

    def begun() -> kernels.Kernels:
        fused.begin(recording=False)
        fused.write_numbers()
        return fused

    opt._kernels_of_base = begun  # type: ignore[method-assign]
    return fused
