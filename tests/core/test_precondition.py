"""WSAM over adaptive bases: its sharpness term goes through the base's denominator."""

import copy
import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import reference
import torch
from helpers import (
    PROBLEMS,
    STYLES,
    batch,
    closure,
    covering,
    make_step,
    parameters,
    same,
    small_model,
    snapshot,
)
from torch import Tensor, nn

import wsam
from wsam._core.param_blocks import build_blocks
from wsam._core.preconditioners import denominators_before
from wsam.rule import Reuse
from wsam.schedule import Every

STEPS = 50
Optimizer = torch.optim.Optimizer
Weights = list[Tensor]

# name -> (class, arguments for torch, name for the reference, arguments for the reference)
BASES: dict[str, tuple[type[Optimizer], dict[str, Any], str, dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"lr": 0.01}, "adam", {}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}, "adamw", {}),
    "amsgrad": (
        torch.optim.AdamW,
        {"lr": 0.01, "amsgrad": True},
        "adamw",
        {"amsgrad": True},
    ),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}, "nadam", {}),
    "radam": (torch.optim.RAdam, {"lr": 0.01}, "radam", {}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.003}, "rmsprop", {}),
    "centered": (
        torch.optim.RMSprop,
        {"lr": 0.003, "centered": True, "momentum": 0.5},
        "rmsprop",
        {"centered": True, "momentum": 0.5},
    ),
    "adagrad": (
        torch.optim.Adagrad,
        {"lr": 0.03, "lr_decay": 0.01},
        "adagrad",
        {"lr_decay": 0.01},
    ),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.2}, "adadelta", {}),
}


def torch_base(name: str, params: Any, decay: float = 0.0, **options: Any) -> Optimizer:
    kind, own, _, _ = BASES[name]
    return kind(params, weight_decay=decay, **{**own, **options})


def reference_base(name: str, decay: float = 0.0) -> reference.Base:
    _, own, twin, hyper = BASES[name]
    return reference.Base(twin, own["lr"], decay, **hyper)


def preconditioned(name: str, model: nn.Module, **options: Any) -> wsam.WSAM:
    return wsam.WSAM(torch_base(name, list(model.parameters()), 0.01), gamma=0.6, **options)


def plain_steps(base: Optimizer, model: nn.Module, steps: range) -> None:
    for t in steps:
        base.zero_grad()
        (model(batch(t)) ** 2).sum(1).mean().backward()
        base.step()


