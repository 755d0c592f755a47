"""The figures of the demonstration, as PNG and SVG files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wsam._format import format_mean_std, mean_and_std
from wsam.demo.config import SAM, TUNED, WSAM
from wsam.demo.summary import Row, Summary
from wsam.demo.tuning import TuningResults
from wsam.plot_style import (
    FIGURE_WIDTH,
    GRID_COLOR,
    METHOD_STYLES,
    MUTED_COLOR,
    RC_PARAMS,
    TEXT_COLOR,
    label_points,
    new_figure,
    save_figure,
    set_title,
)
from wsam.report.charts import HeatMap, Point, draw_heat_map
from wsam.report.experiment import mean_curve, mean_slice

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Not the sharpness in training: each method measures it at its own radius.
_CURVES = {"test_error": "test error (%)", "train_loss": "training loss"}


def save_figures(summary: Summary, tuning: TuningResults, out: Path) -> list[Path]:
    """Draw all figures into a folder; return the paths."""
    from matplotlib import rc_context

    drawings: dict[str, Callable[[], Figure]] = {
        "curves": lambda: curves(summary),
        "errors": lambda: errors(summary),
        "landscape": lambda: landscape(summary),
        "map": lambda: tuning_map(tuning),
        "tuning": lambda: tuning_lines(tuning),
    }
    written = []
    for name, draw in drawings.items():
        with rc_context(RC_PARAMS):
            written += save_figure(draw(), out, name)
    return written


def _color(row: Row) -> str:
    return METHOD_STYLES[row.contender.run.method].light


def _draw_band(axes: Axes, row: Row, points: Sequence[Point]) -> tuple[float, float, str, str]:
    """Draw means with a band of one standard deviation; return the label of the right end."""
    x, means = [point[0] for point in points], [point[1] or 0.0 for point in points]
    low = [mean - point[2] for mean, point in zip(means, points, strict=True)]
    high = [mean + point[2] for mean, point in zip(means, points, strict=True)]
    color, dashes = _color(row), "--" if row.contender.name == TUNED else "-"
    axes.plot(x, means, linewidth=1.8, color=color, linestyle=dashes)
    axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    return x[-1], means[-1], row.contender.name, color


def _add_note(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=10, color=MUTED_COLOR)


def _seeds(summary: Summary) -> str:
    """Return what is drawn: a mean and a deviation, or a single run."""
    several = len(summary.seeds) > 1
    seeds = ", ".join(map(str, summary.seeds))
    return f"mean and deviation, seeds {seeds}" if several else f"seed {seeds} only"


def _lowest(values: Mapping[str, tuple[float, float | None]]) -> list[str]:
    """Return the names with the lowest mean, and those that differ by less than their deviations."""
    best = min(values, key=lambda name: values[name][0])
    mean, std = values[best]
    near = [
        name
        for name, (other, deviation) in values.items()
        if name != best and other - mean <= (std or 0.0) + (deviation or 0.0)
    ]
    return [*near, best]


def _lowest_rows(summary: Summary, figure: str) -> list[str]:
    return _lowest({name: row.figures[figure] for name, row in summary.rows.items()})


def curves(summary: Summary) -> Figure:
    """Draw test error and training loss over the epochs."""
    figure = new_figure(FIGURE_WIDTH, 6.0)
    all_axes = figure.subplots(len(_CURVES), 1)
    all_labels = []
    for axes, (name, label) in zip(all_axes, _CURVES.items(), strict=True):
        labels = [
            _draw_band(axes, row, points)
            for row in summary.rows.values()
            if (points := _curve(row, name))[-1][1] is not None
        ]
        axes.set(ylabel=label, ylim=(0, 50 if name == "test_error" else None))
        axes.set_xlim(0, max(x for x, *_ in labels))
        axes.grid(axis="y", color=GRID_COLOR)
        all_labels.append(labels)
    _add_note(all_axes[0], _seeds(summary))
    all_axes[-1].set_xlabel("gradients per training image")
    best = _lowest_rows(summary, "test_error")
    set_title(figure, f"Lowest test error at equal cost: {' and '.join(best)}")
    for axes, labels in zip(all_axes, all_labels, strict=True):
        label_points(axes, labels)
    return figure


def _curve(row: Row, name: str) -> list[Point]:
    """Return a curve over the cost: the base computes one gradient per image, the others two."""
    gradients = 1 if row.contender.run.method == "vanilla" else 2
    return [(gradients * epoch, mean, std) for epoch, mean, std in mean_curve(row.group, name)]


def errors(summary: Summary) -> Figure:
    """Draw final test errors and top eigenvalues: means, standard deviations and single runs."""
    figure = new_figure(FIGURE_WIDTH, 4.6)
    all_axes = figure.subplots(2, 1)
    rows = list(summary.rows.values())
    columns: tuple[tuple[str, Callable[[Row], list[float]]], ...] = (
        ("test error (%)", lambda row: row.group.values("test_error")),
        ("top eigenvalue of the Hessian", lambda row: row.group.eigenvalues),
    )
    for axes, (label, get) in zip(all_axes, columns, strict=True):
        for at, row in enumerate(rows):
            _draw_dots(axes, at, get(row), _color(row))
        axes.set_xlabel(label)
        axes.set(xlim=(0, axes.get_xlim()[1] * 1.3), ylim=(len(rows) - 0.5, -0.7))
        axes.grid(axis="x", color=GRID_COLOR)
        axes.tick_params(axis="y", length=0)
        axes.set_yticks(range(len(rows)), list(summary.rows))
    _add_note(all_axes[0], _seeds(summary))
    best = [" and ".join(_lowest_rows(summary, name)) for name in ("test_error", "top_eigenvalue")]
    set_title(figure, f"Lowest error: {best[0]}\nFlattest minimum: {best[1]}")
    return figure


def _draw_dots(axes: Axes, at: int, values: list[float], color: str) -> None:
    mean, std = mean_and_std(values)
    assert mean is not None
    axes.plot(values, [at] * len(values), "o", color=color, alpha=0.35, markersize=4)
    face = color if len(values) > 1 else "white"
    axes.errorbar(mean, at, xerr=std, fmt="o", capsize=4, markersize=8, color=color, mfc=face)
    axes.annotate(
        format_mean_std(mean, std, "{:.1f}".format),
        (mean + (std or 0.0), at),
        (9, 0),
        textcoords="offset points",
        va="center",
        color=TEXT_COLOR,
    )


def landscape(summary: Summary) -> Figure:
    """Draw the training loss along a random direction through each minimum."""
    figure = new_figure(FIGURE_WIDTH, 4.0)
    axes = figure.subplots()
    slices = {name: mean_slice(row.group) for name, row in summary.rows.items()}
    labels = [_draw_band(axes, row, slices[name]) for name, row in summary.rows.items()]
    axes.set(xlabel="distance along a random direction", ylabel="training loss")
    axes.set(ylim=(0, None), xlim=(-1, 1))
    axes.grid(axis="y", color=GRID_COLOR)
    _add_note(axes, f"direction with the norms of the filters; {_seeds(summary)}")
    axes.locator_params(axis="x", nbins=5)
    ends = {name: (points[-1][1] or 0.0, points[-1][2]) for name, points in slices.items()}
    set_title(figure, f"The loss rises least around the minima of {' and '.join(_lowest(ends))}")
    label_points(axes, labels)
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
    """Draw WSAM's test error over gamma and rho."""
    figure = new_figure(FIGURE_WIDTH, 4.4)
    axes = figure.subplots()
    draw_heat_map(axes, error_heat_map(tuning), text=TEXT_COLOR, edge="white", muted=MUTED_COLOR)
    axes.set(xlabel="ρ", ylabel="γ")
    _add_note(axes, f"test error (%), mean of seeds {_tuning_seeds(tuning)}; framed: chosen")
    set_title(figure, "A larger γ needs a smaller ρ: WSAM's errors form a valley")
    return figure


