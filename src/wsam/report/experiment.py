"""The section of an experiment: a table of its groups, error charts, curves, slices, heat maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from wsam._format import format_mean_std, mean_and_std
from wsam.plot_style import method_title
from wsam.plots.html import render
from wsam.report.charts import (
    DotRow,
    HeatMap,
    Point,
    Series,
    dot_chart,
    heat_chart,
    line_chart,
)
from wsam.report.elements import Figure, Section, Table, heat_table
from wsam.report.labels import (
    GREEK,
    MAX_LINES_PER_METHOD,
    Experiment,
    LabeledGroup,
    select_best,
)
from wsam.report.results import Group

_MAX_ROWS = 12
"""Rows of an error chart."""
MISSING = "–"
_CURVES = {
    "train_loss": (
        "Training loss",
        "Mean training loss of each epoch, at the unperturbed weights w.",
    ),
    "sharpness": (
        "Sharpness",
        "Mean sharpness of each epoch, L(w + d) − L(w) in training, at each method's own radius: "
        "not comparable between radii.",
    ),
}


def experiment_section(experiment: Experiment, with_table: bool = True) -> Section:
    """Return the section of an experiment.

    Args:
        experiment: The experiment.
        with_table: Whether it starts with the table of its groups.
    """
    compared = select_best(experiment.groups, _MAX_ROWS)
    dots = error_figures(experiment, compared)
    curves = curve_figures(experiment)
    body = render(
        "report/templates/experiment.html",
        summary=summary_table(experiment) if with_table else None,
        dots=[*dots, *heat_figures(experiment)] if dots else [],
        dots_note=selection_note(experiment, compared),
        curves=[*curves, *slice_figures(experiment)] if curves else [],
        curves_note=selection_note(experiment, experiment.plotted),
        plotted=experiment.plotted,
    )
    return Section(experiment.title, body)


# ---- table ----


def summary_table(experiment: Experiment) -> Table:
    """Return the table of an experiment, one row per group. Empty columns are omitted."""
    groups = [item.group for item in experiment.groups]
    columns = {
        metric_label(groups[0]): [
            format_values(g.figures, ".2f" if g.metric["unit"] == "%" else ".4g") for g in groups
        ],
        "train loss": [format_values(g.values("train_loss"), ".4f") for g in groups],
        "sharpness": [format_values(g.values("sharpness"), ".3f") for g in groups],
        "top eigenvalue": [format_values(g.eigenvalues, ".1f") for g in groups],
        "epochs": [str(g.run.epochs) for g in groups],
        "runs": [", ".join(filter(None, (str(len(g.finished)), g.failures))) for g in groups],
        "seconds per run": [format_values(_mean_only(g.seconds), ".1f") for g in groups],
    }
    kept = {head: texts for head, texts in columns.items() if set(texts) != {MISSING}}
    names = [item.name for item in experiment.groups]
    rows = list(zip(names, *kept.values(), strict=True))
    return Table(["method", *kept], rows, styles=[item.style for item in experiment.groups])


def metric_label(group: Group, split: str = "test") -> str:
    """Return the name of the runs' metric with its unit: ``test error (%)``."""
    metric = group.metric
    unit = f" ({metric['unit']})" if metric["unit"] else ""
    return f"{split} {metric['name']}{unit}"


def format_values(values: Sequence[float], spec: str) -> str:
    """Return ``4.3 ± 0.2``, the mean alone, or a dash.

    Args:
        values: The values.
        spec: Format of a number, such as ``.1f``.
    """
    mean, std = mean_and_std(values)
    return MISSING if mean is None else format_mean_std(mean, std, f"{{:{spec}}}".format)


def _mean_only(values: Sequence[float]) -> list[float]:
    mean, _ = mean_and_std(values)
    return [] if mean is None else [mean]


# ---- captions ----


def selection_note(experiment: Experiment, shown: Sequence[LabeledGroup]) -> str:
    """Return which groups are shown; empty if all are."""
    if len(shown) == len(experiment.groups):
        return ""
    return (
        f"{len(shown)} of {len(experiment.groups)} groups: those with the fewest failures and the "
        f"smallest errors, at most {MAX_LINES_PER_METHOD} per method."
    )


def _band_caption(shown: Sequence[LabeledGroup]) -> str:
    several = any(len(item.group.finished) > 1 for item in shown)
    band = " Mean over the seeds; band: one standard deviation." if several else ""
    return band + _failure_caption(shown)


def _failure_caption(shown: Sequence[LabeledGroup]) -> str:
    return " Failed runs are excluded." if any(item.group.failures for item in shown) else ""


# ---- figures ----


