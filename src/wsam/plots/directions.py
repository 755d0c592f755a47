"""The direction of the update as a function of gamma."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from wsam.plot_style import COLORS, METHOD_STYLES, MUTED_COLOR, RC_PARAMS, TEXT_COLOR, new_figure
from wsam.toy import Updates, updates

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def directions(fan: Updates) -> Figure:
    """Draw both gradients, the update for every gamma, and its angle to the first gradient.

    Args:
        fan: A result of `wsam.toy.updates`.
    """
    from matplotlib import rc_context

    with rc_context(RC_PARAMS):
        figure = new_figure(9.6, 4.6)
        arrows, angles = figure.subplots(1, 2, width_ratios=(1.15, 1))
        _arrows(arrows, fan)
        _angles(angles, fan)
    return figure


def _arrows(axes: Axes, fan: Updates) -> None:
    from matplotlib import colormaps

    shade = colormaps["plasma"]
    tips = [fan.first, fan.second, *fan.by_gamma.values()]
    axes.plot(*zip(*_line(fan), strict=True), "--", color="#9aa1ab", linewidth=1, zorder=1)
    for gamma, tip in fan.by_gamma.items():
        color = {0.0: COLORS["sgd"], 0.5: METHOD_STYLES["sam"].light}.get(
            gamma, shade(0.15 + 0.65 * gamma)
        )
        arrow = {"arrowstyle": "-|>", "color": color, "linewidth": 2, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", tip, (0, 0), arrowprops=arrow)
        name = {0.0: " = g₀", 0.5: " = g₁, SAM"}.get(gamma, "")
        _label_arrow(axes, f"γ = {gamma:g}{name}", tip, color)
    axes.plot(0, 0, "o", color=TEXT_COLOR, markersize=4)
    xs, ys = [t[0] for t in tips] + [0.0], [t[1] for t in tips] + [0.0]
    size = max(max(xs) - min(xs), max(ys) - min(ys))
    axes.set(xlim=(min(xs) - 0.2 * size, max(xs) + 0.25 * size), aspect="equal")
    axes.set_ylim(min(ys) - 0.05 * size, max(ys) + 0.45 * size)
    axes.set_title("The update g₀ + k(g₁ − g₀), k = γ/(1 − γ)", loc="left")
    axes.set(xlabel="∂/∂μ", ylabel="∂/∂σ")
    axes.ticklabel_format(style="sci", scilimits=(0, 0))


def _label_arrow(axes: Axes, text: str, tip: tuple[float, float], color: object) -> None:
    """Write a label beyond the tip of an arrow, rotated like it, so that labels do not overlap."""
    angle = math.degrees(math.atan2(tip[1], tip[0]))
    back = abs(angle) > 90  # keep the text upright
    length = math.hypot(*tip)
    axes.annotate(
        text,
        tip,
        (7 * tip[0] / length, 7 * tip[1] / length),
        textcoords="offset points",
        rotation=angle - 180 if back else angle,
        rotation_mode="anchor",
        ha="right" if back else "left",
        va="center",
        color=color,
    )


def _line(fan: Updates) -> Sequence[tuple[float, float]]:
    """Return the ends of the line through the tips of all updates."""
    largest = max([*fan.by_gamma, 0.5])
    k = largest / (1 - largest)
    (ax, ay), (bx, by) = fan.first, fan.second
    return [(ax, ay), (ax + k * (bx - ax), ay + k * (by - ay))]


def _angles(axes: Axes, fan: Updates) -> None:
    gammas = [i / 100 for i in range(0, 99, 2)]
    curve = updates(gammas, point=fan.point, rho=fan.rho)
    axes.plot(gammas, [curve.angle(g) for g in gammas], color=TEXT_COLOR, linewidth=1.6)
    for gamma in fan.by_gamma:
        axes.plot(gamma, fan.angle(gamma), "o", color=COLORS["wsam"], markersize=6)
    axes.axvspan(0, 0.5, color=COLORS["sam"], alpha=0.07, linewidth=0)
    axes.axvspan(0.5, 1, color=COLORS["wsam"], alpha=0.07, linewidth=0)
    top = axes.get_ylim()[1]
    axes.annotate("between\ng₀ and g₁", (0.25, top * 0.9), ha="center", va="top", color=MUTED_COLOR)
    axes.annotate("beyond g₁", (0.72, top * 0.9), ha="center", va="top", color=MUTED_COLOR)
    axes.set(xlabel="γ", ylabel="angle from g₀ (degrees)", xlim=(0, 1))
    mu, sigma = fan.point
    axes.set_title(f"Toy loss at ({mu:g}, {sigma:g}), ρ = {fan.rho:g}", loc="left")
