"""Fabric's and skorch's loops take the optimizer as it is; what they cannot do is refused."""

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import skorch
import torch
from framework_helpers import (
    difference,
    net,
    new_scaler,
    plain_loop,
    samples,
    scaled_loop,
    windows,
    wsam_over_sgd,
)
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from skorch.callbacks import LRScheduler
from skorch.helper import predefined_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import wsam
from wsam.integrations import unwrap

logging.getLogger("lightning.fabric").setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        yield


def by_hand(every: int = 1, epochs: int = 1, **options: Any) -> nn.Module:
    model = net()
    optimizer = wsam_over_sgd(model.parameters())
    steps = windows(samples(), 4, every, epochs)
    plain_loop(model, optimizer, steps, every=every, **options)
    return model


# --- Fabric ------------------------------------------------------------------------------------


def fabric_loop(fabric: Fabric, model: Any, optimizer: Any, every: int) -> None:
    for window in windows(samples(), 4, every):

        def closure(window: Any = window) -> Tensor:
            losses = []
            for number, (x, y) in enumerate(window, start=1):
                with fabric.no_backward_sync(model, enabled=number < len(window)):
                    loss = cross_entropy(model(x), y) / every
                    fabric.backward(loss)
                losses.append(loss.detach())
            return sum(losses)  # type: ignore[return-value]

        optimizer.step(closure)


def start(body: nn.Module, **options: Any) -> tuple[Fabric, Any, Any]:
    fabric = Fabric(accelerator="cpu", devices=1, **options)
    return (fabric, *fabric.setup(body, wsam_over_sgd(body.parameters())))


def test_fabric_works_training() -> None:
    body = net()
    fabric, model, optimizer = start(body)
    fabric_loop(fabric, model, optimizer, every=1)
    assert difference(body, by_hand()) == 0


class StepCounter:
    """What a Fabric callback sees."""

    def __init__(self) -> None:
        self.steps = 0

    def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
        self.steps += 1


def test_fabric_works_one_step_per_step() -> None:
    """A callback hears of each step once, a scheduler counts it once, and the loss is that at w."""
    counter, body, twin = StepCounter(), net(), net()
    fabric, model, optimizer = start(body, callbacks=[counter])
    scheduler = torch.optim.lr_scheduler.StepLR(unwrap(optimizer), 2, gamma=0.5)
    seen = []
    for ((x, y),) in windows(samples(), 4):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            loss = cross_entropy(model(x), y)
            fabric.backward(loss)
            return loss

        seen.append(float(optimizer.step(closure)))
        scheduler.step()
    other = wsam_over_sgd(twin.parameters())
    twin_scheduler = torch.optim.lr_scheduler.StepLR(other, 2, gamma=0.5)
    losses = plain_loop(twin, other, windows(samples(), 4), after=twin_scheduler.step)
    assert counter.steps == len(losses) == unwrap(optimizer).param_groups[0]["sam_step"]
    assert seen == pytest.approx(losses)
    assert difference(body, twin) == 0


def test_fabric_works_bf16() -> None:
    body = net()
    fabric, model, optimizer = start(body, precision="bf16-mixed")
    fabric_loop(fabric, model, optimizer, every=1)
    twin = net()
    x = samples().tensors[0].bfloat16().float()  # Fabric casts the inputs, too
    data = type(samples())(x, samples().tensors[1])
    other = wsam_over_sgd(twin.parameters())
    plain_loop(twin, other, windows(data, 4), autocast=torch.bfloat16)
    assert difference(body, twin) < 1e-3
    assert difference(body, by_hand()) > 1e-3


def test_fabric_works_accumulation() -> None:
    body = net()
    fabric, model, optimizer = start(body)
    fabric_loop(fabric, model, optimizer, every=3)
    assert difference(body, by_hand(every=3)) == 0
    assert unwrap(optimizer).param_groups[0]["sam_step"] == 2


def test_fabric_works_fp16_scaler() -> None:
    """By the phases, on the optimizer inside the wrapper; the scaler is the plugin's."""
    body, scaler = net(), new_scaler()
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    fabric, model, wrapped = start(body, plugins=[plugin])
    optimizer = wrapped.optimizer
    for ((x, y),) in windows(samples(), 4):
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
    scaled_loop(twin, other, windows(samples(), 4), new_scaler(), autocast=torch.float16)
    assert difference(body, twin) < 5e-3  # Fabric casts the inputs and outputs, too
    assert difference(body, net()) > 0.1


