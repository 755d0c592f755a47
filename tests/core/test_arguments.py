"""Constructor arguments: what is accepted, and the errors for what is not."""

import copy
import inspect
import math
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reference
import torch
from helpers import (
    ALL,
    METHODS,
    closure,
    full,
    make_method,
    model_loss,
    same,
    small_model,
    snapshot,
)
from torch import Tensor, nn

import wsam

BAD_FOR_ALL: list[tuple[str, Any]] = [
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
    ("local", True),
    ("when", 2),
]
BAD_NUMBERS = (-0.1, math.nan, "0.1", None)
"""Wrong values of every number that a method has beyond those of `SharpnessAware`."""
BAD: dict[str, list[tuple[str, Any]]] = {
    "sam": [("keep", 0.0), ("keep", 1.5), ("keep", math.nan)],
    "wsam": [("gamma", g) for g in (-0.1, 1.0, 1.5, math.nan, math.inf, "0.9")],
    "coupled_wsam": [("gamma", 1.0), ("gamma", 1.5)],
    "gsam": [
        ("alpha", math.inf),
        *[("rho_min", rho) for rho in (-0.1, 10.0, math.nan)],
    ],
    "esam": [*[(key, value) for key in ("beta", "gamma") for value in (0.0, 1.5)], ("seed", 0.5)],
    "asam": [("weights_only", True)],
    "looksam": [("alpha", math.inf), ("n", 0), ("n", 2.5)],
    "vasso": [("theta", 0.0), ("theta", 1.5)],
    "friendly_sam": [("decay", 1.0)],
}
"""Other wrong values: limits of intervals, and arguments that are not numbers."""


def base_to_watch() -> tuple[torch.optim.Optimizer, Callable[[], bool]]:
    """Return a base, and a function that returns whether it is unchanged."""
    base = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9)
    before = snapshot(base)
    return base, lambda: same(snapshot(base), before)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


# --- signatures ------------------------------------------------------------------------------------

OPTIONS = {*inspect.signature(wsam.SharpnessAware).parameters} - {"base", "rule"}
MAY_BE_FIXED = {"lean", "geometry", "ascent_steps", "keep", "local"}
"""The options that some methods do not have, because they set or exclude them."""


def own_numbers(name: str) -> list[str]:
    """Return the arguments of a method that are numbers and that `SharpnessAware` does not have."""
    parameters = inspect.signature(wsam.METHODS[name]).parameters.values()
    return [p.name for p in parameters if p.name not in OPTIONS and type(p.default) in (int, float)]


@pytest.mark.parametrize("name", wsam.METHODS)
def test_signature_lists_all_arguments(name: str) -> None:
    """No `**kwargs`, so that help(), editors and type checkers show every argument."""
    signature = inspect.signature(wsam.METHODS[name])
    base, *options = signature.parameters.values()
    assert base.name == "base"
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in options)
    assert all(p.default is not inspect.Parameter.empty for p in options)
    assert OPTIONS - {p.name for p in options} <= MAY_BE_FIXED
    documented = inspect.getdoc(wsam.METHODS[name]) or ""
    for p in options:
        assert re.search(rf"\b{p.name}\b.*: " if p.name in OPTIONS else f"{p.name}: ", documented)


@pytest.mark.parametrize("name", ALL)
def test_bad_arguments_unknown(name: str) -> None:
    base, unchanged = base_to_watch()
    with pytest.raises(TypeError, match="radius"):
        make_method(name, base, radius=0.1)
    with pytest.raises(TypeError):
        wsam.METHODS[name](base, 0.1)  # only the base is positional
    assert unchanged()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: wsam.WSAM(p, lr=0.1), "write WSAM(torch.optim.SGD(model.parameters(), lr=0.1)"),
        (lambda p: wsam.SAM(p, torch.optim.SGD, rho=0.1), "write SAM(torch.optim.SGD("),
        (lambda p: wsam.SAM(sgd(nn.Linear(2, 1)), 0.1), "lr=0.1), rho=0.05)"),
        (lambda p: wsam.SAM(rho=0.1), "missing a required argument: 'base'; write SAM("),
    ],
)
def test_bad_arguments_suggest_what_to_write(make: Callable[..., Any], expected: str) -> None:
    with pytest.raises(TypeError, match=re.escape(expected)):
        make(nn.Linear(2, 1).parameters())


class OverSGD(wsam.SAM):
    def __init__(self, params: Any, lr: float, **options: Any) -> None:
        super().__init__(torch.optim.SGD(params, lr=lr), **options)


