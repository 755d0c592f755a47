"""Fabric needs no integration: its loop equals the plain loop; unsupported uses raise."""

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from framework_helpers import (
    difference,
    net,
    new_scaler,
    plain_loop,
    samples,
    scaled_loop,
    split_into_steps,
    wsam_over_sgd,
)
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wsam.integrations import unwrap

pytestmark = pytest.mark.slow
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def _no_lightning_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        yield


def train_plain(accumulate: int = 1, epochs: int = 1) -> nn.Module:
    model = net()
    optimizer = wsam_over_sgd(model.parameters())
    steps = split_into_steps(samples(), 4, accumulate, epochs)
    plain_loop(model, optimizer, steps, accumulate=accumulate)
    return model


def fabric_loop(fabric: Fabric, model: Any, optimizer: Any, accumulate: int) -> None:
    for batches in split_into_steps(samples(), 4, accumulate):

        def closure(batches: Any = batches) -> Tensor:
            losses = []
            for number, (x, y) in enumerate(batches, start=1):
                with fabric.no_backward_sync(model, enabled=number < len(batches)):
                    loss = cross_entropy(model(x), y) / accumulate
                    fabric.backward(loss)
                losses.append(loss.detach())
            return sum(losses)  # type: ignore[return-value]

        optimizer.step(closure)


def start(body: nn.Module, **options: Any) -> tuple[Fabric, Any, Any]:
    fabric = Fabric(accelerator="cpu", devices=1, **options)
    return (fabric, *fabric.setup(body, wsam_over_sgd(body.parameters())))


def test_works_training() -> None:
    body = net()
    fabric, model, optimizer = start(body)
    fabric_loop(fabric, model, optimizer, accumulate=1)
    assert difference(body, train_plain()) == 0


class StepCounter:
    """A Fabric callback."""

    def __init__(self) -> None:
        self.steps = 0

    def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
        self.steps += 1


def test_works_one_step_per_step() -> None:
    """Callbacks and schedulers count each step once, and the returned loss is L(w)."""
    counter, body, twin = StepCounter(), net(), net()
    fabric, model, optimizer = start(body, callbacks=[counter])
    scheduler = torch.optim.lr_scheduler.StepLR(unwrap(optimizer), 2, gamma=0.5)
    seen = []
    for ((x, y),) in split_into_steps(samples(), 4):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            loss = cross_entropy(model(x), y)
            fabric.backward(loss)
            return loss

        seen.append(float(optimizer.step(closure)))
        scheduler.step()
    other = wsam_over_sgd(twin.parameters())
    twin_scheduler = torch.optim.lr_scheduler.StepLR(other, 2, gamma=0.5)
    losses = plain_loop(twin, other, split_into_steps(samples(), 4), after_step=twin_scheduler.step)
    assert counter.steps == len(losses) == unwrap(optimizer).param_groups[0]["sam_step"]
    assert seen == pytest.approx(losses)
    assert difference(body, twin) == 0


def test_works_bf16() -> None:
    body = net()
    fabric, model, optimizer = start(body, precision="bf16-mixed")
    fabric_loop(fabric, model, optimizer, accumulate=1)
    twin = net()
    x = samples().tensors[0].bfloat16().float()  # Fabric also casts the inputs
    data = type(samples())(x, samples().tensors[1])
    other = wsam_over_sgd(twin.parameters())
    plain_loop(twin, other, split_into_steps(data, 4), autocast=torch.bfloat16)
    assert difference(body, twin) < 1e-3
    assert difference(body, train_plain()) > 1e-3


def test_works_accumulation() -> None:
    body = net()
    fabric, model, optimizer = start(body)
    fabric_loop(fabric, model, optimizer, accumulate=3)
    assert difference(body, train_plain(accumulate=3)) == 0
    assert unwrap(optimizer).param_groups[0]["sam_step"] == 2


def test_works_fp16_scaler() -> None:
    """The phases are called on the optimizer inside the wrapper."""
    body, scaler = net(), new_scaler()
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    fabric, model, wrapped = start(body, plugins=[plugin])
    optimizer = wrapped.optimizer
    for ((x, y),) in split_into_steps(samples(), 4):
        optimizer.zero_grad()
        optimizer.begin()
        fabric.backward(cross_entropy(model(x), y))
        optimizer.ascend(scaler.get_scale())
        fabric.backward(cross_entropy(model(x), y))
        scaler.unscale_(optimizer)
        optimizer.descend()
        wrapped.step()
    twin = net()
    other = wsam_over_sgd(twin.parameters())
    scaled_loop(twin, other, split_into_steps(samples(), 4), new_scaler(), autocast=torch.float16)
    assert difference(body, twin) < 5e-3  # Fabric also casts inputs and outputs
    assert difference(body, net()) > 0.1


def test_works_resume(tmp_path: Path) -> None:
    body, path = net(), tmp_path / "state.ckpt"
    fabric, model, optimizer = start(body)
    fabric_loop(fabric, model, optimizer, accumulate=1)
    fabric.save(path, {"model": model, "optimizer": optimizer})
    fresh = net()
    fabric, model, optimizer = start(fresh)
    fabric.load(path, {"model": model, "optimizer": optimizer})
    fabric_loop(fabric, model, optimizer, accumulate=1)
    assert difference(fresh, train_plain(epochs=2)) == 0


def test_works_wrapped_optimizer() -> None:
    """The wrapper returned by `setup` works with schedulers and `zero_grad`."""
    body = net()
    fabric, model, optimizer = start(body)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    fabric_loop(fabric, model, optimizer, accumulate=3)
    optimizer.zero_grad()
    scheduler.step()
    assert all(p.grad is None for p in body.parameters())
    assert optimizer.param_groups is optimizer.optimizer.base.param_groups
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_refuses_phases_on_the_wrapper() -> None:
    fabric, model, optimizer = start(net())
    fabric.backward(model(samples().tensors[0]).sum())
    for phase in ("ascend", "begin"):
        with pytest.raises(TypeError, match=r"\.optimizer"):
            getattr(optimizer, phase)()
    with pytest.raises(TypeError, match=r"\.optimizer"), optimizer.perturbed():
        pass


def test_refuses_closure_with_scaler() -> None:
    body = net()
    fabric, model, optimizer = start(
        body, plugins=[MixedPrecision("16-mixed", "cpu", new_scaler())]
    )
    with pytest.raises(RuntimeError, match=r"[Cc]losure"):
        fabric_loop(fabric, model, optimizer, accumulate=1)
    assert difference(body, net()) == 0
