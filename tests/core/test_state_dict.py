"""Saving and loading: state_dict, torch.distributed.checkpoint, deepcopy and pickle."""

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import (
    ALL,
    BASES,
    ONE_PASS,
    PROBLEMS,
    RULES,
    STYLES,
    VARIANTS,
    closure,
    covering,
    full,
    make_method,
    make_step,
    model_loss,
    parameters,
    same,
    save_and_load,
    small_model,
    snapshot,
    torch_base,
    train,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import StepLR

import wsam
from wsam.rule import Reuse

MLP = PROBLEMS["mlp"]
STEPS = 6


def scheduled(name: str) -> dict[str, Any]:
    """Return scheduled hyperparameters, which show whether the number of steps is lost."""
    options: dict[str, Any] = {"rho": wsam.schedule.InverseSqrt(0.3)}
    if name.endswith("wsam"):
        options["gamma"] = wsam.schedule.Warmup(0.8, steps=4, start=0.1)
    if name == "gsam":
        options["alpha"] = wsam.schedule.Warmup(0.5, steps=3)
    return options


@full(name=[*VARIANTS, *ONE_PASS], base=["momentum", "adamw"])
def test_resume_bitwise_every_step(name: str, base: str) -> None:
    def build(w: list[torch.Tensor]) -> tuple[list[nn.Parameter], wsam.SharpnessAware]:
        params = parameters(w)
        opt = make_method(name, torch_base(base, params, 0.01), **scheduled(name))
        return params, opt

    params, opt = build(MLP.weights())
    saved = []
    for t in range(STEPS):
        saved.append(save_and_load({"w": [p.detach() for p in params], "opt": opt.state_dict()}))
        train(opt, params, MLP, range(t, t + 1))
    for t, checkpoint in enumerate(saved):
        other, resumed = build(checkpoint["w"])
        resumed.load_state_dict(checkpoint["opt"])
        train(resumed, other, MLP, range(t, STEPS))
        assert same(snapshot(resumed), snapshot(opt)), f"resumed at step {t}"


@pytest.mark.parametrize("name", ["wsam", "gsam"])
def test_schedules_are_part_of_the_state(name: str) -> None:
    """An optimizer constructed without them continues with the saved schedules."""
    ours, theirs = parameters(MLP.weights()), parameters(MLP.weights())
    opt = make_method(name, torch_base("sgd", ours), **scheduled(name))
    other = make_method(name, torch_base("sgd", theirs))
    other.load_state_dict(save_and_load(opt.state_dict()))
    train(opt, ours, MLP, range(5))
    train(other, theirs, MLP, range(5))
    assert same(snapshot(opt), snapshot(other))


def test_interval_is_part_of_the_state() -> None:
    every = wsam.schedule.Every(3)
    ours, theirs = parameters(MLP.weights()), parameters(MLP.weights())
    opt = wsam.WSAM(torch_base("sgd", ours), when=every)
    train(opt, ours, MLP, range(2))
    other = wsam.WSAM(torch_base("sgd", theirs))
    with torch.no_grad():
        for p, q in zip(theirs, ours, strict=True):
            p.copy_(q)
    other.load_state_dict(save_and_load(opt.state_dict()))
    train(opt, ours, MLP, range(2, 6))
    train(other, theirs, MLP, range(2, 6))
    assert same(snapshot(opt), snapshot(other))


@covering(name=ALL, base=list(BASES))
def test_plain_base_loads_the_state(name: str, base: str) -> None:
    """The state contains the base's entries and those of the method; the base can continue from it."""
    params = parameters(MLP.weights())
    opt = make_method(name, torch_base(base, params))
    train(opt, params, MLP, range(3))
    state = save_and_load(opt.state_dict())
    plain = torch_base(base, params)
    plain.load_state_dict(state)
    for p in params:
        assert same(dict(plain.state[p]), dict(opt.base.state[p]))
    fresh = parameters(MLP.weights())
    alone = torch_base(base, fresh)
    MLP.losses(fresh, 0).mean().backward()
    alone.step()
    keys = [set(alone.state[p]) for p in fresh]
    found = [state["state"].get(i, {}) for i in range(len(params))]
    assert [{key for key in entry if not key.startswith("sam_")} for entry in found] == keys
    assert all(entry.keys() - alone.state[p] <= {"sam_kept", "sam_average"}
               for entry, p in zip(found, fresh, strict=True))  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_state_of_a_plain_base_loads(name: str) -> None:
    """A run may change from the plain base to a method."""
    params = parameters(MLP.weights())
    plain = torch_base("momentum", params)
    MLP.losses(params, 0).mean().backward()
    plain.step()
    state = copy.deepcopy(plain.state_dict())
    opt = make_method(name, torch_base("momentum", params))
    opt.load_state_dict(state)
    assert same([dict(opt.state[p]) for p in params], [dict(plain.state[p]) for p in params])
    train(opt, params, MLP, range(1, 2))


@pytest.mark.parametrize("lean", [False, True])
def test_state_dict_while_perturbed(lean: bool) -> None:
    model = small_model()
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), lean=lean)
    initial = copy.deepcopy(opt.state_dict())
    opt.step(closure(opt, model, 0))
    loss = model_loss(opt, model, 1)
    loss().backward()
    opt.ascend()
    before = snapshot(opt)
    with pytest.raises(RuntimeError, match=r"w \+ d"):
        opt.state_dict()
    with pytest.raises(RuntimeError, match=r"w \+ d"):
        opt.load_state_dict(initial)
    assert same(snapshot(opt), before)
    loss().backward()
    opt.second_step()
    opt.state_dict()


