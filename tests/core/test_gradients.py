"""Gradients: missing in one pass, zero, stale, in views; and tensors of unusual kinds."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import reference
import torch
from helpers import (
    ALL,
    METHODS,
    PROBLEMS,
    RULES,
    STYLES,
    VARIANTS,
    batch,
    closure,
    covering,
    gap,
    make_method,
    make_step,
    model_loss,
    parameters,
    same,
    small_model,
    snapshot,
    torch_base,
    train,
)
from torch import Tensor, nn

import wsam

MLP = PROBLEMS["mlp"]
MOMENTUM = {"lr": 0.1, "momentum": 0.9}


# --- missing ---------------------------------------------------------------------------------------


class TwoBranches(nn.Module):
    """A part that is always used, and one that only some passes use."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
        self.sometimes = nn.Parameter(torch.tensor([0.3, 0.7], dtype=torch.float64))

    def losses(self, use: bool) -> Tensor:
        each = torch.stack([(self.always**2).sum(), (self.always**4).sum()])
        return each + (self.sometimes**3).sum() if use else each


def step_using(opt: wsam.SharpnessAware, model: TwoBranches, uses: tuple[bool, bool]) -> list[Any]:
    """Make a step whose passes use the second branch or not; return its weights in each pass."""
    seen, passes = [], iter(uses)

    def run() -> Tensor:
        opt.zero_grad()
        seen.append(model.sometimes.detach().clone())
        value = opt.select(model.losses(next(passes)))
        value.backward()
        return value

    opt.step(run)
    return seen


@pytest.mark.parametrize("name", METHODS)
def test_none_pass1(name: str) -> None:
    """No gradient in the first pass: not perturbed, and g0 counts as zero."""
    model = TwoBranches()
    opt = make_method(name, torch.optim.SGD(model.parameters(), lr=0.1), rho=0.2)
    start = model.sometimes.detach().clone()
    seen = step_using(opt, model, (False, True))
    assert same(seen, [start, start])
    assert opt.state_dict()["param_groups"][0]["sam_step"] == 1
    g1 = 3 * start**2
    method = reference.METHODS[name]
    if method.rule == "gsam":  # its inner products are over all tensors: test the direction only
        assert bool((model.sometimes < start).all())
    else:
        _, b, _, e = reference.coefficients(method, [torch.zeros_like(g1)], [g1], 0)
        assert gap([model.sometimes], [start - 0.1 * (b + e) * g1]) < 1e-12
    if method.rule == "wsam":
        assert not opt.state[model.sometimes], "the base receives g0, which is missing"


@pytest.mark.parametrize("name", METHODS)
def test_none_pass2(name: str) -> None:
    """No gradient in the second pass: the weights are restored, without a sharpness term."""
    model = TwoBranches()
    opt = make_method(name, torch.optim.SGD(model.parameters(), **MOMENTUM), rho=0.2)
    start = model.sometimes.detach().clone()
    mask = opt.geometry.mask(0, 2)
    seen = step_using(opt, model, (True, False))
    assert same(seen[0], start)
    perturbed = mask is None or mask[1]
    assert same(seen[1], start) is not perturbed
    g0 = 3 * start**2
    if reference.METHODS[name].rule == "sam":
        assert same(model.sometimes.detach(), start), "the base receives no gradient"
        assert not opt.state[model.sometimes]
    elif reference.METHODS[name].rule == "gsam":
        assert bool((model.sometimes < start).all())
    else:  # g1 counts as g0: the base's own step remains
        assert gap([model.sometimes], [start - 0.1 * g0]) < 1e-12
    step_using(opt, model, (True, True))
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["sam", "wsam"])
def test_none_pass2_of_a_whole_group_is_clipped(name: str) -> None:
    model = TwoBranches()
    groups = [{"params": [p]} for p in model.parameters()]
    opt = make_method(name, torch.optim.SGD(groups, **MOMENTUM), rho=0.2, max_norm=0.1)
    start = [p.detach().clone() for p in model.parameters()]
    step_using(opt, model, (True, False))
    change = torch.cat([p.detach() - w for p, w in zip(model.parameters(), start, strict=True)])
    assert float(change.norm()) == pytest.approx(0.1 * opt.param_groups[0]["lr"], rel=1e-4)


