"""Promises about weights and state: what a step moves, and what it never does."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from helpers import (
    BASES,
    MEMBERS,
    PROBLEMS,
    STYLES,
    Weights,
    batch,
    closure,
    gap,
    make_step,
    member,
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
LATE_AND_LEAN = [(name, False) for name in MEMBERS] + [
    (name, True) for name in MEMBERS if reference.MEMBERS[name].rule == "wsam"
]


def raw(params: Any) -> list[Tensor]:
    """The very bits of the weights, the sign of zero included."""
    return [p.detach().clone().contiguous().view(torch.uint8) for p in params]


# --- the way back from w + d -------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::wsam.WsamWarning")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MEMBERS)
def test_restore_is_bitwise(name: str, dtype: torch.dtype) -> None:
    model = small_model(dtype)
    with torch.no_grad():
        model[0].weight.mul_(torch.logspace(-6, 6, 5).to(dtype))
        model[2].bias.copy_(torch.tensor([-0.0, 0.0]))
    opt = member(name, torch.optim.SGD(model.parameters(), lr=0.1), rho=0.7)
    before, places = raw(model.parameters()), [p.data_ptr() for p in model.parameters()]
    for step in range(3):
        loss = model_loss(opt, model, step)
        loss().backward()
        opt.ascend()
        assert not same(raw(model.parameters()), before)
        loss().backward()
        opt.descend()
        assert same(raw(model.parameters()), before)
    assert [p.data_ptr() for p in model.parameters()] == places


@pytest.mark.parametrize("name", MEMBERS)
def test_perturbed_is_bitwise(name: str) -> None:
    model = small_model()
    opt = member(name, torch.optim.SGD(model.parameters(), lr=0.1), rho=0.7)
    loss = model_loss(opt, model)
    loss().backward()
    before, state = raw(model.parameters()), snapshot(opt)
    grads = [p.grad.clone() for p in model.parameters()]
    here = model(batch(0)).detach()
    with opt.perturbed():
        there = model(batch(0)).detach()
    assert not same(here, there)
    assert same(raw(model.parameters()), before)
    assert same(grads, [p.grad for p in model.parameters()])
    with pytest.raises(ZeroDivisionError), opt.perturbed():
        raise ZeroDivisionError
    assert same(raw(model.parameters()), before)
    assert same(snapshot(opt), state)


@pytest.mark.parametrize("name", [n for n in MEMBERS if reference.MEMBERS[n].rule == "sam"])
def test_replicas_bit_identical(name: str) -> None:
    """Two replicas, each perturbed by its own gradient and fed the same one, never drift apart."""
    generator = torch.Generator().manual_seed(1)
    replicas = [nn.Parameter(torch.linspace(-3, 3, 401)) for _ in range(2)]
    opts = [
        member(name, torch.optim.SGD([p], lr=0.1, momentum=0.9), repeat_randomness=False)
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
        assert same(raw([replicas[0]]), raw([replicas[1]]))


# --- a step that fails half-way ----------------------------------------------------------------


def failing(
    opt: wsam.SharpnessAware, model: nn.Module, fail_in: int, error: BaseException, late: bool
) -> Callable[[], Tensor]:
    """A closure that raises in the given pass, before or after its backward."""
    calls, inner = 0, closure(opt, model, 1)

    def run() -> Tensor:
        nonlocal calls
        calls += 1
        if calls == fail_in and not late:
            raise error
        value = inner()
        if calls == fail_in:
            raise error
        return value

    return run


def check_failure(name: str, fail_in: int, error: BaseException, late: bool) -> None:
    models = small_model(), small_model()
    opts = [
        member(name, torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), rho=0.3) for m in models
    ]
    for opt, model in zip(opts, models, strict=True):
        opt.step(closure(opt, model, 0))
    opt, model = opts[0], models[0]
    before = snapshot(opt)
    with pytest.raises(type(error)):
        opt.step(failing(opt, model, fail_in, error, late))
    assert same(snapshot(opt), before)
    opt.state_dict()
    for opt, model in zip(opts, models, strict=True):
        opt.step(closure(opt, model, 2))
    assert same(snapshot(opts[0]), snapshot(opts[1])), "the next step is not what it would be"


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", MEMBERS)
def test_raise_pass1(name: str, late: bool) -> None:
    check_failure(name, 1, RuntimeError("no batch"), late)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", MEMBERS)
def test_raise_pass2(name: str, late: bool) -> None:
    check_failure(name, 2, RuntimeError("no batch"), late)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", MEMBERS)
def test_ctrl_c_pass2(name: str, late: bool) -> None:
    check_failure(name, 2, KeyboardInterrupt(), late)


@pytest.mark.parametrize("late", [False, True])
def test_raise_pass2_lean(late: bool) -> None:
    """The base has stepped by then and there is no way back: the error says where the weights are."""
    model, plain = small_model(), small_model()
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1), lean=True, rho=0.5, gamma=0.75)
    with pytest.raises(RuntimeError, match="no batch") as caught:
        opt.step(failing(opt, model, 2, RuntimeError("no batch"), late))
    assert any("lean=True" in note and "lr k g0" in note for note in caught.value.__notes__)
    (plain(batch(1)) ** 2).sum(1).mean().backward()
    stepped = [p.detach() - 0.1 * p.grad + 0.1 * 3.0 * p.grad for p in plain.parameters()]
    assert gap(list(model.parameters()), stepped) < 1e-12
    opt.state_dict()
    before = snapshot(opt)["weights"]
    opt.step(closure(opt, model, 2))
    assert not same(snapshot(opt)["weights"], before)
    assert all(p.isfinite().all() for p in model.parameters())


# --- copies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("base", ["momentum", "adamw"])
@pytest.mark.parametrize(("name", "lean"), LATE_AND_LEAN)
def test_deepcopy_pickle(name: str, lean: bool, base: str, how: str) -> None:
    model = small_model()
    options = {"gamma": wsam.schedule.Warmup(0.9, 5)} if name.endswith("wsam") else {}
    opt = member(name, torch_base(base, model.parameters()), lean=lean, **options)
    for t in range(2):
        opt.step(closure(opt, model, t))
    pair = (model, opt)
    twin = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    assert twin[1].param_groups is twin[1].base.param_groups
    assert twin[1].state is twin[1].base.state
    for m, o in (pair, twin):
        for t in range(2, 5):
            o.step(closure(o, m, t))
    assert same(snapshot(opt), snapshot(twin[1]))
    assert all(p is not q for p, q in zip(model.parameters(), twin[0].parameters(), strict=True))


# --- bases that write into the gradient --------------------------------------------------------


class Spoiler(torch.optim.SGD):
    """SGD with momentum that leaves rubbish in p.grad, as an optimizer may."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.fill_(1e6)