@pytest.mark.parametrize("name", ALL)
def test_lr_scheduler_after_load(name: str) -> None:
    model = small_model()
    opt = make_method(name, torch.optim.SGD(model.parameters(), lr=0.8, momentum=0.9))
    scheduler = StepLR(opt, step_size=1, gamma=0.5)
    opt.step(closure(opt, model))
    scheduler.step()
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert opt.param_groups is opt.base.param_groups
    assert opt.state is opt.base.state
    opt.step(closure(opt, model))
    scheduler.step()
    assert [group["lr"] for group in opt.base.param_groups] == [0.2]


@pytest.mark.parametrize("name", ALL)
def test_base_that_loads_a_state_stays_shared(name: str) -> None:
    model = small_model()
    opt = make_method(name, torch.optim.SGD(model.parameters(), lr=0.8, momentum=0.9))
    opt.step(closure(opt, model))
    scheduler = StepLR(opt, step_size=1, gamma=0.5)
    opt.base.load_state_dict(copy.deepcopy(opt.base.state_dict()))
    opt.step(closure(opt, model))
    scheduler.step()
    assert opt.param_groups is opt.base.param_groups
    assert opt.state is opt.base.state
    assert [group["lr"] for group in opt.base.param_groups] == [0.4]


@covering(name=ALL, base=["momentum", "adam"])
def test_load_no_alias(name: str, base: str) -> None:
    ours, theirs = parameters(MLP.weights()), parameters(MLP.weights())
    source = make_method(name, torch_base(base, theirs))
    train(source, theirs, MLP, range(2))
    state = source.state_dict()
    kept = copy.deepcopy(state)
    opt = make_method(name, torch_base(base, ours))
    opt.load_state_dict(state)
    train(opt, ours, MLP, range(2))
    assert same(state, kept), "the loaded state shares tensors with the source"
    mine = snapshot(opt)
    train(source, theirs, MLP, range(2, 3))
    assert same(snapshot(opt), mine)


