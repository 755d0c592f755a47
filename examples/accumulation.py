"""Gradient accumulation: one step over several micro-batches, in two modes.

    python examples/accumulation.py [together|each]

together: one perturbation for the whole batch; equivalent to one large batch.
each:     every micro-batch has its own perturbation (m-sharpness).
"""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from wsam import WSAM


def main(mode: str = "together", steps: int = 100, micro_batches: int = 4) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = WSAM(base, rho=0.05, gamma=0.8, max_norm=5.0)  # clips the combined gradient

    def backward(x, y):
        loss = cross_entropy(model(x), y) / micro_batches
        loss.backward()
        return loss.detach()

    for step in range(steps):
        inputs = torch.randn(128, 20)
        labels = (inputs[:, 0] * inputs[:, 1] > 0).long()
        batches = [*zip(inputs.chunk(micro_batches), labels.chunk(micro_batches), strict=True)]

        def whole_batch(batches=batches):  # gradients accumulate in p.grad
            return sum(backward(x, y) for x, y in batches)

        one_by_one = [lambda x=x, y=y: backward(x, y) for x, y in batches]

        loss = optimizer.step(whole_batch if mode == "together" else one_by_one)
        if step % 25 == 24:
            print(f"step {step + 1}: loss {loss:.3f}, sharpness {optimizer.sharpness:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
