"""WSAM that reuses its sharpness gradient on the steps between two-pass steps."""

import copy
import io
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
from wsam.rule import Reuse
from wsam.schedule import Between, Every

STEPS = 15
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm": {"scale_by_norm": True},
    "average": {"average": 0.5},
    "weight": {"weight": 0.25},
    "all": {"scale_by_norm": True, "average": 0.3, "weight": 2.0},
}


def reusing(model: nn.Module, n: int = 3, reuse: Any = True, **options: Any) -> wsam.WSAM:
    base = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return wsam.WSAM(base, gamma=0.8, when=Every(n), reuse=reuse, **options)


@pytest.mark.filterwarnings("ignore::wsam.WsamWarning")
@covering(2, base=list(BASES), kind=list(OPTIONS), style=STYLES, n=[2, 5])
def test_reference_agreement(base: str, kind: str, style: str, n: int) -> None:
    task = PROBLEMS["mlp"]
    params = parameters(task.weights())
    method = reference.Method("wsam", gamma=0.7, rho=0.1)
    twin = reference.ReusedSharpness(method, n, **OPTIONS[kind])
    opt = wsam.WSAM(
        torch_base(base, params), rho=0.1, gamma=0.7, when=Every(n), reuse=Reuse(**OPTIONS[kind])
    )
    other, w = reference_base(base), task.weights()
    for t in range(STEPS):
        make_step(opt, lambda t=t: opt.select(task.losses(params, t)), style)
        w = twin.step(other, w, lambda v, t=t: task.losses(v, t), t)
        for p, x in zip(params, w, strict=True):
            assert torch.allclose(p, x, rtol=1e-10, atol=1e-10), t


@pytest.mark.parametrize("kind", OPTIONS)
def test_every_step_is_plain_wsam(kind: str) -> None:
    """With n = 1 nothing is reused: bit for bit."""
    models = small_model(), small_model()
    opt = reusing(models[0], 1, Reuse(**OPTIONS[kind]))
    plain = wsam.WSAM(torch.optim.SGD(models[1].parameters(), lr=0.02, momentum=0.9), gamma=0.8)
    for t in range(4):
        opt.step(closure(opt, models[0], t))
        plain.step(closure(plain, models[1], t))
    assert same(list(models[0].parameters()), list(models[1].parameters()))


def test_steps_between_run_the_closure_once() -> None:
    model, passes = small_model(), []
    opt = reusing(model, 3)
    inner = closure(opt, model)

    def run() -> Tensor:
        passes.append(opt.second_pass)
        return inner()

    for _ in range(6):
        opt.step(run)
    assert passes == [False, True, False, False] * 2


def test_before_the_first_two_pass_step_the_base_steps_alone() -> None:
    models = small_model(), small_model()
    base, plain = (torch.optim.SGD(m.parameters(), lr=0.02, momentum=0.9) for m in models)
    opt = wsam.WSAM(base, when=Every(2) & Between(4), reuse=True)
    for t in range(4):
        opt.step(closure(opt, models[0], t))
        plain.zero_grad()
        (models[1](batch(t)) ** 2).sum(1).mean().backward()
        plain.step()
    assert same(list(models[0].parameters()), list(models[1].parameters()))
    opt.step(closure(opt, models[0], 4))
    assert all("sam_kept" in opt.state[p] for p in models[0].parameters())


