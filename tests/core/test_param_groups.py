"""Promises about parameter groups: added late, with values of their own, never ignored."""

from dataclasses import replace
from typing import Any

import pytest
import reference
import torch
from helpers import (
    MEMBERS,
    PROBLEMS,
    STYLES,
    closure,
    gap,
    make_step,
    member,
    parameters,
    reference_base,
    same,
    snapshot,
    torch_base,
    train,
)
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import wsam
from wsam.accel.graph_inputs import GraphScalars as Scalars

MLP = PROBLEMS["mlp"]
LATE_AND_LEAN = [(name, False) for name in MEMBERS] + [
    (name, True) for name in MEMBERS if reference.MEMBERS[name].rule == "wsam"
]


@pytest.mark.parametrize("base", ["momentum", "adam"])
@pytest.mark.parametrize(("name", "lean"), LATE_AND_LEAN)
def test_add_param_group(name: str, lean: bool, base: str) -> None:
    """A group added later works like one that was there from the start."""
    ours, theirs = parameters(MLP.weights()), parameters(MLP.weights())
    late = {"params": ours[2:], "lr": 0.003, "sam_rho": 0.2}
    opt = member(name, torch_base(base, ours[:2]), lean=lean)
    opt.add_param_group(late)
    whole = [{"params": theirs[:2]}, {"params": theirs[2:], "lr": 0.003, "sam_rho": 0.2}]
    twin = member(name, torch_base(base, whole), lean=lean)
    train(opt, ours, MLP, range(4))
    train(twin, theirs, MLP, range(4))
    assert opt.base.param_groups is opt.param_groups
    assert same(snapshot(opt), snapshot(twin))


@pytest.mark.parametrize("name", MEMBERS)
def test_add_param_group_refuses_bad_values(name: str) -> None:
    params = parameters(MLP.weights())
    opt = member(name, torch.optim.SGD(params[:2], lr=0.1))
    before = snapshot(opt)
    with pytest.raises(ValueError, match="rho"):
        opt.add_param_group({"params": params[2:], "sam_rho": -0.1})
    assert len(opt.param_groups) == len(opt.base.param_groups) == 1
    assert same(snapshot(opt), before)


DENSE = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in {"Optimizer", "LBFGS", "SparseAdam"}
)


@pytest.mark.parametrize("base", DENSE)
@pytest.mark.parametrize(("name", "lean"), LATE_AND_LEAN)
def test_every_torch_base(name: str, lean: bool, base: str) -> None:
    """All of torch's optimizers for dense gradients run, and keep their own group keys."""
    assert {"RMSprop", "Adadelta", "Adam"} <= set(DENSE)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False))
    kind = getattr(torch.optim, base)
    wrapped = kind(model.parameters(), lr=0.01)
    own = {k: v for k, v in wrapped.param_groups[0].items() if k != "params"}
    opt = member(name, wrapped, lean=lean)
    start = [p.detach().clone() for p in model.parameters()]
    for t in range(3):
        opt.step(closure(opt, model, t))
    for p, q in zip(model.parameters(), start, strict=True):
        assert p.isfinite().all()
        assert not torch.equal(p, q)
    assert {k: opt.param_groups[0][k] for k in own} == own


@pytest.mark.parametrize("name", MEMBERS)
def test_lbfgs_and_sparse_adam_are_refused(name: str) -> None:
    p = nn.Parameter(torch.zeros(3))
    for kind in (torch.optim.LBFGS, torch.optim.SparseAdam):
        with pytest.raises((TypeError, ValueError), match=kind.__name__):
            member(name, kind([p]))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("name", "lean"), LATE_AND_LEAN)
def test_per_group_hyper(name: str, lean: bool, style: str) -> None:
    """Each group has its own radius and weights of sharpness; the norm stays global."""
    own = {
        "wsam": ("gamma", [0.3, 0.3, 0.8, 0.8]),
        "coupled": ("gamma", [0.3, 0.3, 0.8, 0.8]),
        "gsam": ("alpha", [0.1, 0.1, 0.7, 0.7]),
    }
    params, rho = parameters(MLP.weights()), [0.1, 0.1, 0.4, 0.4]
    method = replace(reference.MEMBERS[name], rho=rho)
    groups: list[dict[str, Any]] = [
        {"params": params[:2], "rho": 0.1},
        {"params": params[2:], "sam_rho": 0.4},
    ]
    if method.rule in own:
        key, values = own[method.rule]
        method = replace(method, **{key: values})
        groups[0][key], groups[1][f"sam_{key}"] = values[0], values[-1]
    opt = member(name, torch_base("momentum", groups), lean=lean)
    w, base = MLP.weights(), reference_base("momentum")
    for t in range(5):
        mask = opt.geometry.mask(t, 4) if method.geometry == "masked" else None
        g0, g1 = reference.two_gradients(method, w, lambda v, t=t: MLP.losses(v, t), mask)
        w = reference.update(method, base, w, g0, g1)
    train(opt, params, MLP, range(5), style)
    assert gap(params, w) < 1e-12


@pytest.mark.parametrize("name", MEMBERS)
def test_per_group_hyper_is_never_ignored(name: str) -> None:
    """A value for a group that the member has no use for is an error, not a silent nothing."""
    has = {"wsam": "gamma", "coupled": "gamma", "gsam": "alpha"}.get(reference.MEMBERS[name].rule)
    for key in ("gamma", "alpha"):
        p = nn.Parameter(torch.zeros(3))
        base = torch.optim.SGD([{"params": [p], f"sam_{key}": 0.5}], lr=0.1)
        if key == has:
            assert member(name, base).param_groups[0][f"sam_{key}"] == 0.5
        else:
            with pytest.raises(ValueError, match=key):
                member(name, base)


