"""Gradients that are not finite, and GradScaler: an overflow changes nothing."""

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from helpers import (
    ALL,
    METHODS,
    RULES,
    batch,
    closure,
    covering,
    make_method,
    make_step,
    model_loss,
    same,
    small_model,
    snapshot,
)
from torch import Tensor, nn

import wsam

MOMENTUM = {"lr": 0.1, "momentum": 0.9}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **MOMENTUM)


# --- nonfinite= ------------------------------------------------------------------------------------


def with_overflow(
    opt: wsam.SharpnessAware, model: nn.Module, bad_pass: int, bad: float
) -> Callable[[], Tensor]:
    """Return a closure whose gradient is not finite in one pass."""
    calls, inner = 0, closure(opt, model, 1)

    def run() -> Tensor:
        nonlocal calls
        calls += 1
        value = inner()
        if calls == bad_pass:
            model[2].weight.grad[0, 1] = bad
        return value

    return run


@covering(
    2,
    name=METHODS,
    bad_pass=[1, 2],
    bad=[math.nan, math.inf],
    policy=["skip", "raise", "propagate"],
)
def test_nan_grad(name: str, bad_pass: int, bad: float, policy: str) -> None:
    models = small_model(), small_model()
    opts = [make_method(name, sgd(m), nonfinite=policy) for m in models]
    opt, model = opts[0], models[0]
    for o, m in zip(opts, models, strict=True):
        o.step(closure(o, m, 0))
    before = snapshot(opt)
    if policy == "propagate":
        opt.step(with_overflow(opt, model, bad_pass, bad))
        assert not all(p.isfinite().all() for p in model.parameters())
        assert int(opt.skipped) == 0
        return
    if policy == "raise":
        with pytest.raises(FloatingPointError, match="NaN or infinite"):
            opt.step(with_overflow(opt, model, bad_pass, bad))
    else:
        opt.step(with_overflow(opt, model, bad_pass, bad))
        assert int(opt.skipped) == 1
        assert all(p.grad is None for p in model.parameters())
    assert same(snapshot(opt)["weights"], before["weights"])
    assert same(snapshot(opt)["state"], before["state"])
    for o, m in zip(opts, models, strict=True):
        o.step(closure(o, m, 2))
    assert all(p.isfinite().all() for p in model.parameters())
    if reference.METHODS[name].geometry != "masked":  # a skipped step may count for the masks
        assert same(snapshot(opt)["weights"], snapshot(opts[1])["weights"])
        assert same(snapshot(opt)["state"], snapshot(opts[1])["state"])


@covering(name=ALL, bad_pass=[1, 2], style=["two_step", "phases"])
def test_nan_grad_by_hand(name: str, bad_pass: int, style: str) -> None:
    model = small_model()
    opt = make_method(name, sgd(model), nonfinite="skip")
    make_step(opt, model_loss(opt, model, 0), style)
    before = snapshot(opt)
    calls = 0
    loss = model_loss(opt, model, 1)

    def bad_loss() -> Tensor:
        nonlocal calls
        calls += 1
        return loss() * (math.nan if calls == bad_pass else 1.0)

    make_step(opt, bad_loss, style)
    assert int(opt.skipped) == 1
    assert same(snapshot(opt)["weights"], before["weights"])
    assert same(snapshot(opt)["state"], before["state"])
    make_step(opt, model_loss(opt, model, 2), style)
    assert int(opt.skipped) == 1
    assert not same(snapshot(opt)["weights"], before["weights"])


@pytest.mark.parametrize("name", ALL)
def test_large_gradients_are_finite(name: str) -> None:
    """Their norm is computed in float32 at least and does not overflow."""
    p = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    opt = make_method(name, torch.optim.SGD([p], lr=1e-17), nonfinite="raise", rho=0.1)
    slope = torch.tensor([1e17, -2e17, 2e17])
    make_step(opt, lambda: opt.select(p * slope))
    assert p.isfinite().all()
    assert not torch.equal(p, torch.tensor([1.0, -2.0, 3.0]))


def test_skipped_steps_are_counted_across_a_resume() -> None:
    model = small_model()
    opt = wsam.WSAM(sgd(model), nonfinite="skip")
    for _ in range(3):
        opt.step(with_overflow(opt, model, 2, math.nan))
    other = wsam.WSAM(sgd(model), nonfinite="skip")
    other.load_state_dict(opt.state_dict())
    assert int(other.skipped) == 3


# --- GradScaler: the documented pattern, with public API only --------------------------------------


