"""Gradient accumulation: micro-batches inside a closure, and a list of closures."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import reference
import torch
from helpers import (
    ALL,
    AVERAGING,
    METHODS,
    PROBLEMS,
    STYLES,
    covering,
    gap,
    make_method,
    parameters,
    reference_base,
    torch_base,
    train,
)
from torch import Tensor, nn

import wsam
from wsam.schedule import Every, NormAbove

MLP = PROBLEMS["mlp"]


@covering(name=ALL, style=STYLES)
def test_accum_equals_big_batch(name: str, style: str) -> None:
    """Micro-batches that are summed before the perturbation equal one large batch."""
    ours, theirs = parameters(MLP.weights()), parameters(MLP.weights())
    opt = make_method(name, torch_base("momentum", ours), all_samples=True)
    twin = make_method(name, torch_base("momentum", theirs), all_samples=True)
    for t in range(3):

        def backward(t: int = t) -> Tensor:
            opt.zero_grad()
            total = torch.zeros((), dtype=torch.float64)
            for part in range(2):
                loss = MLP.losses(ours, t)[5 * part : 5 * part + 5].mean() / 2
                loss.backward()
                total += loss.detach()
            return total

        if style == "closure":
            opt.step(backward)
        else:
            backward()
            opt.first_step(zero_grad=True)
            backward()
            opt.second_step(zero_grad=True)
    train(twin, theirs, MLP, range(3), style)
    assert gap(ours, theirs) < 1e-12


@covering(
    name=METHODS,
    base=["sgd", "momentum", "adam"],
    clip=[None, 0.5],
    weights=[None, (0.3, 0.7)],
)
def test_micro_perturbation(
    name: str, base: str, clip: float | None, weights: tuple[float, float] | None
) -> None:
    """A list of closures: each micro-batch has its own w + d; the weighted gradients are summed."""
    divisor, factors = (2, (1.0, 1.0)) if weights is None else (1, weights)
    method = replace(reference.METHODS[name], keep=1.0, max_norm=clip)
    params, w, plain = parameters(MLP.weights()), MLP.weights(), reference_base(base)
    opt = make_method(name, torch_base(base, params), max_norm=clip, all_samples=True)
    memory: reference.Memory = {}
    for t in range(4):

        def part(number: int, t: int = t) -> Callable[[], Tensor]:
            def run() -> Tensor:
                opt.zero_grad()
                loss = opt.select(MLP.losses(params, t)[5 * number : 5 * number + 5]) / divisor
                loss.backward()
                return loss

            return run

        mask = opt.geometry.mask(t, 4)
        pairs = [
            reference.two_gradients(
                method,
                w,
                lambda v, i=i, t=t: MLP.losses(v, t)[5 * i : 5 * i + 5] / divisor,
                mask,
                memory,
            )
            for i in range(2)
        ]
        left, right = factors
        g0 = [left * x + right * y for x, y in zip(pairs[0][0], pairs[1][0], strict=True)]
        g1 = [left * x + right * y for x, y in zip(pairs[0][1], pairs[1][1], strict=True)]
        means = [MLP.losses(w, t)[5 * i : 5 * i + 5].mean() / divisor for i in range(2)]
        wanted = left * means[0] + right * means[1]
        w = reference.update(method, plain, w, g0, g1, memory)
        found = opt.step([part(0), part(1)], weights=weights)
        assert float(found) == pytest.approx(float(wanted), rel=1e-12)
        assert gap(params, w) < 1e-10


@pytest.mark.parametrize("name", [name for name in METHODS if name not in AVERAGING])
def test_micro_perturbation_with_a_gradient_in_one_second_pass_only(name: str) -> None:
    """It counts in any of the micro-batches, as it does with one closure."""
    found = []
    for late_first in (False, True):
        a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        opt = make_method(name, torch.optim.SGD([a, b], lr=0.1), rho=0.1, all_samples=True)
        calls: list[int] = []

        def late(a: Tensor = a, b: Tensor = b, calls: list[int] = calls) -> Tensor:
            calls.append(1)
            loss = a.pow(3).sum() + (b.pow(3).sum() if len(calls) == 2 else 0)
            loss.backward()
            return loss

        def plain(a: Tensor = a) -> Tensor:
            loss = a.square().sum()
            loss.backward()
            return loss

        opt.step([late, plain] if late_first else [plain, late])
        found.append([a.detach(), b.detach()])
    assert gap(*found) < 1e-7
    assert not torch.equal(found[0][1], torch.ones(3))


@covering(name=METHODS, weights=[None, (0.5, 2.0), (2.0, 0.5)])
def test_micro_perturbation_without_a_second_gradient(name: str, weights: Any) -> None:
    """As with one closure: an error if all are missing; a single missing one counts as g0."""
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def make() -> wsam.SharpnessAware:
        return make_method(name, torch.optim.SGD([a, b], lr=0.1), rho=0.1, all_samples=True)

    calls: list[int] = []

    def forgets_backward() -> Tensor:
        calls.append(1)
        loss = a.square().sum() + b.square().sum()
        if len(calls) == 1:
            loss.backward()
        return loss

    def complete() -> Tensor:
        loss = a.square().sum() + b.square().sum()
        loss.backward()
        return loss

    opt = make()
    with pytest.raises(RuntimeError, match="second pass"):
        opt.step([complete, forgets_backward])
    assert torch.equal(a, torch.ones(3))

    def linear(partly: bool) -> Callable[[], Tensor]:
        seen: list[int] = []

        def run() -> Tensor:
            seen.append(1)
            loss = a.square().sum() + (0.0 if partly and len(seen) == 2 else 1.0) * b.sum()
            loss.backward()
            if partly and len(seen) == 2:
                b.grad = None  # not used in this pass; g1 of a linear term is g0
            return loss

        return run

    def result(partly: bool) -> Tensor:
        with torch.no_grad():
            a.fill_(1.0)
            b.fill_(1.0)
        make().step([linear(False), linear(partly)], weights=weights)
        return b.detach().clone()

    if opt.rule.keeps_g0:
        torch.testing.assert_close(result(True), result(False))


def test_sharpness_of_micro_batches() -> None:
    """It is the sum of the micro-batches' loss increases, as the loss is that of their losses."""
    params = parameters(MLP.weights())
    opt = wsam.SAM(torch_base("sgd", params), rho=0.5)
    losses: list[float] = []

    def part(number: int) -> Callable[[], Tensor]:
        def run() -> Tensor:
            loss = MLP.losses(params, number).mean()
            loss.backward()
            losses.append(loss.item())
            return loss

        return run

    loss = opt.step([part(0), part(1)])
    assert loss.item() == pytest.approx(losses[0] + losses[2])
    assert opt.sharpness.item() == pytest.approx(losses[1] - losses[0] + losses[3] - losses[2])

    losses.clear()
    loss = opt.step([part(0), part(1)], weights=[0.25, 3.0])
    assert loss.item() == pytest.approx(0.25 * losses[0] + 3 * losses[2])
    increases = losses[1] - losses[0], losses[3] - losses[2]
    assert opt.sharpness.item() == pytest.approx(0.25 * increases[0] + 3 * increases[1])


