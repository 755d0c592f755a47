"""MSAM: one gradient a step, at w + d along the base's momentum."""

import copy
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import reference
import torch
from helpers import (
    BASES,
    PROBLEMS,
    STYLES,
    batch,
    closure,
    covering,
    full,
    gap,
    make_step,
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
from wsam.geometry import AlongMomentum
from wsam.rule import Perturbed, Weighted
from wsam.schedule import Every, NormAbove

STEPS = 15
MLP = PROBLEMS["mlp"]
ONLY = "one pass by hand"
MOMENTUM_BASES = [name for name in BASES if name in ("momentum", "nesterov", "adam", "adamw")]

pytestmark = pytest.mark.filterwarnings("ignore:.* without momentum:wsam.WsamWarning")


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def make(base: torch.optim.Optimizer, **options: Any) -> wsam.MSAM:
    return wsam.MSAM(base, **{"rho": 0.1, **options})


def step_by(opt: wsam.SharpnessAware, loss: Callable[[], Tensor], style: str) -> None:
    if style != ONLY:
        make_step(opt, loss, style)
        return
    opt.begin()
    opt.ascend()
    loss().backward()
    opt.descend()
    opt.step()


# --- agreement ----------------------------------------------------------------------------------


@covering(2, base=list(BASES), style=[*STYLES, ONLY], clip=[None, 0.3], decay=[0.0, 0.01])
def test_reference_agreement(base: str, style: str, clip: float | None, decay: float) -> None:
    """A loop by hand with two passes agrees, too: the first gradient has no effect."""
    method = replace(reference.METHODS["msam"], rho=0.1, max_norm=clip)
    params, w, memory = parameters(MLP.weights()), MLP.weights(), {}
    opt = make(torch_base(base, params, decay), max_norm=clip)
    other = reference_base(base, decay)
    for t in range(STEPS):
        step_by(opt, lambda t=t: opt.select(MLP.losses(params, t)), style)
        pair = reference.two_gradients(method, w, lambda v, t=t: MLP.losses(v, t), None, memory)
        w = reference.update(method, other, w, *pair, memory)
        assert gap(params, w) < 1e-10, t
    assert ("momentum" in memory) == (base in MOMENTUM_BASES)


def test_groups() -> None:
    """Each group has its own radius; the norm is over all of them."""
    method = replace(reference.METHODS["msam"], rho=[0.2, 0.2, 0.1, 0.1])
    params, w, memory = parameters(MLP.weights()), MLP.weights(), {}
    groups = [{"params": params[:2], "sam_rho": 0.2}, {"params": params[2:]}]
    opt = make(torch.optim.SGD(groups, lr=0.02, momentum=0.9))
    other = reference_base("momentum")
    for t in range(8):
        make_step(opt, lambda t=t: MLP.losses(params, t).mean())
        pair = reference.two_gradients(method, w, lambda v, t=t: MLP.losses(v, t), None, memory)
        w = reference.update(method, other, w, *pair, memory)
        assert gap(params, w) < 1e-10


def test_micro_batches() -> None:
    """A list of closures equals one large batch: d does not depend on the batch."""
    models = small_model(), small_model()
    one, two = (make(momentum(model)) for model in models)
    for t in range(4):
        one.step(closure(one, models[0], t))

        def part(number: int, t: int = t) -> Callable[[], Tensor]:
            def run() -> Tensor:
                two.zero_grad()
                samples = batch(t)[5 * number : 5 * number + 5]
                loss = two.select((models[1](samples) ** 2).sum(1)) / 2
                loss.backward()
                return loss

            return run

        two.step([part(0), part(1)])
        assert gap(list(models[0].parameters()), list(models[1].parameters())) < 1e-12


# --- identities ---------------------------------------------------------------------------------


@pytest.mark.parametrize("style", [*STYLES, ONLY])
@pytest.mark.parametrize("base", BASES)
def test_base_steps(base: str, style: str) -> None:
    """Bitwise the base: the first step, without a buffer, and all steps with a radius of 0."""
    for steps, options in ((1, {}), (3, {"rho": 0.0}), (3, {"when": Every(10**6, 10**6)})):
        ours, plain = small_model(torch.float32), small_model(torch.float32)
        opt = make(torch_base(base, list(ours.parameters())), **options)
        twin = torch_base(base, list(plain.parameters()))
        for t in range(steps):
            step_by(opt, model_loss(opt, ours, t), style)
            twin.zero_grad()
            (plain(batch(t).float()) ** 2).sum(1).mean().backward()
            twin.step()
        assert same(list(ours.parameters()), list(plain.parameters()))


@pytest.mark.parametrize("base", ["momentum", "adam"])
def test_maximize_is_minimizing_the_negative(base: str) -> None:
    up, down = small_model(), small_model()
    kind, options, _, _ = BASES[base]
    climbing = make(kind(up.parameters(), maximize=True, **options))
    falling = make(kind(down.parameters(), **options))
    for t in range(4):
        make_step(climbing, lambda t=t: -model_loss(climbing, up, t)())
        make_step(falling, model_loss(falling, down, t))
    assert same(list(up.parameters()), list(down.parameters()))


# --- one pass -----------------------------------------------------------------------------------


def test_the_closure_runs_once_at_w_plus_d() -> None:
    model, seen = small_model(), []
    opt = make(momentum(model))
    inner, weight = closure(opt, model), model[0].weight

    def run() -> Tensor:
        seen.append((weight.detach().clone(), opt.second_pass))
        return inner()

    for number in range(4):
        w = [p.detach().clone() for p in model.parameters()]
        buffers = [opt.state[p]["momentum_buffer"] for p in model.parameters() if number]
        norm = torch.sqrt(sum((b**2).sum() for b in buffers)) if number else 1.0
        d = -0.1 * buffers[0] / norm if number else torch.zeros_like(weight)
        wanted = w[0] + d
        opt.step(run)
        assert len(seen) == number + 1
        assert torch.allclose(seen[-1][0], wanted, rtol=1e-12)
        assert not seen[-1][1], "metrics and logs belong to the only pass"
        assert bool(opt.sharpness.isnan())


def test_statistics_and_generators_advance_once() -> None:
    """As in a step of the base: the only pass counts."""
    torch.manual_seed(0)
    layers = nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=None), nn.Dropout(0.5), nn.Linear(4, 2)
    model = nn.Sequential(*layers).double()
    opt = make(momentum(model), model=model)
    for t in range(3):
        plain = copy.deepcopy(model)
        torch.manual_seed(t)
        plain(batch(t))
        after = torch.get_rng_state()
        torch.manual_seed(t)
        opt.step(closure(opt, model, t))
        assert torch.equal(torch.get_rng_state(), after)
        assert int(model[1].num_batches_tracked) == t + 1


