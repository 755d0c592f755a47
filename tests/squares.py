"""A loss to train by, with and without the model given, and ways to run it."""

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wsam

GIVEN = pytest.mark.parametrize("given", [True, False], ids=["model", "no-model"])
X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


def squared(forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a closure by what the model makes of its input."""

    def closure() -> Tensor:
        loss = forward().square().mean()
        loss.backward()
        return loss

    return closure


def train(model: nn.Module, given: bool = False) -> None:
    train_by(lambda: model(X), model.parameters(), model if given else None)


def train_by(
    forward: Callable[[], Tensor], weights: Any, model: nn.Module | None = None, steps: int = 3
) -> None:
    opt = wsam.SAM(torch.optim.SGD(weights, lr=0.1), model=model, rho=0.5)
    for _ in range(steps):
        opt.step(squared(forward))


def in_a_thread(work: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def told(forward: Callable[[], Tensor], weights: Any, model: nn.Module | None = None) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", wsam.WsamWarning)
        train_by(forward, weights, model)
    return [str(w.message) for w in found if issubclass(w.category, wsam.WsamWarning)]