@pytest.mark.parametrize("style", STYLES)
def test_passes_with_different_parameters(style: str) -> None:
    """No parameter has both gradients: the base of SAM receives those of the second pass."""
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    opt = wsam.SAM(torch.optim.SGD([first, second], lr=0.1))
    make_step(opt, lambda: (second if opt.second_pass else first).square().sum(), style)
    assert torch.equal(first, torch.ones(2))
    assert torch.equal(second, torch.full((2,), 0.8))


@covering(name=RULES, style=["two_step", "phases"])
def test_second_pass_that_is_not_needed(name: str, style: str) -> None:
    """A loop by hand runs it in a step that is not perturbed: its gradients have no effect."""
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    base = torch.optim.SGD([first, second], lr=0.1)
    opt = make_method(name, base, when=wsam.schedule.Between(0, 0))
    make_step(opt, lambda: (second if opt.second_pass else first).square().sum(), style)
    assert torch.equal(first, torch.full((2,), 0.8))
    assert torch.equal(second, torch.ones(2))


@covering(name=ALL, style=STYLES)
def test_frozen(name: str, style: str) -> None:
    """Frozen parameters and their `requires_grad` are never changed."""
    model = small_model()
    model[0].requires_grad_(False)
    opt = make_method(name, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1))
    before = [p.detach().clone() for p in model[0].parameters()]
    trained = [p.detach().clone() for p in model[2].parameters()]
    for t in range(4):
        make_step(opt, model_loss(opt, model, t), style)
        assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]
    assert same([p.detach() for p in model[0].parameters()], before)
    assert all(not opt.state.get(p) and p.grad is None for p in model[0].parameters())
    for p, q in zip(model[2].parameters(), trained, strict=True):
        assert not torch.equal(p, q)


@pytest.mark.parametrize("name", VARIANTS)
def test_zero_norm(name: str) -> None:
    """A zero gradient perturbs nothing, and the base still steps: decay and momentum act."""
    ours, plain = (nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2))
    opt = make_method(name, torch.optim.SGD([ours], weight_decay=0.1, **MOMENTUM))
    twin = torch.optim.SGD([plain], weight_decay=0.1, **MOMENTUM)
    seen = []

    def run() -> Tensor:
        opt.zero_grad()
        seen.append(ours.detach().clone())
        value = opt.select(0.0 * ours)
        value.backward()
        return value

    for _ in range(3):
        opt.step(run)
        plain.grad = torch.zeros(2)
        twin.step()
        assert same(seen[-1], seen[-2])
    assert same(ours.detach(), plain.detach())
    assert not torch.equal(ours, torch.tensor([1.0, -2.0]))


# --- stale, or in reused storage -------------------------------------------------------------------


@covering(2, name=RULES, stale=["none", "backward", "garbage"], zeroes=[True, False])
def test_stale_grad(name: str, stale: str, zeroes: bool) -> None:
    """Gradients from before the step do not count, even if the closure never clears them."""
    models = small_model(), small_model()
    opts = [make_method(name, torch.optim.SGD(m.parameters(), **MOMENTUM)) for m in models]
    for t in range(3):
        loss = model_loss(opts[0], models[0], t)
        if stale == "backward":
            (models[0](batch(t)) ** 2).sum(1).mean().backward()
        elif stale == "garbage":
            for p in models[0].parameters():
                p.grad = torch.full_like(p, 100.0)

        def run(loss: Callable[[], Tensor] = loss) -> Tensor:
            if zeroes:
                opts[0].zero_grad()
            value = loss()
            value.backward()
            return value

        opts[0].step(run)
        opts[1].step(closure(opts[1], models[1], t))
    assert same(snapshot(opts[0]), snapshot(opts[1]))


@pytest.mark.parametrize("name", ALL)
def test_stale_grad_by_hand(name: str) -> None:
    """ascend clears the gradients: a loop need not do so between the passes."""
    models = small_model(), small_model()
    opts = [make_method(name, torch.optim.SGD(m.parameters(), **MOMENTUM)) for m in models]
    for t in range(3):
        loss = model_loss(opts[0], models[0], t)
        opts[0].zero_grad()
        loss().backward()
        opts[0].first_step()
        assert all(p.grad is None for p in models[0].parameters())
        loss().backward()
        opts[0].second_step(zero_grad=t == 2)
        opts[1].step(closure(opts[1], models[1], t))
    assert same(snapshot(opts[0]), snapshot(opts[1]))
    assert all(p.grad is None for p in models[0].parameters())


