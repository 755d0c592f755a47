"""Promises about what a step gives back and who hears of it: loss, sharpness, hooks, autocast."""

import warnings
from collections import namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import reference
import torch
from helpers import (
    MEMBERS,
    STYLES,
    batch,
    closure,
    make_step,
    member,
    model_loss,
    same,
    small_model,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import wsam


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("name", MEMBERS)
def test_step_returns_loss(name: str, lean: bool) -> None:
    if lean and reference.MEMBERS[name].rule != "wsam":
        return
    model = small_model()
    opt = member(name, torch.optim.SGD(model.parameters(), lr=0.1), rho=0.5, lean=lean)
    for t in range(3):
        wanted = (model(batch(t)) ** 2).sum(1).mean().detach()
        found = opt.step(closure(opt, model, t))
        assert isinstance(found, Tensor)
        assert not found.requires_grad
        assert torch.equal(found, wanted)


def test_step_returns_a_plain_number_as_it_is() -> None:
    model = small_model()
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1))
    inner = closure(opt, model)
    wanted = (model(batch(0)) ** 2).sum(1).mean().item()
    assert float(opt.step(lambda: inner().item())) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("extra", ["tuple", "none"])
def test_step_returns_whatever_the_closure_does(extra: str) -> None:
    """A closure may return more than a loss, or nothing: the step is made all the same."""
    model, plain = small_model(), small_model()
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1))
    twin = wsam.WSAM(torch.optim.SGD(plain.parameters(), lr=0.1))
    inner = closure(opt, model)
    outputs = (1.0, "accuracy")

    def run() -> Any:
        loss = inner()
        return (loss, *outputs) if extra == "tuple" else None

    found = opt.step(run)
    wanted = twin.step(closure(twin, plain))
    assert found is None if extra == "none" else torch.equal(found[0], wanted)
    assert same(list(model.parameters()), list(plain.parameters()))


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("name", MEMBERS)
def test_sharpness_readout(name: str, lean: bool) -> None:
    """L(w + d) - L(w) over the whole batch, also where only some samples are used further."""
    if lean and reference.MEMBERS[name].rule != "wsam":
        return
    model = small_model()
    opt = member(name, torch.optim.SGD(model.parameters(), lr=0.1), rho=0.5, lean=lean)
    means: list[Tensor] = []
    for t in range(3):
        means.clear()

        def run(t: int = t) -> Tensor:
            opt.zero_grad()
            each = (model(batch(t)) ** 2).sum(1)
            means.append(each.mean().detach())
            loss = opt.select(each)
            loss.backward()
            return loss

        opt.step(run)
        assert isinstance(opt.sharpness, Tensor)
        assert opt.sharpness.shape == ()
        assert not opt.sharpness.requires_grad
        assert float(opt.sharpness) == pytest.approx(float(means[1] - means[0]), rel=1e-10)
        assert float(opt.sharpness) > 0


def test_sharpness_of_a_step_by_hand_is_not_that_of_an_older_one() -> None:
    model = small_model()
    opt = member("wsam", torch.optim.SGD(model.parameters(), lr=0.1))
    assert opt.sharpness is None
    run = closure(opt, model)
    opt.step(run)
    assert isinstance(opt.sharpness, Tensor)
    run()
    opt.ascend()
    run()
    opt.descend()
    opt.step()
    assert opt.sharpness is None


# --- hooks and schedulers ------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("name", MEMBERS)
def test_hook_count(name: str, lean: bool, style: str) -> None:
    if lean and reference.MEMBERS[name].rule != "wsam":
        return
    model = small_model()
    opt = member(name, torch.optim.SGD(model.parameters(), lr=0.1), lean=lean)
    calls: list[str] = []

    def note(word: str) -> Callable[..., None]:
        return lambda *args, **kwargs: calls.append(word)

    opt.register_step_pre_hook(note("pre"))
    opt.register_step_post_hook(note("post"))
    opt.base.register_step_pre_hook(note("base pre"))
    opt.base.register_step_post_hook(note("base post"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = CosineAnnealingLR(opt, T_max=10)
        for t in range(2):
            make_step(opt, model_loss(opt, model, t), style)
            scheduler.step()
    if lean and style != "closure":  # the base steps inside ascend, before step() is called
        assert sorted(calls) == sorted(["base pre", "base post", "pre", "post"] * 2)
    else:
        assert calls == ["pre", "base pre", "base post", "post"] * 2
    assert opt.param_groups[0]["lr"] == opt.base.param_groups[0]["lr"] < 0.1


# --- automatic mixed precision -------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", MEMBERS)
def test_autocast_cache_does_not_hide_the_perturbation(name: str, style: str) -> None:
    """One autocast region around whole steps gives what a region around each forward gives."""
    results: list[Any] = []
    for outside in (True, False):
        model = small_model(torch.float32)
        opt = member(name, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rho=2.0)
        for t in range(3):
            loss = model_loss(opt, model, t)

            def inside(loss: Callable[[], Tensor] = loss) -> Tensor:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return loss()

            region = torch.autocast("cpu", dtype=torch.bfloat16) if outside else nullcontext()
            with region:
                make_step(opt, loss if outside else inside, style)
        results.append([p.detach() for p in model.parameters()])
    assert same(*results)


def test_autocast_around_perturbed() -> None:
    model = small_model(torch.float32)
    opt = wsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=2.0)
    x = batch(0).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model_loss(opt, model)().backward()
        here = model(x).detach()
        with opt.perturbed():
            there = model(x).detach()
        again = model(x).detach()
    assert not same(here, there)
    assert same(here, again)


def test_autocast_around_several_steps() -> None:
    """The cast weights that the region has cached are dropped after the update, too."""
    results: list[Any] = []
    for outside in (True, False):
        model = small_model(torch.float32)
        opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=2.0)

        def run(t: int, opt: Any = opt, model: nn.Module = model) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                value = model_loss(opt, model, t)()
            value.backward()
            return value

        region = torch.autocast("cpu", dtype=torch.bfloat16) if outside else nullcontext()
        with region:
            for t in range(3):
                opt.step(lambda t=t, run=run: run(t))
        results.append([p.detach() for p in model.parameters()])
    assert same(*results)


def test_a_closure_may_return_more_than_the_loss() -> None:
    """A tuple that begins with the loss comes back whole, without its graph."""
    model = small_model()
    opt, x = (
        wsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.5),
        torch.ones(4, 5).double(),
    )

    def both() -> tuple[Tensor, Tensor]:
        out = model(x)
        loss = out.square().mean()
        loss.backward()
        return loss, out

    Both = namedtuple("Both", "loss out")
    made = opt.step(lambda: Both(*both()))
    assert isinstance(made, Both)
    loss, out = made
    assert not loss.requires_grad
    assert not out.requires_grad
    assert out.shape == (4, 2)
    assert opt.sharpness is not None
    assert float(opt.sharpness) > 0


@pytest.mark.parametrize(
    "first", [lambda out: out > 0, lambda out: out[out > 0.1], lambda out: out]
)
def test_a_tuple_that_begins_with_something_else(first: Callable[[Tensor], Tensor]) -> None:
    """What cannot be subtracted is not measured, and the step goes on."""
    model, x = small_model(), torch.ones(4, 5).double()
    opt = wsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.5)

    def both() -> tuple[Tensor, Tensor]:
        out = model(x)
        loss = out.square().mean()
        loss.backward()
        return first(out), loss

    opt.step(both)
    assert opt.sharpness is not None
    assert opt.sharpness.isnan()