def test_fabric_works_resume(tmp_path: Path) -> None:
    body, path = net(), tmp_path / "state.ckpt"
    fabric, model, optimizer = start(body)
    fabric_loop(fabric, model, optimizer, every=1)
    fabric.save(path, {"model": model, "optimizer": optimizer})
    fresh = net()
    fabric, model, optimizer = start(fresh)
    fabric.load(path, {"model": model, "optimizer": optimizer})
    fabric_loop(fabric, model, optimizer, every=1)
    assert difference(fresh, by_hand(epochs=2)) == 0


def test_fabric_works_wrapped_optimizer() -> None:
    """A scheduler can be made over what `setup` returns, and gradients cleared by it."""
    body = net()
    fabric, model, optimizer = start(body)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    fabric_loop(fabric, model, optimizer, every=3)
    optimizer.zero_grad()
    scheduler.step()
    assert all(p.grad is None for p in body.parameters())
    assert optimizer.param_groups is optimizer.optimizer.base.param_groups
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_fabric_refuses_phases_on_the_wrapper() -> None:
    fabric, model, optimizer = start(net())
    fabric.backward(model(samples().tensors[0]).sum())
    for phase in ("ascend", "begin", "descend", "abandon"):
        with pytest.raises(TypeError, match=r"\.optimizer"):
            getattr(optimizer, phase)()
    with pytest.raises(TypeError, match=r"\.optimizer"), optimizer.perturbed():
        pass


def test_fabric_refuses_closure_with_scaler() -> None:
    body = net()
    fabric, model, optimizer = start(
        body, plugins=[MixedPrecision("16-mixed", "cpu", new_scaler())]
    )
    with pytest.raises(RuntimeError, match=r"[Cc]losure"):
        fabric_loop(fabric, model, optimizer, every=1)
    assert difference(body, net()) == 0


# --- skorch ------------------------------------------------------------------------------------


def sharpness_aware(params: Any, lr: float, sam_rho: float, sam_gamma: float) -> wsam.WSAM:
    return wsam.WSAM(torch.optim.SGD(params, lr=lr, momentum=0.9), rho=sam_rho, gamma=sam_gamma)


def classifier(**options: Any) -> skorch.NeuralNetClassifier:
    settings = {
        "criterion": nn.CrossEntropyLoss,
        "optimizer": sharpness_aware,
        "optimizer__sam_rho": 0.1,
        "optimizer__sam_gamma": 0.8,
        "lr": 0.1,
        "batch_size": 4,
        "max_epochs": 1,
        "verbose": 0,
        "train_split": predefined_split(samples()),
        "callbacks__valid_acc": None,
    }
    return skorch.NeuralNetClassifier(net(), **{**settings, **options})


def test_skorch_works_training() -> None:
    model = classifier()
    model.fit(samples(), None)
    assert difference(model.module_, by_hand()) == 0
    assert model.optimizer_.param_groups[0]["sam_step"] == 6


def test_skorch_works_one_step_per_step() -> None:
    """The history holds the loss at w, and a scheduler steps once a batch."""
    schedule = LRScheduler(
        torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5, step_every="batch"
    )
    model = classifier(callbacks=[schedule])
    model.fit(samples(), None)
    twin = net()
    optimizer = wsam_over_sgd(twin.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    losses = plain_loop(twin, optimizer, windows(samples(), 4), after=scheduler.step)
    assert model.history[-1, "batches", :, "train_loss"] == pytest.approx(losses)
    assert difference(model.module_, twin) == 0


def test_skorch_works_resume(tmp_path: Path) -> None:
    files = {"f_params": tmp_path / "model.pt", "f_optimizer": tmp_path / "optimizer.pt"}
    model = classifier()
    model.fit(samples(), None)
    model.save_params(**files)
    resumed = classifier().initialize()
    resumed.load_params(**files)
    resumed.partial_fit(samples(), None)
    assert difference(resumed.module_, by_hand(epochs=2)) == 0


def test_skorch_works_hyperparameters() -> None:
    """Named as in the groups, settings of the method can be set on a net at any time."""
    model = classifier().initialize()
    model.set_params(optimizer__sam_rho=0.3)
    assert model.optimizer_.param_groups[0]["sam_rho"] == 0.3
    model.set_params(lr=0.05)
    assert model.optimizer_.base.param_groups[0]["lr"] == 0.05
