"""The interface of torch.optim: torch's own test inputs, hooks and learning-rate schedulers."""

import copy
import functools
import sys
import types
import unittest
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    METHODS,
    RULES,
    STYLES,
    VARIANTS,
    covering,
    make_method,
    make_step,
    model_loss,
    same,
    small_model,
    snapshot,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

import wsam

NOT_SUPPORTED = {"LBFGS", "SparseAdam"}
DENSE = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in {"Optimizer", *NOT_SUPPORTED}
)


@functools.cache
def database() -> types.ModuleType:
    """Import torch.testing._internal.common_optimizers, and undo the side effects of the import."""
    if "expecttest" not in sys.modules:
        try:
            import expecttest  # noqa: F401
        except ModuleNotFoundError:  # the base class of torch's test cases, which are not used here
            stub = types.ModuleType("expecttest")
            stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
            sys.modules["expecttest"] = stub
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_optimizers
    # The import forbids setting backend flags, which other tests do.
    torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True
    return common_optimizers


def info(name: str) -> Any:
    return next(i for i in database().optim_db if i.optim_cls.__name__ == name)


def inputs(name: str) -> list[Any]:
    """Return every configuration torch tests on a CPU, fused and foreach kernels included."""
    found = database()._get_optim_inputs_including_global_cliquey_kwargs(
        "cpu", torch.float32, info(name), skip=("differentiable",)
    )
    assert len(found) >= 4
    return found


class Line:
    """torch's toy problem for optimizers: a linear function is driven to zero."""

    def __init__(self, two_dimensional: bool) -> None:
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(10, 5))
        self.bias = nn.Parameter(torch.randn(10))
        self.input = torch.randn(5)
        self.params = [self.weight] if two_dimensional else [self.weight, self.bias]

    def losses(self) -> Tensor:
        return (self.weight.mv(self.input) + self.bias).pow(2)

    def loss(self) -> float:
        return float(self.losses().detach().sum())


def build(
    method: str, name: str, options: dict[str, Any], **ours: Any
) -> tuple[Line, wsam.SharpnessAware]:
    line = Line(two_dimensional=name == "Muon")
    base = getattr(torch.optim, name)(line.params, **copy.deepcopy(options))
    return line, make_method(method, base, **ours)


def run(opt: wsam.SharpnessAware, line: Line, steps: int, maximize: bool = False) -> None:
    def closure() -> Tensor:
        opt.zero_grad()
        loss = opt.select(line.losses()) * (-1.0 if maximize else 1.0)
        loss.backward()
        return loss

    for _ in range(steps):
        opt.step(closure)


def test_database_is_complete() -> None:
    known = {i.optim_cls.__name__ for i in database().optim_db}
    assert set(DENSE) | NOT_SUPPORTED == known
    torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark  # may still be set


@covering(name=DENSE, method=["sam", "wsam"])
def test_loss_decreases(name: str, method: str) -> None:
    """In every configuration; with `maximize` the negative loss is used."""
    ours = {"gamma": 0.5} if method == "wsam" else {}
    for entry in inputs(name):
        up = bool(entry.kwargs.get("maximize"))
        line, opt = build(method, name, entry.kwargs, **ours)
        before = line.loss()
        run(opt, line, 8, maximize=up)
        assert line.loss() < before, f"{entry.desc} {entry.kwargs}"
        assert all(p.isfinite().all() for p in line.params)


@covering(name=DENSE, method=["wsam", "gsam"])
def test_rho_zero_is_torch(name: str, method: str) -> None:
    """With a radius of 0 every configuration is bitwise torch's own optimizer."""
    for entry in inputs(name):
        line, opt = build(method, name, entry.kwargs, rho=0.0)
        other = Line(two_dimensional=name == "Muon")
        plain = getattr(torch.optim, name)(other.params, **copy.deepcopy(entry.kwargs))
        run(opt, line, 2)
        for _ in range(2):
            plain.zero_grad()
            other.losses().mean().backward()
            plain.step()
        found = snapshot(opt)
        wanted = snapshot(plain)
        assert same(found["weights"], wanted["weights"]), f"{entry.desc} {entry.kwargs}"
        assert same(found["state"], wanted["state"]), f"{entry.desc} {entry.kwargs}"