def test_subclass_with_other_arguments() -> None:
    opt = OverSGD(nn.Linear(2, 1).parameters(), 0.1, rho=0.2)
    assert [o.rho for o in (opt, copy.deepcopy(opt), pickle.loads(pickle.dumps(opt)))] == [0.2] * 3


# --- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_bad_arguments(name: str) -> None:
    """The message names the argument and what was given."""
    numbers = [(key, value) for key in own_numbers(name) for value in BAD_NUMBERS]
    for key, value in [*BAD_FOR_ALL, *numbers, *BAD.get(name, [])]:
        base, unchanged = base_to_watch()
        with pytest.raises((ValueError, TypeError)) as caught:
            make_method(name, base, **{key: value})
        message = str(caught.value)
        words = {"gamma": ("gamma", "keep", "share"), "rho_min": ("rho", "low")}.get(key, (key,))
        assert any(word in message for word in words), message
        assert len(message) > 15, message
        assert unchanged(), "a rejected construction has changed the base"


@pytest.mark.parametrize("name", ALL)
def test_bad_arguments_state_what_is_allowed(name: str) -> None:
    with pytest.raises(ValueError, match=r"rho.*\[0, inf\).*-0\.25"):
        make_method(name, base_to_watch()[0], rho=-0.25)
    with pytest.raises(ValueError, match=r"propagate.*skip.*raise.*'ignore'"):
        make_method(name, base_to_watch()[0], nonfinite="ignore")
    if reference.METHODS[name].rule in {"wsam", "coupled"}:
        with pytest.raises(ValueError, match=r"gamma.*\[0, 1\).*1\.0"):
            make_method(name, base_to_watch()[0], gamma=1.0)


