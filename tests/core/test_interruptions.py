"""Errors and Ctrl-C at any point of a step: weights and statistics return to w, the next step works."""

import copy
import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ALL, METHODS, closure, covering, make_method, same, small_model, snapshot
from torch import Tensor, nn

import wsam
from wsam._core import lean as lean_step
from wsam.geometry import Only

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
LIBRARY = str(Path(wsam.__file__).parent)


def closure_of(model: nn.Module) -> Callable[[], Tensor]:
    def run() -> Tensor:
        loss = model(X).square().mean()
        loss.backward()
        return loss

    return run


def two_layers(**options: Any) -> tuple[nn.Module, wsam.SharpnessAware, Callable[[], Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    groups = [{"params": layer.parameters()} for layer in model]
    opt = wsam.WSAM(torch.optim.SGD(groups, lr=0.1), model=model, rho=0.5, **options)
    return model, opt, closure_of(model)


# --- closures that raise ---------------------------------------------------------------------------


def failing(
    opt: wsam.SharpnessAware,
    model: nn.Module,
    fail_in: int,
    error: BaseException,
    after_backward: bool,
) -> Callable[[], Tensor]:
    """Return a closure that raises in the given pass, before or after its backward."""
    calls, inner = 0, closure(opt, model, 1)

    def run() -> Tensor:
        nonlocal calls
        calls += 1
        if calls == fail_in and not after_backward:
            raise error
        value = inner()
        if calls == fail_in:
            raise error
        return value

    return run


def check_failure(name: str, fail_in: int, error: BaseException, after_backward: bool) -> None:
    models = small_model(), small_model()
    opts = [
        make_method(name, torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), rho=0.3)
        for m in models
    ]
    for opt, model in zip(opts, models, strict=True):
        opt.step(closure(opt, model, 0))
    opt, model = opts[0], models[0]
    before = snapshot(opt)
    with pytest.raises(type(error)):
        opt.step(failing(opt, model, fail_in, error, after_backward))
    assert same(snapshot(opt), before)
    opt.state_dict()
    for opt, model in zip(opts, models, strict=True):
        opt.step(closure(opt, model, 2))
    assert same(snapshot(opts[0]), snapshot(opts[1])), "the next step gives another result"


@covering(name=ALL, after_backward=[False, True])
def test_raise_pass1(name: str, after_backward: bool) -> None:
    check_failure(name, 1, RuntimeError("no batch"), after_backward)


@covering(name=METHODS, after_backward=[False, True])
def test_raise_pass2(name: str, after_backward: bool) -> None:
    check_failure(name, 2, RuntimeError("no batch"), after_backward)


@pytest.mark.parametrize("backward_before", [False, True])
def test_forward_pass_outside_the_closure(backward_before: bool) -> None:
    model, opt, _ = two_layers()
    loss = model(X).square().mean()
    if backward_before:
        loss.backward()
    before = snapshot(opt)["weights"]
    with pytest.raises(RuntimeError, match="graph a second time") as caught:
        opt.step(lambda: loss.backward() or loss)
    assert ["move the call of the model" in note for note in caught.value.__notes__] == [True]
    assert same(snapshot(opt)["weights"], before)


def test_forward_pass_outside_the_closure_with_a_retained_graph() -> None:
    model, opt, _ = two_layers()
    loss = model(X).square().mean()
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        opt.step(lambda: loss.backward(retain_graph=True) or loss)
    assert ["move the call of the model" in note for note in caught.value.__notes__] == [True]


@covering(name=METHODS, after_backward=[False, True])
def test_ctrl_c_pass2(name: str, after_backward: bool) -> None:
    check_failure(name, 2, KeyboardInterrupt(), after_backward)


# --- errors inside the step ------------------------------------------------------------------------


@covering(
    2,
    function=["_foreach_copy_", "_foreach_addcmul_", "_foreach_norm"],
    steps=[0, 2],
    call=range(4),
)
def test_ctrl_c_while_weights_move(
    function: str, steps: int, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of an earlier step must not be restored."""
    model, opt, run = two_layers()
    for _ in range(steps):
        opt.step(run)
    before = [p.detach().clone() for p in model.parameters()]
    original, calls = getattr(torch, function), []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call + 1:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(torch, function, interrupted)
        for _ in range(2):
            if not all(map(torch.equal, before, model.parameters())):
                break  # a whole step was made: the call was not reached
            try:
                opt.step(run)
            except KeyboardInterrupt:
                assert all(map(torch.equal, before, model.parameters()))
    opt.step(run)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("lean", [False, True])
def test_out_of_memory_while_weights_are_copied(
    lean: bool, by_hand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, opt, run = two_layers(lean=lean)
    before = [p.detach().clone() for p in model.parameters()]
    original, calls = torch.empty_like, []

    def limited(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("can't allocate memory")
        return original(*args, **kwargs)

    def begin_step() -> None:
        if by_hand:
            run()
            opt.ascend()
        else:
            opt.step(run)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty_like", limited)
        with pytest.raises(RuntimeError, match="allocate memory"):
            begin_step()
    assert all(map(torch.equal, before, model.parameters()))
    opt.step(run)


@covering(
    name=METHODS,
    second=[slice(0, 64), slice(32, 96)],
    groups=[1, 2],
)
def test_overlapping_weights_are_restored(name: str, second: slice, groups: int) -> None:
    """Parameters that share a storage, wholly or in part."""
    flat = torch.randn(128, generator=torch.Generator().manual_seed(1))
    before = flat.clone()
    a, b = nn.Parameter(flat[:64]), nn.Parameter(flat[second])
    params: Any = [{"params": [a]}, {"params": [b]}] if groups == 2 else [a, b]
    opt = wsam.create(name, torch.optim.SGD(params, lr=0.1), rho=0.5)
    passes = []

    def run() -> Tensor:
        passes.append(1)
        loss = a.square().sum() + (b - 1).pow(3).sum()
        loss.backward()
        if len(passes) == 2:
            raise KeyboardInterrupt
        return loss

    with pytest.raises(KeyboardInterrupt):
        opt.step(run)
    assert torch.equal(flat, before)


# --- Ctrl-C at every line --------------------------------------------------------------------------


class Tracer:
    """Raises KeyboardInterrupt at one line of the library, counted as lines are executed."""

    def __init__(self, line: int) -> None:
        self.left = line
        self.function = ""

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return None
        return self.count

    def count(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.function = frame.f_code.co_name
                raise KeyboardInterrupt
        return self.count


def normalized(name: str, **options: Any) -> tuple[nn.Module, wsam.SharpnessAware, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = wsam.create(name, base, model=model, rho=0.5, **options)
    opt.step(closure_of(model))
    return model, opt, closure_of(model)


def after_a_step(name: str, **options: Any) -> list[Tensor]:
    model, opt, run = normalized(name, **options)
    opt.step(run)
    return [p.detach().clone() for p in model.parameters()]


def lines_of_a_step(name: str, **options: Any) -> int:
    _, opt, run = normalized(name, **options)
    tracer = Tracer(10**9)
    traced(tracer, lambda: opt.step(run))
    return 10**9 - tracer.left


def traced(tracer: Tracer, call: Callable[[], Any]) -> BaseException | None:
    """Call with the tracer; return the interrupt. One in a finalizer would be lost, so collect none."""
    before = sys.gettrace()
    gc.disable()
    sys.settrace(tracer)
    try:
        call()
    except KeyboardInterrupt as error:
        return error
    finally:
        sys.settrace(before)
        gc.enable()
    return None


UPDATE = (
    "_update",
    "update",
    "finish",
    "apply",
    "factor",
    "device",
    "sign",
    "sign_of",
    "on_device",
    "weights",
)
"""Functions in which the base has stepped and the decoupled term is being applied."""
EVERY_LINE = pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])


@EVERY_LINE
@pytest.mark.parametrize("name", ["sam", "wsam"])
def test_ctrl_c_at_every_line(name: str, stride: int) -> None:
    whole, lines = after_a_step(name), lines_of_a_step(name)
    assert lines > 300
    for line in range(1, lines + 1, stride):
        model, opt, run = normalized(name)
        before = [p.detach().clone() for p in model.parameters()]
        tracer = Tracer(line)
        assert traced(tracer, lambda opt=opt, run=run: opt.step(run)) is not None
        now = list(model.parameters())
        unbroken = all(map(torch.equal, before, now)) or all(map(torch.equal, whole, now))
        assert unbroken or tracer.function in (*UPDATE, "add_scaled"), (line, tracer.function)
        assert int(model[1].num_batches_tracked) <= 2, (line, tracer.function)
        opt.step(run)


class OpcodeTracer:
    """Raises KeyboardInterrupt at one instruction of the functions that hold running statistics."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        caller = frame
        while caller is not None:
            code = caller.f_code
            if code.co_name in ("hold", "release") and "norm_stats" in code.co_filename:
                frame.f_trace_opcodes = True
                return self.trace
            caller = caller.f_back
        return None

    def trace(self, frame: Any, event: str, argument: Any) -> Any:
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.trace


@pytest.mark.slow
def test_ctrl_c_at_every_instruction_leaves_no_hook() -> None:
    """Without model= a global hook finds the layers that run."""

    def interrupted(count: int) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        opt = wsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.5)
        tracer: Any = OpcodeTracer(count)
        error = traced(tracer, lambda: opt.step(closure_of(model)))
        assert (error is None) == (tracer.left > 0)
        assert not nn.modules.module._global_forward_pre_hooks, count
        assert int(model[1].num_batches_tracked) == 1
        return int(tracer.left)

    total = 10**6 - interrupted(10**6)
    assert total > 200
    for count in range(1, total + 1):
        interrupted(count)


@EVERY_LINE
def test_ctrl_c_at_every_line_of_a_lean_step(stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the base has stepped the weights keep its result, and a note of the error states that."""
    monkeypatch.setattr(lean_step, "CHUNK_BYTES", 1)
    whole, lines = after_a_step("wsam", lean=True), lines_of_a_step("wsam", lean=True)
    model, opt, _ = normalized("wsam", lean=True)
    passes = []

    def fails() -> Tensor:
        loss = closure_of(model)()
        passes.append(loss)
        if len(passes) == 2:
            raise KeyboardInterrupt
        return loss

    with pytest.raises(KeyboardInterrupt):
        opt.step(fails)
    stepped = [p.detach().clone() for p in model.parameters()]
    without_note, functions = 0, set()
    for line in range(1, lines + 1, stride):
        model, opt, run = normalized("wsam", lean=True)
        before = [p.detach().clone() for p in model.parameters()]
        tracer = Tracer(line)
        error = traced(tracer, lambda opt=opt, run=run: opt.step(run))
        noted = "could not be undone" in "".join(getattr(error, "__notes__", []))
        now = list(model.parameters())
        if all(map(torch.equal, before, now)):
            assert not noted, (line, tracer.function)
        elif all(map(torch.equal, stepped, now)):
            functions.add(tracer.function)
        elif not all(map(torch.equal, whole, now)):
            without_note += not noted and tracer.function not in (*UPDATE, "add_scaled")
            assert tracer.function != "_save_and_move", line
    assert "_save_and_move" in functions
    if stride == 1:
        assert {"_protect_model", "_restore"} <= functions
        assert without_note == 1, "between the base's step and `base_stepped = True`"
    assert without_note <= 1


# --- global state ----------------------------------------------------------------------------------


def test_ctrl_c_while_parameters_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first step of a copy. The next step finds again which of them are perturbed."""
    model = nn.Linear(2, 2)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = wsam.SAM(base, rho=0.5, geometry=Only(("bias",)), model=model)
    model, opt = copy.deepcopy((model, opt))
    weights: list[Tensor] = []

    def run() -> Tensor:
        weights.append(model.weight.detach().clone())
        loss = model(torch.ones(3, 2)).square().sum()
        loss.backward()
        return loss

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(opt, "_find_fixed_mask", interrupt)
        with pytest.raises(KeyboardInterrupt):
            opt.step(run)
    weights.clear()
    opt.step(run)
    first, second = weights
    assert torch.equal(first, second), "the bias alone is perturbed"


def global_hooks() -> int:
    return len(torch.nn.modules.module._global_forward_pre_hooks)


def test_no_hook_is_left_behind_before_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `nonfinite="skip"` a hook finds statistics in the first pass, too."""
    model, hooks = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), global_hooks()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = wsam.SAM(base, nonfinite="skip")

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(opt, "_update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        opt.step(closure_of(model))
    assert global_hooks() == hooks


@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("fail_in", [1, 2])
def test_nothing_left_behind(fail_in: int, with_model: bool) -> None:
    """An interrupted step leaves no hook, paused iteration, moved generator or fused flag."""
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    model = nn.Sequential(layer, nn.BatchNorm1d(4), nn.Dropout(0.5))
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = wsam.WSAM(base, model=model if with_model else None)
    hooks, flags = global_hooks(), [group["fused"] for group in base.param_groups]
    states: list[Tensor] = []

    def fails() -> Tensor:
        loss = closure_of(model)()
        states.append(torch.get_rng_state())
        if len(states) == fail_in:
            raise KeyboardInterrupt
        return loss

    with pytest.raises(KeyboardInterrupt):
        opt.step(fails)
    assert global_hooks() == hooks
    assert torch.equal(torch.get_rng_state(), states[0]), "as the first pass left it"
    assert layer.parametrizations.weight[0].n_power_iterations == 1
    assert [group["fused"] for group in base.param_groups] == flags
    assert all(m.training for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())


def test_nothing_left_behind_by_a_deleted_optimizer() -> None:
    """Without model= a hook is registered between the passes; it must not keep the optimizer alive."""
    model, hooks = nn.Linear(4, 1), global_hooks()
    for _ in range(2):
        opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1))
        opt.begin()
        closure_of(model)()
        opt.ascend()
        assert global_hooks() == hooks + 1
        del opt
        gc.collect()
        assert global_hooks() == hooks


def test_optimizer_that_its_model_references_is_freed() -> None:
    """As that of a LightningModule, whose trainer has the optimizers."""
    model: Any = nn.Linear(4, 1)
    model.optimizer = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    model.optimizer.step(closure_of(model))
    optimizer = weakref.ref(model.optimizer)
    del model
    gc.collect()
    assert optimizer() is None
