"""The phases of a step: every legal transition, and the error of every call that is not allowed now."""

import contextlib
import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    METHODS,
    RULES,
    batch,
    closure,
    covering,
    full,
    make_method,
    model_loss,
    same,
    small_model,
    snapshot,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import wsam
from wsam._core.step_state import Phase

RECIPES = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
LEGAL = {
    (Phase.IDLE, Phase.PERTURBED),
    (Phase.IDLE, Phase.READ_ONLY),
    (Phase.PERTURBED, Phase.READY),
}
"""Transitions of one state; a new state, which is idle, replaces one that has ended."""


class Loop:
    """An optimizer that is stepped by hand."""

    def __init__(self, name: str = "wsam", **options: Any) -> None:
        self.model = small_model()
        base = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.opt = make_method(name, base, **options)
        self.loss = model_loss(self.opt, self.model)

    @property
    def phase(self) -> Phase:
        return self.opt._step_state.phase

    def backward(self) -> None:
        self.loss().backward()

    def go_to(self, phase: Phase) -> contextlib.ExitStack:
        """Bring a fresh optimizer to a phase; closing the result leaves `perturbed()`."""
        stack = contextlib.ExitStack()
        self.opt.begin()
        self.backward()
        if phase is Phase.READ_ONLY:
            stack.enter_context(self.opt.perturbed())
        elif phase is not Phase.IDLE:
            self.opt.ascend()
            if phase is Phase.READY:
                self.backward()
                self.opt.descend()
        assert self.phase is phase
        return stack


# --- transitions -----------------------------------------------------------------------------------


@full(before=list(Phase), after=list(Phase))
def test_transitions(before: Phase, after: Phase) -> None:
    loop = Loop()
    state = loop.opt._new_step()
    state.phase = before
    if (before, after) in LEGAL:
        state.enter(after)
        assert state.phase is after
    else:
        with pytest.raises(AssertionError, match="no transition"):
            state.enter(after)
        assert state.phase is before


@pytest.mark.parametrize("name", RULES)
def test_phases_of_a_step_by_hand(name: str) -> None:
    loop = Loop(name)
    opt, found = loop.opt, []
    for call in (loop.backward, opt.ascend, loop.backward, opt.descend, opt.step):
        call()
        found.append(loop.phase)
    at_w_d, ready = Phase.PERTURBED, Phase.READY
    assert found == [Phase.IDLE, at_w_d, at_w_d, ready, Phase.IDLE]
    assert opt.param_groups[0]["sam_step"] == 1


def test_phases_of_a_step_with_a_closure() -> None:
    loop = Loop()
    found: list[Phase] = []

    def run() -> Tensor:
        found.append(loop.phase)
        return closure(loop.opt, loop.model)()

    loop.opt.step(run)
    assert [*found, loop.phase] == [Phase.IDLE, Phase.PERTURBED, Phase.IDLE]


@pytest.mark.parametrize("phase", [Phase.IDLE, Phase.READY])
def test_perturbed_returns_to_the_phase_before(phase: Phase) -> None:
    loop = Loop()
    loop.go_to(phase)
    before = snapshot(loop.opt)["weights"]
    with loop.opt.perturbed():
        assert loop.phase is Phase.READ_ONLY
        assert not same(snapshot(loop.opt)["weights"], before)
    assert loop.phase is phase
    assert same(snapshot(loop.opt)["weights"], before)


@pytest.mark.parametrize("phase", [Phase.IDLE, Phase.PERTURBED, Phase.READY])
def test_abandon_returns_to_idle(phase: Phase) -> None:
    loop = Loop()
    before = snapshot(loop.opt)
    loop.go_to(phase)
    loop.opt.abandon()
    assert loop.phase is Phase.IDLE
    assert same(snapshot(loop.opt), before)
    assert loop.opt.skipped == 0
    loop.opt.step(closure(loop.opt, loop.model))


