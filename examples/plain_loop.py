"""Train a classifier with WSAM: bfloat16, accumulation, clipping, schedule, evaluation, resume.

    python examples/plain_loop.py [CHECKPOINT]

An existing CHECKPOINT is continued, bit for bit.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import wsam


def samples(count: int) -> TensorDataset:
    x = torch.randn(count, 20)
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


def main(checkpoint: str | None = None, epochs: int = 8) -> None:
    torch.manual_seed(0)
    loader = DataLoader(samples(2048), batch_size=64, shuffle=True)
    x_test, y_test = samples(1000).tensors
    model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    optimizer = wsam.WSAM(base, rho=0.05, gamma=0.9, max_norm=5.0, model=model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)

    def loss_fn(x, y):
        return cross_entropy(model(x), y)

    train_step = wsam.train_step(optimizer, loss_fn, autocast=torch.bfloat16, micro_batches=2)
    saved = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if checkpoint is not None and Path(checkpoint).exists():
        state = torch.load(checkpoint, weights_only=True)
        for name, each in saved.items():
            each.load_state_dict(state[name])
        torch.set_rng_state(state["random"])
    for epoch in range(scheduler.last_epoch, epochs):
        model.train()
        for x, y in loader:
            loss, _ = train_step(x, y)
        scheduler.step()
        if checkpoint is not None:
            state = {name: each.state_dict() for name, each in saved.items()}
            torch.save({**state, "random": torch.get_rng_state()}, checkpoint)
        with torch.no_grad():
            error = 100 * (model.eval()(x_test).argmax(1) != y_test).float().mean()
        print(f"epoch {epoch + 1}: loss {loss:.3f}, test error {error:.1f}%")


if __name__ == "__main__":
    main(*sys.argv[1:])
