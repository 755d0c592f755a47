"""Test errors of the demonstration and the loss around its weights, from the record of `make demo`."""

import statistics
from typing import Any

from matplotlib.figure import Figure

from wsam._utils.plot_style import (
    FIGURE_WIDTH,
    GRID_COLOR,
    METHOD_STYLES,
    MUTED_COLOR,
    label_points,
    new_figure,
    set_title,
)


def read_rows(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the results by the names of the methods in `METHOD_STYLES`."""
    return {"vanilla" if name == "base" else name: row for name, row in record["methods"].items()}


def run_keys(record: dict[str, Any]) -> list[str]:
    """Return the keys of all runs."""
    return [key for row in record["methods"].values() for key in row["keys"]]


def is_better(row: dict[str, Any]) -> bool:
    """Return whether a method has a significantly lower error than SGD, corrected by Holm."""
    better = row.get("improvement")
    return bool(better and better["p_holm"] < 0.05 and better["mean"] > 0)


def draw_errors(record: dict[str, Any]) -> Figure:
    """Draw the test error of each method with its confidence interval."""
    rows = read_rows(record)
    figure = new_figure(FIGURE_WIDTH, 2.8)
    axes = figure.subplots()
    for at, (method, row) in enumerate(rows.items()):
        color, values = METHOD_STYLES[method].light, list(row["values"].values())
        axes.plot(values, [at] * len(values), "o", color=color, alpha=0.35, markersize=4)
        bar = {"xerr": row["interval"], "capsize": 4, "markersize": 8}
        axes.errorbar(row["mean"], at, fmt="o", color=color, **bar)
        text = f"{row['mean']:.1f} ± {row['interval']:.1f}"
        axes.annotate(text, (row["mean"], at), (0, 9), textcoords="offset points", ha="center")
    axes.set(xlim=(0, None), ylim=(len(rows) - 0.5, -0.7), xlabel="test error (%)")
    axes.set_yticks(range(len(rows)), [row["title"] for row in rows.values()])
    axes.grid(axis="x", color=GRID_COLOR)
    axes.tick_params(axis="y", length=0)
    note = f"mean of {len(record['seeds'])} seeds with its 95% confidence interval"
    axes.set_title(note, loc="left", fontsize=10, color=MUTED_COLOR)
    lower = [row["title"] for row in rows.values() if is_better(row)]
    verb = "lower" if len(lower) > 1 else "lowers"
    message = f"{' and '.join(lower)} {verb} the error of tuned SGD"
    set_title(figure, f"{message}\nat equal passes")
    return figure


def draw_landscape(record: dict[str, Any]) -> Figure:
    """Draw the training loss around the weights of each method."""
    rows, distances = read_rows(record), record["slice"]["distances"]
    figure = new_figure(FIGURE_WIDTH, 4.0)
    axes = figure.subplots()
    labels = []
    for method, row in rows.items():
        color, losses = METHOD_STYLES[method].light, list(zip(*row["slices"], strict=True))
        means = [statistics.fmean(values) for values in losses]
        spread = [statistics.stdev(values) for values in losses]
        axes.plot(distances, means, linewidth=1.8, color=color)
        low = [mean - std for mean, std in zip(means, spread, strict=True)]
        high = [mean + std for mean, std in zip(means, spread, strict=True)]
        axes.fill_between(distances, low, high, color=color, alpha=0.15, linewidth=0)
        labels.append((distances[-1], means[-1], row["title"], color))
    axes.set(xlabel="distance along a random direction", ylabel="training loss", xlim=(-1, 1))
    axes.grid(axis="y", color=GRID_COLOR)
    axes.locator_params(axis="x", nbins=5)
    note = f"direction with the norms of the filters; {len(record['seeds'])} seeds"
    axes.set_title(note, loc="left", fontsize=10, color=MUTED_COLOR)
    set_title(
        figure,
        "Along a random direction, the loss rises\nless around the weights of SAM and WSAM",
    )
    label_points(axes, labels)
    return figure