@pytest.mark.parametrize("style", ["closure", ONLY])
def test_frozen_and_unused_parameters(style: str) -> None:
    model = small_model()
    model[0].requires_grad_(False)
    unused = nn.Parameter(torch.ones(3))
    params = [*model.parameters(), unused]
    opt = make(torch.optim.AdamW(params, lr=0.1, weight_decay=0.1))
    before = [p.detach().clone() for p in (*model[0].parameters(), unused)]
    for t in range(3):
        step_by(opt, model_loss(opt, model, t), style)
    assert same([p.detach() for p in (*model[0].parameters(), unused)], before)
    assert not opt.state.get(unused)


# --- interruptions ------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_step_that_is_not_made_changes_nothing(number: int) -> None:
    """A gradient that is not finite, and an error in the pass."""
    model = small_model()
    opt = make(momentum(model), nonfinite="skip")
    for t in range(number):
        opt.step(closure(opt, model, t))
    before = snapshot(opt)

    def broken(fault: Callable[[], None]) -> Callable[[], Tensor]:
        inner = closure(opt, model, number)

        def run() -> Tensor:
            loss = inner()
            fault()
            return loss

        return run

    def spoil() -> None:
        model[0].weight.grad[0, 0] = torch.inf

    def fail() -> None:
        raise KeyboardInterrupt

    opt.step(broken(spoil))
    assert opt.skipped == 1
    assert same(snapshot(opt), before)
    with pytest.raises(KeyboardInterrupt):
        opt.step(broken(fail))
    assert same(snapshot(opt), before)
    opt.begin()
    opt.ascend()
    opt.abandon()
    assert same(snapshot(opt), before)
    opt.step(closure(opt, model, number))
    assert not same(snapshot(opt), before)


