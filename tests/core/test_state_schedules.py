"""Promises about saved schedules and intervals: the state says what there is, and what there is not."""

import copy
import pickle
from typing import Any

import pytest
import torch
from helpers import PROBLEMS, make_step, parameters, same, snapshot, torch_base, train
from test_state_dict import through_a_file
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

import wsam
from wsam.schedule import Between, Constant, Every, FollowLR, Function, Interval, Warmup

MLP = PROBLEMS["mlp"]
STEPS = 6


class Own(Interval):
    """An interval that no state can hold."""

    def chosen(self, step: int, norm: Any) -> bool:
        return step == 1


def through_pickle(opt: Any) -> Any:
    return pickle.loads(pickle.dumps(opt))


def built(**options: Any) -> wsam.SharpnessAware:
    return wsam.WSAM(torch_base("sgd", parameters(MLP.weights())), **options)


@pytest.mark.parametrize("watch", [True, False])
def test_a_radius_that_follows_the_rate_resumes_bitwise(watch: bool) -> None:
    """Also where the optimizer that loads was built without `rho_min`, at another rate."""

    def make(w: list[torch.Tensor], again: bool) -> tuple[list[nn.Parameter], Any, LRScheduler]:
        params = parameters(w)
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.003}]
        base = torch.optim.SGD(groups, lr=0.7 if again else 0.02, momentum=0.9)
        follow = {} if again and not watch else {"rho": 0.3, "rho_min": 0.02}
        opt = wsam.GSAM(base, **follow)
        cycle = OneCycleLR(opt, max_lr=[0.05, 0.01], total_steps=STEPS + 1)
        return params, opt, cycle

    params, opt, scheduler = make(MLP.weights(), False)
    saved = []
    for t in range(STEPS):
        state = {"w": [p.detach() for p in params], "opt": opt.state_dict()}
        saved.append(through_a_file({**state, "scheduler": scheduler.state_dict()}))
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


def test_a_radius_that_followed_the_rate_in_an_earlier_version() -> None:
    """Its state has a largest rate for all groups, which stays what it was."""
    p = nn.Parameter(torch.ones(2))
    opt = wsam.GSAM(torch.optim.SGD([p], lr=0.1), rho=0.05, rho_min=0.01)
    state = opt.state_dict()
    old = {"kind": "FollowLR", "high": 0.05, "low": 0.01, "lr_high": 0.2, "lr_low": 0.0}
    state["sharpness"]["schedules"] = [{"rho": old}]
    opt.load_state_dict(through_a_file(state))
    assert opt._values.schedules == [{"rho": FollowLR(0.05, 0.01, lr_high=0.2)}]
    make_step(opt, lambda: p.square().sum())
    assert opt.param_groups[0]["sam_rho"] == pytest.approx(0.03)


SAVED_AND_LOADED: list[tuple[Any, Any]] = [(None, Every(5)), (Every(3), Every(5)), (Every(3), None)]


@pytest.mark.parametrize(("before", "constructed"), SAVED_AND_LOADED)
def test_the_state_says_which_steps_are_perturbed(before: Any, constructed: Any) -> None:
    """As it was saved, none included: whatever the optimizer was constructed with."""
    state = through_a_file(built(when=before).state_dict())
    opt = built(when=constructed)
    opt.load_state_dict(state)
    assert opt.when == before


@pytest.mark.parametrize(("before", "constructed"), [(None, 0.3), (0.3, 0.5), (0.3, None)])
def test_the_state_says_which_values_are_scheduled(before: Any, constructed: Any) -> None:
    """The same rule as for steps."""
    given = [{} if level is None else {"gamma": Constant(level)} for level in (before, constructed)]
    opt = built(**given[1])
    opt.load_state_dict(through_a_file(built(**given[0]).state_dict()))
    assert opt._values.schedules == [given[0]]


@pytest.mark.parametrize("when", [Own(), Own() & Every(2)])
def test_an_interval_that_could_not_be_saved(when: Interval) -> None:
    """What was constructed stays; where nothing was, the state is refused and nothing has changed."""
    state = through_a_file(built(when=when).state_dict())
    opt = built(when=when)
    opt.load_state_dict(state)
    assert opt.when is when
    bare = built(rho=0.2)
    before = snapshot(bare)
    with pytest.raises(ValueError, match=r"`when`.*construct the optimizer with it"):
        bare.load_state_dict(state)
    assert same(snapshot(bare), before)


def test_a_schedule_that_could_not_be_saved() -> None:
    """The same rule as for intervals."""
    state = through_a_file(built(gamma=Function(lambda t: 0.5)).state_dict())
    with pytest.raises(ValueError, match=r"gamma.*construct the optimizer with it"):
        built().load_state_dict(state)


def test_states_that_do_not_tell_of_an_interval() -> None:
    """Of an earlier version, or of a plain base: what was constructed stays."""
    old = copy.deepcopy(built().state_dict())
    del old["sharpness"]["interval_lost"]
    plain = {key: old[key] for key in ("state", "param_groups")}
    for state in (old, plain):
        for when in (None, Between(2)):
            opt = built(when=when)
            opt.load_state_dict(through_a_file(state))
            assert opt.when is when


# --- groups that move --------------------------------------------------------------------------


def moved(order: str, **added: Any) -> tuple[list[nn.Parameter], wsam.SharpnessAware]:
    """Groups "a" and "b" with values of their own, the base given a group "c"; then in this order."""
    params = [nn.Parameter(torch.full((2,), value)) for value in (1.0, 2.0, 3.0)]
    groups = [
        {"params": [params[0]], "rho": Warmup(0.5, 10), "name": "a"},
        {"params": [params[1]], "rho": 0.2, "gamma": Warmup(0.6, 10), "name": "b"},
    ]
    opt = wsam.WSAM(torch.optim.SGD(groups, lr=0.01, momentum=0.9), rho=0.1)
    step_on(opt)
    if "c" in order:
        opt.base.add_param_group({"params": [params[2]], "name": "c", **added})
    reorder(opt, order)
    return params, opt


def step_on(opt: wsam.SharpnessAware) -> None:
    held = [p for group in opt.param_groups for p in group["params"]]
    make_step(opt, lambda: sum((p**2).sum() for p in held))


def reorder(opt: wsam.SharpnessAware, order: str) -> None:
    opt.base.param_groups.sort(key=lambda group: order.index(group["name"]))


# --- groups whose base is wrapped or loaded ----------------------------------------------------


@pytest.mark.parametrize("order", ["ab", "abc"])
def test_a_base_that_loads_a_state_of_its_own_goes_on(order: str) -> None:
    """Values, also those set by hand, and the number of steps stay what they were."""
    (_, opt), (_, twin) = moved("ab"), moved("ab")
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
        if "c" in order:
            one.base.add_param_group({"params": [nn.Parameter(torch.ones(2))], "name": "c"})
        reorder(one, order)
    assert same(opt.state_dict()["param_groups"], twin.state_dict()["param_groups"])
    for _ in range(2):
        step_on(opt)
        step_on(twin)
    assert same(snapshot(opt), snapshot(twin))
