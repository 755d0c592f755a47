"""Several sharpness-aware optimizers that are stepped by hand in one loop."""

import copy
import functools
from collections.abc import Callable, Iterable

import pytest
import torch
from squares import X, in_a_thread, squared
from torch import nn

import wsam


def trunk_in_two(*names: str) -> tuple[list[wsam.SharpnessAware], Callable[[], object]]:
    """Return two optimizers of one trunk, each with a head of its own, and a closure of both."""
    trunk, heads = nn.Linear(4, 4), [nn.Linear(4, 1), nn.Linear(4, 1)]
    weights = [[*trunk.parameters(), *head.parameters()] for head in heads]
    both = [wsam.create(name, sgd(own)) for name, own in zip(names, weights, strict=True)]
    return both, squared(lambda: torch.cat([head(trunk(X)) for head in heads]))


def sgd(weights: Iterable[nn.Parameter]) -> torch.optim.SGD:
    return torch.optim.SGD(weights, lr=0.01, momentum=0.9)


@pytest.mark.parametrize("name", ["wsam", "coupled_wsam", "gsam"])
def test_a_parameter_of_two_optimizers_in_one_loop_is_refused(name: str) -> None:
    both, run = trunk_in_two(name, name)
    for opt in both:
        opt.begin()
    run()
    both[0].ascend()
    with pytest.raises(RuntimeError, match="another sharpness-aware optimizer"):
        both[1].ascend()
    both[0].abandon()
    trunk = both[0].param_groups[0]["params"][0]
    before = trunk.detach().clone()
    for opt in both:  # by closures it is two steps
        opt.step(run)
    assert not torch.equal(trunk, before)


def test_two_sams_may_share_a_trunk() -> None:
    both, run = trunk_in_two("sam", "sam")
    for phase in ("begin", "ascend", "descend", "step"):
        for opt in both:
            getattr(opt, phase)()
        if phase in ("begin", "ascend"):
            run()


@pytest.mark.parametrize("names", [("sam", "wsam"), ("wsam", "sam")])
def test_one_that_keeps_its_gradient_is_enough_to_refuse(names: tuple[str, str]) -> None:
    (first, second), run = trunk_in_two(*names)
    run()
    first.ascend()
    with pytest.raises(RuntimeError, match="its abandon"):
        second.ascend()
    assert in_a_thread(second.ascend), "another thread has a loop of its own"
    second.abandon()
    first.abandon()


def test_looking_is_no_step_of_another() -> None:
    (first, second), run = trunk_in_two("wsam", "wsam")
    run()
    first.ascend()
    first.abandon()
    run()
    with first.perturbed():
        run()
        second.ascend()
        second.abandon()


def test_optimizers_of_their_own_parameters_share_a_loop() -> None:
    torch.manual_seed(0)
    one = nn.Linear(4, 1)
    models = [one, copy.deepcopy(one)]
    both = [wsam.WSAM(sgd(model.parameters())) for model in models]
    closures = [squared(functools.partial(model, X)) for model in models]
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
