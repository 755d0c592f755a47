"""Parameter groups: their own hyperparameters, groups added later, and attributes for all groups."""

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import reference
import torch
from helpers import (
    METHODS,
    PROBLEMS,
    RULE_VARIANTS,
    STYLES,
    VARIANTS,
    closure,
    covering,
    gap,
    make_method,
    make_step,
    parameters,
    reference_base,
    same,
    small_model,
    snapshot,
    torch_base,
    train,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import wsam
from wsam.accel.graph_inputs import GraphScalars
from wsam.rule import NOTHING, Mix, Part, Rule
from wsam.schedule import Every, Warmup

MLP = PROBLEMS["mlp"]


def sgd(*groups: dict[str, Any]) -> torch.optim.Optimizer:
    """Return SGD over these groups, with one parameter each."""
    return torch.optim.SGD(
        [{"params": [nn.Parameter(torch.ones(2))], **group} for group in groups], lr=0.1
    )


def reusing(base: torch.optim.Optimizer, offset: int = 0) -> wsam.WSAM:
    return wsam.WSAM(base, when=Every(2, offset), reuse=True)


def values(opt: wsam.SharpnessAware, name: str) -> list[Any]:
    return [group[f"sam_{name}"] for group in opt.param_groups]


def step_on(opt: wsam.SharpnessAware) -> None:
    params = [p for group in opt.param_groups for p in group["params"]]
    make_step(opt, lambda: opt.select(torch.stack([p.square().sum() for p in params])))


# --- groups added later ----------------------------------------------------------------------------


@covering(name=VARIANTS, base=["momentum", "adam"])
def test_add_param_group(name: str, base: str) -> None:
    """A group added later works like one from the start."""
    ours, theirs = parameters(MLP.weights()), parameters(MLP.weights())
    late = {"params": ours[2:], "lr": 0.003, "sam_rho": 0.2}
    opt = make_method(name, torch_base(base, ours[:2]))
    opt.add_param_group(late)
    whole = [{"params": theirs[:2]}, {"params": theirs[2:], "lr": 0.003, "sam_rho": 0.2}]
    twin = make_method(name, torch_base(base, whole))
    train(opt, ours, MLP, range(4))
    train(twin, theirs, MLP, range(4))
    assert opt.base.param_groups is opt.param_groups
    assert same(snapshot(opt), snapshot(twin))


@pytest.mark.parametrize("name", METHODS)
def test_add_param_group_with_a_bad_value(name: str) -> None:
    params = parameters(MLP.weights())
    opt = make_method(name, torch.optim.SGD(params[:2], lr=0.1))
    before = snapshot(opt)
    with pytest.raises(ValueError, match="rho"):
        opt.add_param_group({"params": params[2:], "sam_rho": -0.1})
    assert len(opt.param_groups) == len(opt.base.param_groups) == 1
    assert same(snapshot(opt), before)


@pytest.mark.parametrize("name", METHODS)
def test_add_param_group_to_the_base(name: str) -> None:
    """A group that was added to the base itself gets values, too."""
    ours, theirs = parameters(MLP.weights()), parameters(MLP.weights())
    opt = make_method(name, torch_base("momentum", ours[:2]))
    opt.base.add_param_group({"params": ours[2:]})
    groups = [{"params": theirs[:2]}, {"params": theirs[2:]}]
    twin = make_method(name, torch_base("momentum", groups))
    train(opt, ours, MLP, range(3))
    train(twin, theirs, MLP, range(3))
    assert same(snapshot(opt), snapshot(twin))


def test_value_set_after_a_group_was_added_to_the_base() -> None:
    first, late = (nn.Parameter(torch.ones(2)) for _ in range(2))
    opt = wsam.SAM(torch.optim.SGD([first], lr=0.1))
    opt.base.add_param_group({"params": [late]})
    opt.rho = 0.3
    assert [group["sam_rho"] for group in opt.param_groups] == [0.3, 0.3]


def test_stale_gradients_of_a_group_added_to_the_base() -> None:
    first, late = (nn.Parameter(torch.ones(2)) for _ in range(2))
    opt = wsam.SAM(torch.optim.SGD([first], lr=0.1))
    late.grad = torch.ones(2)
    opt.base.add_param_group({"params": [late]})

    def run() -> Tensor:
        loss = first.square().sum() + late.square().sum()
        loss.backward()
        return loss

    opt.step(run)
    assert torch.equal(first, late)


def test_add_param_group_without_the_names_that_weights_only_needs() -> None:
    model, late = nn.Linear(2, 2), nn.Parameter(torch.full((2,), 5.0))
    opt = wsam.ASAM(torch.optim.SGD(model.parameters(), lr=0.1), weights_only=True, model=model)
    with pytest.raises(ValueError, match="names"):
        opt.add_param_group({"params": [late]})
    assert len(opt.param_groups) == len(opt._values.schedules) == 1
    model.late = late
    opt.add_param_group({"params": [late]})


# --- keys of the base ------------------------------------------------------------------------------

DENSE = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in {"Optimizer", "LBFGS", "SparseAdam"}
)