def test_parameters_without_a_shape() -> None:
    """Those of lazy modules can be saved, and load any shape, as with a plain base."""

    def lazy() -> tuple[nn.Module, wsam.SharpnessAware]:
        model = nn.LazyLinear(2)
        return model, wsam.WSAM(torch_base("momentum", model.parameters()))

    model, opt = lazy()
    before = save_and_load(opt.state_dict())
    opt.load_state_dict(before)
    make_step(opt, lambda: model(torch.ones(3, 4)).square().mean())
    opt.load_state_dict(before)
    make_step(opt, lambda: model(torch.ones(3, 4)).square().mean())

    other, resumed = lazy()
    resumed.load_state_dict(save_and_load(opt.state_dict()))
    other.load_state_dict(model.state_dict())
    for m, o in ((model, opt), (other, resumed)):
        make_step(o, lambda m=m: m(torch.ones(3, 4)).square().mean())
    assert same(snapshot(resumed), snapshot(opt))


@full(name=RULES, base=["momentum", "adam", "sgd"])
def test_shape_mismatch_load(name: str, base: str) -> None:
    def build(shapes: list[tuple[int, ...]], cut: int) -> wsam.SharpnessAware:
        params = [nn.Parameter(torch.ones(s)) for s in shapes]
        groups = [{"params": part} for part in (params[:cut], params[cut:]) if part]
        opt = make_method(name, torch_base(base, groups))
        make_step(opt, lambda: opt.select(sum((p**2).sum() for p in params).reshape(1)))
        return opt

    good = build([(2, 3), (3,)], 2)
    before, state = snapshot(good), copy.deepcopy(good.state_dict())
    wrong = [
        build([(3, 2), (3,)], 2).state_dict(),  # another shape
        build([(2, 3), (3,), (1,)], 3).state_dict(),  # one parameter more
        build([(2, 3), (3,)], 1).state_dict(),  # one group more
        {"state": state["state"]},  # no groups at all
    ]
    for other in wrong:
        with pytest.raises((ValueError, KeyError), match=r"shape|parameter|group"):
            good.load_state_dict(other)
        assert same(snapshot(good), before)
        assert good.param_groups is good.base.param_groups
    good.load_state_dict(state)
    assert same(snapshot(good), before)


@pytest.mark.filterwarnings("ignore::wsam.WsamWarning")
@full(name=RULES, base=[torch.optim.Adam, torch.optim.NAdam])
def test_bf16_load_keeps_counters(name: str, base: Any) -> None:
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    opt = make_method(name, base([p], lr=0.01))
    make_step(opt, lambda: opt.select(p.float() ** 2))
    opt.state[p]["step"].fill_(257.0)  # not a bfloat16 number
    opt.param_groups[0]["sam_step"] = 257
    state = save_and_load(opt.state_dict())
    other = make_method(name, base([nn.Parameter(p.detach().clone())], lr=0.01))
    other.load_state_dict(state)
    q = other.param_groups[0]["params"][0]
    assert same(dict(other.state[q]), dict(opt.state[p]))
    assert other.state[q]["step"].item() == 257.0
    assert other.param_groups[0]["sam_step"] == 257
    assert isinstance(other.param_groups[0]["sam_step"], int)


