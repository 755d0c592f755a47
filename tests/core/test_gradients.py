"""Promises about gradients: missing, zero, stale, not finite, scaled, accumulated, odd ones."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import reference
import torch
from helpers import (
    MEMBERS,
    PROBLEMS,
    STYLES,
    batch,
    closure,
    gap,
    make_step,
    member,
    model_loss,
    parameters,
    reference_base,
    same,
    small_model,
    snapshot,
    torch_base,
    train,
)
from torch import Tensor, nn

import wsam

MLP = PROBLEMS["mlp"]
MOMENTUM = {"lr": 0.1, "momentum": 0.9}


def total_weights(name: str, g0: Tensor, g1: Tensor) -> tuple[float, float, float, float]:
    return reference.coefficients(reference.MEMBERS[name], [g0], [g1], 0)


# --- missing -----------------------------------------------------------------------------------


class TwoBranches(nn.Module):
    """A shared part that is always used, and one that only some passes use."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
        self.sometimes = nn.Parameter(torch.tensor([0.3, 0.7], dtype=torch.float64))

    def losses(self, use: bool) -> Tensor:
        each = torch.stack([(self.always**2).sum(), (self.always**4).sum()])
        return each + (self.sometimes**3).sum() if use else each


def step_using(opt: wsam.SharpnessAware, model: TwoBranches, uses: tuple[bool, bool]) -> list[Any]:
    """One step whose passes use the second branch or not; returns its weights as each pass saw it."""
    seen, passes = [], iter(uses)

    def run() -> Tensor:
        opt.zero_grad()
        seen.append(model.sometimes.detach().clone())
        value = opt.select(model.losses(next(passes)))
        value.backward()
        return value

    opt.step(run)
    return seen


@pytest.mark.parametrize("name", MEMBERS)
def test_none_pass1(name: str) -> None:
    """No gradient in the first pass: not perturbed, and g0 counts as zero there."""
    model = TwoBranches()
    opt = member(name, torch.optim.SGD(model.parameters(), lr=0.1), rho=0.2)
    start = model.sometimes.detach().clone()
    seen = step_using(opt, model, (False, True))
    assert same(seen, [start, start])
    assert opt.state_dict()["param_groups"][0]["sam_step"] == 1
    g1 = 3 * start**2
    rule = reference.MEMBERS[name].rule
    if rule == "gsam":  # its inner products are over all tensors: only the direction is plain here
        assert bool((model.sometimes < start).all())
    else:
        _, b, _, e = total_weights(name, torch.zeros_like(g1), g1)
        assert gap([model.sometimes], [start - 0.1 * (b + e) * g1]) < 1e-12
    if rule == "wsam":
        assert not opt.state[model.sometimes], "the base was to be fed g0, which was not there"


@pytest.mark.parametrize("name", MEMBERS)
def test_none_pass2(name: str) -> None:
    """No gradient in the second pass: back at w, no sharpness term."""
    model = TwoBranches()
    opt = member(name, torch.optim.SGD(model.parameters(), **MOMENTUM), rho=0.2)
    start = model.sometimes.detach().clone()
    mask = opt.geometry.mask(0, 2)
    seen = step_using(opt, model, (True, False))
    assert same(seen[0], start)
    perturbed = mask is None or mask[1]
    assert same(seen[1], start) is not perturbed
    g0 = 3 * start**2
    if reference.MEMBERS[name].rule == "sam":
        assert same(model.sometimes.detach(), start), "the base sees no gradient"
        assert not opt.state[model.sometimes]
    elif reference.MEMBERS[name].rule == "gsam":
        assert bool((model.sometimes < start).all())
    else:  # g1 = g0 there: what is left is the base's own step
        assert gap([model.sometimes], [start - 0.1 * g0]) < 1e-12
    step_using(opt, model, (True, True))
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", MEMBERS)
def test_frozen(name: str, style: str) -> None:
    """Frozen parameters are never touched, not even their `requires_grad`."""
    model = small_model()
    model[0].requires_grad_(False)
    opt = member(name, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1))
    before = [p.detach().clone() for p in model[0].parameters()]
    trained = [p.detach().clone() for p in model[2].parameters()]
    for t in range(4):
        make_step(opt, model_loss(opt, model, t), style)
        assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]
    assert same([p.detach() for p in model[0].parameters()], before)
    assert all(not opt.state.get(p) and p.grad is None for p in model[0].parameters())
    for p, q in zip(model[2].parameters(), trained, strict=True):
        assert not torch.equal(p, q)


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("name", MEMBERS)
def test_zero_norm(name: str, lean: bool) -> None:
    """A zero gradient perturbs nothing, and the base still steps: decay and momentum act."""
    if lean and reference.MEMBERS[name].rule != "wsam":
        return
    ours, plain = (nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2))
    opt = member(name, torch.optim.SGD([ours], weight_decay=0.1, **MOMENTUM), lean=lean)
    twin = torch.optim.SGD([plain], weight_decay=0.1, **MOMENTUM)
    seen = []

    def run() -> Tensor:
        opt.zero_grad()
        seen.append(ours.detach().clone())
        value = opt.select(0.0 * ours)
        value.backward()
        return value

    for _ in range(3):
        opt.step(run)
        plain.grad = torch.zeros(2)
        twin.step()
        assert same(seen[-1], seen[-2])
    assert same(ours.detach(), plain.detach())
    assert not torch.equal(ours, torch.tensor([1.0, -2.0]))