@covering(2, name=RULE_VARIANTS, base=DENSE)
def test_every_torch_base(name: str, base: str) -> None:
    """All of torch's optimizers for dense gradients run, and keep their own group keys."""
    assert {"RMSprop", "Adadelta", "Adam"} <= set(DENSE)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False))
    kind = getattr(torch.optim, base)
    wrapped = kind(model.parameters(), lr=0.01)
    own = {k: v for k, v in wrapped.param_groups[0].items() if k != "params"}
    opt = make_method(name, wrapped)
    start = [p.detach().clone() for p in model.parameters()]
    for t in range(3):
        opt.step(closure(opt, model, t))
    for p, q in zip(model.parameters(), start, strict=True):
        assert p.isfinite().all()
        assert not torch.equal(p, q)
    assert {k: opt.param_groups[0][k] for k in own} == own


def test_keys_of_the_base_do_not_collide() -> None:
    """`alpha` of RMSprop and `rho` of Adadelta stay the base's own."""
    p = nn.Parameter(torch.zeros(3))
    gsam = wsam.GSAM(torch.optim.RMSprop([{"params": [p], "alpha": 0.7}]), alpha=0.2)
    assert (gsam.param_groups[0]["alpha"], gsam.param_groups[0]["sam_alpha"]) == (0.7, 0.2)
    sam = wsam.SAM(torch.optim.Adadelta([{"params": [p], "rho": 0.8}]), rho=0.3)
    assert (sam.param_groups[0]["rho"], sam.param_groups[0]["sam_rho"]) == (0.8, 0.3)
    sam.param_groups[0]["rho"] = 0.7
    step_on(sam)
    assert (sam.param_groups[0]["rho"], sam.param_groups[0]["sam_rho"]) == (0.7, 0.3)


# --- values of groups ------------------------------------------------------------------------------


@covering(name=VARIANTS, style=STYLES)
def test_per_group_hyper(name: str, style: str) -> None:
    """Each group has its own radius and weight of sharpness; the norm stays global."""
    own = {
        "wsam": ("gamma", [0.3, 0.3, 0.8, 0.8]),
        "coupled": ("gamma", [0.3, 0.3, 0.8, 0.8]),
        "gsam": ("alpha", [0.1, 0.1, 0.7, 0.7]),
        "looksam": ("alpha", [0.1, 0.1, 0.7, 0.7]),
    }
    params, rho = parameters(MLP.weights()), [0.1, 0.1, 0.4, 0.4]
    method = replace(reference.METHODS[name], rho=rho)
    groups: list[dict[str, Any]] = [
        {"params": params[:2], "rho": 0.1},
        {"params": params[2:], "sam_rho": 0.4},
    ]
    if method.rule in own:
        key, numbers = own[method.rule]
        method = replace(method, **{key: numbers})
        groups[0][key], groups[1][f"sam_{key}"] = numbers[0], numbers[-1]
    opt = make_method(name, torch_base("momentum", groups))
    w, base, memory = MLP.weights(), reference_base("momentum"), {}
    for t in range(5):
        mask = opt.geometry.mask(t, 4) if method.geometry == "masked" else None
        g0, g1 = reference.two_gradients(method, w, lambda v, t=t: MLP.losses(v, t), mask, memory)
        w = reference.update(method, base, w, g0, g1, memory)
    train(opt, params, MLP, range(5), style)
    assert gap(params, w) < 1e-12