@covering(
    2,
    name=ALL,
    base=["momentum", "adam", "sgd", "adagrad"],
    used=[False, True],
    flatten=[False, True],
)
def test_dcp_fresh_optimizer(name: str, base: str, used: bool, flatten: bool) -> None:
    """A fresh and a used optimizer both load the state of a used one, momentum included."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model = small_model()
    opt = make_method(name, torch_base(base, model.parameters()))
    for t in range(3):
        opt.step(closure(opt, model, t))
    state = copy.deepcopy(get_optimizer_state_dict(model, opt, options=options))

    twin = small_model()
    other = make_method(name, torch_base(base, twin.parameters()))
    if used:
        other.step(closure(other, twin, 7))
        other.zero_grad()
    twin.load_state_dict(model.state_dict())
    weights = [p.detach().clone() for p in twin.parameters()]
    set_optimizer_state_dict(twin, other, state, options=options)
    assert same(weights, [p.detach() for p in twin.parameters()])
    assert same(snapshot(other), snapshot(opt))
    for t in range(3, 5):
        opt.step(closure(opt, model, t))
        other.step(closure(other, twin, t))
    assert same(snapshot(other), snapshot(opt))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ALL)
def test_dcp_fresh_optimizer_is_saved(name: str, tmp_path: Path) -> None:
    """Saving and loading before the first step change neither weights nor learning rates."""
    models = small_model(), small_model()
    opts = [make_method(name, torch.optim.Adam(m.parameters(), lr=0.01)) for m in models]
    before = snapshot(opts[0])
    saved = {"opt": get_optimizer_state_dict(models[0], opts[0])}
    after = snapshot(opts[0])
    assert same(after["weights"], before["weights"])
    assert same(after["groups"], before["groups"]), "creating the state does not count as a step"
    dcp.save(saved, checkpoint_id=tmp_path)
    loaded = {"opt": get_optimizer_state_dict(models[1], opts[1])}
    dcp.load(loaded, checkpoint_id=tmp_path)
    set_optimizer_state_dict(models[1], opts[1], loaded["opt"])
    for model, opt in zip(models, opts, strict=True):
        opt.step(closure(opt, model))
    assert same(snapshot(opts[0]), snapshot(opts[1]))


def test_dcp_fresh_optimizer_with_a_frozen_parameter() -> None:
    model = small_model()
    model[0].bias.requires_grad_(False)
    opt = wsam.SAM(sgd(model))
    get_optimizer_state_dict(model, opt)
    assert [*opt.state] == [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("style", STYLES)
def test_steps_are_counted(style: str) -> None:
    params = parameters(MLP.weights())
    opt = wsam.WSAM(torch_base("sgd", params))
    train(opt, params, MLP, range(3), style)
    assert [group["sam_step"] for group in opt.param_groups] == [3]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("interval", {"kind": "Nope"}),
        ("schedules", [{"rho": {"kind": "Nope"}}]),
        ("shapes", [[[5, 3]]]),
    ],
)
def test_unknown_entry_changes_nothing(key: str, value: Any) -> None:
    model = small_model()
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    opt.step(closure(opt, model))
    state = copy.deepcopy(opt.state_dict())
    state["sharpness"][key] = value
    state["param_groups"][0]["lr"] = 0.7
    before = snapshot(opt)
    with pytest.raises((KeyError, ValueError), match=r"Nope|parameters"):
        opt.load_state_dict(state)
    assert same(snapshot(opt), before)
    assert opt.param_groups[0]["lr"] == 0.1


def test_state_with_a_group_that_was_added_to_the_base() -> None:
    """It gets its values at the next step, but can be saved and loaded before."""

    def make() -> wsam.SharpnessAware:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        opt = wsam.SAM(torch.optim.SGD(model[0].parameters(), lr=0.1), rho=0.3)
        opt.base.add_param_group({"params": model[1].parameters()})
        return opt

    state = make().state_dict()
    assert len(state["sharpness"]["schedules"]) == 2
    other = make()
    other.load_state_dict(state)
    assert [group["sam_rho"] for group in other.param_groups] == [0.3, 0.3]


# --- states that are rejected ----------------------------------------------------------------------


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_load_rejects_the_state_of_another_base() -> None:
    """Nothing has changed, and the groups are still shared."""
    models = small_model(), small_model()
    opt = wsam.WSAM(torch.optim.AdamW(models[0].parameters(), lr=0.03), rho=0.1)
    other = wsam.WSAM(sgd(models[1]))
    opt.step(closure(opt, models[0]))
    other.step(closure(other, models[1]))
    before, groups = snapshot(opt), opt.param_groups
    with pytest.raises(KeyError, match="step"):
        opt.load_state_dict(other.state_dict())
    assert opt.param_groups is groups
    assert same(snapshot(opt), before)
    opt.step(closure(opt, models[0]))


def test_load_warns_about_the_state_of_another_method() -> None:
    model = small_model()
    state = wsam.CoupledWSAM(sgd(model), gamma=0.5).state_dict()
    with pytest.warns(wsam.WsamWarning, match="rule=Coupled, .* rule=Weighted"):
        wsam.WSAM(sgd(model)).load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wsam.CoupledWSAM(sgd(model)).load_state_dict(state)
        del state["sharpness"]["rule"]  # as saved by earlier versions
        wsam.WSAM(sgd(model)).load_state_dict(state)


def test_load_warns_about_the_state_of_another_base() -> None:
    """Torch loads it, and its next step raises KeyError."""
    model = small_model()
    state = wsam.SAM(torch.optim.AdamW(model.parameters())).state_dict()
    with pytest.warns(wsam.WsamWarning, match="base=AdamW, the optimizer has base=SGD"):
        wsam.SAM(sgd(model)).load_state_dict(state)


REUSING = {"reuse": True, "when": wsam.schedule.Every(2)}


@pytest.mark.parametrize(
    ("name", "saved", "given", "message"),
    [
        ("wsam", REUSING, {}, r"with reuse=Reuse\(.*\), the optimizer has reuse=False,"),
        ("wsam", {}, REUSING, r"with reuse=False, the optimizer has reuse=Reuse\("),
        (
            "wsam",
            REUSING,
            REUSING | {"reuse": Reuse(weight=0.5)},
            r"weight=1\.0\), .*weight=0\.5\)",
        ),
        (
            "looksam",
            {"per_tensor": True},
            {},
            "per_tensor=True, the optimizer has per_tensor=False,",
        ),
        (
            "vasso",
            {"theta": 0.2},
            {"theta": 0.8},
            r"Averaged\(theta=0\.2\), .*Averaged\(theta=0\.8\)",
        ),
        ("sam", {"geometry": wsam.Adaptive()}, {}, r"geometry=Adaptive\(.*geometry=Euclidean\(\)"),
    ],
)
def test_load_warns_about_other_options(
    name: str, saved: dict[str, Any], given: dict[str, Any], message: str
) -> None:
    """They are those of the constructor; a load replaces only values of groups, and schedules."""
    model = small_model()
    state = wsam.create(name, sgd(model), **saved).state_dict()
    opt = wsam.create(name, sgd(model), **given)
    before = opt.rule, opt.geometry
    with pytest.warns(wsam.WsamWarning, match=message) as record:
        opt.load_state_dict(save_and_load(state))
    assert [warning.filename for warning in record] == [__file__]
    assert (opt.rule, opt.geometry) == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wsam.create(name, sgd(model), **saved).load_state_dict(state)
        del state["sharpness"]["options"]  # as saved by earlier versions
        opt.load_state_dict(state)


# --- copies ----------------------------------------------------------------------------------------


@covering(2, name=[*VARIANTS, *ONE_PASS], base=["momentum", "adamw"], how=["deepcopy", "pickle"])
def test_deepcopy_pickle(name: str, base: str, how: str) -> None:
    """A copy steps as the original does."""
    model = small_model()
    options = {"gamma": wsam.schedule.Warmup(0.9, 5)} if name.endswith("wsam") else {}
    opt = make_method(name, torch_base(base, model.parameters()), **options)
    StepLR(opt, 100)  # which replaces opt.step
    for t in range(2):
        opt.step(closure(opt, model, t))
    pair = (model, opt)
    twin = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    assert twin[1].param_groups is twin[1].base.param_groups
    assert twin[1].state is twin[1].base.state
    for m, o in (pair, twin):
        for t in range(2, 5):
            o.step(closure(o, m, t))
    assert same(snapshot(opt), snapshot(twin[1]))
    assert all(p is not q for p, q in zip(model.parameters(), twin[0].parameters(), strict=True))