# --- stale, clipped, accumulated -----------------------------------------------------------------


@pytest.mark.parametrize("zeroes", [True, False])
@pytest.mark.parametrize("stale", ["none", "backward", "rubbish"])
@pytest.mark.parametrize("name", MEMBERS)
def test_stale_grad(name: str, stale: str, zeroes: bool) -> None:
    """Gradients that lay there before, or a closure that never zeroes them, do not count."""
    models = small_model(), small_model()
    opts = [member(name, torch.optim.SGD(m.parameters(), **MOMENTUM)) for m in models]
    for t in range(3):
        loss = model_loss(opts[0], models[0], t)
        if stale == "backward":
            (models[0](batch(t)) ** 2).sum(1).mean().backward()
        elif stale == "rubbish":
            for p in models[0].parameters():
                p.grad = torch.full_like(p, 100.0)

        def run(loss: Callable[[], Tensor] = loss) -> Tensor:
            if zeroes:
                opts[0].zero_grad()
            value = loss()
            value.backward()
            return value

        opts[0].step(run)
        opts[1].step(closure(opts[1], models[1], t))
    assert same(snapshot(opts[0]), snapshot(opts[1]))


@pytest.mark.parametrize("name", MEMBERS)
def test_stale_grad_by_hand(name: str) -> None:
    """ascend takes the gradients away: a loop that never zeroes between the passes is right."""
    models = small_model(), small_model()
    opts = [member(name, torch.optim.SGD(m.parameters(), **MOMENTUM)) for m in models]
    for t in range(3):
        loss = model_loss(opts[0], models[0], t)
        opts[0].zero_grad()
        loss().backward()
        opts[0].first_step()
        assert all(p.grad is None for p in models[0].parameters())
        loss().backward()
        opts[0].second_step(zero_grad=t == 2)
        opts[1].step(closure(opts[1], models[1], t))
    assert same(snapshot(opts[0]), snapshot(opts[1]))
    assert all(p.grad is None for p in models[0].parameters())


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", MEMBERS)
def test_gradients_that_are_views(name: str, style: str) -> None:
    """Gradients in one flat buffer that each pass overwrites, as a data-parallel reducer has them."""
    ours, theirs = parameters(MLP.weights()), parameters(MLP.weights())
    flat = torch.zeros(sum(p.numel() for p in ours), dtype=torch.float64)
    opt, twin = (member(name, torch_base("momentum", ps)) for ps in (ours, theirs))
    for t in range(3):
        train(twin, theirs, MLP, range(t, t + 1), style)

        def backward(t: int = t) -> Tensor:
            loss = opt.select(MLP.losses(ours, t))
            start = 0
            for p, g in zip(ours, torch.autograd.grad(loss, ours), strict=True):
                p.grad = flat[start : start + p.numel()].view_as(p)
                p.grad.copy_(g)
                start += p.numel()
            return loss

        if style == "closure":
            opt.step(backward)
        else:
            backward()
            opt.first_step()
            backward()
            opt.second_step()
    assert same([p.detach() for p in ours], [p.detach() for p in theirs])


@pytest.mark.parametrize("name", MEMBERS)
def test_clip_that_does_not_bind_changes_nothing(name: str) -> None:
    ours, theirs = parameters(MLP.weights()), parameters(MLP.weights())
    train(member(name, torch_base("momentum", ours), max_norm=1e6), ours, MLP, range(4))
    train(member(name, torch_base("momentum", theirs)), theirs, MLP, range(4))
    assert gap(ours, theirs) < 1e-13


