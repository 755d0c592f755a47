"""Eager steps on CUDA: a step by kernels equals one without."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import wsam
from wsam._core.step_state import StepState
from wsam.accel.triton_backend import TritonBackend

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
BASES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **more: torch.optim.SGD(p, lr=0.1, **more),
    "momentum": lambda p, **more: torch.optim.SGD(p, **SGD, **more),
    "adam": lambda p, **more: torch.optim.Adam(p, lr=0.01, weight_decay=0.01, **more),
    "adamw": lambda p, **more: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, **more),
}
# Each method over one base, and each base with a rule that keeps g0 and one that does not.
CASES = [
    *(("wsam", base) for base in BASES),
    *(("sam", base) for base in BASES),
    ("coupled_wsam", "adamw"),
    ("gsam", "momentum"),
    ("esam", "momentum"),
    ("asam", "adam"),
    ("fisher_sam", "adamw"),
]


def network() -> nn.Module:
    torch.manual_seed(0)
    hidden = nn.Sequential(nn.Conv2d(3, 7, 3, bias=False), nn.BatchNorm2d(7), nn.ReLU())
    last = nn.Sequential(nn.Linear(7 * 36, 50), nn.Tanh(), nn.Dropout(0.2), nn.Linear(50, 4))
    return nn.Sequential(hidden, nn.Flatten(), last).cuda().to(memory_format=torch.channels_last)


class Loop:
    """A model and its optimizer; `fused` is an option of the base."""

    def __init__(
        self, fused: bool | None, method: str = "wsam", base: str = "momentum", **options: Any
    ):
        self.model = network()
        made = BASES[base](self.model.parameters(), fused=fused)
        self.opt = wsam.create(method, made, model=self.model, **options)

    def closure(self, step: int) -> Callable[[], torch.Tensor]:
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(9, 3, 8, 8, generator=draw).cuda()
        y = torch.randint(0, 4, (9,), generator=draw).cuda()

        def run() -> torch.Tensor:
            loss = self.opt.select(cross_entropy(self.model(x), y, reduction="none"))
            loss.backward()
            return loss

        return run

    def train(self, steps: range) -> None:
        for step in steps:
            torch.cuda.manual_seed(step)
            self.opt.step(self.closure(step))


def assert_same(one: Loop, other: Loop, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    pairs = zip(one.model.state_dict().items(), other.model.state_dict().values(), strict=True)
    for (name, mine), theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol, msg=lambda m, n=name: n + m)


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The plan of each step that kernels have finished, "lean" or "default"."""
    plans: list[str] = []
    own = TritonBackend.finish

    def finish(self: TritonBackend, state: StepState) -> bool:
        done = own(self, state)
        if done:
            plans.append("lean" if state.lean else "default")
        return done

    monkeypatch.setattr(TritonBackend, "finish", finish)
    return plans


@pytest.mark.parametrize(("method", "base"), CASES)
def test_methods(method: str, base: str, finished: list[str]) -> None:
    loops = [Loop(fused, method, base) for fused in (False, True)]
    for loop in loops:
        loop.train(range(6))
    assert_same(*loops)
    # The base creates its state in the first step. ESAM perturbs a part of the tensors only.
    wanted = 0 if method == "esam" else 6 if base == "sgd" else 5
    assert finished == ["default"] * wanted


def test_a_base_without_a_choice_of_implementation(finished: list[str]) -> None:
    loops = [Loop(fused) for fused in (False, None)]
    for loop in loops:
        loop.train(range(6))
    assert_same(*loops)
    assert finished == ["default"] * 5


def test_lean(finished: list[str]) -> None:
    loops = [Loop(fused, lean=True) for fused in (False, True)]
    for loop in loops:
        loop.train(range(6))
    assert_same(*loops)
    assert finished == ["lean"] * 5  # the first step creates the momentum


def test_reused_sharpness(finished: list[str]) -> None:
    options = {"when": wsam.schedule.Every(2), "reuse": True}
    loops = [Loop(fused, **options) for fused in (False, True)]
    for loop in loops:
        loop.train(range(6))
    assert_same(*loops)
    assert finished == ["default"] * 5  # the first step creates the momentum and the kept vector


@pytest.mark.parametrize(
    "options", [{"max_norm": 0.5}, {"nonfinite": "skip"}, {"geometry": wsam.Adaptive()}]
)
def test_options(options: dict[str, Any], finished: list[str]) -> None:
    loops = [Loop(fused, **options) for fused in (False, True)]
    for loop in loops:
        loop.train(range(4))
    assert_same(*loops)
    assert len(finished) == (3 if "geometry" in options else 0)


