"""The test error over k rho: up to which product are WSAM and Coupled-WSAM stable?"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor, nn

from wsam import WSAM, CoupledWSAM
from wsam._utils.plot_style import (
    COLORS,
    FIGURE_WIDTH,
    GRID_COLOR,
    METHOD_STYLES,
    MUTED_COLOR,
    method_title,
    new_figure,
    set_title,
)

PRODUCTS = tuple(0.1 * 2**i for i in range(9))
Errors = dict[tuple[str, float], list[float]]
"""The error at each of `PRODUCTS`, by method and gamma."""


def noisy_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scikit-learn's digits, 1,200 to train on with 40% of labels redrawn, 597 to test on."""
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    order = torch.randperm(len(digits), generator=(seed := torch.Generator().manual_seed(0)))
    x = torch.tensor(pixels, dtype=torch.float32)[order] / 16
    y = torch.tensor(digits)[order]
    noise = torch.rand(1200, generator=seed) < 0.4
    train = y[:1200].clone()
    train[noise] = torch.randint(0, 10, (int(noise.sum()),), generator=seed)
    return x[:1200], train, x[1200:], y[1200:]


def test_error(make: Callable[..., torch.optim.Optimizer], seed: int) -> float:
    """Return the test error in % of a small perceptron trained on the noisy digits for 30 epochs."""
    x, y, x_test, y_test = noisy_digits()
    torch.manual_seed(seed)
    layers = [nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU()]
    layers += [nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10)]
    model = nn.Sequential(*layers)
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer: Any = make(base, model=model)
    for _ in range(30):
        for batch in torch.randperm(1200).view(-1, 100):

            def closure(batch: Tensor = batch) -> Tensor:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            optimizer.step(closure)
    model.eval()
    with torch.no_grad():
        wrong: Tensor = model(x_test).argmax(1) != y_test
    return 100 * wrong.float().mean().item()


def mean_error(make: Callable[..., torch.optim.Optimizer]) -> float:
    """Return the mean test error of two seeds."""
    return (test_error(make, 0) + test_error(make, 1)) / 2


def base_only(base: torch.optim.Optimizer, **_: object) -> torch.optim.Optimizer:
    """Return the base optimizer itself, for the error of SGD."""
    return base


def stability_errors() -> tuple[Errors, float]:
    """Return the mean error of two seeds for each form and gamma by k rho, and that of SGD."""
    errors: Errors = {}
    for rule, name in ((CoupledWSAM, "coupled_wsam"), (WSAM, "wsam")):
        for gamma in (0.8, 0.88, 0.94):
            for product in PRODUCTS:
                make = partial(rule, rho=product * (1 - gamma) / gamma, gamma=gamma)
                error = mean_error(make)
                errors.setdefault((name, gamma), []).append(error)
                print(f"{name} gamma {gamma:g} k*rho {product:.1f}: {error:.1f}%", flush=True)
    return errors, mean_error(base_only)


def draw_stability(errors: Errors, base: float) -> Figure:
    """Draw the errors over k rho.

    Args:
        errors: As `stability_errors` returns them.
        base: The error of SGD.
    """
    markers = {0.8: "o", 0.88: "s", 0.94: "^"}
    figure = new_figure(FIGURE_WIDTH, 4.4)
    axes = figure.subplots()
    for (name, gamma), values in errors.items():
        color, marker = METHOD_STYLES[name].light, markers[gamma]
        axes.plot(PRODUCTS, values, color=color, marker=marker, markersize=6, linewidth=1.5)
    axes.axhline(base, color=COLORS["sgd"], linestyle="--", linewidth=1.3)
    axes.set(xscale="log", ylabel="test error (%)", ylim=(0, 95))
    axes.set_xlabel("weight of sharpness times radius, k ρ = ρ γ/(1 − γ)")
    axes.text(0.1, base + 1.5, method_title("sgd"), color=COLORS["sgd"])
    for name, x, y, text in (
        ("coupled_wsam", 1.9, 60, "Coupled-\nWSAM"),
        ("wsam", 11, 18, "WSAM"),
    ):
        axes.text(x, y, text, color=METHOD_STYLES[name].light, ha="right")
    axes.set_xticks(PRODUCTS, [f"{p:g}" for p in PRODUCTS])
    axes.minorticks_off()
    axes.grid(axis="y", color=GRID_COLOR)
    handles = [
        Line2D([], [], color=MUTED_COLOR, marker=m, linestyle="", label=f"γ = {gamma:g}")
        for gamma, m in markers.items()
    ]
    axes.legend(handles=handles, loc="upper left", handletextpad=0.2)
    note = "digits with 40% noisy labels, lr 0.05 (not tuned), two seeds"
    axes.set_title(note, loc="left", fontsize=10, color=MUTED_COLOR)
    stable = {}  # the largest product with a lower error than SGD for all gammas
    for name in ("coupled_wsam", "wsam"):
        curves = [values for (form, _), values in errors.items() if form == name]
        worst = map(max, zip(*curves, strict=True))
        stable[name] = max(p for p, error in zip(PRODUCTS, worst, strict=True) if error < base)
    ratio = stable["wsam"] / stable["coupled_wsam"]
    set_title(
        figure,
        "The product k ρ decides, not γ alone: WSAM is stable\n"
        f"up to {ratio:.0f} times larger products than Coupled-WSAM",
    )
    return figure
