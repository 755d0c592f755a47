"""lean=True: the base steps between the passes, which saves a buffer and cannot be undone."""

from typing import Any

import pytest
import reference
import torch
from helpers import (
    METHODS,
    batch,
    closure,
    gap,
    make_method,
    model_loss,
    same,
    save_and_load,
    small_model,
    snapshot,
)
from torch import Tensor, nn

import wsam


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


# --- where it is rejected --------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in METHODS if reference.METHODS[n].rule != "wsam"])
def test_lean_needs_a_base_that_receives_g0(name: str) -> None:
    with pytest.raises(TypeError, match="lean"):
        make_method(name, sgd(small_model()), lean=True)


def test_lean_needs_a_rule_whose_base_receives_g0() -> None:
    with pytest.raises(ValueError, match=r"lean.*only WSAM"):
        wsam.SharpnessAware(sgd(small_model()), rule=wsam.rule.Perturbed(), lean=True)


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"nonfinite": "skip"}])
def test_lean_is_rejected_where_a_step_must_be_undone(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"lean.*{next(iter(option))}"):
        wsam.WSAM(sgd(small_model()), lean=True, **option)


def test_lean_is_rejected_with_a_grad_scaler_or_several_closures() -> None:
    model = small_model()
    opt = wsam.WSAM(sgd(model), lean=True)
    before = snapshot(opt)
    model_loss(opt, model)().backward()
    with pytest.raises(ValueError, match="lean"):
        opt.ascend(grad_scale=1024.0)
    with pytest.raises(ValueError, match="lean"):
        opt.step([closure(opt, model), closure(opt, model, 1)])
    assert same(snapshot(opt), before)
    opt.step(closure(opt, model))


def test_lean_is_rejected_for_aliased_weights() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).double()
    model[1].weight.data = model[0].weight.data
    opt = wsam.WSAM(sgd(model), lean=True)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="share memory"):
        opt.step(closure(opt, model))
    assert all(map(torch.equal, before, model.parameters()))


def test_lean_accepts_disjoint_views_of_one_storage() -> None:
    weights = [nn.Parameter(part) for part in torch.linspace(-1, 1, 18).view(3, 6).split(3, dim=1)]
    opt = wsam.WSAM(torch.optim.SGD(weights, lr=0.1), lean=True)

    def run() -> Tensor:
        loss: Tensor = sum(w.square().sum() for w in weights)  # type: ignore[assignment]
        loss.backward()
        return loss

    opt.step(run)


def test_lean_on_the_meta_device() -> None:
    model = small_model().to("meta")
    opt = wsam.WSAM(sgd(model, momentum=0.9), lean=True)

    def run() -> Tensor:
        loss: Tensor = model(batch(0).to("meta")).mean()
        loss.backward()
        return loss

    opt.step(run)


# --- a step that fails -----------------------------------------------------------------------------


@pytest.mark.parametrize("after_backward", [False, True])
def test_raise_pass2_lean(after_backward: bool) -> None:
    """The base has stepped already: a note of the error states where the weights are."""
    model, plain = small_model(), small_model()
    opt = wsam.WSAM(sgd(model), lean=True, rho=0.5, gamma=0.75)
    inner, calls = closure(opt, model, 1), []

    def run() -> Tensor:
        calls.append(1)
        if len(calls) == 2 and not after_backward:
            raise RuntimeError("no batch")
        value = inner()
        if len(calls) == 2:
            raise RuntimeError("no batch")
        return value

    with pytest.raises(RuntimeError, match="no batch") as caught:
        opt.step(run)
    assert any("lean=True" in note and "lr k g0" in note for note in caught.value.__notes__)
    (plain(batch(1)) ** 2).sum(1).mean().backward()
    stepped = [p.detach() - 0.1 * p.grad + 0.1 * 3.0 * p.grad for p in plain.parameters()]
    assert gap(list(model.parameters()), stepped) < 1e-12
    opt.state_dict()
    before = snapshot(opt)["weights"]
    opt.step(closure(opt, model, 2))
    assert not same(snapshot(opt)["weights"], before)
    assert all(p.isfinite().all() for p in model.parameters())


def test_base_that_raises_in_a_lean_step() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("the base failed")

    model = small_model()
    opt = wsam.WSAM(Failing(model.parameters(), lr=0.1), model=model, lean=True, rho=0.5)
    before = snapshot(opt)
    with pytest.raises(RuntimeError, match="the base failed") as caught:
        opt.step(closure(opt, model))
    assert same(snapshot(opt), before)
    assert "already stepped" not in "".join(caught.value.__notes__)


def test_a_base_that_begins_to_write_gradients() -> None:
    class Late(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            p = self.param_groups[0]["params"][0]
            if self.state[p]:
                p.grad.mul_(0.5)
            super().step()

    model = small_model()
    opt = wsam.WSAM(Late(model.parameters(), lr=0.1, momentum=0.9), lean=True)
    opt.step(closure(opt, model))
    with pytest.raises(RuntimeError, match=r"writes into p\.grad: use lean=False"):
        opt.step(closure(opt, model))


def test_none_pass2_lean() -> None:
    model = small_model()
    opt = wsam.WSAM(sgd(model), lean=True)
    first, *others = model.parameters()

    def run() -> Tensor:
        loss: Tensor = sum(
            p.square().sum() for p in (others if opt.second_pass else [first, *others])
        )  # type: ignore[assignment]
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="parameter 0 has a gradient in the first pass and none"):
        opt.step(run)


@pytest.mark.parametrize("stop", [1, 2])
def test_a_base_that_writes_gradients_resumes(stop: int) -> None:
    """Its first lean step finds that out, and later steps are not lean, also after a resume."""

    def new() -> tuple[nn.Module, wsam.WSAM]:
        model = small_model()
        return model, wsam.WSAM(sgd(model, momentum=0.9, nesterov=True, foreach=True), lean=True)

    (model, opt), (other, again) = new(), new()
    for t in range(stop):
        opt.step(closure(opt, model, t))
    other.load_state_dict(model.state_dict())
    again.load_state_dict(save_and_load(opt.state_dict()))
    for t in range(stop, stop + 3):
        opt.step(closure(opt, model, t))
        again.step(closure(again, other, t))
        assert same(snapshot(opt), snapshot(again))
