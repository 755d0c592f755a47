"""Identities between methods and their bases; `same` compares bitwise, `gap` to rounding."""

import math
from typing import Any

import pytest
import torch
from helpers import (
    ALL,
    BASES,
    ONE_PASS,
    PROBLEMS,
    STYLES,
    VARIANTS,
    gap,
    make_method,
    make_step,
    same,
    torch_base,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import wsam

MLP = PROBLEMS["mlp"]
STEPS = 4

MANY = settings(max_examples=50)
"""For tests that also draw the method."""

seeds = st.integers(0, 10**6)
dtypes = st.sampled_from([torch.float32, torch.float64])
radii = st.floats(1e-3, 1.0)
gammas = st.floats(0.0, 0.95)
bases = st.sampled_from(sorted(BASES))
styles = st.sampled_from(STYLES)
decays = st.sampled_from([0.0, 0.01])
methods = st.sampled_from(ALL)


def start(seed: int, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for s in MLP.shapes]


def losses(params: list[nn.Parameter], t: int) -> Tensor:
    x = torch.sin(torch.arange(50, dtype=params[0].dtype).reshape(10, 5) * (1.3 + t))
    return MLP.outputs(params, x)


def run(opt: wsam.SharpnessAware, params: list[nn.Parameter], style: str = "closure") -> None:
    for t in range(STEPS):
        make_step(opt, lambda t=t: opt.select(losses(params, t)), style)


def run_plain(base: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    for t in range(STEPS):
        base.zero_grad()
        losses(params, t).mean().backward()
        base.step()


def weights_and_state(opt: torch.optim.Optimizer, params: list[nn.Parameter]) -> Any:
    """Return the weights and the state. Kept vectors and averages must not have moved from 0."""
    states = [dict(opt.state[p]) for p in params]
    for state in states:
        for name in ("sam_kept", "sam_average"):
            assert not state.pop(name, torch.zeros(1)).any()
    return [p.detach() for p in params], states


@pytest.mark.parametrize("lean", [False, True])
@given(seed=seeds, dtype=dtypes, rho=radii, base=bases, style=styles, decay=decays)
def test_gamma_zero_is_the_base(lean, seed, dtype, rho, base, style, decay) -> None:
    ours, plain = start(seed, dtype), start(seed, dtype)
    opt, twin = torch_base(base, ours, decay), torch_base(base, plain, decay)
    form = {"lean": True, "precondition": False} if lean else {}
    run(wsam.WSAM(opt, rho=rho, gamma=0.0, **form), ours, style)
    run_plain(twin, plain)
    assert same(weights_and_state(opt, ours), weights_and_state(twin, plain))


@given(seed=seeds, dtype=dtypes, rho=radii, base=bases, style=styles, decay=decays)
def test_coupled_gamma_zero_is_the_base(seed, dtype, rho, base, style, decay) -> None:
    ours, plain = start(seed, dtype), start(seed, dtype)
    opt, twin = torch_base(base, ours, decay), torch_base(base, plain, decay)
    run(wsam.CoupledWSAM(opt, rho=rho, gamma=0.0), ours, style)
    run_plain(twin, plain)
    assert same(weights_and_state(opt, ours), weights_and_state(twin, plain))


@MANY
@given(name=methods, seed=seeds, dtype=dtypes, base=bases, style=styles, decay=decays)
def test_rho_zero_is_the_base(name, seed, dtype, base, style, decay) -> None:
    ours, plain = start(seed, dtype), start(seed, dtype)
    opt, twin = torch_base(base, ours, decay), torch_base(base, plain, decay)
    run(make_method(name, opt, rho=0.0, all_samples=True), ours, style)
    run_plain(twin, plain)
    assert same(weights_and_state(opt, ours), weights_and_state(twin, plain))


@given(seed=seeds, dtype=dtypes, base=bases, style=styles, gamma=gammas)
def test_rho_zero_is_the_base_with_lean(seed, dtype, base, style, gamma) -> None:
    """To rounding: a lean step adds and subtracts lr*k*g0 instead of computing g1 - g0."""
    ours, plain = start(seed, dtype), start(seed, dtype)
    form = {"lean": True, "precondition": False}
    run(wsam.WSAM(torch_base(base, ours), rho=0.0, gamma=gamma, **form), ours, style)
    run_plain(torch_base(base, plain), plain)
    assert gap(ours, plain) < (1e-3 if dtype is torch.float32 else 1e-11)


@given(seed=seeds, dtype=dtypes, rho=radii, base=bases, style=styles)
def test_coupled_at_one_half_is_sam(seed, dtype, rho, base, style) -> None:
    ours, theirs = start(seed, dtype), start(seed, dtype)
    opt, twin = torch_base(base, ours), torch_base(base, theirs)
    run(wsam.CoupledWSAM(opt, rho=rho, gamma=0.5), ours, style)
    run(wsam.SAM(twin, rho=rho), theirs, style)
    assert same(weights_and_state(opt, ours), weights_and_state(twin, theirs))


@given(seed=seeds, dtype=dtypes, rho=radii, base=bases, style=styles)
def test_gsam_with_alpha_zero_is_sam(seed, dtype, rho, base, style) -> None:
    ours, theirs = start(seed, dtype), start(seed, dtype)
    opt, twin = torch_base(base, ours), torch_base(base, theirs)
    run(wsam.GSAM(opt, rho=rho, alpha=0.0), ours, style)
    run(wsam.SAM(twin, rho=rho), theirs, style)
    assert same(weights_and_state(opt, ours), weights_and_state(twin, theirs))


@pytest.mark.parametrize("kind", [wsam.WSAM, wsam.CoupledWSAM])
@given(seed=seeds, bad=st.sampled_from([math.nan, math.inf]), base=bases)
def test_zero_coefficient_is_a_branch(kind, seed, bad, base) -> None:
    """With gamma = 0 an infinite g1 has no effect; 0 * inf would be NaN."""
    ours, plain = start(seed), start(seed)
    opt = kind(torch_base(base, ours), gamma=0.0)
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        opt.zero_grad()
        value = losses(ours, 0).mean()
        value.backward()
        if calls == 2:
            ours[0].grad.fill_(bad)
        return value

    opt.step(closure)
    twin = torch_base(base, plain)
    losses(plain, 0).mean().backward()
    twin.step()
    assert same([p.detach() for p in ours], [p.detach() for p in plain])


@given(seed=seeds, rho=radii, gamma=gammas, style=styles)
def test_decoupled_is_coupled_for_plain_sgd(seed, rho, gamma, style) -> None:
    ours, theirs = start(seed), start(seed)
    run(wsam.WSAM(torch.optim.SGD(ours, lr=0.01), rho=rho, gamma=gamma), ours, style)
    run(wsam.CoupledWSAM(torch.optim.SGD(theirs, lr=0.01), rho=rho, gamma=gamma), theirs, style)
    assert gap(ours, theirs) < 1e-10


@pytest.mark.parametrize("base", BASES)
def test_decoupled_at_one_half_is_sam_for_plain_sgd_only(base: str) -> None:
    ours, theirs = start(5), start(5)
    run(wsam.WSAM(torch_base(base, ours), rho=0.1, gamma=0.5), ours)
    run(wsam.SAM(torch_base(base, theirs), rho=0.1), theirs)
    if base == "sgd":
        assert gap(ours, theirs) < 1e-12
    else:
        assert gap(ours, theirs) > 1e-6


@MANY
@given(name=methods, seed=seeds, rho=radii, base=bases, cut=st.integers(1, 3))
def test_splitting_into_groups_changes_nothing(name, seed, rho, base, cut) -> None:
    ours, theirs = start(seed), start(seed)
    groups = [{"params": ours[:cut]}, {"params": ours[cut:]}]
    run(make_method(name, torch_base(base, groups), rho=rho), ours)
    run(make_method(name, torch_base(base, theirs), rho=rho), theirs)
    assert gap(ours, theirs) < 1e-8


@given(seed=seeds, rho=radii)
def test_asam_on_signs_is_sam(seed, rho) -> None:
    """With weights of plus or minus one and eta = 0 the ellipsoid is a ball."""
    ours, theirs = start(seed), start(seed)
    for p, q in zip(ours, theirs, strict=True):
        p.data.sign_()
        q.data.sign_()
    opt = wsam.ASAM(torch.optim.SGD(ours, lr=0.1), rho=rho, eta=0.0)
    twin = wsam.SAM(torch.optim.SGD(theirs, lr=0.1), rho=rho)
    make_step(opt, lambda: losses(ours, 0).mean())
    make_step(twin, lambda: losses(theirs, 0).mean())
    assert gap(ours, theirs) < 1e-14


@given(seed=seeds, rho=radii, scale=st.floats(0.01, 100.0))
def test_asam_is_invariant_to_rescaling(seed, rho, scale) -> None:
    """w1 -> c w1, w2 -> w2 / c leaves a linear network unchanged, and so does ASAM's w + d."""
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(3, 2)

    def seen(kind: type[wsam.SharpnessAware], c: float, **options: float) -> Tensor:
        first, second, *_ = (p.detach()[:2, :2].clone() for p in (start(seed)[0], start(seed)[2]))
        w = [nn.Parameter(first * c), nn.Parameter(second / c)]
        opt = kind(torch.optim.SGD(w, lr=0.1), rho=rho, **options)

        def out() -> Tensor:
            return (x @ w[0].T) @ w[1].T

        (out() ** 2).mean().backward()
        with opt.perturbed():
            return out().detach()

    assert torch.allclose(seen(wsam.ASAM, scale, eta=0.0), seen(wsam.ASAM, 1.0, eta=0.0), 1e-9)
    if abs(math.log(scale)) > 1:
        sam = seen(wsam.SAM, scale), seen(wsam.SAM, 1.0)
        assert not torch.allclose(*sam, 1e-9), "the test would detect nothing"


@MANY
@given(name=st.sampled_from([*VARIANTS, *ONE_PASS]), seed=seeds, rho=radii, base=bases)
def test_maximize_is_minimizing_the_negative(name, seed, rho, base) -> None:
    up, down = start(seed), start(seed)
    kind, options, _, _ = BASES[base]
    maximizer, minimizer = (
        make_method(name, base, rho=rho, all_samples=True)
        for base in (kind(up, maximize=True, **options), kind(down, **options))
    )
    for t in range(STEPS):
        make_step(maximizer, lambda t=t: -maximizer.select(losses(up, t)))
        make_step(minimizer, lambda t=t: minimizer.select(losses(down, t)))
    assert same([p.detach() for p in up], [p.detach() for p in down])


@MANY
@given(name=methods, seed=seeds, base=bases, style=styles)
def test_steps_outside_the_interval_are_the_base(name, seed, base, style) -> None:
    ours, plain = start(seed), start(seed)
    never = wsam.schedule.Between(10**6)
    opt, twin = torch_base(base, ours), torch_base(base, plain)
    run(make_method(name, opt, when=never, all_samples=True), ours, style)
    run_plain(twin, plain)
    assert same(weights_and_state(opt, ours), weights_and_state(twin, plain))


def step_on(opt: wsam.SharpnessAware, p: nn.Parameter, first: float, second: float) -> float:
    """Make a step with these gradients in the two passes."""
    p.grad = torch.full_like(p, first)
    opt.ascend()
    p.grad = torch.full_like(p, second)
    opt.descend()
    opt.step()
    return float(p.detach().flatten()[0])


@pytest.mark.parametrize("lean", [False, True])
def test_zero_coefficient_is_a_branch_by_hand(lean: bool) -> None:
    p = nn.Parameter(torch.ones(2))
    opt = wsam.WSAM(torch.optim.SGD([p], lr=0.1), gamma=0.0, lean=lean)
    assert step_on(opt, p, 2.0, math.inf) == pytest.approx(0.8)


def test_gsam_with_alpha_zero_in_one_group_is_sam_there() -> None:
    """g0 + (g1 - g0) would lose g1 to rounding if g0 is large."""
    p, other = nn.Parameter(torch.full((2,), 1e4)), nn.Parameter(torch.ones(2))
    groups = [{"params": [p], "alpha": 0.0}, {"params": [other]}]
    opt = wsam.GSAM(torch.optim.SGD(groups, lr=1.0), alpha=0.5)
    other.grad = torch.ones(2)
    assert step_on(opt, p, 1e8, 1.0) == 9999.0
