"""skorch needs no integration: `fit` equals the plain loop."""

from pathlib import Path
from typing import Any

import pytest
import skorch
import torch
from framework_helpers import (
    difference,
    net,
    plain_loop,
    samples,
    split_into_steps,
    wsam_over_sgd,
)
from skorch.callbacks import LRScheduler
from skorch.helper import predefined_split
from torch import nn

import wsam


def train_plain(accumulate: int = 1, epochs: int = 1) -> nn.Module:
    model = net()
    optimizer = wsam_over_sgd(model.parameters())
    steps = split_into_steps(samples(), 4, accumulate, epochs)
    plain_loop(model, optimizer, steps, accumulate=accumulate)
    return model


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


def test_works_training() -> None:
    model = classifier()
    model.fit(samples(), None)
    assert difference(model.module_, train_plain()) == 0
    assert model.optimizer_.param_groups[0]["sam_step"] == 6


def test_works_one_step_per_step() -> None:
    """The history has the loss at w, and a scheduler steps once per batch."""
    schedule = LRScheduler(
        torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5, step_every="batch"
    )
    model = classifier(callbacks=[schedule])
    model.fit(samples(), None)
    twin = net()
    optimizer = wsam_over_sgd(twin.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    losses = plain_loop(twin, optimizer, split_into_steps(samples(), 4), after_step=scheduler.step)
    assert model.history[-1, "batches", :, "train_loss"] == pytest.approx(losses)
    assert difference(model.module_, twin) == 0


def test_works_resume(tmp_path: Path) -> None:
    files = {"f_params": tmp_path / "model.pt", "f_optimizer": tmp_path / "optimizer.pt"}
    model = classifier()
    model.fit(samples(), None)
    model.save_params(**files)
    resumed = classifier().initialize()
    resumed.load_params(**files)
    resumed.partial_fit(samples(), None)
    assert difference(resumed.module_, train_plain(epochs=2)) == 0


def test_works_hyperparameters() -> None:
    """Hyperparameters named as in the groups can be set on a net at any time."""
    model = classifier().initialize()
    model.set_params(optimizer__sam_rho=0.3)
    assert model.optimizer_.param_groups[0]["sam_rho"] == 0.3
    model.set_params(lr=0.05)
    assert model.optimizer_.base.param_groups[0]["lr"] == 0.05