@covering(name=ALL, style=STYLES)
def test_gradients_in_one_flat_buffer(name: str, style: str) -> None:
    """Each pass overwrites the buffer, as the reducer of a data-parallel model does."""
    ours, theirs = parameters(MLP.weights()), parameters(MLP.weights())
    flat = torch.zeros(sum(p.numel() for p in ours), dtype=torch.float64)
    opt, twin = (make_method(name, torch_base("momentum", ps)) for ps in (ours, theirs))
    for t in range(3):
        train(twin, theirs, MLP, range(t, t + 1), style)

        def backward(t: int = t) -> Tensor:
            loss = opt.select(MLP.losses(ours, t))
            start = 0
            for p, g in zip(ours, torch.autograd.grad(loss, ours), strict=True):
                p.grad = flat[start : start + p.numel()].view_as(p)
                p.grad.copy_(g)
                start += p.numel()
            return loss

        if style == "closure":
            opt.step(backward)
        else:
            backward()
            opt.first_step()
            backward()
            opt.second_step()
    assert same([p.detach() for p in ours], [p.detach() for p in theirs])


# --- kinds of tensors ------------------------------------------------------------------------------


@covering(name=ALL, style=STYLES)
def test_sparse_grad(name: str, style: str) -> None:
    """A sparse gradient is an error, and nothing has changed."""
    table = nn.Embedding(5, 3, sparse=True)
    opt = make_method(name, torch.optim.SGD(table.parameters(), lr=0.1))
    before = snapshot(opt)
    rows = torch.tensor([1, 3])
    with pytest.raises((TypeError, RuntimeError, ValueError), match="sparse"):
        make_step(opt, lambda: opt.select((table(rows) ** 2).sum(1)), style)
    assert same(snapshot(opt), before)


@pytest.mark.parametrize("name", ALL)
def test_complex_param(name: str) -> None:
    """An error at construction, and in a group that is added later."""
    p = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises((TypeError, ValueError), match="complex"):
        make_method(name, torch.optim.SGD([p], lr=0.1))
    opt = make_method(name, torch.optim.SGD(small_model().parameters(), lr=0.1))
    with pytest.raises(TypeError, match="complex"):
        opt.add_param_group({"params": [p]})
    assert len(opt.param_groups) == 1


@covering(name=ALL, style=STYLES)
def test_tied(name: str, style: str) -> None:
    """A weight that two layers share is perturbed and stepped once."""
    torch.manual_seed(2)
    one, two = nn.Linear(4, 4, bias=False).double(), nn.Linear(4, 4, bias=False).double()
    two.weight = one.weight
    model = nn.Sequential(one, nn.Tanh(), two)
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)

    def losses(w: list[Tensor]) -> Tensor:
        return ((torch.tanh(x @ w[0].T) @ w[0].T) ** 2).sum(1)

    option = {"beta": 1.0} if name == "esam" else {}  # a single tensor is perturbed or not
    method = replace(reference.METHODS[name], beta=1.0)
    base, w = reference.Base("sgd", 0.1, momentum=0.9), [one.weight.detach().clone()]
    opt = make_method(name, torch.optim.SGD(model.parameters(), **MOMENTUM), **option)
    memory: reference.Memory = {}
    for t in range(3):
        mask = opt.geometry.mask(t, 1)
        g0, g1 = reference.two_gradients(method, w, losses, mask, memory)
        w = reference.update(method, base, w, g0, g1, memory)
        make_step(opt, lambda: opt.select((model(x) ** 2).sum(1)), style)
    assert gap([one.weight], w) < 1e-12
    assert two.weight is one.weight


def two_kinds(other: torch.dtype | torch.device) -> tuple[nn.Parameter, nn.Parameter]:
    start = torch.tensor([3.0, -1.0]), torch.tensor([0.5, 2.0, -4.0])
    return nn.Parameter(start[0].double()), nn.Parameter(start[1].double().to(other))


def check_one_norm(other: torch.dtype | torch.device, name: str, tolerance: float) -> None:
    """Parameters of two kinds are perturbed with one global norm, as those of one kind."""
    params, twins = two_kinds(other), two_kinds(torch.float64)
    opts = [
        make_method(name, torch.optim.SGD(ps, foreach=False, **MOMENTUM), rho=0.3)
        for ps in (params, twins)
    ]
    for opt, (p, q) in zip(opts, (params, twins), strict=True):

        def each(p: Tensor = p, q: Tensor = q) -> Tensor:
            return ((p**4).sum() + (q.double() ** 4).sum().to(p.device)).reshape(1)

        for _ in range(2):
            make_step(opt, lambda opt=opt, each=each: opt.select(0.01 * each()))
    found = [p.detach().double().cpu() for p in params]
    assert gap(found, [p.detach() for p in twins]) < tolerance