@pytest.mark.parametrize(
    ("name", "hyper", "message"),
    [
        ("wsam", {"rho": torch.tensor(-1.0)}, "rho must be in"),
        ("wsam", {"gamma": torch.tensor(1.0)}, "gamma must be in"),
        ("esam", {"gamma": 0.0}, "gamma must be in"),
        ("gsam", {"rho": 0.05, "rho_min": 0.1}, "high must be at least low, got 0.05 and 0.1"),
        ("gsam", {"lr_min": 0.01}, "pass rho_min"),
        ("asam", {"geometry": wsam.Fisher()}, "unexpected keyword argument 'geometry'"),
        ("sam", {"gamma": 0.9}, "unexpected keyword argument 'gamma'"),
        (
            "sam",
            {"geometry": wsam.Adaptive},
            "geometry must be an instance, such as wsam.Adaptive()",
        ),
        ("sam", {"geometry": "adaptive"}, "geometry must be an instance, such as wsam.Adaptive()"),
        ("sam", {"model": [nn.Linear(2, 1)]}, "model must be a torch.nn.Module, got list"),
        ("sam", {"when": 2}, "when must be an interval, as wsam.schedule.Every(2), got 2"),
        ("wsam", {"precondition": "no"}, "precondition must be \"auto\", True or False, got 'no'"),
        ("wsam", {"precondition": None}, 'precondition must be "auto", True or False, got None'),
        ("smA", {}, "unknown method 'smA'; known: sam, wsam, "),
    ],
)
def test_bad_arguments_messages(name: str, hyper: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        wsam.create(name, base_to_watch()[0], **hyper)


@pytest.mark.parametrize("name", ALL)
def test_bad_arguments_base(name: str) -> None:
    params = [nn.Parameter(torch.ones(3))]
    sam = wsam.SAM(torch.optim.SGD(params, lr=0.1))
    for base in (torch.optim.SGD, params, None, "sgd", sam):
        with pytest.raises(TypeError, match="base"):
            make_method(name, base)  # type: ignore[arg-type]


@full(name=ALL, group=[{"sam_rho": -1.0}, {"sam_rho": "big"}, {"rho": math.nan}])
def test_bad_arguments_of_groups(name: str, group: dict[str, Any]) -> None:
    good = {"params": [nn.Parameter(torch.ones(2))], "rho": 0.1}
    base = torch.optim.SGD([good, {"params": [nn.Parameter(torch.ones(3))], **group}], lr=0.1)
    before = snapshot(base)
    with pytest.raises((ValueError, TypeError), match="rho"):
        make_method(name, base)
    assert same(snapshot(base), before)


@pytest.mark.parametrize("name", ALL)
def test_bad_value_written_into_a_group(name: str) -> None:
    model = small_model()
    opt = make_method(name, sgd(model))
    opt.param_groups[0]["sam_rho"] = -1.0
    before = snapshot(opt)
    with pytest.raises(ValueError, match="rho"):
        opt.step(closure(opt, model))
    assert same(snapshot(opt), before)
    opt.param_groups[0]["sam_rho"] = 0.1
    opt.step(closure(opt, model))


@pytest.mark.parametrize("name", ALL)
def test_bad_interval_set_after_construction(name: str) -> None:
    every = wsam.schedule.Every(2)
    opt = make_method(name, base_to_watch()[0], when=every)
    for bad in (2, wsam.schedule.Every):
        message = f"when must be an interval, as wsam.schedule.Every(2), got {bad!r}"
        with pytest.raises(TypeError, match=re.escape(message)):
            opt.when = bad
    assert opt.when is every
    for good in (wsam.schedule.Every(3), None):
        opt.when = good
        assert opt.when is good


def test_bad_value_of_a_schedule() -> None:
    """A function of the step may become invalid late: the step raises, the weights stay."""
    model = small_model()
    gamma = wsam.schedule.Function(lambda step: 0.5 + step)
    opt = wsam.WSAM(sgd(model), gamma=gamma)
    opt.step(closure(opt, model))
    weights = snapshot(opt)["weights"]
    with pytest.raises(ValueError, match="gamma"):
        opt.step(closure(opt, model))
    assert same(snapshot(opt)["weights"], weights)
    for bad in (wsam.schedule.Warmup(1.5, 10), wsam.schedule.Constant(-0.1)):
        with pytest.raises(ValueError, match="gamma"):
            wsam.WSAM(base_to_watch()[0], gamma=bad)


def test_numpy_integer_as_seed() -> None:
    geometry = wsam.ESAM(base_to_watch()[0], seed=np.int64(3)).geometry
    assert geometry == wsam.Masked(seed=3)
    assert geometry.mask(7, 100) == wsam.Masked(seed=3).mask(7, 100)


@pytest.mark.parametrize(
    ("name", "key", "geometry"),
    [
        ("esam", "beta", wsam.Masked(0.9)),
        ("esam", "seed", wsam.Masked(0.6, seed=7)),
        ("asam", "eta", wsam.Adaptive(eta=0.3)),
        ("fisher_sam", "eta", wsam.Fisher(eta=3.0)),
    ],
)
def test_geometry_attribute_has_the_effect_of_the_argument(
    name: str, key: str, geometry: Any
) -> None:
    weights = []
    for given in ({}, {key: getattr(geometry, key)}):
        model = small_model()
        opt = make_method(name, torch.optim.SGD(model.parameters(), lr=0.1), rho=0.5, **given)
        if not given:
            opt.geometry = geometry
        assert getattr(opt, key) == getattr(geometry, key)
        for t in range(3):
            opt.step(closure(opt, model, t))
        weights.append(snapshot(opt)["weights"])
    assert same(*weights)


@pytest.mark.parametrize("name", ALL)
def test_weights_only_needs_names(name: str) -> None:
    """They come from model=, or from a base constructed with named parameters."""
    model = small_model()
    geometry = wsam.Adaptive(weights_only=True)
    option: dict[str, Any] = {"weights_only": True} if name == "asam" else {"geometry": geometry}
    if "geometry" not in inspect.signature(wsam.METHODS[name]).parameters and name != "asam":
        with pytest.raises(TypeError, match="geometry"):
            make_method(name, sgd(model), **option)
        return
    with pytest.raises(ValueError, match="name"):
        make_method(name, sgd(model), **option)
    opts = [
        make_method(name, torch.optim.SGD(model.named_parameters(), lr=0.1), **option),
        make_method(name, torch.optim.SGD(model.parameters(), lr=0.1), model=model, **option),
    ]
    seen: list[list[Tensor]] = []
    for opt in opts:
        opt.zero_grad()
        model_loss(opt, model)().backward()
        with opt.perturbed():
            seen.append([p.detach().clone() for p in model.parameters()])
    assert same(*seen)


def test_decoupled_term_over_a_differentiable_base_is_rejected() -> None:
    base = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, differentiable=True)
    with pytest.raises(ValueError, match="use CoupledWSAM"):
        wsam.WSAM(base)
    wsam.SAM(base)


# --- text ------------------------------------------------------------------------------------------


def test_repr() -> None:
    base = sgd(nn.Linear(3, 1))
    text = repr(wsam.ASAM(base, rho=wsam.schedule.Warmup(1.0, steps=5), max_norm=2.0))
    assert text.startswith("ASAM(rho=Warmup(level=1.0, steps=5, start=0.0), geometry=Adaptive(eta")
    assert "max_norm=2.0" in text
    assert "lean" not in text
    assert "base=SGD (" in text
    opt = wsam.SAM(base)
    opt.param_groups[0]["sam_rho"] = wsam.schedule.InverseSqrt(0.1)
    assert repr(opt).startswith("SAM(rho=InverseSqrt(level=0.1), base=")