@pytest.fixture
def double_counters() -> Iterator[None]:
    """NAdam keeps a product of its betas, in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# The mathematics ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("double_counters")
@covering(2, base=list(BASES), decay=[0.0, 0.01], style=STYLES, max_norm=[None, 0.3])
def test_reference_agreement(base: str, decay: float, style: str, max_norm: float | None) -> None:
    """w <- w - lr (m(g0) + k h)/denominator with v over g0^2 + (k h)^2, k h clipped before."""
    task = PROBLEMS["mlp"]
    params = parameters(task.weights())
    method = replace(reference.METHODS["wsam"], rho=0.1, gamma=0.6, max_norm=max_norm)
    opt = wsam.WSAM(torch_base(base, params, decay), rho=0.1, gamma=0.6, max_norm=max_norm)
    twin, w = reference_base(base, decay), task.weights()
    for t in range(STEPS):
        make_step(opt, lambda t=t: opt.select(task.losses(params, t)), style)
        g0, g1 = reference.two_gradients(method, w, lambda v, t=t: task.losses(v, t))
        w = reference.update(method, twin, w, g0, g1)
        for p, x in zip(params, w, strict=True):
            assert torch.allclose(p, x, rtol=1e-10, atol=1e-10), t


@pytest.mark.usefixtures("double_counters")
@pytest.mark.parametrize("base", BASES)
def test_reused_sharpness(base: str) -> None:
    task = PROBLEMS["mlp"]
    params = parameters(task.weights())
    method = reference.Method("wsam", gamma=0.6, rho=0.1)
    twin = reference.ReusedSharpness(method, 3, weight=0.5)
    inner = torch_base(base, params, 0.01)
    opt = wsam.WSAM(inner, rho=0.1, gamma=0.6, when=Every(3), reuse=Reuse(weight=0.5))
    other, w = reference_base(base, 0.01), task.weights()
    for t in range(STEPS):
        make_step(opt, lambda t=t: opt.select(task.losses(params, t)))
        w = twin.step(other, w, lambda v, t=t: task.losses(v, t), t)
        for p, x in zip(params, w, strict=True):
            assert torch.allclose(p, x, rtol=1e-10, atol=1e-10), t


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("hyper", [{"gamma": 0.0}, {"rho": 0.0}])
def test_no_sharpness_is_the_base(base: str, hyper: dict[str, float]) -> None:
    """gamma = 0 and rho = 0 are the base bit for bit, state included."""
    models = small_model(), small_model()
    opt = wsam.WSAM(torch_base(base, models[0].parameters(), 0.01), **hyper)
    plain = torch_base(base, models[1].parameters(), 0.01)
    for t in range(5):
        opt.step(closure(opt, models[0], t))
    plain_steps(plain, models[1], range(5))
    assert same(snapshot(opt)["weights"], snapshot(plain)["weights"])
    assert same(snapshot(opt)["state"], snapshot(plain)["state"])


@pytest.mark.parametrize("base", BASES)
def test_steps_that_the_interval_leaves_out_are_the_base(base: str) -> None:
    models = small_model(), small_model()
    opt = preconditioned(base, models[0], when=Every(4))
    twin = preconditioned(base, models[1])
    opt.step(closure(opt, models[0], 0))
    twin.step(closure(twin, models[1], 0))
    for t in range(1, 4):
        opt.step(closure(opt, models[0], t))
    plain_steps(twin.base, models[1], range(1, 4))
    assert same(snapshot(opt)["weights"], snapshot(twin)["weights"])
    assert same(snapshot(opt)["state"], snapshot(twin)["state"])


@pytest.mark.parametrize("base", ["adamw", "radam", "adadelta"])
def test_ascent_is_descent_of_the_negative(base: str) -> None:
    models = small_model(), small_model()
    up = wsam.WSAM(torch_base(base, models[0].parameters(), maximize=True), gamma=0.6)
    down = wsam.WSAM(torch_base(base, models[1].parameters()), gamma=0.6)
    for t in range(3):
        for opt, model, sign in ((up, models[0], -1), (down, models[1], 1)):
            make_step(opt, lambda m=model, s=sign, t=t: s * (m(batch(t)) ** 2).sum(1).mean())
    assert same(snapshot(up)["weights"], snapshot(down)["weights"])


def test_published_form() -> None:
    """precondition=False applies lr k h as it is, and warns."""
    models = small_model(), small_model()
    inner = torch_base("adamw", models[0].parameters())
    with pytest.warns(
        wsam.WsamWarning, match=r"WSAM over AdamW.*use precondition=True with gamma=0\.5"
    ):
        opt = wsam.WSAM(inner, gamma=0.6, precondition=False)
    plain = torch_base("adamw", models[1].parameters())
    opt.step(closure(opt, models[0]))
    plain_steps(plain, models[1], range(1))
    assert same(snapshot(opt)["state"], snapshot(plain)["state"])
    assert not same(snapshot(opt)["weights"], snapshot(plain)["weights"])


@pytest.mark.parametrize("base", [torch.optim.AdamW, torch.optim.Adagrad])
def test_weight_of_sgd_warns(base: type[torch.optim.Optimizer]) -> None:
    """k rho of at least 0.8, in any group, is too large for a preconditioned term."""
    expected = rf"WSAM over {base.__name__}: k rho = 1\.47.*gamma=0\.5.*0\.05 \(docs/choosing\.md\)"
    with pytest.warns(wsam.WsamWarning, match=expected) as record:
        wsam.WSAM(base(small_model().parameters(), lr=0.01), rho=0.2, gamma=0.88)
    assert [warning.filename for warning in record] == [__file__]
    first, second = small_model(), small_model()
    groups = [{"params": first.parameters()}, {"params": second.parameters(), "gamma": 0.95}]
    with pytest.warns(wsam.WsamWarning, match=r"k rho = 0\.95"):
        wsam.WSAM(base(groups, lr=0.01))


@pytest.mark.filterwarnings("error")
def test_other_weights_do_not_warn() -> None:
    def over(base: type[torch.optim.Optimizer], **options: Any) -> None:
        wsam.WSAM(base(small_model().parameters(), lr=0.01), **options)

    over(torch.optim.AdamW, rho=0.2, gamma=0.79)
    over(torch.optim.SGD, rho=0.2, gamma=0.88)
    over(torch.optim.AdamW, rho=0.2, gamma=wsam.schedule.Warmup(0.88, steps=10))
    over(torch.optim.AdamW, rho=2.0, geometry=wsam.Adaptive())  # another scale of rho


def test_groups_with_their_own_values() -> None:
    """Two groups give the result of one, and a group with gamma = 0 is left to the base."""
    models = [small_model() for _ in range(3)]
    one = preconditioned("adamw", models[0])
    parts = [{"params": [p]} for p in models[1].parameters()]
    split = wsam.WSAM(torch_base("adamw", parts, 0.01), gamma=0.6)
    mixed = [
        {"params": [p], "gamma": 0.0 if i else 0.6} for i, p in enumerate(models[2].parameters())
    ]
    some = wsam.WSAM(torch_base("adamw", mixed, 0.01))
    plain_model = small_model()
    plain = torch_base("adamw", plain_model.parameters(), 0.01)
    for opt, model in zip((one, split, some), models, strict=True):
        opt.step(closure(opt, model))
    plain_steps(plain, plain_model, range(1))
    assert same(snapshot(one)["weights"], snapshot(split)["weights"])
    assert same(snapshot(some)["weights"][1:], snapshot(plain)["weights"][1:])
    assert same(snapshot(some)["weights"][0], snapshot(one)["weights"][0])


# The geometry ---------------------------------------------------------------------------------------


def adam_metric(base: reference.Base, i: int, w: Tensor) -> Tensor:
    """S = 1/(sqrt(v) + eps) of the last step, 1 before the first one."""
    if base.t == 0:
        return torch.ones_like(w)
    return 1 / ((base.memory[i]["v"] / (1 - 0.999**base.t)).sqrt() + 1e-8)


@covering(2, method=["sam", "wsam"], style=STYLES, base=["adamw", "adam"])
def test_preconditioned_geometry(method: str, style: str, base: str) -> None:
    """d = rho S g0 / sqrt(<g0, S g0>) with the base's v of the step before."""
    task = PROBLEMS["mlp"]
    params = parameters(task.weights())
    form = replace(reference.METHODS[method], rho=0.05, gamma=0.6)
    gamma = {"gamma": 0.6} if method == "wsam" else {}
    opt = wsam.create(
        method, torch_base(base, params, 0.01), rho=0.05, geometry=wsam.Preconditioned(), **gamma
    )
    twin, w = reference_base(base, 0.01), task.weights()
    for t in range(STEPS):
        make_step(opt, lambda t=t: opt.select(task.losses(params, t)), style)
        losses = lambda v, t=t: task.losses(v, t)  # noqa: E731
        g0 = reference.gradient(losses, w, None)[1]
        sg = [adam_metric(twin, i, p) * g for i, (p, g) in enumerate(zip(w, g0, strict=True))]
        norm = reference.dot(g0, sg) ** 0.5
        g1 = reference.gradient(
            losses, [p + 0.05 * x / norm for p, x in zip(w, sg, strict=True)], None
        )[1]
        w = reference.update(form, twin, w, g0, g1)
        for p, x in zip(params, w, strict=True):
            assert torch.allclose(p, x, rtol=1e-10, atol=1e-10), t


