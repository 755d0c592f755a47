"""Figure of trajectories over the contours of the toy loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wsam._utils.plot_style import (
    COLORS,
    FIGURE_WIDTH,
    MUTED_COLOR,
    RC_PARAMS,
    TEXT_COLOR,
    new_figure,
)
from wsam.toy import FLAT, RULES, SADDLE, SHARP, Trajectory, loss, places
from wsam.toy.trajectory import RULES_WITH_GAMMA, verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REGION = (-33.0, 33.0, 3.0, 41.0)
"""The plotted region: minimum and maximum of mu, minimum and maximum of sigma."""
LEVELS = (
    *(0.28, 0.29, 0.3, 0.32, 0.34, 0.36, 0.38, 0.3977),
    *(0.42, 0.45, 0.49, 0.55, 0.65, 0.8, 1.0, 1.3),
)
"""Contour levels of the loss. The level 0.3977 passes through the saddle."""
LOSS_COLORS = ("#7fb0d3", "#b9d3e4", "#e3ecf0", "#fbfaf6")
"""Colors of the map, from the lowest loss to the highest."""
STROKES: dict[str, tuple[float, str]] = {
    "sgd": (2.0, "solid"),
    "sam": (4.0, "solid"),
    "gsam": (1.6, "dashed"),  # covers SAM's path: dashes on a wide line keep both visible
    "wsam": (2.0, "solid"),
    "coupled_wsam": (2.0, "solid"),
}


def plot_trajectories(runs: Sequence[Trajectory]) -> Figure:
    """Draw runs of the toy example, one panel for each gamma, with SAM and GSAM in every panel.

    The title of a panel names the minimum at which each form of WSAM ends. Without a run that has
    a gamma, there is one panel without a title.

    Args:
        runs: Results of `wsam.toy.trace`, at least one.
    """
    from matplotlib import rc_context

    weighted = {run.setting.gamma for run in runs if run.setting.rule in RULES_WITH_GAMMA}
    gammas: list[float | None] = [*sorted(weighted)] or [None]
    with rc_context(RC_PARAMS):
        figure = new_figure(FIGURE_WIDTH, 3.4 * len(gammas) + 0.8)
        all_axes = figure.subplots(len(gammas), 1, sharex=True, squeeze=False)[:, 0]
        for axes, gamma in zip(all_axes, gammas, strict=True):
            shown = [
                r
                for r in runs
                if r.setting.rule not in RULES_WITH_GAMMA or r.setting.gamma == gamma
            ]
            _draw_loss(axes)
            for run in shown:
                _draw_path(axes, run)
            _draw_landmarks(axes, shown[0].setting.start)
            if gamma is not None:
                axes.set_title(f"γ = {gamma:g}: {verdict(shown)}", loc="left", fontsize=11)
        all_axes[-1].set_xlabel("μ")
        handles, labels = all_axes[0].get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="outside lower left",
            ncols=len(labels),
            handlelength=1.4,
            columnspacing=1.2,
        )
    return figure


def _draw_loss(axes: Axes) -> None:
    import numpy as np
    import torch
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    left, right, bottom, top = REGION
    mu, sigma = np.meshgrid(np.linspace(left, right, 133), np.linspace(bottom, top, 77))
    height = loss(torch.from_numpy(np.stack([mu, sigma], axis=-1))).numpy()
    colors = LinearSegmentedColormap.from_list("loss", LOSS_COLORS)
    norm = PowerNorm(0.55, vmin=0.27, vmax=0.8)
    fill: Any = {"cmap": colors, "norm": norm, "extend": "both"}
    lines: Any = {"colors": "#284664", "linewidths": 0.6, "alpha": 0.3}
    axes.contourf(mu, sigma, height, levels=LEVELS, **fill).set_rasterized(True)
    axes.contour(mu, sigma, height, levels=LEVELS, **lines)
    axes.set(xlim=(left, right), ylim=(bottom, top), ylabel="σ", aspect="equal")


def _draw_path(axes: Axes, run: Trajectory) -> None:
    from matplotlib.patheffects import Normal, Stroke

    rule = run.setting.rule
    mu, sigma = zip(*run.points, strict=True)
    width, dashes = STROKES[rule]
    stroke: dict[str, Any] = {"color": COLORS[rule], "linewidth": width, "linestyle": dashes}
    (line,) = axes.plot(mu, sigma, label=RULES[rule], **stroke)
    if dashes == "solid":
        line.set_path_effects(
            [Stroke(linewidth=width + 1.8, foreground="white", alpha=0.8), Normal()]
        )
    axes.plot(*run.end, "o", color=COLORS[rule], markersize=6.5, markeredgecolor="white", zorder=4)


def _draw_landmarks(axes: Axes, start: tuple[float, float]) -> None:
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=3, foreground="white", alpha=0.9)]
    offsets = {SHARP: (-22, -32), FLAT: (0, 13), SADDLE: (0, -20)}
    for place in places():
        marker = "x" if place.name == SADDLE else "+"
        axes.plot(
            *place.point, marker, color=TEXT_COLOR, markersize=10, markeredgewidth=1.8, zorder=5
        )
        name = place.name if place.name == SADDLE else f"{place.name} minimum"
        axes.annotate(
            f"{name} {place.loss:.3f}",
            place.point,
            offsets[place.name],
            textcoords="offset points",
            ha="center",
            fontsize=10,
            path_effects=halo,
        )
    axes.plot(*start, "o", color="white", markersize=7, markeredgecolor=TEXT_COLOR, zorder=5)
    axes.annotate(
        "start",
        start,
        (9, -4),
        textcoords="offset points",
        ha="left",
        fontsize=10,
        color=MUTED_COLOR,
        path_effects=halo,
    )
