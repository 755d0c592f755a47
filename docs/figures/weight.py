"""The weight of sharpness in a step of WSAM over gamma: theory, and steps of the optimizer."""

import math
from collections.abc import Callable

import torch
from matplotlib.figure import Figure
from torch import Tensor

from wsam import SAM, WSAM, SharpnessAware
from wsam._utils.plot_style import FIGURE_WIDTH, METHOD_STYLES, MUTED_COLOR, new_figure, set_title
from wsam.theory import effective_weight, parity_gamma


def drift(make: Callable[[torch.optim.Optimizer], SharpnessAware], momentum: float) -> Tensor:
    """Return one step in units of lr, after momentum has converged.

    The lr is so small that both gradients are constant, so that the step depends only on how the
    optimizer combines them.
    """
    lr, curvature = 1e-9, torch.tensor([1.0, 4.0], dtype=torch.float64)
    w = torch.tensor([1.0, 1.0], dtype=torch.float64, requires_grad=True)
    optimizer = make(torch.optim.SGD([w], lr=lr, momentum=momentum))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = 0.5 * (curvature * w.square()).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    before = w.detach().clone()
    for _ in range(math.ceil(12 / (1 - momentum))):
        before.copy_(w.detach())
        optimizer.step(closure)
    return (before - w.detach()) / lr


def measured_weight(gamma: float, momentum: float) -> float:
    """Return the weight of (g1 - g0) in a step, relative to SAM's, which is 1."""
    base = drift(lambda base: WSAM(base, rho=0.1, gamma=0.0), momentum)
    sam = drift(lambda base: SAM(base, rho=0.1), momentum) - base
    mine = drift(lambda base: WSAM(base, rho=0.1, gamma=gamma), momentum) - base
    return ((mine @ sam) / (sam @ sam)).item()


def draw_weight() -> Figure:
    """Draw the weight of sharpness over gamma, with and without momentum."""
    figure = new_figure(FIGURE_WIDTH, 4.2)
    axes = figure.subplots()
    gammas = [i / 200 for i in range(1, 197)]
    places = {0.0: ("sgd", (0.03, 8), "left"), 0.9: ("wsam", (0.99, 0.016), "right")}
    for momentum, (method, place, side) in places.items():
        color = METHOD_STYLES[method].light
        axes.plot(gammas, [effective_weight(g, momentum) for g in gammas], color=color)
        some = [0.2, 0.5, 0.7, 0.8, 0.88, 0.94, 0.97]
        dots = [measured_weight(g, momentum) for g in some]
        axes.plot(some, dots, "o", color=color, markersize=6)
        name = f"momentum {momentum:g}" if momentum else "no momentum"
        name += f":\nSAM's weight at γ = {parity_gamma(momentum):.2f}"
        axes.text(*place, name, color=color, ha=side)
    axes.axhline(1, color=MUTED_COLOR, linewidth=1, linestyle="--")
    axes.text(0.02, 1.12, "SAM", color=MUTED_COLOR)
    axes.set(xlabel="γ", ylabel="weight of sharpness", yscale="log")
    axes.set(xlim=(0, 1), ylim=(0.008, 60))
    axes.yaxis.set_major_formatter("{x:g}")
    note = "WSAM over SGD; lines: k(1 − μ), dots: steps of the optimizer"
    axes.set_title(note, loc="left", fontsize=10, color=MUTED_COLOR)
    set_title(figure, "Momentum 0.9 divides WSAM's weight of sharpness by 10")
    return figure