@pytest.mark.parametrize("base", ["adam", "amsgrad", "nadam", "radam", "rmsprop", "adagrad"])
def test_a_first_gradient_does_not_dominate_the_perturbation(base: str) -> None:
    """S is 1 where all gradients were zero, as it is where there is no state; not 1/eps."""
    w = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    opt = wsam.SAM(torch_base(base, [w]), rho=0.1, geometry=wsam.Preconditioned())
    for _ in range(8):
        make_step(opt, lambda: 1e-3 * w[1])
    before = w.detach().clone()
    w.grad = torch.full_like(w, 1e-3)
    with opt.perturbed():
        first, usual = (w.detach() - before).tolist()
    assert 0 < first < usual


@covering(2, method=["sam", "wsam"], style=STYLES, base=["adamw", "amsgrad"])
def test_per_layer_geometry(method: str, style: str, base: str) -> None:
    """d_i = rho / sqrt(n) g0_i / norm(g0_i): each tensor moves as far, and norm(d) = rho."""
    task = PROBLEMS["mlp"]
    params = parameters(task.weights())
    form = replace(reference.METHODS[method], rho=0.1, gamma=0.6)
    gamma = {"gamma": 0.6} if method == "wsam" else {}
    opt = wsam.create(
        method, torch_base(base, params, 0.01), rho=0.1, geometry=wsam.PerLayer(), **gamma
    )
    twin, w = reference_base(base, 0.01), task.weights()
    for t in range(STEPS):
        make_step(opt, lambda t=t: opt.select(task.losses(params, t)), style)
        losses = lambda v, t=t: task.losses(v, t)  # noqa: E731
        g0 = reference.gradient(losses, w, None)[1]
        moved = [p + 0.1 / 4**0.5 * g / g.norm() for p, g in zip(w, g0, strict=True)]
        g1 = reference.gradient(losses, moved, None)[1]
        w = reference.update(form, twin, w, g0, g1)
        for p, x in zip(params, w, strict=True):
            assert torch.allclose(p, x, rtol=1e-10, atol=1e-10), t


