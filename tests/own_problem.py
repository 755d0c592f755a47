"""A model and data of one's own, as `wsam train --model own_problem.py:net` reads them."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

from wsam.lab import Data, Metric

GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(120, 4, generator=GENERATOR)
CLASSES = (INPUTS[:, 0] > 0).long() + (INPUTS[:, 1] > 0).long()
NUMBERS = INPUTS @ torch.tensor([1.0, -2.0, 0.5, 0.0]) + 3


def net():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))


class Net(nn.Module):
    """Takes a mapping, returns a mapping."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs):
        return {"score": self.layer(inputs["x"])[:, 0]}


def line():
    return nn.Linear(4, 1)


def split(targets):
    return TensorDataset(INPUTS[:90], targets[:90]), TensorDataset(INPUTS[90:], targets[90:])


def classes():
    return split(CLASSES)


def numbers():
    return Data(*split(NUMBERS))


def r2(outputs, targets):
    residual = (outputs[:, 0] - targets).square().sum()
    return 1 - residual / (targets - targets.mean()).square().sum()


R2 = Metric("r2", r2, lower_is_better=False)


def loaders():
    train, test = split(CLASSES)
    return DataLoader(train, 30, shuffle=True), DataLoader(test, 30)


def mappings():
    """Inputs in a mapping, a loss and a metric of one's own."""
    pairs = [({"x": x}, float(y > 0)) for x, y in zip(INPUTS, CLASSES, strict=True)]
    return Data(
        train=pairs[:90],
        test=pairs[90:],
        loss=lambda output, target: binary_cross_entropy_with_logits(output["score"], target),
        metric=Metric(
            "accuracy_of_signs",
            lambda output, target: ((output["score"] > 0) == target.bool()).float().mean(),
            lower_is_better=False,
        ),
    )