def scaled_step(
    opt: wsam.SharpnessAware,
    scaler: torch.amp.GradScaler,
    loss: Callable[[], Tensor],
    after_pass: Callable[[int], None] = lambda number: None,
) -> None:
    opt.zero_grad()
    opt.begin()
    scaler.scale(loss()).backward()
    after_pass(1)
    opt.ascend(grad_scale=scaler.get_scale())
    scaler.scale(loss()).backward()
    after_pass(2)
    scaler.unscale_(opt)
    opt.descend()
    scaler.step(opt)
    scaler.update()


def new_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0)


@covering(name=ALL, max_norm=[None, 0.5])
def test_scaler_parity(name: str, max_norm: float | None) -> None:
    """The scale is a power of two, so the scaled run equals the unscaled one bit for bit."""
    models = small_model(), small_model()
    opts = [make_method(name, sgd(m), max_norm=max_norm) for m in models]
    scaler = new_scaler()
    for t in range(4):
        scaled_step(opts[0], scaler, model_loss(opts[0], models[0], t))
        opts[1].step(closure(opts[1], models[1], t))
    assert same(snapshot(opts[0]), snapshot(opts[1]))
    assert scaler.get_scale() == 1024.0


class Overflow:
    """Two equal optimizers after a step, the first of which then had an overflow in one pass."""

    def __init__(self, name: str, bad_pass: int, **options: Any) -> None:
        self.models, self.scaler = (small_model(), small_model()), new_scaler()
        self.opts = [make_method(name, sgd(m), **options) for m in self.models]
        opt, model = self.opts[0], self.models[0]
        for o, m in zip(self.opts, self.models, strict=True):
            scaled_step(o, self.scaler, model_loss(o, m, 0))
        self.before = snapshot(opt)

        def overflow(number: int) -> None:
            if number == bad_pass:
                model[0].weight.grad[0, 0] = math.inf

        scaled_step(opt, self.scaler, model_loss(opt, model, 1), overflow)


def check_overflow(name: str, bad_pass: int, nonfinite: str) -> None:
    case = Overflow(name, bad_pass, nonfinite=nonfinite)
    opts, models, scaler = case.opts, case.models, case.scaler
    opt, before = opts[0], case.before
    assert same(snapshot(opt)["weights"], before["weights"])
    assert same(snapshot(opt)["state"], before["state"])
    assert scaler.get_scale() == 512.0
    for o, m in zip(opts, models, strict=True):
        scaled_step(o, scaler, model_loss(o, m, 2))
    assert scaler.get_scale() == 512.0
    if reference.METHODS[name].geometry != "masked":  # a skipped step may count for the masks
        assert same(snapshot(opt)["weights"], snapshot(opts[1])["weights"])


@covering(name=METHODS, nonfinite=["propagate", "skip"])
def test_inf_pass1(name: str, nonfinite: str) -> None:
    check_overflow(name, 1, nonfinite)


@covering(name=ALL, nonfinite=["propagate", "skip"])
def test_inf_pass2(name: str, nonfinite: str) -> None:
    check_overflow(name, 2, nonfinite)


@covering(2, name=RULES, bad_pass=[1, 2], max_norm=[None, 0.1])
def test_inf_in_a_step_of_the_base_alone(name: str, bad_pass: int, max_norm: float | None) -> None:
    """The scaler has checked the second pass's gradients, so these are what the base receives."""
    case = Overflow(name, bad_pass, when=wsam.schedule.Every(2), max_norm=max_norm)
    (opt, other), scaler = case.opts, case.scaler
    if bad_pass == 2:
        assert same(snapshot(opt)["weights"], case.before["weights"])
        assert scaler.get_scale() == 512.0
        return
    assert scaler.get_scale() == 1024.0
    other.step(closure(other, case.models[1], 1))
    assert same(snapshot(opt), snapshot(other)), "at w both passes have the same gradient"


# --- GradScaler: calls that are rejected -----------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_scaler_with_a_closure_is_rejected(name: str) -> None:
    """`scaler.step(opt, closure)` would step with scaled gradients, 1024 times too far."""
    model = small_model()
    opt = make_method(name, sgd(model))
    before = snapshot(opt)
    scaler = new_scaler()
    loss = model_loss(opt, model)

    def run() -> Tensor:
        opt.zero_grad()
        value = loss()
        scaler.scale(value).backward()
        return value

    scaler.scale(loss()).backward()
    with pytest.raises(RuntimeError, match="run two passes at every step by hand"):
        scaler.step(opt, run)
    with pytest.raises(RuntimeError, match="run two passes at every step by hand"):
        scaler.step(opt)
    assert same(snapshot(opt), before)
    opt.step(closure(opt, model))  # works without the scaler
    assert not same(snapshot(opt), before)


