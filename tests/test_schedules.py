"""Radius and weight of sharpness that move with the steps; steps that are perturbed or not."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from helpers import (
    MEMBERS,
    PROBLEMS,
    STYLES,
    gap,
    make_step,
    member,
    parameters,
    reference_base,
    torch_base,
    train,
)
from hypothesis import given
from hypothesis import strategies as st
from reference import Method
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR

import wsam
from wsam.schedule import (
    Between,
    Constant,
    Every,
    FollowLR,
    Function,
    InverseSqrt,
    NormAbove,
    Schedule,
    Warmup,
)

MLP = PROBLEMS["mlp"]

FORMULAS: dict[str, tuple[Schedule, Callable[[int], float]]] = {
    "constant": (Constant(0.3), lambda t: 0.3),
    "warmup": (Warmup(0.6, 4), lambda t: 0.6 * min(1.0, t / 4)),
    "warmup_from": (Warmup(0.6, 4, start=0.2), lambda t: 0.2 + 0.4 * min(1.0, t / 4)),
    "inverse_sqrt": (InverseSqrt(0.5), lambda t: 0.5 / math.sqrt(t + 1)),
    "function": (Function(lambda t: 0.1 + 0.05 * t), lambda t: 0.1 + 0.05 * t),
    "follow_lr": (FollowLR(0.4, 0.1, lr_high=0.02, lr_low=0.0), lambda t: 0.4),
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", FORMULAS)
@pytest.mark.parametrize(("name", "key"), [("wsam", "gamma"), ("wsam", "rho"), ("gsam", "alpha")])
def test_scheduled_values_are_the_formulas(name: str, key: str, kind: str, style: str) -> None:
    """The judge is given the formula's value at each step, counted from the first."""
    schedule, formula = FORMULAS[kind]
    params, w, base = parameters(MLP.weights()), MLP.weights(), reference_base("momentum")
    opt = member(name, torch_base("momentum", params), **{key: schedule})
    for t in range(6):
        method = Method(reference.MEMBERS[name].rule, **{key: formula(t)})
        g0, g1 = reference.two_gradients(method, w, lambda v, t=t: MLP.losses(v, t))
        w = reference.update(method, base, w, g0, g1)
        train(opt, params, MLP, range(t, t + 1), style)
        assert opt.param_groups[0][f"sam_{key}"] == pytest.approx(formula(t))
    assert gap(params, w) < 1e-12


@pytest.mark.parametrize("name", MEMBERS)
def test_every_member_takes_a_scheduled_radius(name: str) -> None:
    ours, theirs = parameters(MLP.weights()), parameters(MLP.weights())
    opt = member(name, torch_base("sgd", ours), rho=Function(lambda t: 0.1 * (t + 1)))
    twin = member(name, torch_base("sgd", theirs), rho=0.1)
    for t in range(4):
        twin.param_groups[0]["sam_rho"] = 0.1 * (t + 1)
        train(opt, ours, MLP, range(t, t + 1))
        train(twin, theirs, MLP, range(t, t + 1))
    assert gap(ours, theirs) < 1e-14


@given(lr=st.floats(0.0, 0.2))
def test_radius_follows_the_learning_rate(lr: float) -> None:
    """rho_min + (rho_max - rho_min)(lr - lr_min)/(lr_max - lr_min), never below rho_min."""
    wanted = max(0.02, 0.02 + (0.3 - 0.02) * (lr - 0.01) / (0.1 - 0.01))
    found = FollowLR(0.3, 0.02, lr_high=0.1, lr_low=0.01).value(0, lr)
    assert float(found) == pytest.approx(wanted, rel=1e-9)


def test_gsam_radius_through_warmup_and_decay() -> None:
    """The radius follows the scheduler's learning rate and does not go negative in warm-up."""
    p = nn.Parameter(torch.tensor([1.0, -2.0]))
    opt = wsam.GSAM(torch.optim.SGD([p], lr=0.1), rho=0.3, rho_min=0.02, lr_min=0.01)
    rates = [0.0, 0.05, 1.0, 0.5, 0.1, 0.001]
    scheduler = LambdaLR(opt, lambda t: rates[t])
    for t in range(5):
        make_step(opt, lambda: opt.select(p**4))
        lr = 0.1 * rates[t]
        wanted = max(0.02, 0.02 + 0.28 * (lr - 0.01) / 0.09)
        assert opt.param_groups[0]["sam_rho"] == pytest.approx(wanted)
        scheduler.step()


def test_groups_have_schedules_of_their_own() -> None:
    params = parameters(MLP.weights())
    groups = [
        {"params": params[:2], "sam_gamma": Warmup(0.8, 4)},
        {"params": params[2:], "gamma": 0.5},
    ]
    opt = wsam.WSAM(torch.optim.SGD(groups, lr=0.01), rho=InverseSqrt(0.2))
    for t in range(5):
        train(opt, params, MLP, range(t, t + 1))
        assert opt.param_groups[0]["sam_gamma"] == pytest.approx(0.8 * min(1.0, t / 4))
        assert opt.param_groups[1]["sam_gamma"] == 0.5
        assert [g["sam_rho"] for g in opt.param_groups] == [pytest.approx(0.2 / (t + 1) ** 0.5)] * 2