def test_missing_backward() -> None:
    model = small_model()
    opt = make(momentum(model))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"call backward\(\)"):
            opt.step(model_loss(opt, model))
        opt.step(closure(opt, model))


@pytest.mark.parametrize("base", ["momentum", "adamw"])
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_resume(stop: int, base: str) -> None:
    def new() -> tuple[nn.Module, wsam.SharpnessAware]:
        model = small_model()
        return model, make(torch_base(base, list(model.parameters())))

    (model, opt), (other, again) = new(), new()
    for t in range(stop):
        opt.step(closure(opt, model, t))
    weights, state = save_and_load([model.state_dict(), opt.state_dict()])
    other.load_state_dict(weights)
    again.load_state_dict(state)
    third, copied = pickle.loads(pickle.dumps((model, opt)))
    for t in range(stop, stop + 3):
        for o, m in ((opt, model), (again, other), (copied, third)):
            o.step(closure(o, m, t))
    assert same(snapshot(opt), snapshot(again))
    assert same(snapshot(opt), snapshot(copied))


# --- train_step and GradScaler ------------------------------------------------------------------


@full(scaled=[False, True], micro_batches=[1, 2], when=[None, Every(2)])
def test_train_step(scaled: bool, micro_batches: int, when: Any) -> None:
    models, calls = (small_model(), small_model()), []
    opts = [make(momentum(model), when=when) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if scaled else None

    def loss_fn(x: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        out = models[1](x)
        return (out**2).sum(1).mean(), out

    step = wsam.train_step(opts[1], loss_fn, scaler=scaler, micro_batches=micro_batches)
    for t in range(4):
        wanted = opts[0].step(closure(opts[0], models[0], t))
        loss, outputs = step(batch(t))
        assert outputs.shape == (10, 2)
        assert float(loss) == pytest.approx(float(wanted), rel=1e-10)
        assert bool(opts[1].sharpness.isnan())
    assert len(calls) == 4 * micro_batches
    assert gap(list(models[1].parameters()), list(models[0].parameters())) < 1e-12


@pytest.mark.parametrize("number", [0, 1])
def test_overflow_under_a_grad_scaler(number: int) -> None:
    model = small_model()
    opt = make(momentum(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    factor = [1.0]
    step = wsam.train_step(opt, lambda x: factor[0] * (model(x) ** 2).sum(1).mean(), scaler=scaler)
    for t in range(number):
        step(batch(t))
    before = snapshot(opt)
    factor[0] = torch.inf
    step(batch(number))
    assert same(snapshot(opt), before)
    assert scaler.get_scale() == 128.0


# --- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": Weighted()}, "AlongMomentum has one pass.*no rule that needs"),
        ({"rule": Perturbed(), "keep": 0.5}, "keep"),
        ({"rule": Perturbed(), "when": NormAbove()}, "no interval that reads"),
    ],
)
def test_rejected_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wsam.SharpnessAware(momentum(small_model()), geometry=AlongMomentum(), **options)


@pytest.mark.parametrize("rho", [0.0, 0.1])
def test_sharpness_is_on_the_device_of_the_parameters(rho: float) -> None:
    """A captured step stacks it with the loss."""
    model = nn.Linear(3, 1, device="meta")
    opt = make(momentum(model), rho=rho)

    def run() -> Tensor:
        loss = model(torch.ones(2, 3, device="meta")).sum()
        loss.backward()
        return loss

    opt.step(run)
    assert opt.sharpness is not None
    assert opt.sharpness.device.type == "meta"


def test_base_without_momentum() -> None:
    model = small_model()
    with pytest.warns(wsam.WsamWarning, match="over SGD without momentum"):
        make(torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for base in (momentum(model), torch.optim.AdamW(model.parameters())):
            make(base)


def test_sub_batch_ascent_needs_two_passes() -> None:
    model = small_model()
    with pytest.raises(ValueError, match="ascent_share"):
        wsam.train_step(wsam.MSAM(momentum(model)), lambda x: model(x).sum(), ascent_share=0.5)
