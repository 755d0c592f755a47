"""Several ascent steps: K gradients lead from w to w + d, and the next one is g1."""

import copy
import itertools
import math
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import reference
import torch
from helpers import (
    PROBLEMS,
    batch,
    closure,
    covering,
    gap,
    model_loss,
    parameters,
    reference_base,
    same,
    save_and_load,
    small_model,
    snapshot,
    torch_base,
)
from torch import Tensor, nn

import wsam
from wsam.geometry import Averaged
from wsam.rule import Perturbed
from wsam.schedule import Every

STEPS = 15
MLP = PROBLEMS["mlp"]
NAMES = ["sam", "wsam", "coupled_wsam", "gsam"]
GEOMETRIES: dict[str, tuple[Any, dict[str, float]]] = {
    "euclidean": (None, {}),
    "adaptive": (wsam.Adaptive(eta=0.1), {"eta": 0.1}),
    "fisher": (wsam.Fisher(eta=0.7), {"eta": 0.7}),
    "masked": (wsam.Masked(beta=0.5), {"beta": 0.5}),
}


def make(name: str, model: nn.Module, **options: Any) -> wsam.SharpnessAware:
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return wsam.create(name, base, **{"rho": 0.3, "ascent_steps": 2, "model": model, **options})


def step_by_hand(opt: wsam.SharpnessAware, loss: Callable[[], Tensor]) -> None:
    opt.begin()
    loss().backward()
    for _ in range(opt.ascent_steps):
        opt.ascend()
        loss().backward()
    opt.descend()
    opt.step()


@covering(
    2,
    name=NAMES,
    geometry=list(GEOMETRIES),
    base=["momentum", "adamw"],
    number=[2, 3],
    style=["closure", "by hand"],
)
def test_reference_agreement(name: str, geometry: str, base: str, number: int, style: str) -> None:
    part, values = GEOMETRIES[geometry]
    hyper = {"gamma": 0.8} if name.endswith("wsam") else {}
    shared = {"rho": 0.3, "max_norm": 5.0, "ascent_steps": number, **hyper}
    method = replace(reference.METHODS[name], geometry=geometry, **shared, **values)
    params, w = parameters(MLP.weights()), MLP.weights()
    opt = wsam.create(name, torch_base(base, params, 0.01), geometry=part, **shared)
    other, memory = reference_base(base, 0.01), {}
    for t in range(STEPS):

        def loss(t: int = t) -> Tensor:
            return MLP.losses(params, t).mean()

        mask = opt.geometry.mask(t, len(w))
        if style == "closure":
            opt.step(lambda loss=loss: _backward(loss))
        else:
            step_by_hand(opt, loss)
        pair = reference.two_gradients(method, w, lambda v, t=t: MLP.losses(v, t), mask, memory)
        w = reference.update(method, other, w, *pair, memory)
        assert gap(params, w) < 1e-10, t


def _backward(loss: Callable[[], Tensor]) -> Tensor:
    value = loss()
    value.backward()
    return value


@pytest.mark.parametrize("name", NAMES)
def test_one_ascent_step_is_the_default(name: str) -> None:
    """Bit for bit, and two ascent steps are not."""
    models = small_model(), small_model(), small_model()
    base = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in models]
    gamma = {"gamma": 0.8} if name == "coupled_wsam" else {}
    opts = [
        wsam.create(name, one, rho=0.3, **gamma, **options)
        for one, options in zip(base, ({}, {"ascent_steps": 1}, {"ascent_steps": 2}), strict=True)
    ]
    for t in range(3):
        for opt, model in zip(opts, models, strict=True):
            opt.step(closure(opt, model, t))
    assert same(snapshot(opts[0]), snapshot(opts[1]))
    assert gap(list(models[2].parameters()), list(models[0].parameters())) > 1e-6


def test_points_of_the_passes() -> None:
    """Each ascent step has the length rho / K, and d is within rho."""
    model, seen, losses = small_model(), [], []
    opt = make("wsam", model, ascent_steps=3)
    inner = closure(opt, model)

    def run() -> Tensor:
        weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        seen.append((weights, opt.second_pass))
        losses.append(float(inner().detach()))
        return torch.tensor(losses[-1])

    w = [p.detach().clone() for p in model.parameters()]
    returned = opt.step(run)
    assert len(seen) == 4
    assert [second for _, second in seen] == [False, True, True, True]
    points = [point for point, _ in seen]
    assert torch.equal(points[0], torch.cat([p.reshape(-1) for p in w]))
    for one, other in itertools.pairwise(points):
        assert float((other - one).norm()) == pytest.approx(0.1, rel=1e-10)
    assert 0.2 < float((points[-1] - points[0]).norm()) <= 0.3
    assert float(returned) == pytest.approx(losses[0])
    assert float(opt.sharpness) == pytest.approx(losses[3] - losses[0], rel=1e-6)


