"""Whatever goes wrong between the passes, weights and statistics are as they were."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wsam
from wsam._core import lean as lean_step

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def problem(**options: Any) -> tuple[nn.Module, wsam.SharpnessAware, Callable[[], Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    groups = [{"params": layer.parameters()} for layer in model]
    opt = wsam.WSAM(torch.optim.SGD(groups, lr=0.1), model=model, rho=0.5, **options)
    return model, opt, closure_of(model)


def closure_of(model: nn.Module) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        loss = model(X).square().mean()
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("call", range(4))
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", ["_foreach_copy_", "_foreach_addcmul_", "_foreach_norm"])
def test_ctrl_c_while_the_weights_move(
    name: str, steps: int, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of an earlier step's copy is not taken for this step's."""
    model, opt, closure = problem()
    for _ in range(steps):
        opt.step(closure)
    before = [p.detach().clone() for p in model.parameters()]
    own, calls = getattr(torch, name), []

    def interrupted(*given: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == call + 1:
            raise KeyboardInterrupt
        return own(*given, **more)

    with monkeypatch.context() as patched:
        patched.setattr(torch, name, interrupted)
        for _ in range(2):
            if not all(map(torch.equal, before, model.parameters())):
                break  # the step went through: the call came in no step, or later
            try:
                opt.step(closure)
            except KeyboardInterrupt:
                assert all(map(torch.equal, before, model.parameters()))
    opt.step(closure)


@pytest.mark.parametrize("lean", [False, True])
def test_no_memory_for_a_copy(lean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, opt, closure = problem(lean=lean)
    before = [p.detach().clone() for p in model.parameters()]
    own, calls = torch.empty_like, []

    def scarce(*given: Any, **more: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("can't allocate memory")
        return own(*given, **more)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty_like", scarce)
        with pytest.raises(RuntimeError, match="allocate memory"):
            opt.step(closure)
    assert all(map(torch.equal, before, model.parameters()))
    opt.step(closure)


def test_a_base_that_fails_in_the_lean_plan() -> None:
    class Bad(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("the base failed")

    model = nn.Linear(4, 4)
    opt = wsam.WSAM(Bad(model.parameters(), lr=0.1), model=model, lean=True, rho=0.5)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="the base failed") as caught:
        opt.step(closure_of(model))
    assert all(map(torch.equal, before, model.parameters()))
    assert not getattr(caught.value, "__notes__", []), "nothing had stepped"


@pytest.mark.parametrize("second", [slice(0, 64), slice(32, 96)], ids=["tied", "partly"])
@pytest.mark.parametrize("apart", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("name", wsam.METHODS)
def test_weights_that_share_memory_come_back(name: str, apart: bool, second: slice) -> None:
    flat = torch.randn(128, generator=torch.Generator().manual_seed(1))
    before = flat.clone()
    a, b = nn.Parameter(flat[:64]), nn.Parameter(flat[second])
    groups: Any = [{"params": [a]}, {"params": [b]}] if apart else [a, b]
    opt = wsam.create(name, torch.optim.SGD(groups, lr=0.1), rho=0.5)
    passes = []

    def closure() -> Tensor:
        passes.append(flat.clone())
        loss = a.square().sum() + (b - 1).pow(3).sum()
        loss.backward()
        if len(passes) == 2:
            raise KeyboardInterrupt
        return loss

    with pytest.raises(KeyboardInterrupt):
        opt.step(closure)
    assert torch.equal(flat, before)


class Rebinding(nn.Module):
    """Makes new buffers instead of writing into those it has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(4))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.running_mean = 0.9 * self.running_mean + 0.1 * x.mean(0).detach()
        self.num_batches_tracked = self.num_batches_tracked + 1
        return x


def test_buffers_that_are_replaced_in_a_pass() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Rebinding())
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    for _ in range(3):
        opt.step(closure_of(model))
    assert int(model[1].num_batches_tracked) == 3


def test_a_count_whose_memory_is_replaced() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    opt.step(closure_of(model))
    model[1].num_batches_tracked.data = torch.tensor(10)
    for _ in range(2):
        opt.step(closure_of(model))
    assert int(model[1].num_batches_tracked) == 12


def test_a_lazy_layer_that_is_used_late() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(4, 4), nn.LazyBatchNorm1d(affine=False)
            self.use = False

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.first(x)) if self.use else self.first(x)

    model = Late()
    opt = wsam.WSAM(torch.optim.SGD(model.first.parameters(), lr=0.1), model=model)
    opt.step(closure_of(model))
    model.use = True
    model(X)
    for _ in range(2):
        opt.step(closure_of(model))
    assert int(model.norm.num_batches_tracked) == 3


LIBRARY = str(Path(wsam.__file__).parent)


class Tracer:
    """Presses Ctrl-C at one line of the library; the lines are counted as they run."""

    def __init__(self, line: int) -> None:
        self.left = line
        self.place = ""

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return None
        return self.count

    def count(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.place = frame.f_code.co_name
                raise KeyboardInterrupt
        return self.count


def normalised(name: str, **options: Any) -> tuple[nn.Module, wsam.SharpnessAware, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = wsam.create(name, base, model=model, rho=0.5, **options)
    opt.step(closure_of(model))
    return model, opt, closure_of(model)


def after_a_step(name: str, **options: Any) -> list[Tensor]:
    model, opt, closure = normalised(name, **options)
    opt.step(closure)
    return [p.detach().clone() for p in model.parameters()]


UPDATE = ("_update", "finish", "apply", "device", "sign", "sign_of", "on_device", "weights")
"""Where the base has stepped and the decoupled term is being applied: an update of two parts."""


@pytest.mark.parametrize("name", ["sam", "wsam"])
def test_ctrl_c_at_every_line(name: str) -> None:
    whole = after_a_step(name)
    line = 0
    while True:
        line += 1
        model, opt, closure = normalised(name)
        before = [p.detach().clone() for p in model.parameters()]
        tracer, untraced = Tracer(line), sys.gettrace()
        sys.settrace(tracer)
        try:
            opt.step(closure)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(untraced)
        now = list(model.parameters())
        left = all(map(torch.equal, before, now)) or all(map(torch.equal, whole, now))
        assert left or tracer.place in (*UPDATE, "add_scaled"), (line, tracer.place)
        assert int(model[1].num_batches_tracked) <= 2, (line, tracer.place)
        opt.step(closure)
        if not tracer.place:
            break
    assert line > 300, "the lines of a whole step"


def test_ctrl_c_at_every_line_of_the_lean_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the base has stepped the weights are left at its result, and the error says so."""
    monkeypatch.setattr(lean_step, "EXCHANGE_BYTES", 1)
    whole = after_a_step("wsam", lean=True)
    model, opt, _ = normalised("wsam", lean=True)
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
    line, silent, places = 0, 0, set()
    while True:
        line += 1
        model, opt, closure = normalised("wsam", lean=True)
        before = [p.detach().clone() for p in model.parameters()]
        tracer, untraced = Tracer(line), sys.gettrace()
        noted = False
        sys.settrace(tracer)
        try:
            opt.step(closure)
        except KeyboardInterrupt as error:
            noted = "could not be undone" in "".join(getattr(error, "__notes__", []))
        finally:
            sys.settrace(untraced)
        now = list(model.parameters())
        if all(map(torch.equal, before, now)):
            assert not noted, (line, tracer.place)
        elif all(map(torch.equal, stepped, now)) and tracer.place:
            places.add(tracer.place)
        elif not all(map(torch.equal, whole, now)):
            silent += not noted and tracer.place not in (*UPDATE, "add_scaled")
            assert tracer.place != "_exchange", line
        if not tracer.place:
            break
    assert {"_exchange", "_hold_model", "_restore"} <= places
    assert silent == 1, "between the base's step and `base_stepped = True`"
