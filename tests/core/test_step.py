"""The arithmetic of a step: return to w, clipping, bases that write into gradients, autocast."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import reference
import torch
from helpers import (
    ALL,
    BASES,
    METHODS,
    PROBLEMS,
    RULE_VARIANTS,
    STYLES,
    Weights,
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
from wsam._core.step import owned

MLP = PROBLEMS["mlp"]


def bits(params: Any) -> list[Tensor]:
    """Return the bytes of the weights, which include the sign of zero."""
    return [p.detach().clone().contiguous().view(torch.uint8) for p in params]


# --- the return from w + d -------------------------------------------------------------------------


def with_momentum(model: nn.Module) -> torch.optim.Optimizer:
    """Return a base whose momentum one-pass methods follow from the first step on."""
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for p in model.parameters():
        base.state[p]["momentum_buffer"] = torch.full_like(p, 0.1)
    return base


@pytest.mark.filterwarnings("ignore::wsam.WsamWarning")
@covering(name=ALL, dtype=[torch.float64, torch.float32, torch.bfloat16])
def test_restore_is_bitwise(name: str, dtype: torch.dtype) -> None:
    model = small_model(dtype)
    with torch.no_grad():
        model[0].weight.mul_(torch.logspace(-6, 6, 5).to(dtype))
        model[2].bias.copy_(torch.tensor([-0.0, 0.0]))
    opt = make_method(name, with_momentum(model), rho=0.7)
    before, addresses = bits(model.parameters()), [p.data_ptr() for p in model.parameters()]
    for step in range(3):
        loss = model_loss(opt, model, step)
        loss().backward()
        opt.ascend()
        assert not same(bits(model.parameters()), before)
        loss().backward()
        opt.descend()
        assert not opt.second_pass
        assert same(bits(model.parameters()), before)
    assert [p.data_ptr() for p in model.parameters()] == addresses


@pytest.mark.parametrize("name", ALL)
def test_perturbed_is_bitwise(name: str) -> None:
    model = small_model()
    opt = make_method(name, with_momentum(model), rho=0.7)
    loss = model_loss(opt, model)
    loss().backward()
    before, state = bits(model.parameters()), snapshot(opt)
    grads = [p.grad.clone() for p in model.parameters()]
    at_w = model(batch(0)).detach()
    with opt.perturbed():
        at_w_plus_d = model(batch(0))
        at_w_plus_d.sum().backward()
    assert not same(at_w, at_w_plus_d.detach())
    assert same(bits(model.parameters()), before)
    assert same(grads, [p.grad for p in model.parameters()])
    with pytest.raises(ZeroDivisionError), opt.perturbed():
        raise ZeroDivisionError
    assert same(bits(model.parameters()), before)
    assert same(snapshot(opt), state)


def test_perturbed_moves_as_the_next_step() -> None:
    """By its radius, and only the weights that the geometry selects."""
    model = small_model()
    options = {
        "rho": wsam.schedule.Function(lambda t: 0.1 * (t + 1)),
        "geometry": wsam.geometry.Only(("0.*t",)),
    }
    opt = wsam.SAM(with_momentum(model), model=model, **options)
    opt.step(closure(opt, model))
    closure(opt, model)()
    before = [p.detach().clone() for p in model.parameters()]
    with opt.perturbed():
        lengths = [(p - w).norm().item() for p, w in zip(model.parameters(), before, strict=True)]
    assert lengths == pytest.approx([0.2, 0.0, 0.0, 0.0])


def test_perturbed_keeps_gradients_in_storage_that_a_pass_overwrites() -> None:
    """As DistributedDataParallel's `gradient_as_bucket_view` does."""
    p, bucket = nn.Parameter(torch.ones(2)), torch.ones(3)
    opt = wsam.SAM(torch.optim.SGD([p], lr=0.1))
    p.grad = bucket[:2]
    with opt.perturbed():
        bucket.zero_()
    assert torch.equal(p.grad, torch.ones(2))


def test_perturbed_leaves_no_gradients() -> None:
    """A pass inside it gives no gradient to a parameter that had none, not even if `step` is due."""
    model = small_model()
    unused = model[0].bias
    opt = wsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1))
    unused.requires_grad_(False)
    for make_pass in (opt.ascend, opt.descend):
        closure(opt, model)()
        make_pass()
    unused.requires_grad_(True)
    before = unused.detach().clone()
    with opt.perturbed():
        model_loss(opt, model)().backward()
    assert unused.grad is None
    opt.step()
    assert torch.equal(unused, before)


@pytest.mark.parametrize("name", [n for n in METHODS if reference.METHODS[n].rule == "sam"])
def test_replicas_bit_identical(name: str) -> None:
    """Two replicas with different first gradients and the same second one stay equal."""
    generator = torch.Generator().manual_seed(1)
    replicas = [nn.Parameter(torch.linspace(-3, 3, 401)) for _ in range(2)]
    opts = [
        make_method(name, torch.optim.SGD([p], lr=0.1, momentum=0.9), repeat_randomness=False)
        for p in replicas
    ]
    for _ in range(20):
        shared = torch.randn(401, generator=generator)
        for p, opt in zip(replicas, opts, strict=True):
            p.grad = torch.randn(401, generator=generator)
            opt.ascend()
            p.grad = shared.clone()
            opt.descend()
            opt.step()
        assert same(bits([replicas[0]]), bits([replicas[1]]))


