"""Helpers of the Lightning tests: a module, and a Trainer without output."""

import logging
from collections.abc import Callable
from typing import Any

import lightning
import torch
from framework_helpers import net, samples, wsam_over_sgd
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import wsam
from wsam.integrations.lightning import SharpnessAwareMixin

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
Make = Callable[..., wsam.SharpnessAware]


class Net(SharpnessAwareMixin, lightning.LightningModule):
    def __init__(self, make: Make = wsam_over_sgd, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.body, self.make = net(dtype), make
        self.calls = 0
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.calls += 1
        losses = cross_entropy(self.body(x), y, reduction="none")
        loss = self.trainer.optimizers[0].select(losses)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def trainer(**options: Any) -> lightning.Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
    }
    return lightning.Trainer(**{**quiet, **options})


def fit(module: Net, data: Dataset[Any] | None = None, size: int = 4, **options: Any) -> Any:
    runner = trainer(**options)
    runner.fit(module, DataLoader(samples() if data is None else data, size))
    return runner