def error_figures(experiment: Experiment, shown: Sequence[LabeledGroup]) -> list[Figure]:
    """Return charts of the final metric and, if measured, of the top eigenvalue."""
    quantities: tuple[tuple[str, Callable[[Group], list[float]]], ...] = (
        (_capitalized(metric_label(experiment.groups[0].group)), lambda group: group.figures),
        ("Top eigenvalue of the Hessian", lambda group: group.eigenvalues),
    )
    figures = []
    for label, get in quantities:
        rows = [_dot_row(item, get(item.group)) for item in shown if get(item.group)]
        if rows:
            several = any(len(row.values) > 1 for row in rows)
            spread = "Mean and sample standard deviation; small dots: single runs."
            caption = (spread if several else "One run each.") + _failure_caption(shown)
            chart = dot_chart(f"{label}: {experiment.title}", rows, label, log=True)
            figures.append(Figure(chart, caption))
    return figures


def _dot_row(item: LabeledGroup, values: list[float]) -> DotRow:
    mean, std = mean_and_std(values)
    assert mean is not None
    return DotRow(item.label, item.style, values, mean, std)


def curve_figures(experiment: Experiment) -> list[Figure]:
    """Return charts of metric, loss and sharpness over the epochs."""
    shown, figures = experiment.plotted, []
    group = experiment.groups[0].group
    name, split = str(group.metric["name"]), str(group.metric["split"])
    column = f"{split}_{name}".replace("-", "_")
    title = _capitalized(metric_label(group, split))
    first = {column: (title, f"{_capitalized(f'{split} {name}')} after each epoch.")}
    for name, (label, caption) in {**first, **_CURVES}.items():
        series = [Series(item.style, mean_curve(item.group, name)) for item in shown]
        series = [one for one in series if any(point[1] is not None for point in one.points)]
        if series:
            title = f"{label} by epoch: {experiment.title}"
            chart = line_chart(title, series, "epoch", label, log=True, integer_x=True)
            figures.append(Figure(chart, f"{caption}{_band_caption(shown)}"))
    return figures


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def mean_curve(group: Group, name: str) -> list[Point]:
    """Return mean and deviation of a figure for each epoch."""
    curves = [result.record["curve"] for result in group.finished]
    points = []
    for rows in zip(*curves, strict=False):
        values = [float(row[name]) for row in rows if row.get(name) is not None]
        points.append(_point(rows[0]["epoch"], values))
    return points


def slice_figures(experiment: Experiment) -> list[Figure]:
    """Return a chart of the loss along a line through each minimum, if it was measured."""
    shown = [item for item in experiment.plotted if item.group.slices]
    if not shown:
        return []
    chart = line_chart(
        f"Training loss along a random direction: {experiment.title}",
        [Series(item.style, mean_slice(item.group)) for item in shown],
        "distance along a filter-normalised direction",
        "Training loss around the minimum",
    )
    caption = (
        "The training loss around each minimum. At distance 1 the displacement of every filter has "
        "the norm of the filter."
    )
    return [Figure(chart, caption + _band_caption(shown))]


def mean_slice(group: Group) -> list[Point]:
    """Return mean and deviation of the loss for each distance from the minimum."""
    distances, losses = group.slices[0][0], [losses for _, losses in group.slices]
    return [
        _point(distance, values)
        for distance, values in zip(distances, zip(*losses, strict=True), strict=True)
    ]


def _point(x: float, values: Iterable[float]) -> Point:
    mean, std = mean_and_std(list(values))
    return x, mean, std or 0.0


def heat_figures(experiment: Experiment) -> list[Figure]:
    """Return a heat map of the error for every method with a grid of two hyperparameters."""
    by_method: dict[str, list[Group]] = {}
    for item in experiment.groups:
        by_method.setdefault(item.group.run.method, []).append(item.group)
    figures = []
    for method, groups in by_method.items():
        axes = _grid_axes(groups)
        if axes is not None:
            heat_map = error_map(groups, *axes)
            title = f"Test error (%) of {method_title(method)} by {axes[0]} and {axes[1]}"
            caption = f"{title}: {experiment.title}."
            figures.append(Figure(heat_chart(title, heat_map), caption, heat_table(heat_map)))
    return figures


def error_map(groups: Sequence[Group], x_name: str, y_name: str) -> HeatMap:
    """Return the mean errors of groups over two hyperparameters.

    A group with failed runs shows their number instead: the mean of the others is not comparable.
    """
    cells: dict[tuple[float, float], float | str] = {}
    for group in groups:
        mean, _ = mean_and_std(group.figures)
        value = group.failures or (MISSING if mean is None else mean)
        cells[_hyper(group, x_name), _hyper(group, y_name)] = value
    return HeatMap((GREEK.get(x_name, x_name), GREEK.get(y_name, y_name)), cells)


def _grid_axes(groups: Sequence[Group]) -> tuple[str, str] | None:
    """Return the two hyperparameters that differ between groups, if nothing else differs."""
    rest = {g.run.replace(hyper={}, seed=0, noise_seed=0).key for g in groups}
    varied = [n for n in groups[0].run.hyper if len({str(g.run.hyper[n]) for g in groups}) > 1]
    if len(groups) < 4 or len(rest) > 1 or len(varied) != 2:
        return None
    first, second = sorted(varied, key=lambda name: name != "rho")  # rho is the horizontal axis
    return first, second


def _hyper(group: Group, name: str) -> float:
    value = group.run.hyper[name]
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