@pytest.mark.parametrize("base", ["momentum", "adamw", "adagrad"])
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
@pytest.mark.filterwarnings("ignore::wsam.WsamWarning")
def test_kept_sharpness_resumes(stop: int, base: str) -> None:
    """The kept vector is part of the state: a resumed run equals an uninterrupted one bitwise."""

    def new() -> tuple[nn.Module, wsam.WSAM]:
        model = small_model()
        reuse = Reuse(scale_by_norm=True, average=0.5)
        inner = torch_base(base, list(model.parameters()))
        return model, wsam.WSAM(inner, gamma=0.8, when=Every(3), reuse=reuse)

    (model, opt), (other, again) = new(), new()
    for t in range(stop):
        opt.step(closure(opt, model, t))
    file = io.BytesIO()
    torch.save([model.state_dict(), opt.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other.load_state_dict(weights)
    again.load_state_dict(state)
    for t in range(stop, stop + 4):
        opt.step(closure(opt, model, t))
        again.step(closure(again, other, t))
    assert same(snapshot(opt), snapshot(again))


@pytest.mark.filterwarnings("ignore::wsam.WsamWarning")
def test_averages_of_low_precision_scalars() -> None:
    """0-d tensors take the dtype of the float32 norm by which h is divided."""
    scale = nn.Parameter(torch.tensor(1.0, dtype=torch.bfloat16))
    base = torch.optim.SGD([scale], lr=0.1)
    reuse = Reuse(scale_by_norm=True, average=0.5)
    opt = wsam.WSAM(base, when=Every(1), reuse=reuse)
    for _ in range(2):
        make_step(opt, lambda: scale.float().square())
    assert opt.state[scale]["sam_kept"].dtype == torch.bfloat16


def test_norm_of_zero_beside_float64() -> None:
    """The inverse of the smallest float64 norm would be infinite in float32."""
    weights = [nn.Parameter(torch.ones(2, dtype=kind)) for kind in (torch.float32, torch.float64)]
    base = torch.optim.SGD(weights, lr=0.1)
    opt = wsam.WSAM(base, when=Every(2), reuse=Reuse(scale_by_norm=True))
    for factor in (0.0, 1.0):
        make_step(opt, lambda factor=factor: factor * sum(w.square().sum() for w in weights))
    for w in weights:
        assert torch.allclose(w, torch.full_like(w, 0.8))


def test_micro_batches_reuse() -> None:
    """A list of closures sums their gradients on one-pass steps, too."""
    models = small_model(), small_model()
    one, two = reusing(models[0], 2), reusing(models[1], 2)
    for t in range(4):
        one.step(closure(one, models[0], t))
        inner = closure(two, models[1], t)

        def half(inner: Any = inner, model: nn.Module = models[1]) -> Tensor:
            loss = inner()
            for p in model.parameters():
                p.grad /= 2
            return loss / 2

        two.step([half, half])
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-10, atol=1e-12)


def test_micro_batches_with_and_without_a_kept_vector() -> None:
    """Parameters of one micro-batch have a kept vector, those of the other have none."""
    heads = nn.ModuleList([nn.Linear(5, 2), nn.Linear(5, 2)]).double()
    opt = wsam.WSAM(torch.optim.SGD(heads.parameters(), lr=0.1), when=Every(2), reuse=True)
    first, second = ([closure(opt, head, t) for head in heads] for t in (0, 1))
    opt.step(first[0])
    before, twins = [p.detach().clone() for p in heads.parameters()], copy.deepcopy(heads)
    opt.step(second)
    for head in twins:
        (head(batch(1)) ** 2).sum(1).mean().backward()
    k = opt.gamma / (1 - opt.gamma)
    for p, q, w in zip(heads.parameters(), twins.parameters(), before, strict=True):
        expected = w - 0.1 * (q.grad + k * opt.state[p].get("sam_kept", 0.0))
        assert torch.allclose(p, expected, rtol=1e-12)


def test_clipping_scales_both_terms() -> None:
    model = small_model()
    opt = reusing(model, 2, max_norm=1e-3)
    base = opt.param_groups[0]
    base["momentum"] = 0.0
    opt.step(closure(opt, model, 0))
    before = [p.detach().clone() for p in model.parameters()]
    opt.step(closure(opt, model, 1))
    moved = [p.detach() - q for p, q in zip(model.parameters(), before, strict=True)]
    norm = torch.sqrt(sum((m**2).sum() for m in moved))
    assert float(norm) == pytest.approx(0.02 * 1e-3, rel=1e-2)


def test_zero_radius_leaves_the_base_alone() -> None:
    models = small_model(), small_model()
    opt = reusing(models[0], 2, rho=0.0)
    plain = torch.optim.SGD(models[1].parameters(), lr=0.02, momentum=0.9)
    for t in range(3):
        opt.step(closure(opt, models[0], t))
        plain.zero_grad()
        (models[1](batch(t)) ** 2).sum(1).mean().backward()
        plain.step()
    assert same(list(models[0].parameters()), list(models[1].parameters()))


@pytest.mark.parametrize("method", ["wsam", "looksam"])
def test_an_unfrozen_parameter_leaves_the_reuse_of_others_alone(method: str) -> None:
    """A parameter without a kept vector does not take it from the others of its group."""

    def run(unfreeze: bool) -> list[Tensor]:
        model = small_model()
        base = torch.optim.SGD(model.parameters(), lr=0.02)
        options = {"reuse": True, "when": Every(2)} if method == "wsam" else {"per_tensor": True}
        opt = wsam.create(method, base, **options)
        model[0].bias.requires_grad_(False)
        opt.step(closure(opt, model, 0))
        model[0].bias.requires_grad_(unfreeze)
        opt.step(closure(opt, model, 1))
        return [p.detach() for name, p in model.named_parameters() if name != "0.bias"]

    assert same(run(True), run(False))


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_weight_of_zero_is_the_base(kind: str) -> None:
    """Bit for bit: fused code, which rounds differently where 25 elements do not fill a vector."""
    model = nn.Linear(5, 5).double()
    models = model, copy.deepcopy(model)
    base, plain = (torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in models)
    opt = wsam.WSAM(base, gamma=0.0, when=Every(2), reuse=Reuse(**OPTIONS[kind]))
    for t in range(12):
        opt.step(closure(opt, models[0], t))
        plain.zero_grad()
        (models[1](batch(t)) ** 2).sum(1).mean().backward()
        plain.step()
        assert same(list(models[0].parameters()), list(models[1].parameters())), t


def test_a_skipped_step_keeps_the_vector() -> None:
    model = small_model()
    opt = reusing(model, 1, nonfinite="skip")
    opt.step(closure(opt, model, 0))
    kept = [opt.state[p]["sam_kept"].clone() for p in model.parameters()]
    inner = closure(opt, model, 1)

    def bad() -> Tensor:
        loss = inner()
        model[0].weight.grad[0, 0] = torch.nan
        return loss

    opt.step(bad)
    assert opt.skipped == 1
    assert same([opt.state[p]["sam_kept"] for p in model.parameters()], kept)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"when": None, "reuse": True}, "when=Every"),
        ({"when": Every(2), "reuse": True, "lean": True}, "lean=True .*without .*reuse"),
        ({"when": Every(2), "reuse": 0.5}, "reuse must be True, False or a wsam.rule.Reuse"),
    ],
)
def test_rejected_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        wsam.WSAM(torch.optim.SGD(small_model().parameters(), lr=0.1), **options)