class CleanMuon(torch.optim.Muon):
    """Muon that is given copies of the gradients to write into."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        kept: Weights = [p.grad for p in params]
        for p in params:
            p.grad = p.grad.clone()
        super().step()
        for p, grad in zip(params, kept, strict=True):
            p.grad = grad


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("pair", [(Spoiler, torch.optim.SGD), (torch.optim.Muon, CleanMuon)])
@pytest.mark.parametrize(("name", "lean"), LATE_AND_LEAN)
def test_grad_mutating_base(name: str, lean: bool, pair: Any, style: str) -> None:
    results = []
    for kind in pair:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False))
        opt = member(name, kind(model.double().parameters(), lr=0.05, momentum=0.9), lean=lean)
        for t in range(5):
            make_step(opt, model_loss(opt, model, t), style)
        results.append(list(model.parameters()))
    assert gap(*results) < 1e-12


def test_tensor_learning_rate() -> None:
    """A learning rate kept in a tensor, as captured steps need, gives the same numbers."""
    for kind in (wsam.WSAM, wsam.SAM):
        for base in ("adam", "sgd"):
            ours, theirs = parameters(MLP.weights()), parameters(MLP.weights())
            cls, options, _, _ = BASES[base]
            lr = torch.tensor(options["lr"], dtype=torch.float64)
            opt = kind(cls(ours, **{**options, "lr": lr}, foreach=False))
            twin = kind(cls(theirs, **options))
            train(opt, ours, MLP, range(3))
            train(twin, theirs, MLP, range(3))
            assert gap(ours, theirs) < 1e-12