@pytest.mark.parametrize("by_hand", [False, True])
def test_statistics_and_generators_advance_once(by_hand: bool) -> None:
    torch.manual_seed(0)
    layers = nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=None), nn.Dropout(0.5), nn.Linear(4, 2)
    model, masks = nn.Sequential(*layers).double(), []
    opt = make("wsam", model, ascent_steps=3)
    layers[2].register_forward_hook(lambda module, args, out: masks.append(out == 0))
    for t in range(3):
        plain = copy.deepcopy(model)
        torch.manual_seed(t)
        plain(batch(t))
        after, statistics = torch.get_rng_state(), dict(plain.named_buffers())
        torch.manual_seed(t)
        masks.clear()
        if by_hand:
            step_by_hand(opt, model_loss(opt, model, t))
        else:
            opt.step(closure(opt, model, t))
        assert torch.equal(torch.get_rng_state(), after)
        assert same(dict(model.named_buffers()), statistics)
        assert len(masks) == 4
        assert all(torch.equal(mask, masks[0]) for mask in masks)


def test_autocast_around_a_step() -> None:
    """Casts of the weights of one pass are not used in the next."""
    results = []
    for outside in (True, False):
        model = small_model(torch.float32)
        opt = make("wsam", model, rho=2.0)
        loss, none = model_loss(opt, model, 0), nullcontext()
        region = torch.autocast("cpu", dtype=torch.bfloat16)
        outer, inner = (region, none) if outside else (none, region)

        def run(loss: Any = loss, inner: Any = inner) -> Tensor:
            with inner:
                value: Tensor = loss()
            value.backward()
            return value

        with outer:
            opt.step(run)
        results.append([p.detach() for p in model.parameters()])
    assert same(*results)


def test_masks_of_their_own() -> None:
    dropout, masks = nn.Dropout(0.5), []
    model = nn.Sequential(dropout, nn.Linear(5, 2)).double()
    opt = make("wsam", model, ascent_steps=2, repeat_randomness=False)
    dropout.register_forward_hook(lambda module, args, out: masks.append(out == 0))
    opt.step(closure(opt, model))
    assert len(masks) == 3
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(masks, 2))


@pytest.mark.parametrize("name", NAMES)
def test_resume(name: str) -> None:
    (model, opt), (other, again) = ((m, make(name, m)) for m in (small_model(), small_model()))
    for t in range(2):
        opt.step(closure(opt, model, t))
    weights, state = save_and_load([model.state_dict(), opt.state_dict()])
    other.load_state_dict(weights)
    again.load_state_dict(state)
    third, copied = pickle.loads(pickle.dumps((model, opt)))
    for t in range(2, 5):
        for o, m in ((opt, model), (again, other), (copied, third)):
            o.step(closure(o, m, t))
    assert same(snapshot(opt), snapshot(again))
    assert same(snapshot(opt), snapshot(copied))


def test_intervals() -> None:
    """Steps that are not chosen are the base's own, with one pass; by hand all passes may run."""
    models, calls = (small_model(), small_model()), []
    opts = [make("sam", model, when=Every(2), ascent_steps=3) for model in models]
    models[0].register_forward_hook(lambda *_: calls.append(1))
    for t in range(4):
        opts[0].step(closure(opts[0], models[0], t))
        step_by_hand(opts[1], model_loss(opts[1], models[1], t))
    assert len(calls) == 4 + 1 + 4 + 1
    assert same(snapshot(opts[0]), snapshot(opts[1]))


# --- overflow and interruptions -----------------------------------------------------------------


def in_pass(number: int, run: Callable[[], Tensor], fault: Callable[[], None]) -> Any:
    """Return a closure with a fault after one of its runs."""
    calls = 0

    def broken() -> Tensor:
        nonlocal calls
        calls += 1
        value = run()
        if calls == number:
            fault()
        return value

    return broken


