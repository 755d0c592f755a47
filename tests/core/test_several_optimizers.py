"""Several sharpness-aware optimizers that are stepped by hand in one loop."""

import copy
import functools
from collections.abc import Iterable

import pytest
import torch
from square_loss import X, square_closure
from torch import nn

import wsam


def sgd(weights: Iterable[nn.Parameter]) -> torch.optim.SGD:
    return torch.optim.SGD(weights, lr=0.01, momentum=0.9)


def test_optimizers_of_their_own_parameters_share_a_loop() -> None:
    torch.manual_seed(0)
    one = nn.Linear(4, 1)
    models = [one, copy.deepcopy(one)]
    both = [wsam.WSAM(sgd(model.parameters())) for model in models]
    closures = [square_closure(functools.partial(model, X)) for model in models]
    for opt in both:
        opt.begin()
    for opt, closure in zip(both, closures, strict=True):
        closure()
        opt.ascend()
    for opt, closure in zip(both, closures, strict=True):
        closure()
        opt.descend()
        opt.step()
    assert torch.equal(models[0].weight, models[1].weight)


@pytest.mark.parametrize("reverse", [False, True])
def test_two_optimizers_in_one_loop_draw_new_masks(reverse: bool) -> None:
    """Dropout masks repeat in the second pass and differ from step to step."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    masks: list[torch.Tensor] = []
    model[1].register_forward_hook(lambda module, given, out: masks.append(out == 0))
    weights = [p for p in model.parameters() if p.dim() == 2]
    biases = [p for p in model.parameters() if p.dim() == 1]
    opts = [wsam.SAM(sgd(params)) for params in (weights, biases)]
    for _ in range(4):
        for opt in opts:
            opt.begin()
        model(torch.ones(4, 8)).square().mean().backward()
        for opt in opts:
            opt.ascend()
        model(torch.ones(4, 8)).square().mean().backward()
        for opt in reversed(opts) if reverse else opts:
            opt.descend()
        for opt in opts:
            opt.step()
    first_passes, second_passes = masks[::2], masks[1::2]
    assert all(map(torch.equal, first_passes, second_passes))
    assert not any(torch.equal(first_passes[0], later) for later in first_passes[1:])
