"""How gamma turns the update between the two gradients, and beyond."""

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
    """Draw the two gradients and every gamma's update, and the angle it turns by.

    Args:
        fan: as `wsam.toy.updates` returns it.
    """
    from matplotlib import rc_context

    with rc_context(RC_PARAMS):
        drawn = new_figure(9.6, 4.6)
        arrows, angles = drawn.subplots(1, 2, width_ratios=(1.15, 1))
        _arrows(arrows, fan)
        _angles(angles, fan)
    return drawn


def _arrows(panel: Axes, fan: Updates) -> None:
    from matplotlib import colormaps

    shade = colormaps["plasma"]
    tips = [fan.first, fan.second, *fan.by_gamma.values()]
    panel.plot(*zip(*_line(fan), strict=True), "--", color="#9aa1ab", linewidth=1, zorder=1)
    for gamma, tip in fan.by_gamma.items():
        color = {0.0: COLORS["sgd"], 0.5: METHOD_STYLES["sam"].light}.get(
            gamma, shade(0.15 + 0.65 * gamma)
        )
        arrow = {"arrowstyle": "-|>", "color": color, "linewidth": 2, "shrinkA": 0, "shrinkB": 0}
        panel.annotate("", tip, (0, 0), arrowprops=arrow)
        name = {0.0: " = g₀", 0.5: " = g₁, SAM"}.get(gamma, "")
        _along(panel, f"γ = {gamma:g}{name}", tip, color)
    panel.plot(0, 0, "o", color=TEXT_COLOR, markersize=4)
    xs, ys = [t[0] for t in tips] + [0.0], [t[1] for t in tips] + [0.0]
    size = max(max(xs) - min(xs), max(ys) - min(ys))
    panel.set(xlim=(min(xs) - 0.2 * size, max(xs) + 0.25 * size), aspect="equal")
    panel.set_ylim(min(ys) - 0.05 * size, max(ys) + 0.45 * size)
    panel.set_title("The update g₀ + k(g₁ − g₀), k = γ/(1 − γ)", loc="left")
    panel.set(xlabel="∂/∂μ", ylabel="∂/∂σ")
    panel.ticklabel_format(style="sci", scilimits=(0, 0))


def _along(panel: Axes, text: str, tip: tuple[float, float], color: object) -> None:
    """Write a label beyond an arrow's tip, along the arrow, so that near arrows do not clash."""
    angle = math.degrees(math.atan2(tip[1], tip[0]))
    back = abs(angle) > 90  # keep it upright
    length = math.hypot(*tip)
    panel.annotate(
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
    """Return the ends of the straight line that every update's tip lies on."""
    largest = max([*fan.by_gamma, 0.5])
    k = largest / (1 - largest)
    (ax, ay), (bx, by) = fan.first, fan.second
    return [(ax, ay), (ax + k * (bx - ax), ay + k * (by - ay))]


def _angles(panel: Axes, fan: Updates) -> None:
    gammas = [i / 100 for i in range(0, 99, 2)]
    curve = updates(gammas, point=fan.point, rho=fan.rho)
    panel.plot(gammas, [curve.angle(g) for g in gammas], color=TEXT_COLOR, linewidth=1.6)
    for gamma in fan.by_gamma:
        panel.plot(gamma, fan.angle(gamma), "o", color=COLORS["wsam"], markersize=6)
    panel.axvspan(0, 0.5, color=COLORS["sam"], alpha=0.07, linewidth=0)
    panel.axvspan(0.5, 1, color=COLORS["wsam"], alpha=0.07, linewidth=0)
    top = panel.get_ylim()[1]
    panel.annotate(
        "between\ng₀ and g₁", (0.25, top * 0.9), ha="center", va="top", color=MUTED_COLOR
    )
    panel.annotate("beyond g₁", (0.72, top * 0.9), ha="center", va="top", color=MUTED_COLOR)
    panel.set(xlabel="γ", ylabel="angle from g₀ (degrees)", xlim=(0, 1))
    mu, sigma = fan.point
    panel.set_title(f"Toy loss at ({mu:g}, {sigma:g}), ρ = {fan.rho:g}", loc="left")