@pytest.mark.parametrize("call", ["begin", "ascend", "select"])
def test_a_prepared_update_is_dropped_by_a_new_first_pass(call: str) -> None:
    """As after `scaler.step`, which does not call `step` if it found an overflow."""
    loop = Loop()
    loop.go_to(Phase.READY)
    before = snapshot(loop.opt)
    if call == "begin":
        loop.opt.begin()
    elif call == "select":
        loop.opt.select(torch.ones(3))
    else:
        loop.backward()
        loop.opt.ascend()
        loop.opt.abandon()
    assert loop.phase is Phase.IDLE
    assert same(snapshot(loop.opt), before)
    assert loop.opt.skipped == 1


@pytest.mark.parametrize("fail_in", [1, 2])
def test_an_error_returns_to_idle(fail_in: int) -> None:
    loop = Loop()
    calls: list[int] = []

    def fails() -> Tensor:
        calls.append(1)
        if len(calls) == fail_in:
            raise ZeroDivisionError
        return closure(loop.opt, loop.model)()

    with pytest.raises(ZeroDivisionError):
        loop.opt.step(fails)
    assert loop.phase is Phase.IDLE


# --- calls that are not allowed now ----------------------------------------------------------------


def enter_perturbed(loop: Loop) -> None:
    with loop.opt.perturbed():
        raise AssertionError("never reached")


CALLS: dict[str, tuple[str, Callable[[Loop], Any]]] = {
    "begin": ("begin a step", lambda loop: loop.opt.begin()),
    "ascend": ("ascend", lambda loop: loop.opt.ascend()),
    "first_step": ("ascend", lambda loop: loop.opt.first_step()),
    "step(closure)": ("begin a step", lambda loop: loop.opt.step(closure(loop.opt, loop.model))),
    "step()": ("step", lambda loop: loop.opt.step()),
    "perturbed": ("perturb again", enter_perturbed),
    "add_param_group": (
        "add a parameter group",
        lambda loop: loop.opt.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    ),
    "state_dict": ("save a state", lambda loop: loop.opt.state_dict()),
    "load_state_dict": ("load a state", lambda loop: loop.opt.load_state_dict({})),
    "deepcopy": ("copy the optimizer", lambda loop: copy.deepcopy(loop.opt)),
    "descend": ("", lambda loop: loop.opt.descend()),
    "second_step": ("", lambda loop: loop.opt.second_step()),
    "abandon": ("", lambda loop: loop.opt.abandon()),
}
NEED_W = [call for call in CALLS if call not in {"descend", "second_step", "abandon"}]


def assert_rejected(loop: Loop, call: str, message: str) -> None:
    """The call raises this error and changes nothing."""
    before, phase = snapshot(loop.opt), loop.phase
    with pytest.raises(RuntimeError, match=re.escape(message)):
        CALLS[call][1](loop)
    assert same(snapshot(loop.opt), before)
    assert loop.phase is phase


@pytest.mark.parametrize("name", RULES)
def test_calls_rejected_between_ascend_and_descend(name: str) -> None:
    """The step can still be finished, and gives the usual result."""
    loops = [Loop(name), Loop(name)]
    for loop in loops:
        loop.go_to(Phase.PERTURBED)
        if loop is loops[0]:
            for call in NEED_W:
                what = f"cannot {CALLS[call][0]} while the weights are at w + d: "
                assert_rejected(loop, call, what + "call descend() first, or abandon()")
        loop.backward()
        loop.opt.second_step()
    assert same(*(snapshot(loop.opt) for loop in loops))


@pytest.mark.parametrize("name", RULES)
def test_calls_rejected_in_the_second_pass_of_a_closure(name: str) -> None:
    loops = [Loop(name), Loop(name)]

    def run() -> Tensor:
        if loops[0].phase is Phase.PERTURBED:
            for call in NEED_W:
                what = f"cannot {CALLS[call][0]} while the weights are at w + d: "
                assert_rejected(loops[0], call, what + "not inside a closure")
            assert_rejected(loops[0], "abandon", "abandon() inside a closure or perturbed()")
        return closure(loops[0].opt, loops[0].model)()

    loops[0].opt.step(run)
    loops[1].opt.step(closure(loops[1].opt, loops[1].model))
    assert same(*(snapshot(loop.opt) for loop in loops))


