"""What torchrun starts to interrupt a team: a model whose dropout draws in every process.

``python lab_team.py OUT`` trains a run to its end; with ``stop`` after it all processes leave
after two of its four epochs.
"""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

from torch import nn

from wsam.lab import models
from wsam.lab.means import Means
from wsam.lab.run import Run
from wsam.lab.train import Session, train

RUN = Run(model="mlp", method="sam", epochs=4, train_limit=200, test_limit=50, batch_size=50)


class Stop(Exception):
    """Stands for anything that ends all processes at once."""


class Stopped(Session):
    def _epoch(self, stepper: Any) -> str | None:
        if len(self.curve) == 2:
            raise Stop
        return super()._epoch(stepper)


def with_dropout(task: models.Task) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, task.classes))


if __name__ == "__main__":
    out, *rest = sys.argv[1:]
    kind = Stopped if rest == ["stop"] else Session
    models._SMALL["mlp"] = with_dropout
    with suppress(Stop), mock.patch("wsam.lab.train.Session", kind):
        train(RUN, Path(out), Means(device="cpu", checkpoint_seconds=0))