@pytest.mark.parametrize("name", DENSE)
def test_state_dict_roundtrip(name: str) -> None:
    for entry in inputs(name):
        line, opt = build("wsam", name, entry.kwargs)
        run(opt, line, 2)
        state = copy.deepcopy(opt.state_dict())
        other, twin = build("wsam", name, entry.kwargs)
        with torch.no_grad():
            for p, q in zip(other.params, line.params, strict=True):
                p.copy_(q)
        twin.load_state_dict(state)
        run(opt, line, 2)
        run(twin, other, 2)
        assert same(snapshot(opt), snapshot(twin)), f"{entry.desc} {entry.kwargs}"


@pytest.mark.parametrize("name", DENSE)
def test_deepcopy(name: str) -> None:
    for entry in inputs(name):
        pair = build("wsam", name, entry.kwargs)
        run(pair[1], pair[0], 2)
        twin = copy.deepcopy(pair)
        for line, opt in (pair, twin):
            run(opt, line, 2)
        assert same(snapshot(pair[1]), snapshot(twin[1])), f"{entry.desc} {entry.kwargs}"


@pytest.mark.parametrize("name", DENSE)
def test_errors(name: str) -> None:
    """Errors and warnings of torch's constructors are unchanged."""
    for entry in info(name).optim_error_inputs_func(device="cpu", dtype=torch.float32):
        given = entry.optimizer_error_input
        params = Line(name == "Muon").params if given.params is None else given.params

        def wrap(params: Any = params, given: Any = given) -> Any:
            return wsam.WSAM(getattr(torch.optim, name)(params, **given.kwargs))

        if issubclass(entry.error_type, Warning):
            with pytest.warns(entry.error_type, match=entry.error_regex):
                wrap()
            continue
        if entry.error_on is database().OptimizerErrorEnum.STEP_ERROR:
            # torch raises at the first step, the method at construction.
            assert any(p.is_complex() for p in params)
            with pytest.raises(TypeError, match="complex"):
                wrap()
            continue
        with pytest.raises(entry.error_type, match=entry.error_regex):
            wrap()


@covering(name=DENSE, method=METHODS)
def test_param_group_errors(name: str, method: str) -> None:
    """A group that torch rejects is rejected, and nothing changes."""
    line, opt = build(method, name, {"lr": 0.01})
    run(opt, line, 1)
    before = snapshot(opt)
    leaf = torch.ones(2, 2, requires_grad=True)
    wrong: list[tuple[Any, type[Exception], str]] = [
        ([leaf], TypeError, "param_group must be a dict"),
        ({"params": {leaf}}, TypeError, "ordered"),
        ({"params": [3]}, TypeError, "optimizer can only optimize Tensors"),
        ({"params": [leaf * 2]}, ValueError, "non-leaf"),
        ({"params": [line.weight]}, ValueError, "more than one parameter group"),
    ]
    for group, error, words in wrong:
        with pytest.raises(error, match=words):
            opt.add_param_group(group)
        assert opt.param_groups is opt.base.param_groups
        assert same(snapshot(opt), before)
    run(opt, line, 1)
    assert not same(snapshot(opt)["weights"], before["weights"])


@pytest.mark.parametrize("name", DENSE)
def test_lr_schedulers(name: str) -> None:
    """torch's selection of schedulers changes the base's learning rate, and the loss decreases."""
    for makers in info(name).scheduler_inputs:
        line, opt = build("wsam", name, {"lr": 0.01}, gamma=0.5)
        _, plain = build("wsam", name, {"lr": 0.01})
        schedulers = [make(opt) for make in makers]
        twins = [make(plain.base) for make in makers]
        before = line.loss()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*lr_scheduler.step.*optimizer.step")
            warnings.filterwarnings("ignore", message=".*epoch parameter.*")
            for _ in range(20):
                run(opt, line, 1)
                for scheduler in schedulers:
                    plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                    scheduler.step(1.0) if plateau else scheduler.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(20):
                for scheduler in twins:
                    plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                    scheduler.step(1.0) if plateau else scheduler.step()
        rate = opt.base.param_groups[0]["lr"]
        assert rate == opt.param_groups[0]["lr"] == plain.base.param_groups[0]["lr"]
        assert line.loss() < before


# --- hooks and schedulers --------------------------------------------------------------------------