@pytest.mark.parametrize("name", RULES)
def test_calls_rejected_inside_perturbed(name: str) -> None:
    loop = Loop(name)
    with loop.go_to(Phase.READ_ONLY):
        for call in NEED_W:
            what = f"cannot {CALLS[call][0]} while the weights are at w + d: "
            assert_rejected(loop, call, what + "not inside perturbed()")
        assert_rejected(loop, "descend", "descend() without ascend()")
        assert_rejected(loop, "abandon", "abandon() inside a closure or perturbed()")
    assert loop.phase is Phase.IDLE


@pytest.mark.parametrize("name", RULES)
def test_descend_without_ascend(name: str) -> None:
    """Also after a whole step, and a second time."""
    loop = Loop(name)
    message = "descend() without ascend()"
    for call in ("descend", "second_step"):
        assert_rejected(loop, call, message)
    loop.opt.step(closure(loop.opt, loop.model))
    for call in ("descend", "second_step"):
        assert_rejected(loop, call, message)
    loop.go_to(Phase.READY)
    assert_rejected(loop, "descend", message)


def test_closure_while_an_update_is_pending() -> None:
    loop = Loop()
    loop.go_to(Phase.READY)
    assert_rejected(loop, "step(closure)", "descend() has prepared a step: finish it with step()")
    loop.opt.step()
    assert loop.opt.param_groups[0]["sam_step"] == 1
    assert loop.opt.skipped == 0


INSTEAD = (
    ": use step = wsam.train_step(optimizer, loss_fn), which makes the whole step; after step(*batch) "
    "no optimizer.step() is needed"
)
NO_CLOSURE = f"step() was called without a closure{INSTEAD}"


@pytest.mark.parametrize("given", [torch.ones(()), (torch.ones(2), torch.ones(2)), 0.5])
def test_a_loss_or_batch_instead_of_a_closure(given: Any) -> None:
    kind = "float" if isinstance(given, float) else "Tensor"
    message = f"step() was called with a {kind} instead of a closure{INSTEAD}"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        Loop().opt.step(given)


def test_no_closures() -> None:
    loop = Loop()
    before = snapshot(loop.opt)
    with pytest.raises(ValueError, match="the list of closures is empty"):
        loop.opt.step([])
    assert same(snapshot(loop.opt), before)
    loop.opt.step(closure(loop.opt, loop.model))


@pytest.mark.parametrize("name", RULES)
def test_bad_arguments_no_closure(name: str) -> None:
    """`step()` alone is legal only with zero learning rates and gradients."""
    loop = Loop(name)
    opt, before = loop.opt, snapshot(loop.opt)
    assert_rejected(loop, "step()", NO_CLOSURE)
    loop.backward()
    assert_rejected(loop, "step()", NO_CLOSURE)
    opt.param_groups[0]["lr"] = 0.0
    assert_rejected(loop, "step()", NO_CLOSURE)  # the gradients are not zero
    for p in loop.model.parameters():
        p.grad = torch.zeros_like(p)
    opt.step(closure=None)
    assert same(snapshot(opt)["weights"], before["weights"])


# --- gradients that the phases need ----------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_first_pass_without_gradients(name: str) -> None:
    loop = Loop(name)
    message = "no parameter has a gradient: the loss must depend"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        loop.opt.step(lambda: torch.zeros(()))
    assert_rejected(loop, "ascend", message)
    assert_rejected(
        loop, "perturbed", "no parameter has a gradient: call backward() before perturbed()"
    )
    loop.opt.step(closure(loop.opt, loop.model))