@pytest.mark.parametrize("name", RULES)
def test_scaler_without_unscale_is_rejected(name: str) -> None:
    """Otherwise the base would receive scaled gradients."""
    model = small_model()
    opt = make_method(name, sgd(model))
    before, scaler, loss = snapshot(opt), new_scaler(), model_loss(opt, model)
    scaler.scale(loss()).backward()
    opt.ascend(grad_scale=scaler.get_scale())
    scaler.scale(loss()).backward()
    opt.descend()
    with pytest.raises(RuntimeError, match="unscale_"):
        scaler.step(opt)
    assert same(snapshot(opt), before)
    fresh = new_scaler()
    scaled_step(opt, fresh, loss)
    opt.step(closure(opt, model))
    assert not same(snapshot(opt)["weights"], before["weights"])
    assert all(p.abs().max() < 100 for p in model.parameters())


@pytest.mark.parametrize("name", RULES)
def test_scaler_before_descend_is_rejected(name: str) -> None:
    """The weights would stay at w + d."""
    model = small_model()
    opt = make_method(name, sgd(model), rho=1.0)
    before, scaler, loss = snapshot(opt), new_scaler(), model_loss(opt, model)
    scaler.scale(loss()).backward()
    opt.ascend(scaler.get_scale())
    scaler.scale(loss()).backward()
    scaler.unscale_(opt)
    with pytest.raises(RuntimeError, match=r"cannot step .* call descend\(\) first"):
        scaler.step(opt)
    opt.descend()
    assert same(snapshot(opt)["weights"], before["weights"])


def test_overflow_before_descend_is_skipped() -> None:
    """`descend` was forgotten; the weights return to w."""
    model = small_model()
    opt = wsam.WSAM(sgd(model), rho=1.0)
    before, scaler, loss = snapshot(opt), new_scaler(), model_loss(opt, model)
    scaler.scale(loss()).backward()
    opt.ascend(scaler.get_scale())
    scaler.scale(loss() * math.inf).backward()
    scaler.unscale_(opt)
    scaler.step(opt)
    assert same(snapshot(opt)["weights"], before["weights"])
    assert opt.skipped == 1


def test_scaler_needs_the_scale_in_ascend() -> None:
    model = small_model()
    opt = wsam.WSAM(sgd(model))
    before, scaler, loss = snapshot(opt), new_scaler(), model_loss(opt, model)
    opt.begin()
    scaler.scale(loss()).backward()
    opt.ascend()
    scaler.scale(loss()).backward()
    scaler.unscale_(opt)
    opt.descend()
    with pytest.raises(RuntimeError, match=r"ascend\(scaler.get_scale\(\)\)"):
        scaler.step(opt)
    assert same(snapshot(opt)["weights"], before["weights"])


@pytest.mark.parametrize("factor", [1.0, math.inf])
@pytest.mark.parametrize("reuse", [False, True])
def test_scaler_without_gradients_to_check_is_rejected(factor: float, reuse: bool) -> None:
    """`ascend` returned False and the second pass was omitted: g0 may have overflowed."""
    model = small_model()
    opt = wsam.WSAM(sgd(model), when=wsam.schedule.Every(2), reuse=reuse)
    scaler, loss = new_scaler(), model_loss(opt, model)
    scaled_step(opt, scaler, loss)
    before = snapshot(opt)
    opt.begin()
    scaler.scale(loss() * factor).backward()
    assert not opt.ascend(scaler.get_scale())
    scaler.unscale_(opt)
    opt.descend()
    with pytest.raises(RuntimeError, match=r"second loss, also if ascend\(\) returned False"):
        scaler.step(opt)
    assert same(snapshot(opt), before)
    opt.abandon()
    scaled_step(opt, new_scaler(), loss)
    assert not same(snapshot(opt)["weights"], before["weights"])


def test_scaler_without_descend_in_a_step_of_the_base_alone() -> None:
    models = small_model(), small_model()
    never = wsam.schedule.Between(0, 0)
    opts = [wsam.WSAM(sgd(model), when=never) for model in models]
    scaler, loss = new_scaler(), model_loss(opts[0], models[0])
    opts[0].begin()
    scaler.scale(loss()).backward()
    assert not opts[0].ascend(scaler.get_scale())
    scaler.scale(loss()).backward()
    scaler.unscale_(opts[0])
    scaler.step(opts[0])
    opts[1].step(closure(opts[1], models[1]))
    assert same(snapshot(opts[0]), snapshot(opts[1]))


def test_scaler_attributes_are_removed_after_an_error() -> None:
    model = small_model()
    opt = wsam.WSAM(sgd(model))
    scaler, loss = new_scaler(), model_loss(opt, model)
    scaler.scale(loss()).backward()
    opt.ascend(scaler.get_scale())
    scaler.scale(loss()).backward()
    scaler.unscale_(opt)
    opt.descend()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match="max_norm"):
        scaler.step(opt)
    opt.abandon()
    opt.step(closure(opt, model))


