"""Eager steps on CUDA: kernels do our part and the base's, and nobody can tell."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import wsam
from wsam import kernels
from wsam.bases import may_use_kernels

needs_cuda = [
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


def network() -> nn.Module:
    torch.manual_seed(0)
    hidden = nn.Sequential(nn.Conv2d(3, 7, 3, bias=False), nn.BatchNorm2d(7), nn.ReLU())
    last = nn.Sequential(nn.Linear(7 * 36, 50), nn.Tanh(), nn.Dropout(0.2), nn.Linear(50, 4))
    return nn.Sequential(hidden, nn.Flatten(), last).cuda().to(memory_format=torch.channels_last)


class Loop:
    """A model, its optimizer and how often a kernel finished a step."""

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
    """Which kernels ended a step."""
    heard: list[str] = []
    for name in ("finish", "end_lean"):
        own = getattr(kernels.Kernels, name)

        def listen(self: Any, flight: Any, own: Any = own, name: str = name) -> bool:
            done: bool = own(self, flight)
            if done:
                heard.append(name)
            return done

        monkeypatch.setattr(kernels.Kernels, name, listen)
    return heard


class TestOnCuda:
    pytestmark = needs_cuda

    @pytest.mark.parametrize("base", BASES)
    @pytest.mark.parametrize("method", wsam.METHODS)
    def test_every_member(self, method: str, base: str, finished: list[str]) -> None:
        loops = [Loop(fused, method, base) for fused in (False, True)]
        for loop in loops:
            loop.train(range(6))
        assert_same(*loops)
        # The first step makes the base's state; ESAM leaves tensors out.
        wanted = 0 if method == "esam" else 6 if base == "sgd" else 5
        assert finished == ["finish"] * wanted

    def test_a_base_that_leaves_it_open(self, finished: list[str]) -> None:
        loops = [Loop(fused) for fused in (False, None)]
        for loop in loops:
            loop.train(range(6))
        assert_same(*loops)
        assert finished == ["finish"] * 5

    def test_lean(self, finished: list[str]) -> None:
        loops = [Loop(fused, lean=True) for fused in (False, True)]
        for loop in loops:
            loop.train(range(6))
        assert_same(*loops)
        assert finished == ["end_lean"] * 5  # the first makes the momentum

    @pytest.mark.parametrize(
        "options", [{"max_norm": 0.5}, {"nonfinite": "skip"}, {"geometry": wsam.Adaptive()}]
    )
    def test_options(self, options: dict[str, Any], finished: list[str]) -> None:
        loops = [Loop(fused, **options) for fused in (False, True)]
        for loop in loops:
            loop.train(range(4))
        assert_same(*loops)
        assert len(finished) == (3 if "geometry" in options else 0)

    def test_scheduled_values(self, finished: list[str]) -> None:
        loops = [Loop(fused, rho=wsam.schedule.Warmup(0.2, 4)) for fused in (False, True)]
        for loop in loops:
            scheduler = torch.optim.lr_scheduler.StepLR(loop.opt, 2, gamma=0.5)
            for step in range(6):
                loop.train(range(step, step + 1))
                scheduler.step()
        assert_same(*loops)
        assert len(finished) == 5  # in the first there is no radius and no perturbation

    def test_two_groups(self, finished: list[str]) -> None:
        loops = [Loop(fused) for fused in (False, True)]
        for fused, loop in zip((False, True), loops, strict=True):
            first, *others = loop.model.parameters()
            groups = [{"params": [first], "lr": 0.02, "sam_rho": 0.5}, {"params": others}]
            loop.opt = wsam.WSAM(torch.optim.SGD(groups, **SGD, fused=fused), model=loop.model)
            loop.train(range(4))
        assert_same(*loops)
        assert len(finished) == 3

    def test_micro_batches_and_steps_by_hand(self, finished: list[str]) -> None:
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

    def test_an_exception_puts_the_weights_back(self) -> None:
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

    def test_weights_that_are_replaced(self, finished: list[str]) -> None:
        loops = [Loop(fused) for fused in (False, True)]
        for loop in loops:
            loop.train(range(2))
            for p in loop.model.parameters():
                p.data = p.data.clone()
            loop.train(range(2, 4))
        assert_same(*loops)

    def test_hooks_of_the_base_are_heard(self, finished: list[str]) -> None:
        loop, heard = Loop(True), []
        loop.train(range(2))
        assert len(finished) == 1
        loop.opt.base.register_step_post_hook(lambda *_: heard.append(1))
        loop.train(range(2, 4))
        assert (len(heard), len(finished)) == (2, 1)

    def test_copies_and_states(self) -> None:
        loop = Loop(True)
        loop.train(range(3))
        other = Loop(True)
        other.model.load_state_dict(loop.model.state_dict())
        other.opt.load_state_dict(copy.deepcopy(loop.opt.state_dict()))
        for each in (loop, other):
            each.train(range(3, 6))
        assert_same(loop, other, rtol=0, atol=0)
        assert copy.deepcopy(loop.opt).param_groups[0]["fused"]

    def test_gradients_are_not_held_beyond_their_step(self) -> None:
        loop, held = Loop(True), []
        loop.train(range(2))
        run = loop.closure(2)

        def looks() -> torch.Tensor:
            flight = loop.opt._flight
            if flight is not None:
                held.extend(weakref.ref(g) for g in flight.blocks[0].first)
            return run()

        loop.opt.step(looks)
        loop.opt.zero_grad()
        assert held
        assert not any(ref() is not None for ref in held)

    def test_nothing_waits_for_the_device(self) -> None:
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

    def test_numbers_come_from_pinned_memory(self) -> None:
        """A copy out of ordinary memory would wait for the device, and torch does not tell."""
        loop = Loop(True)
        loop.train(range(3))
        closure = loop.closure(3)
        loop.opt.param_groups[0]["lr"] *= 0.9
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as seen:
            loop.opt.step(closure)
            torch.cuda.synchronize()
        copies = [event.name for event in seen.events() if "HtoD" in event.name]
        assert copies
        assert not [name for name in copies if "Pageable" in name]


@pytest.mark.parametrize(
    ("make", "options", "left"),
    [
        (torch.optim.SGD, {}, True),
        (torch.optim.SGD, {"fused": True}, True),
        (torch.optim.SGD, {"fused": False}, False),
        (torch.optim.SGD, {"foreach": True}, False),
        (torch.optim.SGD, {"foreach": False}, False),
        (torch.optim.SGD, {"differentiable": True}, False),
        (torch.optim.Adam, {}, False),  # its counts are on the host
        (torch.optim.Adam, {"capturable": True}, True),
        (torch.optim.AdamW, {"fused": True}, True),
    ],
)
def test_whose_step_is_left_to_kernels(make: Any, options: dict[str, bool], left: bool) -> None:
    opt = wsam.CoupledWSAM(make([nn.Parameter(torch.zeros(2))], lr=0.1, **options))
    assert may_use_kernels(opt.base, opt.rule) is left


def test_a_step_may_be_marked_as_a_schedulers() -> None:
    """What silences the scheduler's warning is no scheduler's own."""
    base = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    own = base.step

    def step(*given: Any) -> Any:
        return own(*given)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    base.step = step  # type: ignore[method-assign]
    assert not may_use_kernels(base, wsam.rule.Weighted())


def test_where_kernels_do_not_serve() -> None:
    weights = [nn.Parameter(torch.zeros(2))]
    rule = wsam.rule.Weighted()
    for fused in (False, True):
        base = torch.optim.SGD(weights, lr=0.1, fused=fused)
        assert kernels.for_eager_steps(base, rule, 1.0, torch.device("cpu"), None) is None


def test_kernels_serve_as_long_as_nothing_changes() -> None:
    cpu, rule = torch.device("cpu"), wsam.rule.Weighted()
    base = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    known = kernels.Kernels(cpu, base, rule, 1.0)
    assert known.serves(cpu, base, rule, 1.0)
    assert not known.serves(cpu, base, rule, 2.0)
    assert not known.serves(cpu, base, wsam.rule.Perturbed(), 1.0)
    base.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert not known.serves(cpu, base, rule, 1.0)
    known = kernels.Kernels(cpu, base, rule, 1.0)
    base.register_step_pre_hook(lambda *_: None)
    assert not known.serves(cpu, base, rule, 1.0)
