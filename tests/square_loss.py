"""Training steps with a square loss, with and without the `model` argument."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wsam

with_and_without_model = pytest.mark.parametrize(
    "pass_model", [True, False], ids=["model", "no-model"]
)
X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


def square_closure(forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a closure that computes the mean square of the output, and its gradient."""

    def closure() -> Tensor:
        loss = forward().square().mean()
        loss.backward()
        return loss

    return closure


def train(model: nn.Module, pass_model: bool = False) -> None:
    train_forward(lambda: model(X), model.parameters(), model if pass_model else None)


def train_forward(
    forward: Callable[[], Tensor], weights: Any, model: nn.Module | None = None, steps: int = 3
) -> None:
    opt = wsam.SAM(torch.optim.SGD(weights, lr=0.1), model=model, rho=0.5)
    for _ in range(steps):
        opt.step(square_closure(forward))


def run_in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]
