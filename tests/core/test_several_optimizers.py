"""Several sharpness-aware optimizers that are stepped by hand in one loop."""

import copy
import functools
from collections.abc import Iterable

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