def tuning_lines(tuning: TuningResults) -> Figure:
    """Draw the test errors of SAM over rho and of SGD over its learning rate, with WSAM's."""
    figure = new_figure(FIGURE_WIDTH, 3.6)
    all_axes = figure.subplots(1, 2, sharey=True)
    rows = ((SAM, "rho", "sam", "ρ", "SAM"), (TUNED, "lr", "vanilla", "learning rate", "SGD"))
    lowest = tuning.best(WSAM).mean or 0.0
    for axes, (name, key, method, label, title) in zip(all_axes, rows, strict=True):
        color = METHOD_STYLES[method].light
        points = [(p.hyper[key], p.mean) for p in tuning.points[name] if p.mean is not None]
        axes.plot(*zip(*points, strict=True), "o-", color=color, markersize=6)
        axes.axhline(lowest, color=METHOD_STYLES["wsam"].light, linewidth=1.5, linestyle="--")
        axes.set(xscale="log", xlabel=label)
        axes.set_title(title, loc="left", color=color)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(axis="y", color=GRID_COLOR)
    all_axes[0].set(ylabel="test error (%)", ylim=(0, None))
    style: Any = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    style |= {"color": METHOD_STYLES["wsam"].light, "va": "top"}
    all_axes[0].annotate(f"WSAM {lowest:.1f}", (0.02, lowest), (0, -4), **style)
    names = {WSAM: "WSAM", SAM: "SAM", TUNED: "SGD"}
    best = (f"{title} {tuning.best(name).mean:.1f}%" for name, title in names.items())
    set_title(figure, f"At their best settings: {', '.join(best)}")
    return figure


def _tuning_seeds(tuning: TuningResults) -> str:
    return ", ".join(map(str, tuning.metadata["seeds"]))
