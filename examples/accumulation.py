"""Gradient accumulation: one step over many micro-batches, in two ways.

    python examples/accumulation.py [together|each]

together: both gradients are those of the whole batch; the result is that of one large batch.
each:     every micro-batch has a perturbation of its own (m-sharpness, as on many devices).
"""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from wsam import WSAM


def main(way: str = "together", steps: int = 100, micro_batches: int = 4) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = WSAM(base, rho=0.05, gamma=0.8, max_norm=5.0)  # clips the step as a whole

    def backward(x, y):
        loss = cross_entropy(model(x), y) / micro_batches
        loss.backward()
        return loss.detach()

    for step in range(steps):
        inputs = torch.randn(128, 20)
        labels = (inputs[:, 0] * inputs[:, 1] > 0).long()
        window = [*zip(inputs.chunk(micro_batches), labels.chunk(micro_batches), strict=True)]

        def whole_batch(window=window):  # gradients add up in p.grad, as ever
            return sum(backward(x, y) for x, y in window)

        one_by_one = [lambda x=x, y=y: backward(x, y) for x, y in window]

        loss = optimizer.step(whole_batch if way == "together" else one_by_one)
        if step % 25 == 24:
            print(f"step {step + 1}: loss {loss:.3f}, sharpness {optimizer.sharpness:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