def test_per_layer_geometry_with_a_zero_gradient() -> None:
    used, unused = (nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(2))
    opt = wsam.SAM(torch.optim.SGD([used, unused], lr=0.1), rho=0.1, geometry=wsam.PerLayer())
    used.grad, unused.grad = torch.ones(2).double(), torch.zeros(2).double()
    with opt.perturbed():
        assert float(used.detach().norm()) == pytest.approx(0.1)
        assert not unused.any()


def test_preconditioned_geometry_of_a_weight_without_a_gradient_so_far() -> None:
    """Its denominator is 1, and Adadelta's own is not small."""
    p = nn.Parameter(torch.ones(2))
    base = torch.optim.Adadelta([p])
    p.grad = torch.tensor([3.0, 0.0])
    base.step()
    found = denominators_before(base, build_blocks(base.param_groups, {})[0])[0]
    assert found[0] > 2.0
    assert found[1] == 1.0


@pytest.mark.parametrize("lr_decay", [0.5, 1.0, 2.0])
def test_preconditioned_geometry_before_the_first_step_of_adagrad(lr_decay: float) -> None:
    """Its learning rate has not decayed there, and its squares have their initial value."""
    w = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    base = torch.optim.Adagrad([w], lr_decay=lr_decay, initial_accumulator_value=0.25)
    opt = wsam.SAM(base, rho=0.1, geometry=wsam.Preconditioned())
    g0 = 2 * w.detach()
    w.square().sum().backward()
    with opt.perturbed():
        d = w.detach() - g0 / 2
    inverse = 1 / (0.5 + base.defaults["eps"])
    wanted = 0.1 * inverse * g0 / (g0 * inverse * g0).sum().sqrt()
    assert torch.allclose(d, wanted, rtol=1e-10)


def test_preconditioned_geometry_needs_a_denominator() -> None:
    base = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(ValueError, match=r"SGD.*register_preconditioner"):
        wsam.SAM(base, geometry=wsam.Preconditioned())