def test_scheduled_values(finished: list[str]) -> None:
    loops = [Loop(fused, rho=wsam.schedule.Warmup(0.2, 4)) for fused in (False, True)]
    for loop in loops:
        scheduler = torch.optim.lr_scheduler.StepLR(loop.opt, 2, gamma=0.5)
        for step in range(6):
            loop.train(range(step, step + 1))
            scheduler.step()
    assert_same(*loops)
    assert len(finished) == 5  # rho is 0 in the first step


def test_two_groups(finished: list[str]) -> None:
    loops = [Loop(fused) for fused in (False, True)]
    for fused, loop in zip((False, True), loops, strict=True):
        first, *others = loop.model.parameters()
        groups = [{"params": [first], "lr": 0.02, "sam_rho": 0.5}, {"params": others}]
        loop.opt = wsam.WSAM(torch.optim.SGD(groups, **SGD, fused=fused), model=loop.model)
        loop.train(range(4))
    assert_same(*loops)
    assert len(finished) == 3


def test_micro_batches_and_steps_by_hand(finished: list[str]) -> None:
    loops = [Loop(fused) for fused in (False, True)]
    for loop in loops:
        loop.train(range(2))
        loop.opt.step([loop.closure(2), loop.closure(3)])
        run = loop.closure(4)
        loop.opt.zero_grad()
        run()
        loop.opt.ascend()
        run()
        loop.opt.descend()
        assert all(p.grad is not None for p in loop.model.parameters())
        loop.opt.step()
        loop.train(range(5, 7))
    assert_same(*loops)
    assert len(finished) == 3


def test_weights_are_restored_after_an_interrupt() -> None:
    loop = Loop(True)
    loop.train(range(2))
    before = [p.detach().clone() for p in loop.model.parameters()]
    run, calls = loop.closure(2), []

    def fails() -> torch.Tensor:
        calls.append(1)
        loss = run()
        if len(calls) == 2:
            raise KeyboardInterrupt
        return loss

    with pytest.raises(KeyboardInterrupt):
        loop.opt.step(fails)
    assert all(map(torch.equal, before, loop.model.parameters()))
    loop.train(range(2, 4))


def test_weights_that_move_between_steps() -> None:
    loops = [Loop(fused) for fused in (False, True)]
    for loop in loops:
        loop.train(range(2))
        for p in loop.model.parameters():
            p.data = p.data.clone()
        loop.train(range(2, 4))
    assert_same(*loops)


def test_hooks_of_the_base_are_called(finished: list[str]) -> None:
    loop, calls = Loop(True), []
    loop.train(range(2))
    assert len(finished) == 1
    loop.opt.base.register_step_post_hook(lambda *_: calls.append(1))
    loop.train(range(2, 4))
    assert (len(calls), len(finished)) == (2, 1)


def test_loaded_states_and_copies() -> None:
    loop = Loop(True)
    loop.train(range(3))
    other = Loop(True)
    other.model.load_state_dict(loop.model.state_dict())
    other.opt.load_state_dict(copy.deepcopy(loop.opt.state_dict()))
    for each in (loop, other):
        each.train(range(3, 6))
    assert_same(loop, other, rtol=0, atol=0)
    assert copy.deepcopy(loop.opt).param_groups[0]["fused"]


def test_gradients_are_freed_with_the_step() -> None:
    loop, refs = Loop(True), []
    loop.train(range(2))
    run = loop.closure(2)

    def closure() -> torch.Tensor:
        for block in loop.opt._step_state.blocks:  # there are none in the first pass
            refs.extend(weakref.ref(g) for g in block.g0 or [])
        return run()

    loop.opt.step(closure)
    loop.opt.zero_grad()
    assert refs
    assert not any(ref() is not None for ref in refs)


def test_a_step_does_not_synchronize() -> None:
    loop = Loop(True)
    loop.train(range(3))
    closures = [loop.closure(step) for step in range(3)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for closure in closures:
            loop.opt.param_groups[0]["lr"] *= 0.9
            loop.opt.step(closure)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_numbers_come_from_pinned_memory() -> None:
    """A copy from pageable memory would synchronize, and `set_sync_debug_mode` does not show it."""
    loop = Loop(True)
    loop.train(range(3))
    closure = loop.closure(3)
    loop.opt.param_groups[0]["lr"] *= 0.9
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        loop.opt.step(closure)
        torch.cuda.synchronize()
    copies = [event.name for event in profile.events() if "HtoD" in event.name]
    assert copies
    assert not [name for name in copies if "Pageable" in name]