# --- the first gradient ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "view",
    [torch.zeros(4).view(2, 2), torch.zeros(8)[:4]],
    ids=["of a whole storage", "of a part"],
)
def test_gradients_that_are_views_are_copied(view: Tensor) -> None:
    whole = torch.zeros(3)
    kept = owned([whole, view], sharded=False)
    assert kept[0] is whole
    assert kept[1].data_ptr() != view.data_ptr()


# --- clipping --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_clip_with_a_large_max_norm_changes_nothing(name: str) -> None:
    ours, theirs = parameters(MLP.weights()), parameters(MLP.weights())
    train(make_method(name, torch_base("momentum", ours), max_norm=1e6), ours, MLP, range(4))
    train(make_method(name, torch_base("momentum", theirs)), theirs, MLP, range(4))
    assert gap(ours, theirs) < 1e-13


@pytest.mark.parametrize("name", ALL)
def test_clip_bounds_the_whole_update(name: str) -> None:
    """With plain SGD the update has the norm lr * max_norm, however large the sharpness term is."""
    params = parameters([1e3 * w for w in MLP.weights()])
    start = [p.detach().clone() for p in params]
    opt = make_method(name, torch.optim.SGD(params, lr=0.5), max_norm=0.25, rho=50.0)
    train(opt, params, MLP, range(1))
    moved = torch.cat([(p - q).detach().reshape(-1) for p, q in zip(params, start, strict=True)])
    assert moved.norm().item() == pytest.approx(0.125, rel=1e-5)


# --- the base --------------------------------------------------------------------------------------


class GradientOverwritingSGD(torch.optim.SGD):
    """Leaves garbage in p.grad."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.fill_(1e6)


Muon: Any = getattr(torch.optim, "Muon", torch.optim.SGD)  # not in torch 2.6


class MuonOnCopies(Muon):
    """Muon that writes into copies of the gradients."""

    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"]]
        kept: Weights = [p.grad for p in params]
        for p in params:
            p.grad = p.grad.clone()
        super().step()
        for p, grad in zip(params, kept, strict=True):
            p.grad = grad


@covering(
    2,
    name=RULE_VARIANTS,
    pair=[(GradientOverwritingSGD, torch.optim.SGD), (Muon, MuonOnCopies)],
    style=STYLES,
)
def test_grad_mutating_base(name: str, pair: Any, style: str) -> None:
    results = []
    for kind in pair:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False))
        opt = make_method(name, kind(model.double().parameters(), lr=0.05, momentum=0.9))
        for t in range(5):
            make_step(opt, model_loss(opt, model, t), style)
        results.append(list(model.parameters()))
    assert gap(*results) < 1e-12


@pytest.mark.parametrize("base", ["adam", "sgd"])
@pytest.mark.parametrize("kind", [wsam.WSAM, wsam.SAM])
def test_tensor_learning_rate(kind: type[wsam.SharpnessAware], base: str) -> None:
    """A learning rate in a tensor, which captured steps need, gives the same results."""
    ours, theirs = parameters(MLP.weights()), parameters(MLP.weights())
    cls, options, _, _ = BASES[base]
    lr = torch.tensor(options["lr"], dtype=torch.float64)
    opt = kind(cls(ours, **{**options, "lr": lr}, foreach=False))
    twin = kind(cls(theirs, **options))
    train(opt, ours, MLP, range(3))
    train(twin, theirs, MLP, range(3))
    assert gap(ours, theirs) < 1e-12


def test_replaced_parameters() -> None:
    """A step uses the parameters that the groups hold now."""
    model, other, twin = small_model(), small_model(), small_model()
    opt, plain = (wsam.WSAM(torch.optim.SGD(m.parameters(), lr=0.1)) for m in (model, twin))
    opt.param_groups[0]["params"] = list(other.parameters())
    opt.step(closure(opt, other))
    plain.step(closure(plain, twin))
    assert same(list(other.parameters()), list(twin.parameters()))


# --- autocast --------------------------------------------------------------------------------------


@covering(name=ALL, style=STYLES)
def test_autocast_around_a_step(name: str, style: str) -> None:
    """The casts of w that the region has cached are not used in the second pass, nor after it."""
    results: list[Any] = []
    for outside in (True, False):
        model = small_model(torch.float32)
        opt = make_method(name, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rho=2.0)
        for t in range(3):
            loss = model_loss(opt, model, t)

            def inside(loss: Callable[[], Tensor] = loss) -> Tensor:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return loss()

            region = torch.autocast("cpu", dtype=torch.bfloat16) if outside else nullcontext()
            with region:
                make_step(opt, loss if outside else inside, style)
        results.append([p.detach() for p in model.parameters()])
    assert same(*results)


def test_autocast_around_several_steps() -> None:
    """The cached casts are dropped after the update, too."""
    results: list[Any] = []
    for outside in (True, False):
        model = small_model(torch.float32)
        opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=2.0)

        def run(t: int, opt: Any = opt, model: nn.Module = model) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                value = model_loss(opt, model, t)()
            value.backward()
            return value

        region = torch.autocast("cpu", dtype=torch.bfloat16) if outside else nullcontext()
        with region:
            for t in range(3):
                opt.step(lambda t=t, run=run: run(t))
        results.append([p.detach() for p in model.parameters()])
    assert same(*results)


def test_autocast_around_perturbed() -> None:
    model = small_model(torch.float32)
    opt = wsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=2.0)
    x = batch(0).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model_loss(opt, model)().backward()
        before = model(x).detach()
        with opt.perturbed():
            at_w_plus_d = model(x).detach()
        after = model(x).detach()
    assert not same(before, at_w_plus_d)
    assert same(before, after)