def test_scaler_inside_perturbed_is_rejected() -> None:
    model = small_model()
    opt, scaler = wsam.SAM(sgd(model)), new_scaler()
    before = snapshot(opt)
    scaler.scale(model_loss(opt, model)()).backward()
    with pytest.raises(RuntimeError, match="run two passes"), opt.perturbed():
        scaler.step(opt)
    assert same(snapshot(opt), before)


def test_inf_pass1_if_the_mask_selects_no_tensor() -> None:
    """The scaler checks the gradients of the second pass only."""
    seed = next(s for s in range(99) if not any(wsam.Masked(0.5, s).mask(0, 2)))
    p, q = (nn.Parameter(torch.ones(4)) for _ in range(2))
    base = torch.optim.SGD([p, q], lr=0.1)
    opt = wsam.WSAM(base, gamma=0.5, geometry=wsam.Masked(0.5, seed))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    opt.begin()
    scaler.scale((p * q).sum()).backward()
    assert p.grad is not None
    p.grad[0] = torch.inf
    opt.ascend(scaler.get_scale())
    scaler.scale((p * q).sum()).backward()
    scaler.unscale_(opt)
    opt.descend()
    scaler.step(opt)
    scaler.update()
    assert torch.equal(p, torch.ones(4))
    assert scaler.get_scale() == 4.0


# --- GradScaler: an overflow that the second pass does not show ------------------------------------


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("name", METHODS)
def test_overflow_of_the_first_pass_reaches_the_scaler(name: str, nonfinite: str) -> None:
    """At NaN weights this loss has a zero gradient, which the scaler finds finite."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    options = {"geometry": wsam.Masked(1.0)} if name == "wsam" else {}
    opt = make_method(name, sgd(model), nonfinite=nonfinite, **options)
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)

    def loss(factor: float) -> Callable[[], Tensor]:
        def compute() -> Tensor:
            each = nn.functional.multi_margin_loss(model(x), y, reduction="none")
            return opt.select(each) * (1.0 if opt.second_pass else factor)

        return compute

    before = snapshot(opt)
    scaled_step(opt, scaler, loss(1e38))  # finite, but its scaled gradient is not
    assert same(snapshot(opt)["weights"], before["weights"])
    assert opt.skipped == 1
    assert scaler.get_scale() == 2.0**14
    scaled_step(opt, scaler, loss(1.0))
    assert opt.skipped == 1
    assert not same(snapshot(opt)["weights"], before["weights"])
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_overflow_of_the_first_pass_if_the_last_parameter_has_no_second_gradient() -> None:
    """The report of the overflow is added to the gradient of that parameter."""
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
    opt, scaler = wsam.SAM(torch.optim.SGD([a, b], lr=0.1)), new_scaler()
    opt.begin()
    scaler.scale(a.relu().sum() + b.sum()).backward()
    a.grad.fill_(math.inf)
    opt.ascend(scaler.get_scale())
    scaler.scale(a.relu().sum()).backward()  # zero at NaN weights
    scaler.unscale_(opt)
    opt.descend()
    scaler.step(opt)
    assert torch.equal(a, torch.ones(2))
    assert opt.skipped == 1


@pytest.mark.parametrize("returned", ["loss", "scaled"])
def test_a_grad_scaler_in_a_closure_is_rejected(returned: str) -> None:
    model, scaler = small_model(), torch.amp.GradScaler("cpu")
    opt = wsam.WSAM(sgd(model))
    scale = torch.amp.GradScaler.scale
    before = [p.detach().clone() for p in model.parameters()]

    def run() -> Tensor:
        loss = (model(batch(0)) ** 2).sum(1).mean()
        scaled = scaler.scale(loss)
        scaled.backward()
        return {"loss": loss, "scaled": scaled}[returned]

    for _ in range(2):  # also when it is tried again
        with pytest.raises(RuntimeError, match=r"train_step\(optimizer, loss_fn, scaler=scaler\)"):
            opt.step(run)
        assert same(list(model.parameters()), before)
    assert torch.amp.GradScaler.scale is scale
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    wsam.WSAM(sgd(model)).step(run)


def test_first_steps_in_two_threads_restore_the_scaler() -> None:
    """The closures run at the same time, and end in the order in which they began."""
    inside, outside = threading.Event(), threading.Event()

    def train(before: Callable[[], Any]) -> None:
        model = small_model()
        opt = wsam.WSAM(sgd(model))
        run = closure(opt, model)
        opt.step(lambda: (before(), run())[1])

    def second() -> None:
        train(lambda: (inside.set(), outside.wait(10)))

    thread, scale = threading.Thread(target=second), torch.amp.GradScaler.scale
    train(lambda: (thread.is_alive() or thread.start(), inside.wait(10)))
    outside.set()
    thread.join()
    assert torch.amp.GradScaler.scale is scale
