"""What a step returns: the loss at w, the closure's other outputs, and the sharpness."""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import VARIANTS, batch, closure, make_method, same, small_model
from torch import Tensor

import wsam
from wsam._core import losses, pytree


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("name", VARIANTS)
def test_step_returns_loss(name: str) -> None:
    model = small_model()
    opt = make_method(name, sgd(model), rho=0.5)
    for t in range(3):
        wanted = (model(batch(t)) ** 2).sum(1).mean().detach()
        found = opt.step(closure(opt, model, t))
        assert isinstance(found, Tensor)
        assert not found.requires_grad
        assert torch.equal(found, wanted)


def test_step_returns_loss_as_a_number() -> None:
    model = small_model()
    opt = wsam.WSAM(sgd(model))
    inner = closure(opt, model)
    wanted = (model(batch(0)) ** 2).sum(1).mean().item()
    assert float(opt.step(lambda: inner().item())) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("extra", ["tuple", "none"])
def test_closure_may_return_more_or_nothing(extra: str) -> None:
    """The update does not depend on what the closure returns."""
    model, plain = small_model(), small_model()
    opt, twin = wsam.WSAM(sgd(model)), wsam.WSAM(sgd(plain))
    inner = closure(opt, model)
    outputs = (1.0, "accuracy")

    def run() -> Any:
        loss = inner()
        return (loss, *outputs) if extra == "tuple" else None

    found = opt.step(run)
    wanted = twin.step(closure(twin, plain))
    if extra == "none":
        assert found is None
    else:
        assert torch.equal(found[0], wanted)
        assert found[1:] == outputs
    assert same(list(model.parameters()), list(plain.parameters()))


def test_outputs_of_first_pass() -> None:
    """A tuple that begins with the loss is returned as it was in the first pass, detached."""
    model = small_model()
    opt, x = wsam.SAM(sgd(model), rho=0.5), torch.ones(4, 5).double()
    first = model(x).detach()
    Both = namedtuple("Both", "loss out")

    def run() -> Any:
        out = model(x)
        loss = out.square().mean()
        loss.backward()
        return Both(loss, out)

    found = opt.step(run)
    assert isinstance(found, Both)
    assert not found.loss.requires_grad
    assert not found.out.requires_grad
    assert torch.equal(found.out, first)
    assert opt.sharpness is not None
    assert float(opt.sharpness) > 0


@pytest.mark.parametrize("name", VARIANTS)
def test_sharpness_readout(name: str) -> None:
    """L(w + d) - L(w) over the whole batch, also if the second pass uses some samples only."""
    model = small_model()
    opt = make_method(name, sgd(model), rho=0.5)
    means: list[Tensor] = []
    for t in range(3):
        means.clear()

        def run(t: int = t) -> Tensor:
            opt.zero_grad()
            each = (model(batch(t)) ** 2).sum(1)
            means.append(each.mean().detach())
            loss = opt.select(each)
            loss.backward()
            return loss

        opt.step(run)
        assert isinstance(opt.sharpness, Tensor)
        assert opt.sharpness.shape == ()
        assert not opt.sharpness.requires_grad
        assert float(opt.sharpness) == pytest.approx(float(means[1] - means[0]), rel=1e-10)
        assert float(opt.sharpness) > 0


def test_sharpness_readout_of_a_step_by_hand() -> None:
    """Its losses are unknown: None, instead of the value of an earlier step."""
    model = small_model()
    opt = wsam.WSAM(sgd(model))
    assert opt.sharpness is None
    run = closure(opt, model)
    opt.step(run)
    assert isinstance(opt.sharpness, Tensor)
    run()
    opt.ascend()
    run()
    opt.descend()
    opt.step()
    assert opt.sharpness is None


@pytest.mark.parametrize(
    "first", [lambda out: out > 0, lambda out: out[out > 0.1], lambda out: out]
)
def test_sharpness_readout_of_a_tuple_without_a_loss(first: Callable[[Tensor], Tensor]) -> None:
    """It is NaN, and the step is made."""
    model, x = small_model(), torch.ones(4, 5).double()
    opt = wsam.SAM(sgd(model), rho=0.5)

    def run() -> tuple[Tensor, Tensor]:
        out = model(x)
        loss = out.square().mean()
        loss.backward()
        return first(out), loss

    opt.step(run)
    assert opt.sharpness is not None
    assert opt.sharpness.isnan()


