"""Schedules and intervals in a state: the loaded ones replace those of the constructor."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    PROBLEMS,
    make_step,
    parameters,
    same,
    save_and_load,
    snapshot,
    torch_base,
    train,
)
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

import wsam
from wsam.schedule import (
    Between,
    Constant,
    Every,
    FollowLR,
    Function,
    Interval,
    NormAbove,
    Warmup,
)

MLP = PROBLEMS["mlp"]
STEPS = 6


class Custom(Interval):
    """An interval that cannot be saved."""

    def chosen(self, step: int, norm: Any) -> bool:
        return step == 1


def built(**options: Any) -> wsam.SharpnessAware:
    return wsam.WSAM(torch_base("sgd", parameters(MLP.weights())), **options)


@pytest.mark.parametrize("with_rho_min", [True, False])
def test_radius_that_follows_the_rate_resumes_bitwise(with_rho_min: bool) -> None:
    """Also if the loading optimizer was constructed without `rho_min`, at another rate."""

    def make(w: list[torch.Tensor], again: bool) -> tuple[list[nn.Parameter], Any, LRScheduler]:
        params = parameters(w)
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.003}]
        base = torch.optim.SGD(groups, lr=0.7 if again else 0.02, momentum=0.9)
        follow = {} if again and not with_rho_min else {"rho": 0.3, "rho_min": 0.02}
        opt = wsam.GSAM(base, **follow)
        cycle = OneCycleLR(opt, max_lr=[0.05, 0.01], total_steps=STEPS + 1)
        return params, opt, cycle

    params, opt, scheduler = make(MLP.weights(), False)
    saved = []
    for t in range(STEPS):
        state = {"w": [p.detach() for p in params], "opt": opt.state_dict()}
        saved.append(save_and_load({**state, "scheduler": scheduler.state_dict()}))
        train(opt, params, MLP, range(t, t + 1))
        scheduler.step()
    assert [named["rho"].found for named in opt._values.schedules] == [0.05, 0.01]
    for t, checkpoint in enumerate(saved):
        other, resumed, cycle = make(checkpoint["w"], True)
        resumed.load_state_dict(checkpoint["opt"])
        cycle.load_state_dict(checkpoint["scheduler"])
        for at in range(t, STEPS):
            train(resumed, other, MLP, range(at, at + 1))
            cycle.step()
        assert same(snapshot(resumed), snapshot(opt)), f"resumed at step {t}"


def test_follow_lr_saved_by_an_earlier_version() -> None:
    """Its state has one largest rate for all groups, which is kept."""
    p = nn.Parameter(torch.ones(2))
    opt = wsam.GSAM(torch.optim.SGD([p], lr=0.1), rho=0.05, rho_min=0.01)
    state = opt.state_dict()
    old = {"kind": "FollowLR", "high": 0.05, "low": 0.01, "lr_high": 0.2, "lr_low": 0.0}
    state["sharpness"]["schedules"] = [{"rho": old}]
    opt.load_state_dict(save_and_load(state))
    assert opt._values.schedules == [{"rho": FollowLR(0.05, 0.01, lr_high=0.2)}]
    make_step(opt, lambda: p.square().sum())
    assert opt.param_groups[0]["sam_rho"] == pytest.approx(0.03)


SAVED_AND_LOADED: list[tuple[Any, Any]] = [(None, Every(5)), (Every(3), Every(5)), (Every(3), None)]


@pytest.mark.parametrize(("before", "constructed"), SAVED_AND_LOADED)
def test_saved_interval_replaces_the_constructed_one(before: Any, constructed: Any) -> None:
    """Also if none was saved."""
    state = save_and_load(built(when=before).state_dict())
    opt = built(when=constructed)
    opt.load_state_dict(state)
    assert opt.when == before


@pytest.mark.parametrize(("before", "constructed"), [(None, 0.3), (0.3, 0.5), (0.3, None)])
def test_saved_schedules_replace_the_constructed_ones(before: Any, constructed: Any) -> None:
    given = [{} if level is None else {"gamma": Constant(level)} for level in (before, constructed)]
    opt = built(**given[1])
    opt.load_state_dict(save_and_load(built(**given[0]).state_dict()))
    assert opt._values.schedules == [given[0]]


def test_schedule_of_a_hyperparameter_that_the_saved_method_lacks() -> None:
    """The constructed one stays, as a plain value does."""
    state = save_and_load(wsam.SAM(torch_base("sgd", parameters(MLP.weights()))).state_dict())
    opt = built(gamma=Warmup(0.9, steps=4), rho=Constant(0.3))
    with pytest.warns(wsam.WsamWarning, match="saved with rule=Perturbed"):
        opt.load_state_dict(state)
    assert opt._values.schedules == [{"gamma": Warmup(0.9, steps=4)}]
    assert opt.rho == 0.05


@pytest.mark.parametrize("when", [Custom(), Custom() & Every(2)])
def test_interval_that_could_not_be_saved(when: Interval) -> None:
    """The constructed one stays; without one the state is rejected before anything changes."""
    state = save_and_load(built(when=when).state_dict())
    opt = built(when=when)
    opt.load_state_dict(state)
    assert opt.when is when
    bare = built(rho=0.2)
    before = snapshot(bare)
    with pytest.raises(ValueError, match=r"`when`.*construct the optimizer with it"):
        bare.load_state_dict(state)
    assert same(snapshot(bare), before)


def test_schedule_that_could_not_be_saved() -> None:
    state = save_and_load(built(gamma=Function(lambda t: 0.5)).state_dict())
    with pytest.raises(ValueError, match=r"gamma.*construct the optimizer with it"):
        built().load_state_dict(state)


def test_state_without_information_about_an_interval() -> None:
    """Of an earlier version, or of a plain base: the constructed interval stays."""
    old = copy.deepcopy(built().state_dict())
    del old["sharpness"]["interval_lost"]
    plain = {key: old[key] for key in ("state", "param_groups")}
    for state in (old, plain):
        for when in (None, Between(2)):
            opt = built(when=when)
            opt.load_state_dict(save_and_load(state))
            assert opt.when is when


# --- a base that loads a state ---------------------------------------------------------------------


def two_groups() -> wsam.SharpnessAware:
    """Return an optimizer with two groups that have their own values, after one step."""
    params = [nn.Parameter(torch.full((2,), value)) for value in (1.0, 2.0)]
    groups = [
        {"params": [params[0]], "rho": Warmup(0.5, 10), "name": "a"},
        {"params": [params[1]], "rho": 0.2, "gamma": Warmup(0.6, 10), "name": "b"},
    ]
    opt = wsam.WSAM(torch.optim.SGD(groups, lr=0.01, momentum=0.9), rho=0.1)
    step_on(opt)
    return opt


def step_on(opt: wsam.SharpnessAware) -> None:
    held = [p for group in opt.param_groups for p in group["params"]]
    make_step(opt, lambda: sum((p**2).sum() for p in held))


@pytest.mark.parametrize("add_group", [False, True])
def test_base_that_loads_its_own_state(add_group: bool) -> None:
    """Values, also those written into groups, and the number of steps are kept."""
    opt, twin = two_groups(), two_groups()
    plain = opt.base.state_dict()
    for group in plain["param_groups"]:
        for key in [key for key in group if key.startswith("sam_")]:
            del group[key]
    for one in (opt, twin):
        step_on(one)
        one.param_groups[1]["sam_rho"] = 0.4
    plain["state"] = copy.deepcopy(opt.base.state_dict()["state"])
    opt.base.load_state_dict(plain)
    assert "sam_rho" not in opt.param_groups[0]
    assert repr(opt).partition("base=")[0] == repr(twin).partition("base=")[0]
    for one in (opt, twin):
        if add_group:
            one.base.add_param_group({"params": [nn.Parameter(torch.ones(2))], "name": "c"})
    assert same(opt.state_dict()["param_groups"], twin.state_dict()["param_groups"])
    for _ in range(2):
        step_on(opt)
        step_on(twin)
    assert same(snapshot(opt), snapshot(twin))


# --- numbers of NumPy ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"when": Every(np.int64(3))},
        {"gamma": Warmup(np.float64(0.9), steps=np.int32(5))},
        {"when": Every(2) & NormAbove(np.float32(1.0))},
    ],
)
def test_numpy_numbers_are_saved_as_plain_ones(options: dict[str, Any]) -> None:
    params = parameters(MLP.weights())
    opt = wsam.WSAM(torch_base("sgd", params), **options)
    train(opt, params, MLP, range(1))
    again = built()
    again.load_state_dict(save_and_load(opt.state_dict()))
    assert again.when == opt.when
    assert again._values.schedules == opt._values.schedules
