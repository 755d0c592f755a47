"""Train a classifier with WSAM in a plain loop: learning-rate schedule, evaluation, checkpoint.

    python examples/plain_loop.py [CHECKPOINT]

Only the construction of the optimizer and the closure differ from training with SGD.
"""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from wsam import WSAM


def two_spirals(count: int) -> TensorDataset:
    labels = torch.arange(count) % 2
    turn = 3 * torch.rand(count).sqrt() * torch.pi
    angle = turn + torch.pi * labels
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1) / 4
    return TensorDataset(points + 0.1 * torch.randn(count, 2), labels)


def main(checkpoint: str | None = None, epochs: int = 20) -> None:
    torch.manual_seed(0)
    loader = DataLoader(two_spirals(2000), batch_size=50, shuffle=True)
    x_test, y_test = two_spirals(1000).tensors

    hidden = [nn.Linear(2, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
    model = nn.Sequential(*hidden, nn.Linear(64, 2))
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    optimizer = WSAM(base, rho=0.05, gamma=0.9, model=model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)

    for epoch in range(epochs):
        model.train()
        for x, y in loader:

            def closure(x=x, y=y):  # runs twice: at w and at w + d
                loss = cross_entropy(model(x), y)
                loss.backward()
                return loss

            loss = optimizer.step(closure)
        scheduler.step()
        model.eval()
        with torch.no_grad():
            error = 100 * (model(x_test).argmax(1) != y_test).float().mean()
        sharp = optimizer.sharpness
        print(f"epoch {epoch + 1}: loss {loss:.3f}, sharpness {sharp:.4f}, test error {error:.1f}%")
    if checkpoint is not None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)


if __name__ == "__main__":
    main(*sys.argv[1:])