@covering(bad_pass=[1, 2, 3], policy=["skip", "raise"], bad=[math.inf, math.nan])
def test_nonfinite_gradient(bad_pass: int, policy: str, bad: float) -> None:
    """Nothing changes, running statistics included."""
    model = small_model().append(nn.BatchNorm1d(2).double())
    opt = make("wsam", model, nonfinite=policy)
    opt.step(closure(opt, model, 0))
    before, statistics = snapshot(opt), copy.deepcopy(list(model.buffers()))

    def spoil() -> None:
        model[2].weight.grad[0, 0] = bad

    broken = in_pass(bad_pass, closure(opt, model, 1), spoil)
    if policy == "raise":
        with pytest.raises(FloatingPointError):
            opt.step(broken)
    else:
        opt.step(broken)
        assert opt.skipped == 1
    assert same(snapshot(opt), before)
    assert same(list(model.buffers()), statistics)
    opt.step(closure(opt, model, 1))
    assert not same(snapshot(opt), before)


def test_nonfinite_gradient_that_the_last_pass_does_not_show() -> None:
    """At NaN weights this loss has a zero gradient."""
    w = nn.Parameter(torch.ones(3))
    opt = wsam.WSAM(torch.optim.SGD([w], lr=0.1), ascent_steps=2, nonfinite="skip")

    def run() -> Tensor:
        loss = w.relu().sum()
        loss.backward()
        return loss

    opt.step(in_pass(2, run, lambda: w.grad.fill_(math.inf)))
    assert torch.equal(w, torch.ones(3))
    assert opt.skipped == 1


@pytest.mark.parametrize("bad_pass", [1, 2, 3])
def test_an_error_restores_the_weights(bad_pass: int) -> None:
    model = small_model()
    opt = make("wsam", model)
    opt.step(closure(opt, model, 0))
    before = snapshot(opt)

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        opt.step(in_pass(bad_pass, closure(opt, model, 1), fail))
    assert same(snapshot(opt), before)
    opt.step(closure(opt, model, 1))