@pytest.mark.parametrize("name", METHODS)
def test_per_group_hyper_is_never_ignored(name: str) -> None:
    """A value that the method does not use is an error."""
    hyper = {"wsam": "gamma", "coupled": "gamma", "gsam": "alpha", "looksam": "alpha"}
    used = hyper.get(reference.METHODS[name].rule)
    for key in ("gamma", "alpha"):
        base = sgd({f"sam_{key}": 0.5})
        if key == used:
            assert values(make_method(name, base), key) == [0.5]
        else:
            with pytest.raises(ValueError, match=key):
                make_method(name, base)


@pytest.mark.parametrize("key", ["sam_rhoo", "eta", "beta", "alpha"])
def test_per_group_hyper_unknown(key: str) -> None:
    with pytest.raises(ValueError, match="groups of this method may set rho, gamma"):
        wsam.WSAM(sgd({key: 0.1}))


def test_per_group_hyper_of_a_custom_rule() -> None:
    @dataclass(frozen=True)
    class Mixed(Rule):
        mixing: float = 0.5

        def mix(self, hyper, products):
            return Mix(Part(g0=1.0, difference=hyper["mixing"]), NOTHING)

    opt = wsam.SharpnessAware(sgd({"mixing": 0.1}, {}), rule=Mixed())
    assert values(opt, "mixing") == [0.1, 0.5]


def test_values_written_into_a_group() -> None:
    ours, theirs = parameters(MLP.weights()), parameters(MLP.weights())
    opt = wsam.WSAM(torch_base("momentum", ours), rho=0.05, gamma=0.9)
    opt.param_groups[0]["sam_rho"] = 0.3
    opt.param_groups[0]["sam_gamma"] = 0.6
    twin = wsam.WSAM(torch_base("momentum", theirs), rho=0.3, gamma=0.6)
    train(opt, ours, MLP, range(3))
    train(twin, theirs, MLP, range(3))
    assert same(ours, theirs)


@pytest.mark.parametrize("name", ["rho", "gamma"])
def test_plain_names_written_into_a_group_later_are_rejected(name: str) -> None:
    """They are read at construction; later they would have no effect."""
    opt = wsam.WSAM(sgd({}))
    opt.param_groups[0][name] = 0.2
    with pytest.raises(ValueError, match=f"set group\\['sam_{name}'\\]"):
        step_on(opt)
    del opt.param_groups[0][name]
    step_on(opt)


@pytest.mark.parametrize("name", ["rho", "gamma"])
def test_schedule_written_into_a_group_is_followed(name: str) -> None:
    opt = wsam.WSAM(sgd({}))
    opt.param_groups[0][f"sam_{name}"] = Warmup(0.1, steps=2)
    found = []
    for _ in range(3):
        step_on(opt)
        found.append(opt.param_groups[0][f"sam_{name}"])
    assert found == [0.0, 0.05, 0.1]
    opt.param_groups[0][f"sam_{name}"] = Warmup(-1.0, steps=2)
    with pytest.raises(ValueError, match=name):
        step_on(opt)


def test_schedule_written_into_a_group_is_saved_before_the_next_step() -> None:
    """As plain values: a state must not contain objects."""
    opt, twin = (wsam.SAM(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)) for _ in range(2))
    opt.param_groups[0]["sam_rho"] = wsam.schedule.Warmup(0.1, steps=3)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    twin.load_state_dict(torch.load(file, weights_only=True))
    assert "rho=Warmup(level=0.1, steps=3, start=0.0)" in repr(twin)


