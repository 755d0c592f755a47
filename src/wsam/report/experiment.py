"""The section of an experiment: a table of its groups, error charts, curves, slices, heat maps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from wsam._utils.html import render
from wsam._utils.plot_style import method_title
from wsam._utils.text import format_mean_std, mean_and_std
from wsam.lab.records import Record
from wsam.lab.run import with_seed
from wsam.lab.settings import BASE_CLASSES, VANILLA
from wsam.lab.titles import GREEK, figure_column, figure_splits, metric_label
from wsam.lab.values import is_number
from wsam.report.charts import (
    HEAT_COLUMNS,
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
    MAX_LINES_PER_METHOD,
    Experiment,
    LabeledGroup,
    select_best,
)
from wsam.report.results import Group

_MAX_ROWS = 12
"""Rows of an error chart."""
MISSING = "–"
_OTHER_NUMBERS = ".4g"
"""Format of a metric that is not a percentage."""
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


def experiment_section(experiment: Experiment) -> Section:
    """Return the section of an experiment."""
    compared = select_best(experiment.groups, _MAX_ROWS)
    dots = error_figures(experiment, compared)
    curves = curve_figures(experiment)
    body = render(
        "report/templates/experiment.html",
        summary=summary_table(experiment),
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
    groups, metric = [item.group for item in experiment.groups], experiment.metric
    spec = ".2f" if metric["unit"] == "%" else _OTHER_NUMBERS
    columns = {
        metric_label(metric, split): [format_values(g.metric_values(split), spec) for g in groups]
        for split in figure_splits(metric)
    }
    columns |= {
        "train loss": [format_values(g.values("train_loss"), ".4f") for g in groups],
        "sharpness": [format_values(g.values("sharpness"), ".3f") for g in groups],
        "top eigenvalue": [format_values(g.eigenvalues, ".1f") for g in groups],
        "epochs": [str(g.run.epochs) for g in groups],
        "runs": [", ".join(filter(None, (str(len(g.finished)), g.failures))) for g in groups],
        "seconds per run": [MISSING if g.seconds is None else f"{g.seconds:.1f}" for g in groups],
    }
    kept = {head: texts for head, texts in columns.items() if set(texts) != {MISSING}}
    names = [item.name for item in experiment.groups]
    rows = list(zip(names, *kept.values(), strict=True))
    return Table(["method", *kept], rows, styles=[item.style for item in experiment.groups])


def metric_baseline(metric: Mapping[str, Any]) -> float:
    """Return the value from which a metric is drawn: that of a perfect model, in percent, or zero."""
    return 100.0 if metric["unit"] == "%" and not metric["lower_is_better"] else 0.0


def format_values(values: Sequence[float], spec: str) -> str:
    """Return ``4.3 ± 0.2``, the mean alone, or a dash.

    Args:
        values: The values.
        spec: Format of a number, such as ``.1f``.
    """
    mean, std = mean_and_std(values)
    return MISSING if mean is None else format_mean_std(mean, std, f"{{:{spec}}}".format)


# ---- captions ----


def selection_note(experiment: Experiment, shown: Sequence[LabeledGroup]) -> str:
    """Return which groups are shown; empty if all are."""
    if len(shown) == len(experiment.groups):
        return ""
    metric = experiment.metric
    return (
        f"{len(shown)} of {len(experiment.groups)} groups: the base, and those with the fewest "
        f"failures and the best {metric['split']} {metric['name']}, at most {MAX_LINES_PER_METHOD} "
        "per method."
    )


def _band_caption(shown: Sequence[LabeledGroup]) -> str:
    several = any(len(item.group.finished) > 1 for item in shown)
    band = " Mean over the seeds; band: one standard deviation." if several else ""
    return band + _failure_caption(shown)


def _failure_caption(shown: Sequence[LabeledGroup]) -> str:
    return " Failed runs are excluded." if any(item.group.failures for item in shown) else ""


# ---- figures ----


def error_figures(experiment: Experiment, shown: Sequence[LabeledGroup]) -> list[Figure]:
    """Return charts of the final test metric and, if measured, of the top eigenvalue."""
    metric = experiment.metric
    quantities: tuple[tuple[str, float, Callable[[Group], list[float]]], ...] = (
        (metric_label(metric, "Test"), metric_baseline(metric), Group.metric_values),
        ("Top eigenvalue of the Hessian", 0.0, lambda group: group.eigenvalues),
    )
    figures = []
    for label, baseline, get in quantities:
        rows = []
        for item in shown:
            values = get(item.group)
            mean, std = mean_and_std(values)
            if mean is not None:
                rows.append(DotRow(item.label, item.style, values, mean, std))
        if rows:
            several = any(len(row.values) > 1 for row in rows)
            spread = "Mean and sample standard deviation; small dots: single runs."
            caption = (spread if several else "One run each.") + _failure_caption(shown)
            chart = dot_chart(
                f"{label}: {experiment.title}", rows, label, log=True, baseline=baseline
            )
            figures.append(Figure(chart, caption))
    return figures


def curve_figures(experiment: Experiment) -> list[Figure]:
    """Return charts of error, loss and sharpness over the epochs."""
    shown, figures, metric = experiment.plotted, [], experiment.metric
    split = metric["split"]
    label = metric_label(metric, split.capitalize())
    column = figure_column(metric, split)
    caption = f"{split.capitalize()} {metric['name']} after each epoch."
    curves = {column: (label, caption)} | _CURVES
    for name, (label, caption) in curves.items():
        series = [
            Series(item.style, mean_curve([r.record for r in item.group.finished], name))
            for item in shown
        ]
        series = [one for one in series if any(point.mean is not None for point in one.points)]
        if series:
            title = f"{label} by epoch: {experiment.title}"
            baseline = metric_baseline(metric) if name == column else 0.0
            chart = line_chart(
                title, series, "epoch", label, log=True, integer_x=True, baseline=baseline
            )
            figures.append(Figure(chart, f"{caption}{_band_caption(shown)}"))
    return figures


def mean_curve(records: Iterable[Record], name: str) -> list[Point]:
    """Return mean and deviation of a figure for each epoch."""
    points = []
    for rows in zip(*(record["curve"] for record in records), strict=False):
        values = [float(row[name]) for row in rows if row.get(name) is not None]
        points.append(mean_point(rows[0]["epoch"], values))
    return points


def slice_figures(experiment: Experiment) -> list[Figure]:
    """Return a chart of the loss along a line through each minimum, if it was measured."""
    shown = [item for item in experiment.plotted if item.group.slices]
    if not shown:
        return []
    chart = line_chart(
        f"Training loss along a random direction: {experiment.title}",
        [Series(item.style, mean_slice(item.group)) for item in shown],
        "distance along a filter-normalized direction",
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
        mean_point(distance, values)
        for distance, values in zip(distances, zip(*losses, strict=True), strict=True)
    ]


def mean_point(x: float, values: Iterable[float]) -> Point:
    """Return mean and deviation of values as a point at x."""
    mean, std = mean_and_std(list(values))
    return Point(x, mean, std or 0.0)


def heat_figures(experiment: Experiment) -> list[Figure]:
    """Return a heat map of the metric for every method with a grid of two numbers."""
    by_method: dict[tuple[str, str], list[Group]] = {}
    for item in experiment.groups:
        by_method.setdefault((item.group.variant, item.group.run.base), []).append(item.group)
    bases = {base for _, base in by_method}
    figures = []
    for (method, base), groups in by_method.items():
        axes = _grid_axes(groups)
        if axes is not None:
            heat_map = error_map(groups, *axes)
            label = metric_label(experiment.metric, experiment.metric["split"].capitalize())
            name = BASE_CLASSES[base] if method == VANILLA else method_title(method)
            if len(bases) > 1 and method != VANILLA:
                name = f"{name} ({BASE_CLASSES[base]})"
            title = f"{label} of {name} by {' and '.join(a.replace('_', ' ') for a in axes)}"
            caption = f"{title}: {experiment.title}."
            figures.append(Figure(heat_chart(title, heat_map), caption, heat_table(heat_map)))
    return figures


def error_map(groups: Sequence[Group], x_name: str, y_name: str) -> HeatMap:
    """Return the mean metric of groups over two numbers, on the split that searches use.

    A group with failed runs shows their number instead: the mean of the others is not comparable.
    """
    cells: dict[tuple[float, float], float | str] = {}
    spec = ".1f" if groups[0].metric["unit"] == "%" else _OTHER_NUMBERS
    for group in groups:
        mean, _ = mean_and_std(group.metric_values(group.metric["split"]))
        value = group.failures or (MISSING if mean is None else mean)
        point = cast(float, _setting(group, x_name)), cast(float, _setting(group, y_name))
        cells[point] = value
    return HeatMap((GREEK.get(x_name, x_name), GREEK.get(y_name, y_name)), cells, spec=spec)


def _grid_axes(groups: Sequence[Group]) -> tuple[str, str] | None:
    """Return the two numbers that differ between groups, if nothing else differs.

    They are hyperparameters of the method or arguments of the base optimizer.
    """
    first = groups[0].run
    if len(groups) < 4 or any(group.run.hyper.keys() != first.hyper.keys() for group in groups):
        return None
    same = {"hyper": first.hyper, "base_args": first.base_args}
    if len({with_seed(group.run, 0).replace(**same).key for group in groups}) > 1:
        return None
    names = dict.fromkeys((*first.hyper, *first.base_args))
    counts = {name: len({str(_setting(group, name)) for group in groups}) for name in names}
    varied = [name for name in names if counts[name] > 1]
    if len(varied) != 2:
        return None
    if not all(is_number(_setting(group, name)) for group in groups for name in varied):
        return None
    x, y = sorted(varied, key=lambda name: name != "rho")  # rho is the horizontal axis
    return (y, x) if counts[x] > max(HEAT_COLUMNS, counts[y]) else (x, y)


def _setting(group: Group, name: str) -> object:
    return {**group.run.base_args, **group.run.hyper}[name]