def train_steps(
    model: nn.Module, opt: wsam.SharpnessAware, factors: list[float], **options: Any
) -> list[Tensor]:
    """Make a step for each factor of the loss; return the losses. An infinite one overflows."""
    losses, factor = [], [1.0]
    step = wsam.train_step(opt, lambda x: factor[0] * (model(x) ** 2).sum(1).mean(), **options)
    for t, value in enumerate(factors):
        factor[0] = value
        losses.append(step(batch(t))[0])
    return losses


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("scaled", [False, True])
def test_train_step(scaled: bool, micro_batches: int) -> None:
    models = small_model(), small_model()
    options = {"ascent_steps": 3, "geometry": wsam.Fisher()}  # for which a scale matters
    opts = [make("wsam", model, **options) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if scaled else None
    wanted = [opts[0].step(closure(opts[0], models[0], t)) for t in range(4)]
    options = {"scaler": scaler, "micro_batches": micro_batches}
    found = train_steps(models[1], opts[1], [1.0] * 4, **options)
    assert [float(x) for x in found] == pytest.approx([float(x) for x in wanted], rel=1e-10)
    assert float(opts[1].sharpness) == pytest.approx(float(opts[0].sharpness), rel=1e-8)
    assert gap(list(models[1].parameters()), list(models[0].parameters())) < 1e-12


@pytest.mark.parametrize("bad_pass", [1, 2, 3])
@pytest.mark.parametrize("hidden", [False, True])
def test_overflow_under_a_grad_scaler(bad_pass: int, hidden: bool) -> None:
    """One overflow halves the scale once and changes nothing.

    `hidden`: the later passes have zero gradients, as a hinge loss has at NaN weights.
    """
    model, calls, bad = small_model(), [], [0]
    opt = make("wsam", model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def loss_fn(x: Tensor) -> Tensor:
        calls.append(1)
        loss = (model(x) ** 2).sum(1).mean()
        if len(calls) == bad[0]:
            return loss * math.inf
        return sum(0.0 * p.nan_to_num().sum() for p in model.parameters()) if later() else loss

    def later() -> bool:
        return hidden and 0 < bad[0] < len(calls)

    step = wsam.train_step(opt, loss_fn, scaler=scaler)
    step(batch(0))
    before, bad[0] = snapshot(opt), 3 + bad_pass
    step(batch(1))
    assert len(calls) == 6
    assert same(snapshot(opt), before)
    assert scaler.get_scale() == 128.0
    bad[0] = 0
    step(batch(1))
    assert not same(snapshot(opt), before)


def test_share_of_the_batch() -> None:
    """All ascent steps use the share."""
    model, sizes = small_model(), []
    opt = make("sam", model, ascent_steps=2)

    def loss_fn(x: Tensor) -> Tensor:
        sizes.append(len(x))
        return (model(x) ** 2).sum(1).mean()

    wsam.train_step(opt, loss_fn, ascent_share=0.3)(batch(0))
    assert sizes == [3, 3, 10]


def test_micro_batches_with_their_own_perturbation() -> None:
    """A list of closures equals the mean of the gradients of each."""
    model, w = small_model(), None
    opt = make("sam", model)
    names = [name for name, _ in model.named_parameters()]
    w = [p.detach().clone() for p in model.parameters()]
    opt.step([closure(opt, model, t) for t in range(2)])
    method = replace(reference.METHODS["sam"], rho=0.3, ascent_steps=2)

    def losses(values: list[Tensor], t: int) -> Tensor:
        found = dict(zip(names, values, strict=True))
        return (torch.func.functional_call(model, found, batch(t)) ** 2).sum(1)

    grads = [reference.two_gradients(method, w, lambda v, t=t: losses(v, t))[1] for t in range(2)]
    wanted = [p - 0.05 * (x + y) for p, x, y in zip(w, *grads, strict=True)]
    assert gap(list(model.parameters()), wanted) < 1e-12


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_missing_gradients(missing: int) -> None:
    """A parameter is perturbed by the gradients that it has; without g0 it is not perturbed."""
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    opt = wsam.SAM(torch.optim.SGD([p, q], lr=0.1), rho=1.0, ascent_steps=2)
    points, calls = [], 0

    def run() -> Tensor:
        nonlocal calls
        calls += 1
        points.append(q.detach().clone())
        loss = 3 * p.sum() + (0.0 if calls == missing else 4 * q.sum())
        loss.backward()
        return loss

    opt.step(run)
    length, alone = 0.5 * 4 / math.sqrt(50), torch.ones(2)
    first = alone + (0.0 if missing == 1 else length)
    second = first + (length if missing == 3 else 0.0)
    assert torch.allclose(points[1], first)
    assert torch.allclose(points[2], second)
    assert torch.allclose(q.detach(), alone - (0.0 if missing == 3 else 0.4))


# --- errors -------------------------------------------------------------------------------------


def test_wrong_number_of_ascent_steps_by_hand() -> None:
    model = small_model()
    opt, loss = make("wsam", model), model_loss(make("wsam", model), model)
    before = [p.detach().clone() for p in model.parameters()]
    opt.begin()
    loss().backward()
    opt.ascend()
    loss().backward()
    with pytest.raises(RuntimeError, match=r"ascent_steps=2, but ascend\(\) was called 1 times"):
        opt.descend()
    opt.ascend()
    loss().backward()
    with pytest.raises(RuntimeError, match="cannot ascend while the weights are at w"):
        opt.ascend()
    opt.abandon()
    assert same([p.detach() for p in model.parameters()], before)
    opt.begin()
    loss().backward()
    opt.ascend()
    with pytest.raises(RuntimeError, match=r"call backward\(\) in the second pass"):
        opt.ascend()
    assert same([p.detach() for p in model.parameters()], before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ascent_steps": 0}, "at least 1"),
        ({"ascent_steps": 1.5}, "whole number"),
        ({"keep": 0.5}, "does not support keep"),
        ({"geometry": Averaged()}, "Averaged averages one gradient a step.*ascent_steps > 1"),
        ({"geometry": wsam.geometry.AlongMomentum()}, "has one pass.*ascent_steps"),
    ],
)
def test_rejected_options(options: dict[str, Any], message: str) -> None:
    base = torch.optim.SGD(small_model().parameters(), lr=0.1, momentum=0.9)
    with pytest.raises((TypeError, ValueError), match=message):
        wsam.SharpnessAware(base, rule=Perturbed(), **{"ascent_steps": 2, **options})


def test_rejected_with_lean_and_capture() -> None:
    with pytest.raises(ValueError, match=r"lean=True.*without.*ascent_steps"):
        make("wsam", small_model(), lean=True)
    with pytest.raises(ValueError, match="ascent_steps > 1 cannot be captured"):
        wsam.train_step(make("wsam", small_model()), lambda x: x, capture=True)