def test_radius_in_a_tensor_of_one_element() -> None:
    p = nn.Parameter(torch.tensor(1.0))
    opt = wsam.SAM(torch.optim.SGD([p], lr=0.1), rho=torch.tensor([0.5]))
    assert "rho=0.5" in repr(opt)
    opt.param_groups[0]["sam_rho"] = torch.tensor([0.25])
    seen: list[float] = []

    def run() -> Tensor:
        seen.append(p.item())
        loss = p.square()
        loss.backward()
        return loss

    opt.step(run)
    assert seen == [1.0, 1.25]


def test_graph_inputs_of_groups_with_their_own_values() -> None:
    opt = wsam.SAM(sgd({"rho": 0.1}))
    opt.add_param_group({"params": nn.Linear(2, 2).parameters(), "rho": 0.2})
    GraphScalars(opt, torch.device("cpu")).write()


# --- attributes ------------------------------------------------------------------------------------

PROPERTIES: list[tuple[type[wsam.SharpnessAware], str]] = [
    *((kind, "rho") for kind in wsam.METHODS.values()),
    (wsam.WSAM, "gamma"),
    (wsam.CoupledWSAM, "gamma"),
    (wsam.GSAM, "alpha"),
    (wsam.LookSAM, "alpha"),
]


@pytest.mark.parametrize(("kind", "name"), PROPERTIES)
def test_hyperparameter_attributes(kind: Callable[..., wsam.SharpnessAware], name: str) -> None:
    """Reading returns the first group's value, setting changes all groups."""
    opt = kind(sgd({f"sam_{name}": 0.3}, {}), **{name: 0.2})
    assert getattr(opt, name) == 0.3
    setattr(opt, name, 0.4)
    assert getattr(opt, name) == 0.4
    assert values(opt, name) == [0.4, 0.4]
    step_on(opt)
    assert values(opt, name) == [0.4, 0.4]
    opt.param_groups[0][f"sam_{name}"] = 0.1
    assert getattr(opt, name) == 0.1


@pytest.mark.parametrize(("kind", "name"), PROPERTIES)
def test_hyperparameter_attributes_accept_a_schedule(
    kind: Callable[..., wsam.SharpnessAware], name: str
) -> None:
    """It is evaluated at each step in all groups; a number ends it."""
    opt = kind(sgd({}, {}))
    setattr(opt, name, Warmup(0.4, steps=2, start=0.2))
    for value in (0.2, 0.3, 0.4):
        step_on(opt)
        assert values(opt, name) == pytest.approx([value] * 2)
    setattr(opt, name, 0.1)
    step_on(opt)
    assert values(opt, name) == [0.1, 0.1]
    assert all(name not in each for each in opt.state_dict()["sharpness"]["schedules"])


@pytest.mark.parametrize(("kind", "name"), PROPERTIES)
def test_hyperparameter_attributes_reject_bad_values(
    kind: Callable[..., wsam.SharpnessAware], name: str
) -> None:
    opt = kind(sgd({}, {}), **{name: 0.2})
    before = snapshot(opt)
    for bad in (-0.1, float("nan"), "0.1", None, Warmup(-0.1, steps=2), lambda step: 0.1):
        with pytest.raises((ValueError, TypeError), match=name):
            setattr(opt, name, bad)
        assert same(snapshot(opt), before)
    assert all(name not in each for each in opt.state_dict()["sharpness"]["schedules"])


# --- a base that is wrapped again ------------------------------------------------------------------


def test_group_copied_from_another_keeps_its_values() -> None:
    """As when a group is split in two."""
    opt = wsam.WSAM(sgd({"rho": 0.2, "gamma": 0.3}))
    opt.add_param_group({**opt.param_groups[0], "params": [nn.Parameter(torch.ones(2))]})
    opt.base.add_param_group({**opt.param_groups[0], "params": [nn.Parameter(torch.ones(2))]})
    step_on(opt)
    assert values(opt, "rho") == [0.2] * 3
    assert values(opt, "gamma") == [0.3] * 3


