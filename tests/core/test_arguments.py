"""Promises about wrong use: every mistake is an error in words, and nothing has moved."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reference
import torch
from helpers import MEMBERS, closure, member, model_loss, same, small_model, snapshot
from torch import Tensor, nn

import wsam

ALL = [
    ("rho", -0.1),
    ("rho", math.nan),
    ("rho", math.inf),
    ("rho", "0.05"),
    ("rho", None),
    ("rho", True),
    ("rho", [0.05]),
    ("max_norm", 0.0),
    ("max_norm", -1.0),
    ("max_norm", math.nan),
    ("max_norm", "1"),
    ("nonfinite", "ignore"),
    ("nonfinite", None),
    ("model", 3),
    ("model", "net"),
    ("when", 5),
    ("when", lambda step: True),
    ("lean", "yes"),
    ("repeat_randomness", "no"),
    ("local", True),
]
OWN: dict[str, list[tuple[str, Any]]] = {
    "sam": [("keep", 0.0), ("keep", 1.5), ("keep", math.nan), ("geometry", "adaptive")],
    "wsam": [("gamma", g) for g in (-0.1, 1.0, 1.5, math.nan, math.inf, "0.9", None, True)],
    "coupled_wsam": [("gamma", g) for g in (-0.1, 1.0, 1.5, math.nan, "0.9", None)],
    "gsam": [
        *[("alpha", a) for a in (-0.1, math.nan, math.inf, "0.1", None)],
        ("rho_min", -0.1),
        ("rho_min", 10.0),
        ("rho_min", math.nan),
    ],
    "esam": [
        *[("beta", b) for b in (0.0, -0.1, 1.5, math.nan, "0.5")],
        *[("gamma", g) for g in (0.0, -0.1, 1.5, math.nan, "0.5")],
        ("seed", 0.5),
    ],
    "asam": [("eta", -0.1), ("eta", math.nan), ("eta", "0.01"), ("weights_only", True)],
    "fisher_sam": [("eta", -0.1), ("eta", math.nan), ("eta", None)],
}
CASES = [(name, key, value) for name in MEMBERS for key, value in [*ALL, *OWN.get(name, [])]]


def untouched_base() -> tuple[torch.optim.Optimizer, Callable[[], bool]]:
    base = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9)
    before = snapshot(base)
    return base, lambda: same(snapshot(base), before)


@pytest.mark.parametrize(("name", "key", "value"), CASES)
def test_bad_arguments(name: str, key: str, value: Any) -> None:
    """The message says which argument, and what was given."""
    base, untouched = untouched_base()
    with pytest.raises((ValueError, TypeError)) as caught:
        member(name, base, **{key: value})
    message = str(caught.value)
    words = {"gamma": ("gamma", "keep", "share"), "rho_min": ("rho", "low")}.get(key, (key,))
    assert any(word in message for word in words), message
    assert len(message) > 15, message
    assert untouched(), "a refused construction has changed the base"


@pytest.mark.parametrize("name", MEMBERS)
def test_bad_arguments_say_what_is_allowed(name: str) -> None:
    with pytest.raises(ValueError, match=r"rho.*\[0, inf\).*-0\.25"):
        member(name, untouched_base()[0], rho=-0.25)
    with pytest.raises(ValueError, match=r"propagate.*skip.*raise.*'ignore'"):
        member(name, untouched_base()[0], nonfinite="ignore")
    if reference.MEMBERS[name].rule in {"wsam", "coupled"}:
        with pytest.raises(ValueError, match=r"gamma.*\[0, 1\).*1\.0"):
            member(name, untouched_base()[0], gamma=1.0)


@pytest.mark.parametrize("name", MEMBERS)
def test_bad_arguments_unknown(name: str) -> None:
    base, untouched = untouched_base()
    with pytest.raises(TypeError, match="radius"):
        member(name, base, radius=0.1)
    with pytest.raises(TypeError):
        wsam.METHODS[name](base, 0.1)  # everything after the base is by keyword
    assert untouched()


@pytest.mark.parametrize("name", MEMBERS)
def test_bad_base(name: str) -> None:
    params = [nn.Parameter(torch.ones(3))]
    sam = wsam.SAM(torch.optim.SGD(params, lr=0.1))
    for base in (torch.optim.SGD, params, None, "sgd", sam):
        with pytest.raises(TypeError, match="base"):
            member(name, base)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize("group", [{"sam_rho": -1.0}, {"sam_rho": "big"}, {"rho": math.nan}])
def test_bad_group_values(name: str, group: dict[str, Any]) -> None:
    good = {"params": [nn.Parameter(torch.ones(2))], "rho": 0.1}
    base = torch.optim.SGD([good, {"params": [nn.Parameter(torch.ones(3))], **group}], lr=0.1)
    before = snapshot(base)
    with pytest.raises((ValueError, TypeError), match="rho"):
        member(name, base)
    assert same(snapshot(base), before)


@pytest.mark.parametrize("name", MEMBERS)
def test_bad_value_set_by_hand(name: str) -> None:
    model = small_model()
    opt = member(name, torch.optim.SGD(model.parameters(), lr=0.1))
    opt.param_groups[0]["sam_rho"] = -1.0
    before = snapshot(opt)
    with pytest.raises(ValueError, match="rho"):
        opt.step(closure(opt, model))
    assert same(snapshot(opt), before)
    opt.param_groups[0]["sam_rho"] = 0.1
    opt.step(closure(opt, model))


def test_bad_value_of_a_schedule() -> None:
    """A function of the step may go wrong late: the step is refused, the weights stay."""
    model = small_model()
    gamma = wsam.schedule.Function(lambda step: 0.5 + step)
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1), gamma=gamma)
    opt.step(closure(opt, model))
    weights = snapshot(opt)["weights"]
    with pytest.raises(ValueError, match="gamma"):
        opt.step(closure(opt, model))
    assert same(snapshot(opt)["weights"], weights)
    for bad in (wsam.schedule.Warmup(1.5, 10), wsam.schedule.Constant(-0.1)):
        with pytest.raises(ValueError, match="gamma"):
            wsam.WSAM(untouched_base()[0], gamma=bad)


# Read at every step, so that setting them counts.
ATTRIBUTES = {"geometry", "model", "lean", "max_norm", "nonfinite", "repeat_randomness", "when"}
ATTRIBUTES |= {"local"}


READ = {"keep", "beta", "seed", "eta", "weights_only"}


def test_an_integer_may_be_of_numpy() -> None:
    geometry = wsam.ESAM(untouched_base()[0], seed=np.int64(3)).geometry
    assert geometry == wsam.Masked(seed=3)
    assert geometry.mask(7, 100) == wsam.Masked(seed=3).mask(7, 100)


def test_a_wrapper_whose_base_has_another() -> None:
    base, _ = untouched_base()
    old, _ = wsam.WSAM(base), wsam.SAM(base)
    with pytest.raises(RuntimeError, match="wrapped again"):
        old.step(lambda: None)
    new = wsam.SAM(base)
    base.param_groups.pop()
    with pytest.raises(RuntimeError, match="removed from the base"):
        new.step(lambda: None)


@pytest.mark.parametrize(
    ("name", "key", "shape"),
    [
        ("esam", "beta", wsam.Masked(0.9)),
        ("esam", "seed", wsam.Masked(0.6, seed=7)),
        ("asam", "eta", wsam.Adaptive(eta=0.3)),
        ("fisher_sam", "eta", wsam.Fisher(eta=3.0)),
    ],
)
def test_arguments_that_live_in_the_geometry(name: str, key: str, shape: Any) -> None:
    """What the message recommends has the effect of the argument."""
    weights = []
    for given in ({}, {key: getattr(shape, key)}):
        model = small_model()
        opt = member(name, torch.optim.SGD(model.parameters(), lr=0.1), rho=0.5, **given)
        if not given:
            opt.geometry = shape
        for t in range(3):
            opt.step(closure(opt, model, t))
        weights.append(snapshot(opt)["weights"])
    assert same(*weights)


def test_unknown_method() -> None:
    with pytest.raises(ValueError, match=r"'sharp'.*wsam"):
        wsam.create("sharp", untouched_base()[0])


# --- lean, where it would be wrong -----------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in MEMBERS if reference.MEMBERS[n].rule != "wsam"])
def test_lean_is_refused_by_rules_that_feed_the_second_gradient(name: str) -> None:
    with pytest.raises(ValueError, match=r"lean.*second"):
        member(name, untouched_base()[0], lean=True)


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"nonfinite": "skip"}])
def test_lean_is_refused_where_a_step_must_be_undone(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"lean.*{next(iter(option))}"):
        wsam.WSAM(untouched_base()[0], lean=True, **option)


def test_lean_with_a_scaler_or_a_list_is_refused() -> None:
    model = small_model()
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1), lean=True)
    before = snapshot(opt)
    model_loss(opt, model)().backward()
    with pytest.raises((ValueError, RuntimeError), match="lean"):
        opt.ascend(grad_scale=1024.0)
    with pytest.raises((ValueError, RuntimeError), match="lean"):
        opt.step([closure(opt, model), closure(opt, model, 1)])
    assert same(snapshot(opt), before)
    opt.step(closure(opt, model))


# --- wrong order -----------------------------------------------------------------------------------


def look(opt: wsam.SharpnessAware, model: nn.Module) -> None:
    with opt.perturbed():
        raise AssertionError("never reached")


MISTAKES: dict[str, Callable[[wsam.SharpnessAware, nn.Module], Any]] = {
    "ascend": lambda opt, model: opt.ascend(),
    "first_step": lambda opt, model: opt.first_step(),
    "begin": lambda opt, model: opt.begin(),
    "closure": lambda opt, model: opt.step(closure(opt, model)),
    "step": lambda opt, model: opt.step(),
    "perturbed": look,
    "add": lambda opt, model: opt.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    "state_dict": lambda opt, model: opt.state_dict(),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", MEMBERS)
def test_wrong_order_while_perturbed(name: str, mistake: str) -> None:
    """Between ascend and descend nothing else is allowed, and the step can still be finished."""
    models = small_model(), small_model()
    opts = [member(name, torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)) for m in models]
    for opt, model in zip(opts, models, strict=True):
        loss = model_loss(opt, model)
        loss().backward()
        opt.ascend()
        if opt is opts[0]:
            before = snapshot(opt)
            with pytest.raises(RuntimeError, match=r"descend|w \+ d"):
                MISTAKES[mistake](opt, model)
            assert same(snapshot(opt), before)
        loss().backward()
        opt.second_step()
    assert same(snapshot(opts[0]), snapshot(opts[1]))


@pytest.mark.parametrize("call", ["descend", "second_step"])
@pytest.mark.parametrize("name", MEMBERS)
def test_wrong_order_second_before_first(name: str, call: str) -> None:
    model = small_model()
    opt = member(name, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    model_loss(opt, model)().backward()
    before = snapshot(opt)
    with pytest.raises(RuntimeError, match=r"ascend|first_step"):
        getattr(opt, call)()
    assert same(snapshot(opt), before)
    opt.step(closure(opt, model))
    after = snapshot(opt)
    with pytest.raises(RuntimeError, match=r"ascend|first_step"):
        getattr(opt, call)()
    assert same(snapshot(opt), after)


@pytest.mark.parametrize("name", MEMBERS)
def test_no_closure(name: str) -> None:
    """step() alone is legal with zero learning rate and zero gradients only."""
    model = small_model()
    opt = member(name, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    before = snapshot(opt)
    with pytest.raises((RuntimeError, TypeError), match="closure"):
        opt.step()
    model_loss(opt, model)().backward()
    with pytest.raises((RuntimeError, TypeError), match="closure"):
        opt.step()
    opt.param_groups[0]["lr"] = 0.0
    with pytest.raises((RuntimeError, TypeError), match="closure"):
        opt.step()  # the gradients are not zero
    opt.param_groups[0]["lr"] = 0.1
    assert same(snapshot(opt), before)
    opt.param_groups[0]["lr"] = 0.0
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    opt.step(closure=None)
    assert same(snapshot(opt)["weights"], before["weights"])


@pytest.mark.parametrize("wrong", [3, "loss", [], [None], torch.ones(())])
@pytest.mark.parametrize("name", MEMBERS)
def test_closure_that_is_none(name: str, wrong: Any) -> None:
    model = small_model()
    opt = member(name, torch.optim.SGD(model.parameters(), lr=0.1))
    before = snapshot(opt)
    with pytest.raises(TypeError, match=r"function|closure|callable"):
        opt.step(wrong)
    assert same(snapshot(opt), before)


@pytest.mark.parametrize("name", MEMBERS)
def test_perturbed_needs_gradients(name: str) -> None:
    model = small_model()
    opt = member(name, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="gradient"), opt.perturbed():
        pass
    opt.step(closure(opt, model))


@pytest.mark.parametrize("name", MEMBERS)
def test_names_for_weights_only(name: str) -> None:
    """The adaptive metric by name needs names: from model=, or from named parameters."""
    model = small_model()
    shape = wsam.Adaptive(weights_only=True)
    option: dict[str, Any] = {"weights_only": True} if name == "asam" else {"geometry": shape}
    if name in {"esam", "fisher_sam"}:
        with pytest.raises(TypeError, match="geometry"):
            member(name, torch.optim.SGD(model.parameters(), lr=0.1), **option)
        return
    with pytest.raises(ValueError, match="name"):
        member(name, torch.optim.SGD(model.parameters(), lr=0.1), **option)
    opts = [
        member(name, torch.optim.SGD(model.named_parameters(), lr=0.1), **option),
        member(name, torch.optim.SGD(model.parameters(), lr=0.1), model=model, **option),
    ]
    seen: list[list[Tensor]] = []
    for opt in opts:
        opt.zero_grad()
        model_loss(opt, model)().backward()
        with opt.perturbed():
            seen.append([p.detach().clone() for p in model.parameters()])
    assert same(*seen)
