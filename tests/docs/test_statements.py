"""Statements of docs/algorithm.md, choosing.md and faq.md that a small computation can check."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from figures.weight import measured_weight
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel

from wsam import WSAM
from wsam.schedule import Warmup
from wsam.theory import effective_weight


@pytest.mark.parametrize("gamma", [0.5, 0.88, 10 / 11])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_weight_of_sharpness_with_momentum(gamma: float, momentum: float) -> None:
    """algorithm.md: k(1 - mu), so that SAM's weight is reached at gamma = 1/(2 - mu)."""
    expected = effective_weight(gamma, momentum)
    assert measured_weight(gamma, momentum) == pytest.approx(expected, rel=1e-3)


def decoupled_ratio(make_base: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> float:
    """Return the mean norm of the decoupled term divided by that of the base's update."""
    torch.manual_seed(0)
    x = torch.randn(256, 20)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    params = list(model.parameters())
    opt = WSAM(make_base(params), rho=0.05, gamma=0.9, precondition=False)
    ratios = []

    def flat(tensors: Any) -> Tensor:
        return torch.cat([tensor.detach().flatten() for tensor in tensors])

    for _ in range(60):
        grads: list[Tensor] = []
        before = flat(params).clone()

        def closure(grads: list[Tensor] = grads) -> Tensor:
            loss = cross_entropy(model(x), y)
            loss.backward()
            grads.append(flat(p.grad for p in params))
            return loss

        opt.step(closure)
        decoupled = opt.param_groups[0]["lr"] * 9 * (grads[1] - grads[0])  # k = 9
        ratios.append((decoupled.norm() / (before - flat(params) - decoupled).norm()).item())
    return sum(ratios) / len(ratios)


def test_published_term_is_small_over_adam() -> None:
    """algorithm.md states both ratios, bases.md that one is less than a tenth of the other."""
    over_sgd = decoupled_ratio(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))
    over_adam = decoupled_ratio(lambda p: torch.optim.Adam(p, lr=1e-3))
    assert (round(over_sgd, 2), round(over_adam, 3)) == (0.2, 0.005)


def history(**hyper: Any) -> list[tuple[float, float]]:
    """Train on digits for five epochs; return the mean loss and sharpness of each."""
    pixels, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
    torch.manual_seed(0)
    layers = [nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU()]
    layers += [nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(128, 10))
    optimizer = WSAM(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), **hyper)
    rows = []
    for _ in range(5):
        losses, increases = [], []
        for batch in torch.randperm(1200).split(100):

            def closure(batch: Tensor = batch) -> Tensor:
                loss = cross_entropy(model(x[batch]), y[batch])
                loss.backward()
                return loss

            losses.append(optimizer.step(closure))
            increases.append(optimizer.sharpness)
        rows.append((torch.stack(losses).mean().item(), torch.stack(increases).mean().item()))
    return rows


def test_signs_of_divergence_and_warm_up() -> None:
    """choosing.md: the sharpness at first, the loss later, and what a warm-up of gamma changes."""
    stable, diverging = history(rho=0.1, gamma=0.9), history(rho=2.0, gamma=0.9)
    (loss, sharpness), (last_loss, last_sharpness) = stable[0], stable[-1]
    assert sharpness < loss / 2
    assert last_loss < 0.1
    assert last_sharpness < sharpness / 2
    assert last_sharpness / last_loss > sharpness / loss, "late in training the ratio grows"
    loss, sharpness = diverging[0]
    assert sharpness > loss
    assert diverging[-1][0] > 0.8 * math.log(10), "the level of guessing"
    warmed = history(rho=2.0, gamma=Warmup(0.9, steps=36))
    assert warmed[-1][0] < diverging[-1][0] / 5
    too_much = history(rho=1.0, gamma=Warmup(0.97, steps=36))
    assert too_much[-1][0] > 5 * too_much[2][0], "diverges when the warm-up is over"


def test_answers_of_the_faq() -> None:
    """faq.md: BatchNorm, EMA, new groups, values of a group, freezing, copies."""
    torch.manual_seed(0)
    x, y = torch.randn(32, 8), torch.randint(0, 3, (32,))
    norm, last = nn.BatchNorm1d(16), nn.Linear(16, 3)
    model = nn.Sequential(nn.Linear(8, 16), norm, nn.Dropout(0.2), last)
    base = torch.optim.SGD(model[0].parameters(), lr=0.05, momentum=0.9)
    optimizer = WSAM(base, rho=0.05, gamma=Warmup(0.9, steps=10))
    averaged = AveragedModel(model)

    def closure(model: nn.Module = model) -> Tensor:
        loss = cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    loss = optimizer.step(closure)
    averaged.update_parameters(model)
    assert norm.num_batches_tracked == 1, "once, although the closure ran twice"
    assert not loss.requires_grad

    optimizer.add_param_group({"params": last.parameters(), "rho": 0.1})
    optimizer.param_groups[0]["sam_rho"] = 0.2
    optimizer.param_groups[0]["sam_gamma"] = 0.5  # no effect: a schedule sets it
    optimizer.step(closure)
    first, second = optimizer.param_groups
    assert (first["sam_rho"], second["sam_rho"]) == (0.2, 0.1)
    assert (first["sam_step"], second["sam_step"]) == (2, 1)
    assert first["sam_gamma"] == Warmup(0.9, steps=10).value(1, lr=0.05)

    last.requires_grad_(False)
    frozen = last.weight.clone()
    optimizer.step(closure)
    assert torch.equal(last.weight, frozen)

    model_copy, optimizer_copy = copy.deepcopy((model, optimizer))
    torch.manual_seed(1)
    optimizer.step(closure)
    torch.manual_seed(1)
    optimizer_copy.step(lambda: closure(model_copy))
    assert torch.equal(model[0].weight, model_copy[0].weight)
