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


MISTAKES: dict[str, tuple[Callable[[nn.Module, Tensor], Any], str]] = {
    "nothing": (lambda m, x: None, "NoneType"),
    "a number": (lambda m, x: loss(m, x).item(), "float"),
    "several elements": (lambda m, x: m(x).sum(1), r"of shape \(10,\)"),
    "no elements": (lambda m, x: m(x)[:0].sum(1), r"of shape \(0,\)"),
    "no loss": (lambda m, x: {"logits": m(x)}, "NoneType"),
    "outputs first": (lambda m, x: ("x", loss(m, x)), "str"),
    "three": (lambda m, x: (loss(m, x), m(x), x), r"a tuple of 3: write return loss, \(a, b\)"),
    "list": (lambda m, x: [loss(m, x), x], "list"),
    "logits first": (lambda m, x: (m(x), loss(m, x)), r"of shape \(10, 2\)"),
}


@pytest.mark.parametrize("kind", ["wsam", "base"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_the_loss_function(mistake: str, kind: str) -> None:
    function, found = MISTAKES[mistake]
    message = rf"must return the loss.*\(loss, outputs\).*its loss is {found}"
    model = small_model()
    opt = optimizer(kind, model)
    before = snapshot(opt)
    wrong = wsam.train_step(opt, lambda x: function(model, x))
    with pytest.raises(TypeError, match=message):
        wrong(batch(0))
    assert same(snapshot(opt)["weights"], before["weights"])
    wsam.train_step(opt, lambda x: loss(model, x))(batch(0))
    assert not same(snapshot(opt)["weights"], before["weights"])


def test_wrong_arguments() -> None:
    model = small_model()
    opt = optimizer("wsam", model)
    with pytest.raises(TypeError, match="takes an optimizer first, got <function"):
        wsam.train_step(lambda x: loss(model, x), opt)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be a dtype such as torch.bfloat16, got True"):
        wsam.train_step(opt, lambda x: loss(model, x), autocast=True)  # type: ignore[arg-type]


def test_a_loss_of_another_model() -> None:
    step = wsam.train_step(optimizer("wsam", small_model()), lambda x: loss(small_model(), x))
    with pytest.raises(RuntimeError, match="the loss must depend on the base's parameters"):
        step(batch(0))


def test_step_after_train_step() -> None:
    model = small_model()
    opt = optimizer("wsam", model)
    wsam.train_step(opt, lambda x: loss(model, x))(batch(0))
    before = snapshot(opt)
    with pytest.raises(RuntimeError, match=r"train_step.* no optimizer\.step\(\) is needed"):
        opt.step()
    assert same(snapshot(opt), before)


class Wrapper(torch.optim.Optimizer):
    """As that of Accelerate."""

    def __init__(self) -> None:
        self.optimizer = optimizer("wsam", small_model())


ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "wrapper": (
        {"optimizer": Wrapper()},
        TypeError,
        "Wrapper is a framework's wrapper.*integrations",
    ),
    "no micro-batch": ({"micro_batches": 0}, ValueError, "at least 1, got 0"),
    "half": ({"micro_batches": 0.5}, TypeError, "micro_batches must be a whole number"),
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
