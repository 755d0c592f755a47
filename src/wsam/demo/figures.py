"""The figures of the demonstration, as PNG and SVG files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wsam._format import format_mean_std, mean_and_std
from wsam.demo.config import SAM, TUNED, WSAM
from wsam.demo.summary import Row, Summary
from wsam.demo.tuning import TuningResults
from wsam.plot_style import COLORS, MUTED_COLOR, RC_PARAMS, TEXT_COLOR, new_figure, save_figure
from wsam.report.charts import HeatMap, Point, draw_heat_map
from wsam.report.experiment import mean_curve, mean_slice

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CURVES = {
    "test_error": "test error (%)",
    "train_loss": "training loss",
    "sharpness": "sharpness in training, each at its own ρ",
}
_GRID_COLOR = "#eceef1"


def save_figures(summary: Summary, tuning: TuningResults, out: Path) -> list[Path]:
    """Draw all figures into a folder; return the paths."""
    from matplotlib import rc_context

    drawings: dict[str, Callable[[], Figure]] = {
        "curves": lambda: curves(summary),
        "errors": lambda: errors(summary),
        "landscape": lambda: landscape(summary),
        "map": lambda: tuning_map(tuning),
    }
    written = []
    for name, draw in drawings.items():
        with rc_context(RC_PARAMS):
            written += save_figure(draw(), out, name)
    return written


def _line_style(row: Row) -> dict[str, Any]:
    dashes = "--" if row.contender.name == TUNED else "-"
    return {"color": COLORS[row.contender.run.method], "linestyle": dashes}


def _label_with_radius(row: Row) -> str:
    """Return the name of a row and, if it has one, the radius of its training sharpness."""
    radius = row.contender.run.hyper.get("rho")
    return row.contender.name if radius is None else f"{row.contender.name}, ρ {radius:g}"


def _draw_band(axes: Axes, row: Row, points: Sequence[Point], label: str) -> None:
    """Draw means with a band of one standard deviation."""
    x, means = [point[0] for point in points], [point[1] or 0.0 for point in points]
    low = [mean - point[2] for mean, point in zip(means, points, strict=True)]
    high = [mean + point[2] for mean, point in zip(means, points, strict=True)]
    style = _line_style(row)
    axes.plot(x, means, linewidth=1.8, label=label, **style)
    axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)


def curves(summary: Summary) -> Figure:
    """Draw test error, training loss and sharpness over the epochs."""
    figure = new_figure(12.0, 3.9)
    all_axes = figure.subplots(1, len(_CURVES))
    for axes, (name, label) in zip(all_axes, _CURVES.items(), strict=True):
        for row in summary.rows.values():
            points = mean_curve(row.group, name)
            if points[-1][1] is not None:
                _draw_band(axes, row, points, _label_with_radius(row))
        axes.set_title(label, loc="left")
        axes.set(xlabel="epoch", ylim=(0, None))
        axes.grid(axis="y", color=_GRID_COLOR)
    all_axes[0].set_ylim(0, 50)
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def errors(summary: Summary) -> Figure:
    """Draw final test errors and top eigenvalues: means, standard deviations and single runs."""
    figure = new_figure(9.6, 3.2)
    all_axes = figure.subplots(1, 2, sharey=True)
    rows = list(summary.rows.values())
    columns: tuple[tuple[str, Callable[[Row], list[float]]], ...] = (
        ("test error (%)", lambda row: row.group.values("test_error")),
        ("top eigenvalue of the Hessian", lambda row: row.group.eigenvalues),
    )
    for axes, (label, get) in zip(all_axes, columns, strict=True):
        for at, row in enumerate(rows):
            _draw_dots(axes, at, get(row), _line_style(row)["color"])
        axes.set_xlabel(label)
        axes.set(xlim=(0, axes.get_xlim()[1] * 1.28), ylim=(len(rows) - 0.5, -0.7))
        axes.grid(axis="x", color=_GRID_COLOR)
        axes.tick_params(axis="y", length=0)
    all_axes[0].set_yticks(range(len(rows)), list(summary.rows))
    seeds = ", ".join(map(str, summary.seeds))
    several = len(summary.seeds) > 1
    all_axes[0].set_title(
        f"Mean and standard deviation, seeds {seeds}" if several else f"Seed {seeds} only",
        loc="left",
    )
    return figure


def _draw_dots(axes: Axes, at: int, values: list[float], color: str) -> None:
    mean, std = mean_and_std(values)
    assert mean is not None
    axes.plot(values, [at] * len(values), "o", color=color, alpha=0.35, markersize=4)
    axes.errorbar(mean, at, xerr=std, fmt="o", capsize=4, markersize=8, color=color)
    axes.annotate(
        format_mean_std(mean, std, "{:.1f}".format),
        (mean + (std or 0.0), at),
        (9, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        color=TEXT_COLOR,
    )


def landscape(summary: Summary) -> Figure:
    """Draw the training loss along a random direction through each minimum."""
    figure = new_figure(7.2, 4.2)
    axes = figure.subplots()
    for row in summary.rows.values():
        _draw_band(axes, row, mean_slice(row.group), row.contender.name)
    axes.set(xlabel="distance along a filter-normalised random direction", ylim=(0, None))
    axes.set_title("Training loss around the minima (wrong labels included)", loc="left")
    axes.grid(axis="y", color=_GRID_COLOR)
    axes.legend(loc="upper center")
    return figure


def error_heat_map(tuning: TuningResults) -> HeatMap:
    """Return WSAM's test error over rho and gamma."""
    cells = {
        (point.hyper["rho"], point.hyper["gamma"]): (
            point.failures if point.mean is None else point.mean
        )
        for point in tuning.points[WSAM]
    }
    best = tuning.best(WSAM).hyper
    return HeatMap(("ρ", "γ"), cells, (best["rho"], best["gamma"]))


def tuning_map(tuning: TuningResults) -> Figure:
    """Draw WSAM's test error over gamma and rho, and the tuning of SAM and SGD."""
    figure = new_figure(9.6, 4.6)
    grid, side = figure.subplots(1, 2, width_ratios=(1.7, 1))
    draw_heat_map(grid, error_heat_map(tuning), text=TEXT_COLOR, edge="white", muted=MUTED_COLOR)
    seeds = ", ".join(map(str, tuning.metadata["seeds"]))
    grid.set(xlabel="ρ", ylabel="γ")
    grid.set_title(f"WSAM's test error (%), mean of seeds {seeds}", loc="left")
    for name, axis, color in ((SAM, "rho", "sam"), (TUNED, "lr", "sgd")):
        points = tuning.points[name]
        x, y = [p.hyper[axis] for p in points], [p.mean for p in points]
        label = "SAM over ρ" if name == SAM else "SGD over its lr, twice the epochs"
        side.plot(x, y, "o-", color=COLORS[color], label=label, markersize=5)
    lowest = tuning.best(WSAM).mean or 0.0
    side.axhline(lowest, color=COLORS["wsam"], linewidth=1, linestyle=":")
    side.annotate(
        "WSAM as chosen",
        (0.0, lowest),
        (4, 4),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        color=COLORS["wsam"],
        fontsize=9,
    )
    side.set(xscale="log", xlabel="ρ or lr", ylim=(0, None))
    side.set_title("The same tuning of SAM and SGD", loc="left")
    side.legend(fontsize=9)
    return figure