def test_rewrapped_base_starts_from_the_new_arguments() -> None:
    """Values of groups, schedules and the number of steps of the old optimizer are dropped."""
    base = sgd({"rho": 0.3}, {"gamma": 0.5})
    old = wsam.WSAM(base, rho=Warmup(0.2, steps=3), gamma=0.7)
    step_on(old)
    new = wsam.WSAM(base, rho=0.1)
    assert values(new, "rho") == [0.1, 0.1]
    assert values(new, "gamma") == [0.9, 0.9]
    assert values(new, "step") == [0, 0]
    sam = wsam.SAM(base)
    assert all("sam_gamma" not in group for group in base.param_groups)
    base.param_groups[0]["rho"] = 0.4  # set before the base is wrapped again
    assert values(wsam.SAM(base, rho=0.2), "rho") == [0.4, 0.2]
    assert sam.base is base


def test_rewrapped_base_equals_a_fresh_one() -> None:
    models = small_model(), small_model()
    bases = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    wsam.GSAM(bases[0], rho=0.3)
    opts = [wsam.WSAM(base, rho=0.2) for base in bases]
    for t in range(3):
        for opt, model in zip(opts, models, strict=True):
            opt.step(closure(opt, model, t))
    assert same(snapshot(opts[0]), snapshot(opts[1]))


@pytest.mark.parametrize("method", [reusing, wsam.LookSAM, wsam.VaSSO, wsam.FriendlySAM])
def test_rewrapped_base_has_no_kept_tensors(method: Callable[[Any], Any]) -> None:
    opt = method(sgd({"momentum": 0.9}))
    step_on(opt)
    step_on(wsam.SAM(opt.base))
    assert [{*state} for state in opt.base.state.values()] == [{"momentum_buffer"}]


def test_rewrapped_base_does_not_reuse_the_sharpness_of_the_first_wrapper() -> None:
    models = small_model(), small_model()
    bases = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]

    def step_both(*opts: wsam.WSAM) -> None:
        for opt, model in zip(opts, models, strict=True):
            opt.step(closure(opt, model))

    step_both(reusing(bases[0]), wsam.WSAM(bases[1]))
    step_both(*[reusing(base, offset=1) for base in bases])  # has one pass
    assert same(list(models[0].parameters()), list(models[1].parameters()))


# --- a radius that follows the learning rate -------------------------------------------------------


def gsam_of(rates: list[float], **options: float) -> tuple[wsam.GSAM, list[nn.Parameter]]:
    params = [nn.Parameter(torch.ones(2)) for _ in rates]
    groups = [{"params": [p], "lr": lr} for p, lr in zip(params, rates, strict=True)]
    return wsam.GSAM(torch.optim.SGD(groups), rho=0.05, rho_min=0.01, **options), params


def test_radius_follows_the_rate_of_each_group() -> None:
    """Relative to the group's own largest learning rate, also in a group that is added later."""
    opt, params = gsam_of([0.1, 0.001])
    late = nn.Parameter(torch.ones(2))
    opt.add_param_group({"params": [late], "lr": 0.02})
    assert values(opt, "rho") == pytest.approx([0.05] * 3)
    LambdaLR(opt, lambda t: 0.5)
    make_step(opt, lambda: (params[0] * params[1] * late).square().sum())
    assert values(opt, "rho") == pytest.approx([0.03] * 3)


def test_radius_of_a_group_with_a_rate_below_lr_min() -> None:
    """It is rho_min until the group's learning rate is set higher."""
    opt, params = gsam_of([0.1, 0.001], lr_min=0.01)
    assert values(opt, "rho") == [pytest.approx(0.05), 0.01]
    opt.param_groups[0]["lr"], opt.param_groups[1]["lr"] = 0.055, 0.02
    make_step(opt, lambda: (params[0] * params[1]).square().sum())
    assert values(opt, "rho") == [pytest.approx(0.03), 0.05]