@pytest.mark.parametrize("name", MEMBERS)
def test_clip_bounds_the_whole_step(name: str) -> None:
    """With plain SGD the step is lr * max_norm long, however large the sharpness term is."""
    params = parameters([1e3 * w for w in MLP.weights()])
    start = [p.detach().clone() for p in params]
    opt = member(name, torch.optim.SGD(params, lr=0.5), max_norm=0.25, rho=50.0)
    train(opt, params, MLP, range(1))
    moved = torch.cat([(p - q).detach().reshape(-1) for p, q in zip(params, start, strict=True)])
    assert moved.norm().item() == pytest.approx(0.125, rel=1e-5)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", MEMBERS)
def test_accum_equals_big_batch(name: str, style: str) -> None:
    """Micro-batches summed before the perturbation equal one large batch."""
    option = {"gamma": 1.0} if name == "esam" else {}  # selection looks at one batch at a time
    ours, theirs = parameters(MLP.weights()), parameters(MLP.weights())
    opt = member(name, torch_base("momentum", ours), **option)
    twin = member(name, torch_base("momentum", theirs), **option)
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


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("base", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("name", MEMBERS)
def test_micro_perturbation(name: str, base: str, clip: float | None) -> None:
    """A list of closures: each micro-batch has its own w + d; the gradients are summed."""
    option: dict[str, Any] = {"gamma": 1.0} if name == "esam" else {}
    method = replace(reference.MEMBERS[name], keep=1.0, max_norm=clip)
    params, w, judge = parameters(MLP.weights()), MLP.weights(), reference_base(base)
    opt = member(name, torch_base(base, params), max_norm=clip, **option)
    for t in range(4):

        def part(number: int, t: int = t) -> Callable[[], Tensor]:
            def run() -> Tensor:
                opt.zero_grad()
                loss = opt.select(MLP.losses(params, t)[5 * number : 5 * number + 5]) / 2
                loss.backward()
                return loss

            return run

        mask = opt.geometry.mask(t, 4)
        pairs = [
            reference.two_gradients(
                method, w, lambda v, i=i, t=t: MLP.losses(v, t)[5 * i : 5 * i + 5] / 2, mask
            )
            for i in range(2)
        ]
        g0 = [x + y for x, y in zip(pairs[0][0], pairs[1][0], strict=True)]
        g1 = [x + y for x, y in zip(pairs[0][1], pairs[1][1], strict=True)]
        wanted = MLP.losses(w, t).mean()
        w = reference.update(method, judge, w, g0, g1)
        found = opt.step([part(0), part(1)])
        assert float(found) == pytest.approx(float(wanted), rel=1e-12)
        assert gap(params, w) < 1e-10


@pytest.mark.parametrize("name", MEMBERS)
def test_micro_batches_of_which_one_has_a_gradient_in_the_second_pass_only(name: str) -> None:
    """It counts, whichever micro-batch it is, as it does with one closure."""
    found = []
    for late_first in (False, True):
        a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        options = {"gamma": 1.0} if name == "esam" else {}
        opt = member(name, torch.optim.SGD([a, b], lr=0.1), rho=0.1, **options)
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


@pytest.mark.parametrize("name", MEMBERS)
def test_micro_batches_of_which_one_lacks_a_second_gradient(name: str) -> None:
    """As with one closure: without any it is refused, a single missing one counts as g0."""
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    options = {"gamma": 1.0} if name == "esam" else {}
    opt = member(name, torch.optim.SGD([a, b], lr=0.1), rho=0.1, **options)
    calls: list[int] = []

    def forgetful() -> Tensor:
        calls.append(1)
        loss = a.square().sum() + b.square().sum()
        if len(calls) == 1:
            loss.backward()
        return loss

    def whole() -> Tensor:
        loss = a.square().sum() + b.square().sum()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="second pass"):
        opt.step([whole, forgetful])
    assert torch.equal(a, torch.ones(3))

    def linear(partly: bool) -> Callable[[], Tensor]:
        seen: list[int] = []

        def run() -> Tensor:
            seen.append(1)
            loss = a.square().sum() + (0.0 if partly and len(seen) == 2 else 1.0) * b.sum()
            loss.backward()
            if partly and len(seen) == 2:
                b.grad = None  # not used in this pass; of a linear term g1 is g0
            return loss

        return run

    def end(partly: bool) -> Tensor:
        with torch.no_grad():
            a.fill_(1.0)
            b.fill_(1.0)
        fresh = member(name, torch.optim.SGD([a, b], lr=0.1), rho=0.1, **options)
        fresh.step([linear(False), linear(partly)])
        return b.detach().clone()

    if opt.rule.keeps_g0:
        torch.testing.assert_close(end(True), end(False))
