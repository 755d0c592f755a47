"""Promises about saved schedules and intervals: the state says what there is, and what there is not."""

import copy
from typing import Any

import pytest
import torch
from helpers import PROBLEMS, make_step, parameters, same, snapshot, torch_base, train
from test_promises_state_dict import through_a_file
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
    assert [named["rho"].found for named in opt._schedules] == [0.05, 0.01]
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
    assert opt._schedules == [{"rho": FollowLR(0.05, 0.01, lr_high=0.2)}]
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
    assert opt._schedules == [given[0]]


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


def by_name(opt: wsam.SharpnessAware) -> dict[str, Any]:
    return {
        group["name"]: ([p.detach() for p in group["params"]], group["sam_rho"], group["sam_gamma"])
        for group in opt.param_groups
    }


@pytest.mark.parametrize("order", ["ba", "cab", "acb", "bca", "cba"])
def test_schedules_stay_with_their_groups(order: str) -> None:
    _, opt = moved(order)
    _, twin = moved("".join(sorted(order)))
    for _ in range(3):
        step_on(opt)
        step_on(twin)
    assert same(by_name(opt), by_name(twin))
    assert [group["name"] for group in opt.param_groups] == list(order)


@pytest.mark.parametrize("order", ["ba", "cab", "bca"])
def test_a_state_is_saved_in_the_order_of_its_groups(order: str) -> None:
    """Also before a step has been made with the groups in that order."""
    (_, opt), (_, other) = moved(order), moved(order)
    other.load_state_dict(through_a_file(opt.state_dict()))
    for _ in range(2):
        step_on(opt)
        step_on(other)
    assert same(snapshot(opt), snapshot(other))
    reorder(opt, order[::-1])
    reorder(other, order[::-1])
    step_on(opt)
    step_on(other)
    assert same(snapshot(opt), snapshot(other))


@pytest.mark.parametrize("remake", ["load", "copy"])
def test_groups_that_were_made_anew_are_known_by_their_order(remake: str) -> None:
    """Loading into the base, and copying, make other dicts of all groups."""
    (_, opt), (_, twin) = moved("ab"), moved("ab")
    if remake == "load":
        opt.base.load_state_dict(opt.base.state_dict())
    else:
        opt = copy.deepcopy(opt)
    for one in (opt, twin):
        one.base.add_param_group({"params": [nn.Parameter(torch.ones(2))], "name": "c"})
    reorder(opt, "cab")
    step_on(opt)
    step_on(twin)
    assert same(by_name(opt), by_name(twin))


def test_another_wrapper_hears_what_groups_said_that_were_moved() -> None:
    _, opt = moved("cab")
    again = wsam.WSAM(opt.base, rho=0.05)
    values = {group["name"]: group["sam_rho"] for group in again.param_groups}
    assert values["b"] == 0.2
    assert values["c"] == 0.05
    assert again._schedules[1]["rho"] == Warmup(0.5, 10)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_group_that_was_removed_is_missed(replaced: bool) -> None:
    _, opt = moved("ab")
    state = copy.deepcopy(opt.state_dict())
    opt.base.param_groups.pop(0)
    if replaced:
        opt.base.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    for act in (lambda: step_on(opt), opt.state_dict, lambda: opt.load_state_dict(state)):
        with pytest.raises(RuntimeError, match="group was removed from the base"):
            act()


def test_a_group_that_is_refused_changes_nothing() -> None:
    """Not even a group that is new beside it and would be right."""
    _, opt = moved("cab", rho=0.3)
    bad = nn.Parameter(torch.ones(2))
    opt.base.add_param_group({"params": [bad], "alpha": 0.1})
    for _ in range(2):
        with pytest.raises(ValueError, match="alpha"):
            opt.state_dict()
        assert opt.base.param_groups[0]["rho"] == 0.3
    opt.base.param_groups.pop()
    step_on(opt)
    assert [group["sam_rho"] for group in opt.param_groups] == [0.3, 0.05, 0.2]
