"""A run with dropout, started by torchrun.

Arguments: ``OUT`` to train to the end, ``OUT stop`` to end all processes after two of four epochs.
"""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

from torch import nn

from wsam.lab import models
from wsam.lab.execution import ExecutionConfig
from wsam.lab.run import Run
from wsam.lab.train import train
from wsam.lab.trainer import Trainer

RUN = Run(model="mlp", method="sam", epochs=4, train_limit=200, test_limit=50, batch_size=50)


class Stop(Exception):
    """Simulates anything that ends all processes at once."""


class StoppingTrainer(Trainer):
    def _epoch(self, stepper: Any) -> str | None:
        if len(self.curve) == 2:
            raise Stop
        return super()._epoch(stepper)


def check_no_gloo_threads() -> None:
    """Gloo's worker threads must end before the interpreter does, which they may abort."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert "pt_gloo_runloop" not in names, names


def with_dropout(task: models.Task) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, task.outputs))


if __name__ == "__main__":
    out, *rest = sys.argv[1:]
    trainer = StoppingTrainer if rest == ["stop"] else Trainer
    models._BUILDERS["mlp"] = with_dropout
    with suppress(Stop), mock.patch("wsam.lab.train.Trainer", trainer):
        train(RUN, Path(out), ExecutionConfig(device="cpu", checkpoint_seconds=0))
    if sys.platform == "linux":
        check_no_gloo_threads()