def test_keys_of_the_base_are_its_own() -> None:
    """`alpha` of RMSprop and `rho` of Adadelta stay what they were and mean nothing to us."""
    p = nn.Parameter(torch.zeros(3))
    gsam = wsam.GSAM(torch.optim.RMSprop([{"params": [p], "alpha": 0.7}]), alpha=0.2)
    assert (gsam.param_groups[0]["alpha"], gsam.param_groups[0]["sam_alpha"]) == (0.7, 0.2)
    sam = wsam.SAM(torch.optim.Adadelta([{"params": [p], "rho": 0.8}]), rho=0.3)
    assert (sam.param_groups[0]["rho"], sam.param_groups[0]["sam_rho"]) == (0.8, 0.3)


def test_values_changed_by_hand_count() -> None:
    ours, theirs = parameters(MLP.weights()), parameters(MLP.weights())
    opt = wsam.WSAM(torch_base("momentum", ours), rho=0.05, gamma=0.9)
    opt.param_groups[0]["sam_rho"] = 0.3
    opt.param_groups[0]["sam_gamma"] = 0.6
    twin = wsam.WSAM(torch_base("momentum", theirs), rho=0.3, gamma=0.6)
    train(opt, ours, MLP, range(3))
    train(twin, theirs, MLP, range(3))
    assert same(ours, theirs)


@pytest.mark.parametrize("name", MEMBERS)
def test_add_param_group_to_the_base(name: str) -> None:
    """A group that was added to the base itself is not overlooked."""
    ours, theirs = parameters(MLP.weights()), parameters(MLP.weights())
    opt = member(name, torch_base("momentum", ours[:2]))
    opt.base.add_param_group({"params": ours[2:]})
    twin = member(name, torch_base("momentum", [{"params": theirs[:2]}, {"params": theirs[2:]}]))
    train(opt, ours, MLP, range(3))
    train(twin, theirs, MLP, range(3))
    assert same(snapshot(opt), snapshot(twin))


def test_what_a_captured_step_writes_of_groups_with_values_of_their_own() -> None:
    model = nn.Linear(2, 2)
    opt = wsam.SAM(torch.optim.SGD([{"params": model.parameters(), "rho": 0.1}], lr=0.1))
    opt.add_param_group({"params": nn.Linear(2, 2).parameters(), "rho": 0.2})
    Scalars(opt, torch.device("cpu")).write()


def test_names_are_needed_of_parameters_that_come_late() -> None:
    model, late = nn.Linear(2, 2), nn.Parameter(torch.full((2,), 5.0))
    opt = wsam.ASAM(torch.optim.SGD(model.parameters(), lr=0.1), weights_only=True, model=model)
    with pytest.raises(ValueError, match="names"):
        opt.add_param_group({"params": [late]})
    assert len(opt.param_groups) == len(opt._values.schedules) == 1
    model.late = late
    opt.add_param_group({"params": [late]})


def test_layers_that_come_late_keep_their_statistics() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    opt = wsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    model.append(nn.BatchNorm1d(4))
    opt.add_param_group({"params": model[1].parameters()})

    def run() -> torch.Tensor:
        loss = model(torch.arange(8.0).reshape(2, 4)).square().mean()
        loss.backward()
        return loss

    for count in (1, 2):
        opt.step(run)
        assert int(model[1].num_batches_tracked) == count


def test_a_radius_in_a_tensor_of_one_element() -> None:
    p = nn.Parameter(torch.tensor(1.0))
    opt = wsam.SAM(torch.optim.SGD([p], lr=0.1), rho=torch.tensor([0.5]))
    assert "rho=0.5" in repr(opt)
    opt.param_groups[0]["sam_rho"] = torch.tensor([0.25])

    def run() -> torch.Tensor:
        seen.append(p.item())
        loss = p.square()
        loss.backward()
        return loss

    seen: list[float] = []
    opt.step(run)
    assert seen == [1.0, 1.25]


def gsam_of(rates: list[float], **options: float) -> tuple[wsam.GSAM, list[nn.Parameter]]:
    params = [nn.Parameter(torch.ones(2)) for _ in rates]
    groups = [{"params": [p], "lr": lr} for p, lr in zip(params, rates, strict=True)]
    return wsam.GSAM(torch.optim.SGD(groups), rho=0.05, rho_min=0.01, **options), params


def test_layers_with_rates_of_their_own_have_a_radius_that_follows_them() -> None:
    """Each group is measured against its own largest rate, one that comes late, too."""
    opt, params = gsam_of([0.1, 0.001])
    late = nn.Parameter(torch.ones(2))
    opt.add_param_group({"params": [late], "lr": 0.02})
    assert [g["sam_rho"] for g in opt.param_groups] == [pytest.approx(0.05)] * 3
    LambdaLR(opt, lambda t: 0.5)
    make_step(opt, lambda: (params[0] * params[1] * late).square().sum())
    assert [g["sam_rho"] for g in opt.param_groups] == [pytest.approx(0.03)] * 3


def test_a_group_whose_rate_is_never_above_the_least() -> None:
    """It stays at rho_min until its rate is set by hand; the other group has its line."""
    opt, params = gsam_of([0.1, 0.001], lr_min=0.01)
    assert [g["sam_rho"] for g in opt.param_groups] == [pytest.approx(0.05), 0.01]
    opt.param_groups[0]["lr"], opt.param_groups[1]["lr"] = 0.055, 0.02
    make_step(opt, lambda: (params[0] * params[1]).square().sum())
    assert [g["sam_rho"] for g in opt.param_groups] == [pytest.approx(0.03), 0.05]
