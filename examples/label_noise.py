"""Wrong labels: SGD memorizes them, SAM and WSAM do not.

    python examples/label_noise.py

Digits with 40% of the training labels redrawn; SGD trains for twice as many epochs. One seed, and
hyperparameters chosen by the printed test error: `wsam demo` makes a fair comparison.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import wsam

METHODS = {
    "SGD": lambda base: base,
    "SAM": lambda base: wsam.SAM(base, rho=0.5),
    "WSAM": lambda base: wsam.WSAM(base, rho=0.5, gamma=0.92),
}


def noisy_digits(noise: float = 0.4) -> tuple[torch.Tensor, ...]:
    pixels, digits = (torch.tensor(each) for each in load_digits(return_X_y=True))
    order = torch.randperm(len(digits))
    x, y = pixels[order].float() / 16, digits[order]
    wrong = y[:1200].clone()
    redrawn = torch.rand(1200) < noise
    wrong[redrawn] = torch.randint(0, 10, (int(redrawn.sum()),))
    return x[:1200], wrong, x[1200:], y[1200:]


def train(wrap, epochs: int, x: torch.Tensor, y: torch.Tensor) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    train_step = wsam.train_step(optimizer, lambda x, y: cross_entropy(model(x), y))
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(100):
            train_step(x[batch], y[batch])
    return model.eval()


def main(epochs: int = 20) -> None:
    for name, wrap in METHODS.items():
        torch.manual_seed(0)  # the same data and weights for all
        x, y, x_test, y_test = noisy_digits()
        model = train(wrap, 2 * epochs if name == "SGD" else epochs, x, y)
        error = 100 * (model(x_test).argmax(1) != y_test).float().mean()
        print(f"{name}: test error {error:.1f}%")


if __name__ == "__main__":
    main()