@pytest.mark.parametrize("name", METHODS)
def test_second_pass_without_backward(name: str) -> None:
    """Otherwise some methods would never train, and others would be their base, silently."""
    loop = Loop(name)
    before = snapshot(loop.opt)
    loop.go_to(Phase.PERTURBED)
    with pytest.raises(RuntimeError, match=r"call backward\(\) in the second pass, too"):
        loop.opt.descend()
    assert same(snapshot(loop.opt), before)
    passes: list[Tensor] = []

    def run() -> Tensor:
        passes.append(loop.loss())
        if len(passes) == 1:
            passes[0].backward()
        return passes[-1]

    with pytest.raises(RuntimeError, match="second pass"):
        loop.opt.step(run)
    assert same(snapshot(loop.opt), before)


def test_clip_half_of_the_update_is_rejected() -> None:
    """`clip_grad_norm_` after `descend` would scale base_grad and not the decoupled term."""
    loop = Loop()
    loop.go_to(Phase.READY)
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3)
    assert_rejected(loop, "step()", "p.grad was changed between descend() and step()")
    loop.opt.abandon()
    loop.opt.step(closure(loop.opt, loop.model))


# --- the loop by hand ------------------------------------------------------------------------------


@pytest.mark.parametrize("lean", [False, True])
def test_abandon_restores_the_model(lean: bool) -> None:
    """Weights, statistics and generators; a lean step cannot be undone, which is a warning."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.5, lean=lean)

    def loss() -> Tensor:
        return model(torch.ones(4, 3)).square().mean()

    opt.abandon()  # no step has begun
    opt.begin()
    loss().backward()
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    opt.ascend()
    loss()
    with pytest.warns(wsam.WsamWarning, match="stepped") if lean else contextlib.nullcontext():
        opt.abandon()
    for key, value in model.state_dict().items():
        if not lean or key not in dict(model.named_parameters()):
            assert torch.equal(before[key], value), key
    assert torch.equal(torch.get_rng_state(), generator)


def recipe(title: str) -> str:
    """Return the code of a section of docs/recipes.md."""
    section = RECIPES.split(f"## {title}\n")[1].split("\n## ")[0]
    return "\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))


@covering(
    title=["By hand", "float16 with GradScaler"],
    name=["sam", "wsam", "coupled_wsam", "gsam", "asam", "fisher_sam"],
)
def test_documented_loop_equals_the_closure(name: str, title: str) -> None:
    models = [small_model(), small_model()]
    bases = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    opts = [make_method(name, base) for base in bases]
    batches = [(batch(t), torch.arange(10) % 2) for t in range(4)]
    names = {"torch": torch, "cross_entropy": cross_entropy, "batches": batches}
    exec(recipe(title), {**names, "model": models[0], "optimizer": opts[0]})
    for x, y in batches:

        def run(x: Tensor = x, y: Tensor = y) -> Tensor:
            loss = cross_entropy(models[1](x), y)
            loss.backward()
            return loss

        opts[1].step(run)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_perturbed_between_the_phases_has_no_effect() -> None:
    """Dropout masks, selected samples and a prepared update stay."""

    def run(evaluated: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        opt = wsam.ESAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.5, gamma=0.5)
        x = torch.randn(6, 4)

        def evaluate() -> None:
            if evaluated:
                with opt.perturbed(), torch.random.fork_rng():
                    model(x)

        for _ in range(2):
            opt.begin()
            opt.select(model(x).square().flatten()).backward()
            evaluate()
            opt.ascend()
            opt.select(model(x).square().flatten()).backward()
            opt.descend()
            evaluate()
            opt.step()
        return [p.detach() for p in model.parameters()]

    assert same(run(evaluated=True), run(evaluated=False))


def test_two_optimizers_in_one_loop() -> None:
    loops = [Loop(), Loop()]
    for loop in loops:
        loop.opt.begin()
    for loop in loops:
        loop.backward()
        loop.opt.ascend()
    for loop in loops:
        loop.backward()
        loop.opt.descend()
        loop.opt.step()
    alone = Loop()
    alone.opt.step(closure(alone.opt, alone.model))
    assert same(snapshot(loops[0].opt), snapshot(alone.opt))
    assert same(snapshot(loops[1].opt), snapshot(alone.opt))