def test_repr_shows_options_that_differ_from_the_default() -> None:
    every = wsam.schedule.Every(5)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (torch.optim.SGD, {}, ""),
        (torch.optim.SGD, {"precondition": False}, ""),
        (torch.optim.AdamW, {}, ", precondition=True"),
        (torch.optim.AdamW, {"precondition": False}, ""),
        (torch.optim.SGD, {"lean": True}, ", lean=True"),
        (torch.optim.SGD, {"max_norm": 2.0, "when": every}, f", max_norm=2.0, when={every!r}"),
        (torch.optim.SGD, {"when": every, "reuse": True}, f", when={every!r}, reuse=Reuse("),
    ]
    for kind, options, shown in cases:
        opt = wsam.WSAM(kind(nn.Linear(3, 1).parameters(), lr=0.1), gamma=0.5, **options)
        assert repr(opt).startswith(f"WSAM(rho=0.05, gamma=0.5{shown}")
        assert shown.endswith("Reuse(") or f"gamma=0.5{shown}, base=" in repr(opt)
    looksam = wsam.LookSAM(sgd(nn.Linear(3, 1)), per_tensor=True)
    assert "per_tensor=True" in repr(looksam)


def test_warnings_point_to_the_callers_line() -> None:
    weights = [nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))]
    with pytest.warns(wsam.WsamWarning, match="bfloat16") as record:
        wsam.SAM(torch.optim.SGD(weights, lr=0.1))
    assert record[0].filename == __file__


ADAPTIVE = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "Adadelta")


@pytest.mark.parametrize("base", ADAPTIVE)
def test_decoupled_term_over_an_adaptive_base_warns(base: str) -> None:
    params = [nn.Parameter(torch.ones(2))]
    other = "CoupledWSAM or SAM" if base == "Adamax" else "precondition=True"
    with pytest.warns(wsam.WsamWarning, match=f"WSAM over {base}.*{other}") as record:
        wsam.WSAM(getattr(torch.optim, base)(params, lr=0.1), precondition=False)
    assert [warning.filename for warning in record] == [__file__]


@pytest.mark.filterwarnings("error")
def test_other_methods_and_bases_do_not_warn() -> None:
    params = [nn.Parameter(torch.ones(2))]
    for name in set(METHODS) - {"wsam"}:
        wsam.create(name, torch.optim.AdamW(params, lr=0.1))
    for base in (torch.optim.SGD, torch.optim.ASGD):
        wsam.WSAM(base(params, lr=0.1))
    wsam.WSAM(torch.optim.AdamW(params, lr=0.1))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "WSAM over")
        wsam.WSAM(torch.optim.AdamW(params, lr=0.1), precondition=False)


# --- bases of other libraries ----------------------------------------------------------------------


def test_error_of_the_base_names_the_base() -> None:
    model = small_model()
    opt = wsam.SAM(torch.optim.SparseAdam(model.parameters()))
    weights = snapshot(opt)["weights"]
    with pytest.raises(RuntimeError, match="dense gradients") as caught:
        opt.step(closure(opt, model))
    assert "raised by the base, SparseAdam.step()" in "".join(caught.value.__notes__)
    assert same(snapshot(opt)["weights"], weights)


def test_base_that_needs_a_closure_is_refused() -> None:
    base = torch.optim.LBFGS(small_model().parameters())
    with pytest.raises(TypeError, match=r"LBFGS\.step\(\) needs a closure"):
        wsam.SAM(base)
    torch.optim.lr_scheduler.StepLR(base, 1)  # patches `step`
    with pytest.raises(TypeError, match=r"LBFGS\.step\(\) needs a closure"):
        wsam.SAM(base)


class OwnGamma(torch.optim.Optimizer):
    """Stores gamma in its groups, but not in `defaults`."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        for group in self.param_groups:
            group["gamma"] = 5.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * group["gamma"])


def test_base_may_store_its_own_gamma() -> None:
    model = small_model()
    with pytest.warns(UserWarning, match="'gamma' is left to the base, OwnGamma.*'sam_gamma'"):
        opt = wsam.WSAM(OwnGamma(model.parameters()), gamma=0.5)
    opt.step(closure(opt, model))
    assert opt.param_groups[0]["gamma"] == 5.0
    assert opt.gamma == 0.5


def test_masks_do_not_depend_on_the_default_device() -> None:
    wanted = wsam.Masked(0.5, 3).mask(7, 20)
    torch.set_default_device("meta")
    try:
        assert wsam.Masked(0.5, 3).mask(7, 20) == wanted
    finally:
        torch.set_default_device(None)