def test_each_closure_needs_a_weight() -> None:
    params: Any = parameters(MLP.weights())
    opt = wsam.SAM(torch_base("sgd", params))
    with pytest.raises(ValueError, match="a number for each of 2 closures"):
        opt.step([lambda: torch.zeros(()), lambda: torch.zeros(())], weights=[1.0])


def test_micro_batches_of_a_step_without_perturbation() -> None:
    """Each closure runs once, and the weighted gradients are summed."""
    params, plain = parameters(MLP.weights()), parameters(MLP.weights())
    opt = wsam.WSAM(torch_base("momentum", params), when=Every(2, offset=1))
    base = torch_base("momentum", plain)
    runs: list[int] = []

    def part(number: int) -> Callable[[], Tensor]:
        def run() -> Tensor:
            runs.append(number)
            loss = MLP.losses(params, number).mean()
            loss.backward()
            return loss

        return run

    opt.step([part(number) for number in range(3)], weights=[2.0, 1.0, 0.5])
    for number, weight in enumerate([2.0, 1.0, 0.5]):  # powers of 2, which are exact
        (weight * MLP.losses(plain, number).mean()).backward()
    base.step()
    assert runs == [0, 1, 2]
    assert all(map(torch.equal, params, plain))


def test_interval_by_gradient_norm_needs_a_single_closure() -> None:
    """The norm of one micro-batch cannot decide for the others."""
    params: Any = parameters(MLP.weights())
    opt = wsam.SAM(torch_base("sgd", params), when=NormAbove())
    with pytest.raises(ValueError, match="a single closure"):
        opt.step([lambda: torch.zeros(()), lambda: torch.zeros(())])