def test_an_unknown_increase_is_on_the_device_of_the_known_loss() -> None:
    loss = torch.zeros((), device="meta")
    assert losses.loss_increase(loss, None).device == loss.device
    assert losses.loss_increase(None, loss).device == loss.device
    assert losses.loss_increase(None, 1.0).isnan()


def returning(kind: str, model: torch.nn.Module) -> Callable[[], Any]:
    """Return a closure whose result has this form."""
    x = torch.ones(4, 5).double()

    def run() -> Any:
        out = model(x)
        loss = out.square().mean()
        loss.backward()
        if kind == "ModelOutput":
            from transformers.modeling_outputs import SequenceClassifierOutput

            return SequenceClassifierOutput(loss=loss, logits=out)
        forms: dict[str, Any] = {
            "tuple": (loss, {"logits": out, "names": ["a"]}),
            "list": (loss, [out, out]),
            "dict": {"loss": loss, "logits": out},
        }
        return forms[kind]

    return run


@pytest.mark.parametrize(
    "kind", ["tuple", "list", "dict", pytest.param("ModelOutput", marks=pytest.mark.slow)]
)
def test_outputs_in_any_container(kind: str) -> None:
    """Tensors are those of the first pass, detached; the sharpness is that of the loss."""
    model, twin = small_model(), small_model()
    opt, plain = wsam.SAM(sgd(model), rho=0.5), wsam.SAM(sgd(twin), rho=0.5)
    first = model(torch.ones(4, 5).double()).detach()
    found = opt.step(returning(kind, model))
    wanted, _ = plain.step(returning("tuple", twin))
    loss = found[0] if isinstance(found, tuple) else found["loss"]
    logits = {
        "tuple": lambda: found[1]["logits"],
        "list": lambda: found[1][0],
        "dict": lambda: found["logits"],
        "ModelOutput": lambda: found.logits,
    }[kind]()
    assert not loss.requires_grad
    assert not logits.requires_grad
    assert torch.equal(loss, wanted)
    assert torch.equal(logits, first)
    assert opt.sharpness is not None
    assert plain.sharpness is not None
    assert torch.equal(opt.sharpness, plain.sharpness)
    assert float(opt.sharpness) > 0


def test_several_closures_return_the_sum_of_their_losses() -> None:
    model, twin = small_model(), small_model()
    opt, plain = wsam.SAM(sgd(model)), wsam.SAM(sgd(twin))
    found = opt.step([returning("dict", model), returning("tuple", model)])
    single = plain.step([returning("dict", twin)])["loss"]
    assert torch.equal(found, single + single)


def test_backward_of_a_sum_whose_mean_is_returned() -> None:
    """The loss that is returned may have another scale, as a mean over many tokens has."""
    model, twin = small_model(), small_model()
    opt, other = wsam.WSAM(sgd(model)), wsam.WSAM(sgd(twin))

    def run(net: torch.nn.Module, tokens: int) -> Tensor:
        loss = (net(batch(0)) ** 2).sum(1).mean()
        loss.backward()
        return loss / tokens

    opt.step(lambda: run(model, 1))
    other.step(lambda: run(twin, 4096))
    assert same(list(model.parameters()), list(twin.parameters()))


def test_a_plain_loss_is_not_traversed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traversing a container costs several percent of the host's work of a small step."""
    monkeypatch.setattr(pytree, "tree_map", None)
    value = pytree.map_tensors(Tensor.detach, torch.ones(2, requires_grad=True).sum())
    assert value == 2
    assert not value.requires_grad


def test_tensors_in_a_dataclass_are_detached() -> None:
    @dataclass
    class Output:
        logits: torch.Tensor

    result = (torch.ones((), requires_grad=True), Output(torch.ones(2).requires_grad_()))
    loss, output = pytree.map_tensors(Tensor.detach, result)
    assert not loss.requires_grad
    assert not output.logits.requires_grad
