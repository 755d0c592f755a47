"""Models with batch norms, and how they are trained while somebody watches their switches."""

from collections.abc import Callable
from typing import Any

import torch
from squares import X, squared
from torch import Tensor, nn

import wsam

STEPS = 4
Forward = Callable[[Tensor], Tensor]


def normed(*more: nn.Module, norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), norm(8), nn.ReLU(), *more, nn.Linear(8, 2))


def optimizer(model: nn.Module, told: nn.Module | None = None) -> wsam.WSAM:
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return wsam.WSAM(base, rho=0.5, gamma=0.8, model=told)


def closure_of(forward: Forward, number: int = 0) -> Callable[[], Tensor]:
    return squared(lambda: forward(X + 0.1 * number))


def train(opt: wsam.WSAM, forward: Forward, steps: int = STEPS) -> None:
    for number in range(steps):
        opt.step(closure_of(forward, number))


def trained(model: nn.Module, told: bool = True) -> wsam.WSAM:
    opt = optimizer(model, model if told else None)
    train(opt, model)
    return opt


def watched(layer: nn.Module) -> list[bool]:
    """Return a list that grows by the layer's switch whenever it runs."""
    seen: list[bool] = []
    layer.register_forward_pre_hook(lambda m, args: seen.append(m.track_running_stats))
    return seen


def count(layer: Any) -> int:
    return int(layer.num_batches_tracked)
