"""Wrong uses of `train_step` raise one clear error, and leave the weights unchanged."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import batch, same, small_model, snapshot
from torch import Tensor, nn

import wsam


def optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    return wsam.WSAM(base) if kind == "wsam" else base


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def calling_backward(model: nn.Module, x: Tensor) -> Tensor:
    value = loss(model, x)
    value.backward()
    return value


def sum_calling_backward(model: nn.Module, x: Tensor) -> Tensor:
    """torch would allow a second backward pass, because this graph has no saved tensors."""
    value = sum(p.sum() for p in model.parameters())
    value.backward()
    return value


def number_after_backward(model: nn.Module, x: Tensor) -> float:
    return calling_backward(model, x).item()


MISTAKES: dict[str, tuple[Callable[[nn.Module, Tensor], Any], type[Exception], str]] = {
    "backward": (calling_backward, RuntimeError, r"called backward\(\).*return the loss instead"),
    "backward of a sum": (sum_calling_backward, RuntimeError, r"called backward\(\)"),
    "a number after backward": (number_after_backward, RuntimeError, r"called backward\(\)"),
    "nothing": (lambda m, x: None, TypeError, "must return the loss.*returned NoneType"),
    "a number": (lambda m, x: loss(m, x).item(), TypeError, "as a tensor.*returned float"),
    "no gradient": (lambda m, x: loss(m, x).detach(), RuntimeError, "has no gradient.*detach"),
    "several elements": (lambda m, x: m(x).sum(1), ValueError, r"shape \(10,\).*mean\(\)"),
    "no elements": (lambda m, x: m(x)[:0].sum(1), ValueError, r"shape \(0,\)"),
    "no loss": (lambda m, x: {"logits": m(x)}, TypeError, r'a dict without "loss".*\[.logits.\]'),
    "loss None": (lambda m, x: {"loss": None}, TypeError, 'a dict without "loss"'),
    "three values": (lambda m, x: (loss(m, x), 1, 2), TypeError, r"tuple of 3.*\(loss, outputs\)"),
    "an empty tuple": (lambda m, x: (), TypeError, "tuple of 0"),
    "outputs first": (lambda m, x: ("x", loss(m, x)), TypeError, "a loss of type str"),
    "logits first": (lambda m, x: (m(x), loss(m, x)), TypeError, r"return \(loss, outputs\)"),
}


@pytest.mark.parametrize("kind", ["wsam", "base"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_the_loss_function(mistake: str, kind: str) -> None:
    function, error, message = MISTAKES[mistake]
    model = small_model()
    opt = optimizer(kind, model)
    before = snapshot(opt)
    wrong = wsam.train_step(opt, lambda x: function(model, x))
    with pytest.raises(error, match=message):
        wrong(batch(0))
    with pytest.raises(error, match=message):  # again, not only once
        wrong(batch(0))
    assert same(snapshot(opt)["weights"], before["weights"])
    wsam.train_step(opt, lambda x: loss(model, x))(batch(0))
    assert not same(snapshot(opt)["weights"], before["weights"])


def test_a_loss_of_another_model() -> None:
    step = wsam.train_step(optimizer("wsam", small_model()), lambda x: loss(small_model(), x))
    with pytest.raises(RuntimeError, match="the loss must depend on the base's parameters"):
        step(batch(0))


@pytest.mark.parametrize("kind", ["wsam", "base"])
def test_batch_as_one_argument(kind: str) -> None:
    model = small_model()
    step = wsam.train_step(optimizer(kind, model), lambda x, y: loss(model, x) + loss(model, y))
    pair = batch(0), batch(1)
    with pytest.raises(TypeError, match=r"one tuple \(missing .*'y'\): write step\(\*batch\)"):
        step(pair)
    with pytest.raises(TypeError, match=r"one dict \(missing .*'y'\): write step\(\*\*batch\)"):
        step(dict(zip("xy", pair, strict=True)))
    step(*pair)
    wsam.train_step(step.optimizer, lambda xs: loss(model, xs[0]))(pair)


def test_step_after_train_step() -> None:
    model = small_model()
    opt = optimizer("wsam", model)
    wsam.train_step(opt, lambda x: loss(model, x))(batch(0))
    before = snapshot(opt)
    with pytest.raises(RuntimeError, match=r"train_step.* no optimizer\.step\(\) is needed"):
        opt.step()
    assert same(snapshot(opt), before)


def test_gradients_from_before_are_not_mistaken_for_a_call_of_backward() -> None:
    model = small_model()
    for kind in ("wsam", "base"):
        opt = optimizer(kind, model)
        loss(model, batch(0)).backward()
        wsam.train_step(opt, lambda x: loss(model, x), micro_batches=2)(batch(0))


def test_a_loss_function_without_a_signature() -> None:
    weights = [nn.Parameter(torch.tensor(value)) for value in (1.0, 2.0)]
    opt = wsam.SAM(torch.optim.SGD(weights, lr=0.1))
    wsam.train_step(opt, max)(weights)
    assert weights[1].item() == pytest.approx(1.9)


class Wrapper(torch.optim.Optimizer):
    """As that of Accelerate."""

    def __init__(self) -> None:
        self.optimizer = optimizer("wsam", small_model())


ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "optimizer": ({"optimizer": "sgd"}, TypeError, "must be a torch.optim.Optimizer, got str"),
    "wrapper": (
        {"optimizer": Wrapper()},
        TypeError,
        "Wrapper is a framework's wrapper.*integrations",
    ),
    "loss_fn": ({"loss_fn": torch.ones(1)}, TypeError, "function of the batch.*got Tensor"),
    "autocast": ({"autocast": True}, TypeError, "torch.bfloat16, or None, got True"),
    "capture": ({"capture": "always"}, ValueError, "'auto', True or False, got 'always'"),
    "capture as a number": ({"capture": 1}, ValueError, "'auto', True or False, got 1"),
    "no micro-batch": ({"micro_batches": 0}, ValueError, "at least 1, got 0"),
    "half": ({"micro_batches": 0.5}, TypeError, "micro_batches must be a whole number"),
    "flag": ({"perturb_per_micro_batch": 1}, TypeError, "True or False, got 1"),
    "gather": ({"gather_selected": 1}, TypeError, "gather_selected must be True or False, got 1"),
    "share": ({"ascent_share": 0.0}, ValueError, r"ascent_share must be in \(0, 1\], got 0"),
    "scaler": (
        {"perturb_per_micro_batch": True, "scaler": torch.amp.GradScaler("cpu")},
        ValueError,
        "does not support a GradScaler",
    ),
    "capture on a CPU": ({"capture": True}, ValueError, "one CUDA device, they are on cpu"),
    "capture with a scaler": (
        {"capture": True, "scaler": torch.amp.GradScaler("cpu")},
        ValueError,
        "GradScaler reads its scale on the host",
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_bad_arguments_of_train_step(name: str) -> None:
    given, error, message = ARGUMENTS[name]
    model = small_model()
    usual = {"optimizer": optimizer("wsam", model), "loss_fn": lambda x: loss(model, x)}
    with pytest.raises(error, match=message):
        wsam.train_step(**{**usual, **given})
