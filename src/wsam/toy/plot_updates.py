"""Figure of the update as a function of gamma."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wsam._utils.plot_style import (
    FIGURE_WIDTH,
    METHOD_STYLES,
    MUTED_COLOR,
    RC_PARAMS,
    TEXT_COLOR,
    new_figure,
    set_title,
)
from wsam.toy import Updates

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KNOWN = {0.0: ("sgd", ["g₀: SGD"]), 0.5: ("sam", ["g₁: SAM"])}
"""Method and further lines of the label, for the gammas at which WSAM equals another method."""


def plot_updates(updates: Updates) -> Figure:
    """Draw the update for every gamma as an arrow, with its angle to the first gradient.

    Args:
        updates: A result of `wsam.toy.updates`.
    """
    from matplotlib import rc_context

    with rc_context(RC_PARAMS):
        figure = new_figure(FIGURE_WIDTH, 4.2)
        axes = figure.subplots()
        _draw_arrows(axes, updates)
        mu, sigma = updates.point
        note = (
            f"g₀ + k(g₁ − g₀), k = γ/(1 − γ); toy loss at ({mu:g}, {sigma:g}), ρ = {updates.rho:g}"
        )
        axes.set_title(note, loc="left", fontsize=10, color=MUTED_COLOR)
        set_title(figure, "A larger γ turns the update further from g₀, beyond SAM's")
    return figure


def _draw_arrows(axes: Axes, updates: Updates) -> None:
    tips = [(0.0, 0.0), *updates.by_gamma.values()]
    xs, ys = zip(*tips, strict=True)
    width, height = max(xs) - min(xs), max(ys) - min(ys)
    axes.set(xlim=(min(xs) - 0.2 * width, max(xs) + 0.2 * width))
    axes.set(ylim=(min(ys) - 0.05 * height, max(ys) + 0.5 * height), aspect="equal")
    axes.plot(*zip(*_line(updates), strict=True), "--", color="#9aa1ab", linewidth=1, zorder=1)
    for number, (gamma, tip) in enumerate(sorted(updates.by_gamma.items())):
        method, lines = _KNOWN.get(gamma, ("wsam", []))
        color = METHOD_STYLES[method].light
        arrow = {"arrowstyle": "-|>", "color": color, "linewidth": 2, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", tip, (0, 0), arrowprops=arrow)
        label = "\n".join([f"γ = {gamma:g}", f"{updates.angle(gamma):.0f}°", *lines])
        # Neighbors are close: every second label is higher.
        above = 8 + 46 * (number % 2)
        style: Any = {"textcoords": "offset points", "ha": "center", "va": "bottom", "color": color}
        leader = {"arrowstyle": "-", "color": "#c3c9d2", "linewidth": 1, "shrinkB": 4}
        axes.annotate(label, tip, (0, above), arrowprops=leader, **style)
    axes.plot(0, 0, "o", color=TEXT_COLOR, markersize=5)
    axes.set(xlabel="derivative by μ", ylabel="derivative by σ")
    axes.locator_params(nbins=4)


def _line(updates: Updates) -> Sequence[tuple[float, float]]:
    """Return the ends of the line through the tips of all updates."""
    largest = max([*updates.by_gamma, 0.5])
    k = largest / (1 - largest)
    (ax, ay), (bx, by) = updates.first, updates.second
    return [(ax, ay), (ax + k * (bx - ax), ay + k * (by - ay))]