@pytest.mark.parametrize("name", ALL)
def test_mixed_dtype(name: str) -> None:
    check_one_norm(torch.float32, name, 1e-5)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ALL)
def test_mixed_device(name: str) -> None:
    check_one_norm(torch.device("cuda"), name, 1e-10)


@pytest.mark.parametrize("name", ALL)
def test_views_and_strides(name: str) -> None:
    """Channels-last and empty parameters give the results of contiguous ones."""
    generator = torch.Generator().manual_seed(4)
    start = torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64)
    plain = nn.Parameter(start.clone())
    last = nn.Parameter(start.clone(memory_format=torch.channels_last))
    empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
    for ps in ([plain], [last, empty]):
        option = {"beta": 1.0} if name == "esam" else {}
        opt = make_method(name, torch.optim.SGD(ps, lr=0.01, momentum=0.9), rho=0.3, **option)
        for _ in range(3):
            make_step(
                opt,
                lambda ps=ps, opt=opt: opt.select(
                    (ps[0] ** 4).sum((1, 2, 3)) + sum(p.sum() for p in ps[1:])
                ),
            )
    assert gap([last], [plain]) < 1e-12
    assert last.is_contiguous(memory_format=torch.channels_last)


# --- low precision ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::wsam.WsamWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_is_float32_at_least(dtype: torch.dtype) -> None:
    """A norm summed in bfloat16 stops growing at a few hundred; in float16 it overflows."""
    n = 100_000
    p = nn.Parameter(torch.zeros(n, dtype=dtype))
    opt = wsam.SAM(torch.optim.SGD([p], lr=0.1), rho=1.0)
    p.grad = torch.full((n,), 3.0, dtype=dtype)
    with opt.perturbed():
        length = p.detach().double().norm().item()
    assert length == pytest.approx(1.0, rel=0.01)


@covering(name=METHODS, dtype=[torch.bfloat16, torch.float16])
def test_bf16_vanishing(name: str, dtype: torch.dtype) -> None:
    """At rho 0.05 most bfloat16 weights do not move at all: one warning, at construction."""
    model = small_model(dtype)
    with pytest.warns(wsam.WsamWarning, match=r"bfloat16|float16|precision"):
        opt = make_method(name, torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", wsam.WsamWarning)
        opt.step(closure(opt, model))
        make_method(name, torch.optim.SGD(small_model().parameters(), lr=0.1))
    assert all(p.dtype == dtype for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [wsam.SAM, wsam.ASAM, wsam.FisherSAM])
@pytest.mark.parametrize("gradient", [[1e-4, 1e-4, 0.0], [3e-7, 1e-6, 0.0], [300.0, 1.0, -1e4]])
def test_perturbations_in_half_precision(kind, dtype, gradient) -> None:
    """The scale rho / norm, squares and products exceed the range of float16."""

    def moved(precision: torch.dtype) -> Tensor:
        p = nn.Parameter(torch.full((3,), 0.01, dtype=precision))
        p.grad = torch.tensor(gradient, dtype=dtype).to(precision)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", wsam.WsamWarning)
            opt = kind(torch.optim.SGD([p], lr=0.1), rho=2.0)
        with opt.perturbed():
            return p.detach().float().clone()

    assert torch.allclose(moved(dtype), moved(torch.float32), rtol=1e-2, atol=1e-3)


def test_clip_in_half_precision() -> None:
    """A sharpness term with weight 99 exceeds the range of float16; the step is clipped, not lost."""

    def stepped(dtype: torch.dtype) -> float:
        p = nn.Parameter(torch.ones((), dtype=dtype))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", wsam.WsamWarning)
            opt = wsam.WSAM(torch.optim.SGD([p], lr=0.1), gamma=0.99, max_norm=1.0)
        p.grad = torch.full((), 10.0, dtype=dtype)
        opt.ascend()
        p.grad = torch.full((), 1000.0, dtype=dtype)
        opt.descend()
        opt.step()
        return p.item()

    assert stepped(torch.float16) == pytest.approx(stepped(torch.float32), abs=1e-3)