@covering(name=VARIANTS, style=STYLES)
def test_hook_count(name: str, style: str) -> None:
    """Hooks of the optimizer and of its base are called once a step; a scheduler does not warn."""
    model = small_model()
    opt = make_method(name, torch.optim.SGD(model.parameters(), lr=0.1))
    calls: list[str] = []

    def record(word: str) -> Callable[..., None]:
        return lambda *args, **kwargs: calls.append(word)

    opt.register_step_pre_hook(record("pre"))
    opt.register_step_post_hook(record("post"))
    opt.base.register_step_pre_hook(record("base pre"))
    opt.base.register_step_post_hook(record("base post"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = CosineAnnealingLR(opt, T_max=10)
        for t in range(2):
            make_step(opt, model_loss(opt, model, t), style)
            scheduler.step()
    if opt.lean and style != "closure":  # the base steps inside ascend
        assert sorted(calls) == sorted(["base pre", "base post", "pre", "post"] * 2)
    else:
        assert calls == ["pre", "base pre", "base post", "post"] * 2
    assert opt.param_groups[0]["lr"] == opt.base.param_groups[0]["lr"] < 0.1


def test_scheduler_of_the_base_after_a_skipped_step() -> None:
    """It does not warn that the optimizer has not stepped."""
    model = small_model()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = StepLR(base, 1)
    opt = wsam.SAM(base, nonfinite="skip")
    make_step(opt, lambda: model_loss(opt, model)() * torch.inf)
    assert opt.skipped == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


@pytest.mark.parametrize("method", RULES)
def test_step_hooks(method: str) -> None:
    """Hooks are called in torch's order with the optimizer, and can be removed."""
    line, opt = build(method, "SGD", {"lr": 0.01})
    calls: list[str] = []
    seen: list[Any] = []

    def pre(optimizer: Any, args: Any, kwargs: Any) -> None:
        calls.append("pre")
        seen.append(optimizer)

    def post(optimizer: Any, args: Any, kwargs: Any) -> None:
        calls.append("post")
        seen.append(optimizer)

    handles = [opt.register_step_pre_hook(pre), opt.register_step_post_hook(post)]
    run(opt, line, 2)
    assert calls == ["pre", "post"] * 2
    assert all(o is opt for o in seen)
    for handle in handles:
        handle.remove()
    run(opt, line, 1)
    assert len(calls) == 4


@pytest.mark.parametrize("method", RULES)
def test_state_dict_hooks(method: str) -> None:
    line, opt = build(method, "SGD", {"lr": 0.01, "momentum": 0.9})
    run(opt, line, 1)
    calls: list[str] = []

    def after(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        calls.append("saved")
        return {**state, "ran": True}

    def before_load(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        calls.append("loading")
        state = copy.copy(state)
        state["param_groups"] = [{**g, "lr": 0.123} for g in state["param_groups"]]
        return state

    opt.register_state_dict_pre_hook(lambda optimizer: calls.append("saving"))
    opt.register_state_dict_post_hook(after)
    opt.register_load_state_dict_pre_hook(before_load)
    opt.register_load_state_dict_pre_hook(lambda optimizer, state: None)
    opt.register_load_state_dict_post_hook(lambda optimizer: calls.append("loaded"))
    state = opt.state_dict()
    assert state["ran"] is True
    opt.load_state_dict(state)
    assert calls == ["saving", "saved", "loading", "loaded"]
    assert opt.base.param_groups[0]["lr"] == opt.param_groups[0]["lr"] == 0.123
    run(opt, line, 1)


@pytest.mark.parametrize("name", ["state", "param_groups", "defaults"])
def test_assigned_attributes_are_those_of_the_base(name: str) -> None:
    opt = build("sam", "SGD", {"lr": 0.01})[1]
    setattr(opt, name, value := copy.copy(getattr(opt, name)))
    assert getattr(opt.base, name) is value


def test_zero_grad_and_repr() -> None:
    line, opt = build("wsam", "SGD", {"lr": 0.01}, rho=0.25)
    run(opt, line, 1)
    line.losses().sum().backward()
    opt.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in line.params)
    opt.zero_grad()
    assert all(p.grad is None for p in line.params)
    text = repr(opt)
    assert "WSAM" in text
    assert "SGD" in text
    assert "0.25" in text