@pytest.mark.parametrize("number", [0, 1])
def test_clipping_by_hand_is_rejected(number: int) -> None:
    """Of both kinds of step: it would scale half of the update."""
    model = small_model()
    opt = reusing(model)
    for t in range(number + 1):
        opt.begin()
        model_loss(opt, model, t)().backward()
        if opt.ascend():
            model_loss(opt, model, t)().backward()
        opt.descend()
        if t < number:
            opt.step()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match="was changed between"):
        opt.step()


def test_parameter_without_a_kept_vector_resumes_bitwise() -> None:
    """Its first gradient came in a step that reuses, so its average begins with the next vector."""

    def build() -> tuple[list[nn.Parameter], wsam.WSAM]:
        params = [nn.Parameter(torch.tensor(value)) for value in ([0.5, -1.0], [2.0])]
        base = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        return params, wsam.WSAM(base, when=Every(2), reuse=Reuse(average=0.5))

    def train(params: list[nn.Parameter], opt: wsam.WSAM, steps: range) -> None:
        for t in steps:
            used = params if t > 0 else params[:1]
            make_step(opt, lambda used=used, t=t: sum((p**4).sum() * (t + 1) for p in used))

    (params, opt), (others, resumed) = build(), build()
    train(params, opt, range(2))
    resumed.load_state_dict(save_and_load(opt.state_dict()))
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p.data)
    train(params, opt, range(2, 5))
    train(others, resumed, range(2, 5))
    assert same(snapshot(resumed), snapshot(opt))