# State ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("stop", [1, 3])
def test_resume_bitwise(base: str, stop: int) -> None:
    model, other = small_model(), small_model()
    opt, again = preconditioned(base, model), preconditioned(base, other)
    for t in range(stop):
        opt.step(closure(opt, model, t))
    file = io.BytesIO()
    torch.save([model.state_dict(), opt.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other.load_state_dict(weights)
    again.load_state_dict(state)
    for t in range(stop, stop + 3):
        opt.step(closure(opt, model, t))
        again.step(closure(again, other, t))
    assert same(snapshot(opt), snapshot(again))


@pytest.mark.parametrize("base", BASES)
def test_state_is_created_as_the_base_does(base: str) -> None:
    models = small_model(torch.float32), small_model(torch.float32)
    opt = preconditioned(base, models[0])
    plain = torch_base(base, models[1].parameters())
    opt.step(closure(opt, models[0]))
    plain.zero_grad()
    models[1](batch(0).float()).sum().backward()
    plain.step()
    for mine, theirs in zip(snapshot(opt)["state"], snapshot(plain)["state"], strict=True):
        kinds = [{k: (v.dtype, v.shape) for k, v in s.items()} for s in (mine, theirs)]
        assert kinds[0] == kinds[1]
        assert torch.equal(mine["step"], theirs["step"])


@pytest.mark.parametrize(
    "kind", [copy.deepcopy, lambda x: torch.load(_saved(x), weights_only=False)]
)
def test_copies_continue_alike(kind: Any) -> None:
    model = small_model()
    opt = preconditioned("adamw", model)
    opt.step(closure(opt, model, 0))
    other, again = kind((model, opt))
    for t in range(1, 3):
        opt.step(closure(opt, model, t))
        again.step(closure(again, other, t))
    assert same(snapshot(opt), snapshot(again))


def _saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_a_parameter_without_g0_gets_its_term() -> None:
    """Where the gradient appears in the second pass only, g0 is 0: v holds (k h)^2 alone."""
    model, extra = small_model(), nn.Parameter(torch.ones(2, dtype=torch.float64))
    base = torch.optim.AdamW([*model.parameters(), extra], lr=0.01, weight_decay=0.0)
    opt = wsam.WSAM(base, gamma=0.5)

    def run() -> Tensor:
        opt.zero_grad()
        loss = (model(batch(0)) ** 2).sum(1).mean()
        loss = loss + (extra * 3.0).sum() if opt.second_pass else loss
        loss.backward()
        return loss

    opt.step(run)
    assert torch.allclose(extra, torch.full((2,), 0.99, dtype=torch.float64))
    assert torch.allclose(opt.state[extra]["exp_avg_sq"], torch.tensor(0.009, dtype=torch.float64))


# Precision, scaling, options ------------------------------------------------------------------------


@pytest.mark.parametrize("base", BASES)
@pytest.mark.filterwarnings("ignore:parameters are float16:wsam.WsamWarning")
def test_bfloat16_follows_float32(base: str) -> None:
    models = small_model(torch.bfloat16), small_model(torch.bfloat16).float()
    low, high = (preconditioned(base, m, rho=1.0) for m in models)
    for t in range(3):
        low.step(closure(low, models[0], t))
        high.step(closure(high, models[1], t))
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert p.dtype == torch.bfloat16
        assert torch.allclose(p.float(), q, atol=0.05)


def test_grad_scaler() -> None:
    """A scaled loss gives the step of an unscaled one; an overflow in either pass changes nothing."""
    models = small_model(torch.float32), small_model(torch.float32)
    opt, plain = (preconditioned("adamw", m) for m in models)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for t in range(3):
        plain.step(closure(plain, models[1], t))
        loss = lambda t=t: (models[0](batch(t).float()) ** 2).sum(1).mean()  # noqa: E731
        opt.zero_grad()
        scaler.scale(loss()).backward()
        opt.ascend(scaler.get_scale())
        scaler.scale(loss()).backward()
        scaler.unscale_(opt)
        opt.descend()
        scaler.step(opt)
        scaler.update()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)
    for factors in ((1.0, torch.inf), (torch.inf, 1.0)):
        before, scale = snapshot(opt), scaler.get_scale()
        opt.zero_grad()
        scaler.scale(factors[0] * loss()).backward()
        opt.ascend(scale)
        scaler.scale(factors[1] * loss()).backward()
        scaler.unscale_(opt)
        opt.descend()
        scaler.step(opt)
        scaler.update()
        assert same(snapshot(opt), before), factors
        assert scaler.get_scale() == scale / 2, factors


def test_a_skipped_step_leaves_the_squares() -> None:
    model = small_model()
    opt = preconditioned("adamw", model, nonfinite="skip")
    opt.step(closure(opt, model, 0))
    before = snapshot(opt)

    def bad() -> Tensor:
        loss = closure(opt, model, 1)()
        next(model.parameters()).grad.fill_(torch.nan)
        return loss

    opt.step(bad)
    assert same(snapshot(opt), before)


def test_chosen_by_the_base() -> None:
    params = [nn.Parameter(torch.zeros(2))]
    for name in BASES:
        assert wsam.WSAM(torch_base(name, params)).rule.precondition, name
    assert not wsam.WSAM(torch.optim.SGD(params, lr=0.1)).rule.precondition
    assert not wsam.WSAM(torch.optim.Adamax(params)).rule.precondition


def test_a_derived_base_has_the_denominator_of_its_class() -> None:
    class OwnAdam(torch.optim.Adam):
        pass

    results = []
    for kind in (torch.optim.Adam, OwnAdam):
        model = small_model()
        opt = wsam.WSAM(kind(model.parameters(), lr=0.01))
        assert opt.rule.precondition
        for t in range(2):
            opt.step(closure(opt, model, t))
        results.append(list(model.parameters()))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


def test_a_state_is_created_with_amsgrad_as_an_argument() -> None:
    """As AdamW of torch 2.6 takes it."""

    class OldAdamW(torch.optim.AdamW):
        def _init_group(self, group: Any, params: Any, grads: Any, amsgrad: Any, rest: Any) -> None:
            assert (params, grads, amsgrad, rest) == ([], [], True, [])
            self.was_called = True

    base = OldAdamW([nn.Parameter(torch.zeros(2))], amsgrad=True)
    wsam.Preconditioner().create_state(base, base.param_groups[0])
    assert base.was_called


@pytest.mark.parametrize("name", ["SGD", "Adamax", "Muon"])
def test_refused_without_a_denominator(name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this version of torch has no {name}")
    base = getattr(torch.optim, name)([nn.Parameter(torch.zeros(2, 2))], lr=0.1)
    with pytest.raises(ValueError, match=f"{name}.*Adam.*register_preconditioner"):
        wsam.WSAM(base, precondition=True)


def test_bad_arguments() -> None:
    params = [nn.Parameter(torch.zeros(2))]
    with pytest.raises(ValueError, match=r"lean=True.*precondition=False"):
        wsam.WSAM(torch.optim.AdamW(params), lean=True)
    with pytest.raises(ValueError, match="decay above 0"):
        wsam.WSAM(torch.optim.AdamW(params, betas=(0.9, 0.0)))
    opt = wsam.WSAM(torch.optim.AdamW(params))
    with pytest.raises(ValueError, match="decay above 0"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "betas": (0.9, 0.0)})


class RootAdam(torch.optim.Optimizer):
    """A third-party base: v <- 0.5 v + 2 g^2, w -= lr g / sqrt(v)."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                v = self.state[p].setdefault("v", torch.zeros_like(p))
                v.mul_(0.5).addcmul_(p.grad, p.grad, value=2.0)
                p.addcdiv_(p.grad, v.sqrt(), value=-group["lr"])


class RootPreconditioner(wsam.Preconditioner):
    square = "v"

    def create_state(self, base: Any, group: Any) -> None:
        for p in group["params"]:
            base.state[p].setdefault("v", torch.zeros_like(p))

    def square_weight(self, group: Any) -> float:
        return 4.0

    def denominators(self, group: Any, states: Any) -> list[Tensor]:
        return [state["v"].sqrt() for state in states]

    def check(self, group: Any) -> None:
        """Accept every group."""


def test_registered_base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wsam._core.preconditioners._KNOWN", {})
    task = PROBLEMS["mlp"]
    params = parameters(task.weights())
    assert not wsam.WSAM(RootAdam(params, 0.01)).rule.precondition
    wsam.register_preconditioner(RootAdam, RootPreconditioner())
    opt = wsam.WSAM(RootAdam(params, 0.01), rho=0.1, gamma=0.6)
    assert opt.rule.precondition
    method, w = reference.Method("wsam", rho=0.1), task.weights()
    v = [torch.zeros_like(p) for p in w]
    for t in range(5):
        make_step(opt, lambda t=t: opt.select(task.losses(params, t)))
        g0, g1 = reference.two_gradients(method, w, lambda x, t=t: task.losses(x, t))
        s = [1.5 * (b - a) for a, b in zip(g0, g1, strict=True)]
        v = [0.5 * x + 2 * (a**2 + b**2) for x, a, b in zip(v, g0, s, strict=True)]
        w = [p - 0.01 * (a + b) / x.sqrt() for p, a, b, x in zip(w, g0, s, v, strict=True)]
        assert all(torch.allclose(p, x, rtol=1e-10) for p, x in zip(params, w, strict=True))


def test_registered_base_whose_state_cannot_be_created(monkeypatch: pytest.MonkeyPatch) -> None:
    class Incomplete(RootPreconditioner):
        create_state = wsam.Preconditioner.create_state

    monkeypatch.setattr("wsam._core.preconditioners._KNOWN", {RootAdam: Incomplete()})
    p = nn.Parameter(torch.ones(2))
    opt = wsam.WSAM(RootAdam([p], 0.01))
    with pytest.raises(AttributeError, match="'RootAdam' object has no attribute '_init_group'"):
        make_step(opt, lambda: p.square().sum())


# Devices --------------------------------------------------------------------------------------------


class _NoHost(torch.utils._python_dispatch.TorchDispatchMode):
    """Raises where a value is read on the host, as a CUDA graph would."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value was read"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("base", BASES)
def test_denominators_of_counts_on_a_device(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without reading values on the host, the denominators are the same to rounding."""
    from wsam._core import preconditioners

    model = small_model()
    opt = preconditioned(base, model)
    for t in range(8):
        opt.step(closure(opt, model, t))
    states = [opt.state[p] for p in model.parameters()]
    known = preconditioners.find_preconditioner(opt.base)
    assert known is not None
    wanted = known.denominators(opt.param_groups[0], states)
    monkeypatch.setattr(preconditioners, "per_tensor", lambda values: list(values.unbind()))
    with _NoHost():
        found = known.denominators(opt.param_groups[0], states)
    assert all(torch.allclose(x, y, rtol=1e-12) for x, y in zip(found, wanted, strict=True))


def test_default_gamma() -> None:
    """It has about the weight of SAM, over SGD with momentum and where it is preconditioned."""
    model = small_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    adam = torch.optim.AdamW(model.parameters())
    assert wsam.WSAM(sgd).gamma == 0.9
    assert wsam.WSAM(adam).gamma == 0.5
    assert wsam.WSAM(torch.optim.AdamW(model.parameters()), gamma=0.9).gamma == 0.9


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "base", ["adam", "adamw", "amsgrad", "nadam", "radam", "rmsprop", "adadelta"]
)
def test_captured_step_equals_eager(base: str) -> None:
    models = [small_model(torch.float32).cuda() for _ in range(2)]
    opts = [
        wsam.WSAM(torch_base(base, m.parameters(), 0.01, capturable=True), gamma=0.6)
        for m in models
    ]
    x = batch(0).float().cuda()
    step = wsam.capture(opts[0], lambda x: (models[0](x) ** 2).sum(1).mean(), x)
    for t in range(8):
        x = batch(t).float().cuda()
        step(x)
        make_step(opts[1], lambda x=x: (models[1](x) ** 2).sum(1).mean())
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-4, atol=1e-6)