def passes_of(when: Any, steps: int, style: str = "closure") -> list[bool]:
    """Which steps were perturbed, told by the weights that the passes see."""
    w = nn.Parameter(torch.tensor([3.0, -1.0]))
    opt = wsam.SAM(torch.optim.SGD([w], lr=0.01), rho=0.5, when=when)
    chosen = []
    for t in range(steps):
        seen: list[Tensor] = []

        def loss(t: int = t, seen: list[Tensor] = seen) -> Tensor:
            seen.append(w.detach().clone())
            return (1.0 + 10.0 * (t == 3)) * (w**2).mean()

        make_step(opt, loss, style)
        chosen.append(len(seen) == 2 and not torch.equal(*seen))
    return chosen


@pytest.mark.parametrize("style", STYLES)
def test_intervals(style: str) -> None:
    yes, no = True, False
    assert passes_of(None, 3, style) == [yes, yes, yes]
    assert passes_of(Every(3), 7, style) == [yes, no, no, yes, no, no, yes]
    assert passes_of(Every(2, offset=1), 5, style) == [no, yes, no, yes, no]
    assert passes_of(Between(2, 4), 6, style) == [no, no, yes, yes, no, no]
    assert passes_of(Between(3), 5, style) == [no, no, no, yes, yes]
    assert passes_of(Every(2) & Between(2), 5, style) == [no, no, yes, no, yes]
    assert passes_of(Every(4) | Between(2, 3), 5, style) == [yes, no, yes, no, yes]


def test_interval_by_gradient_norm() -> None:
    """The step whose gradient stands out is chosen; a quiet one after it is not."""
    chosen = passes_of(NormAbove(), 6)
    assert chosen[3]
    assert not chosen[4]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Warmup(0.9, 0),
        lambda: Warmup(0.9, -3),
        lambda: Warmup(0.9, 2.5),
        lambda: Every(0),
        lambda: Every(2, offset=-1),
        lambda: Between(-1),
        lambda: FollowLR(0.1, 0.2, lr_high=0.1),
        lambda: FollowLR(0.2, 0.1, lr_high=0.1, lr_low=0.1),
        lambda: NormAbove(decay=1.0),
    ],
)
def test_bad_schedules(make: Callable[[], Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        make()


def test_scheduler_of_the_learning_rate_reaches_the_decoupled_term() -> None:
    """The decoupled term uses the learning rate of its own step."""
    params, w = parameters(MLP.weights()), MLP.weights()
    method, base = Method("wsam", gamma=0.8), reference_base("sgd")
    opt = wsam.WSAM(torch_base("sgd", params), gamma=0.8)
    scheduler = ExponentialLR(opt, gamma=0.5)
    for t in range(5):
        base.lr = 0.05 * 0.5**t
        g0, g1 = reference.two_gradients(method, w, lambda v, t=t: MLP.losses(v, t))
        w = reference.update(method, base, w, g0, g1)
        train(opt, params, MLP, range(t, t + 1))
        scheduler.step()
    assert gap(params, w) < 1e-12


def test_a_schedule_of_ones_own_with_a_name_of_ours() -> None:
    """It cannot be saved, and is not replaced by ours."""

    class Warmup(wsam.schedule.Warmup):
        def value(self, step: int, lr: Any) -> float:
            return 0.5

    class Constant(wsam.schedule.Schedule):
        def value(self, step: int, lr: Any) -> float:
            return 0.5

    for own in (Warmup(0.1, steps=3), Constant()):
        opt = wsam.SAM(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), rho=own)
        state = opt.state_dict()
        assert state["sharpness"]["schedules"] == [{"rho": None}]
        opt.load_state_dict(state)
        assert opt._schedules == [{"rho": own}]


def test_a_step_that_fails_leaves_no_trace_in_the_running_norm() -> None:
    p = nn.Parameter(torch.ones(2))
    when = wsam.schedule.NormAbove() & wsam.schedule.Every(1)
    opt = wsam.SAM(torch.optim.SGD([p], lr=0.1), when=when)
    passes: list[int] = []

    def fails() -> Tensor:
        passes.append(1)
        loss = p.square().sum()
        loss.backward()
        if len(passes) == 2:
            raise RuntimeError("the second pass failed")
        return loss

    with pytest.raises(RuntimeError, match="second pass"):
        opt.step(fails)
    assert opt.state_dict()["sharpness"]["interval"]["one"]["mean"] == 0.0
    opt.step(fails)
    assert opt.state_dict()["sharpness"]["interval"]["one"]["mean"] == pytest.approx(8.0)


def test_a_step_that_is_skipped_leaves_no_trace_in_the_running_norm() -> None:
    p, when = nn.Parameter(torch.ones(2)), wsam.schedule.NormAbove()
    opt = wsam.SAM(torch.optim.SGD([p], lr=0.1), when=when, nonfinite="skip")
    passes: list[int] = []

    def overflows() -> Tensor:
        passes.append(1)
        loss = p.square().sum() * (math.inf if len(passes) == 2 else 1.0)
        loss.backward()
        return loss

    opt.step(overflows)
    assert opt.skipped == 1
    assert opt.when is when
    assert when.mean == 0.0


def test_an_interval_of_ones_own_is_not_copied() -> None:
    """It may hold what cannot be copied, the optimizer itself included."""

    class Own(wsam.schedule.Interval):
        needs_norm = True

        def chosen(self, step: int, norm: Callable[[], float]) -> bool:
            self.opt.state_dict()
            return norm() > 0

    p, when = nn.Parameter(torch.ones(2)), Own()
    when.opt = opt = wsam.SAM(torch.optim.SGD([p], lr=0.1), when=when)
    make_step(opt, lambda: p.square().sum())
    assert opt.when is when
