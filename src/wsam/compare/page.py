"""The page of a comparison, as one HTML file in the style of the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from wsam._utils.html import render
from wsam._utils.significance import interval
from wsam._utils.text import mean_and_std, pluralize
from wsam.compare.command import command
from wsam.compare.contenders import BASE
from wsam.compare.formatting import format_number, format_p, format_point, format_seconds
from wsam.compare.sharpness import DISTANCES, RADIUS
from wsam.compare.summary import Row, Summary
from wsam.lab.run import Run
from wsam.lab.titles import GREEK, experiment_title, figure_column, format_figure, metric_label
from wsam.report import sections
from wsam.report.charts import DotRow, Point, Series, dot_chart, line_chart
from wsam.report.elements import Figure, Section, Table, render_page
from wsam.report.experiment import MISSING, mean_curve, mean_point, metric_baseline
from wsam.report.labels import Experiment, LabeledGroup
from wsam.report.results import Group, Result


def page(
    summary: Summary, *, title: str | None = None, lead: str = "", last: Sequence[Section] = ()
) -> str:
    """Return the page of a comparison as HTML.

    Args:
        summary: Its figures.
        title: The heading. Default: methods and problem.
        lead: Text after the sentence that answers the question.
        last: Sections at the end.
    """
    from markupsafe import Markup

    run = summary.state.request.run
    experiment = _experiment(summary)
    results = [result for item in experiment.groups for result in item.group.results]
    parts = [
        _results_section(summary),
        _curves_section(summary),
        _search_section(summary),
        _method_section(summary),
        sections.environment_section(results),
        sections.reproduce_section([experiment]) if results else None,
        *last,
    ]
    names = ", ".join(row.method.title for row in summary.rows.values())
    rest = lead or f"{pluralize(len(summary.compared), 'method')} compared with the base."
    answer = Markup("<strong>{}</strong> {}").format(summary.sentence, rest)
    return render_page(title or f"{names} on {experiment_title(run)}", answer, parts)


def _experiment(summary: Summary) -> Experiment:
    """Return the final runs as groups of the report."""
    groups = []
    for row in summary.rows.values():
        results = tuple(
            Result(Run.from_dict(record["settings"]), record) for record in row.records.values()
        )
        if results:
            group = Group(results[0].run, results)
            groups.append(LabeledGroup(group, row.method.title, row.method.style))
    return Experiment(experiment_title(summary.state.request.run), tuple(groups))


# ---- table ----


def table_heads(summary: Summary) -> list[str]:
    """Return the headings of the table of results."""
    figure = metric_label(summary.metric, "test")
    return ["method", figure, "better by", "p", "cost", "epochs", "sharpness"]


def table_rows(summary: Summary) -> list[list[str]]:
    """Return the cells of the table of results, one row for each method."""
    unit = summary.metric["unit"]
    rows = []
    for row in summary.rows.values():
        difference = row.difference
        gain = p = MISSING
        if difference is not None:
            gain = format_number(difference.mean, unit, difference.interval)
            p = format_p(difference.p_holm).removeprefix("p ").removeprefix("= ")
        sharpness, _ = mean_and_std(row.sharpness)
        rows.append(
            [
                row.method.title + _missing_seeds(summary, row),
                MISSING if row.mean is None else format_number(row.mean, unit, row.interval),
                gain,
                p,
                f"{row.cost:.2f}",
                str(row.epochs),
                MISSING if sharpness is None else f"{sharpness:.3g}",
            ]
        )
    return rows


def _missing_seeds(summary: Summary, row: Row) -> str:
    """Return how many runs finished, if not all did: `` (2 of 3 runs)``."""
    runs, seeds = len(row.values), len(summary.state.request.seeds)
    return f" ({runs} of {seeds} runs)" if runs < seeds else ""


# ---- sections ----


def _results_section(summary: Summary) -> Section:
    """Return the table of results with its charts."""
    label = metric_label(summary.metric, "Test")
    single = all(row.interval is None for row in summary.rows.values())
    spread = "One run each." if single else "Mean and 95% confidence interval; small dots: seeds."
    baseline = metric_baseline(summary.metric)
    figures = _dots(summary, label, spread, lambda row: list(row.values.values()), baseline)
    if summary.compared and not single:
        figures.append(_difference_figure(summary, label.removeprefix("Test ")))
    styles = [row.method.style for row in summary.rows.values()]
    body = render(
        "compare/templates/results.html",
        table=Table(table_heads(summary), table_rows(summary), styles=styles),
        figures=figures,
        failures=summary.failures,
        lower=summary.metric["lower_is_better"],
        metric=summary.metric["name"],
        effort=summary.state.request.effort,
    )
    return Section("Results", body)


def _difference_figure(summary: Summary, label: str) -> Figure:
    """Return a chart of the improvements over the base."""
    rows = []
    for name, row in summary.rows.items():
        title, style, difference = row.method.title, row.method.style, row.difference
        if name == BASE:
            rows.append(DotRow(title, style, [], 0.0, None))
        elif difference is not None:
            rows.append(DotRow(title, style, [], difference.mean, difference.interval))
    axis = f"Improvement over the base, {label}"
    caption = (
        "Mean over the seeds of the difference to the base with the same seed, and its 95% confidence "
        "interval. An interval that contains 0 is noise; the test also corrects for the number of "
        "methods."
    )
    return Figure(dot_chart(axis, rows, axis), caption)


def _dots(
    summary: Summary,
    label: str,
    caption: str,
    get: Callable[[Row], list[float]],
    baseline: float = 0.0,
) -> list[Figure]:
    """Return a chart of some values of each method; nothing if no method has any."""
    rows = []
    for row in summary.rows.values():
        values = get(row)
        mean, _ = mean_and_std(values)
        if mean is not None:
            style = row.method.style
            rows.append(DotRow(row.method.title, style, values, mean, interval(values)))
    return [Figure(dot_chart(label, rows, label, baseline=baseline), caption)] if rows else []


def _curves_section(summary: Summary) -> Section | None:
    """Return the charts over training time and around the weights; None if there are none."""
    split = summary.metric["split"]
    column = figure_column(summary.metric, split)
    label = metric_label(summary.metric, split.capitalize())
    wanted = (
        (column, label, f"{label} after each epoch.", metric_baseline(summary.metric)),
        ("train_loss", "Training loss", "Mean training loss of each epoch, at the weights w.", 0.0),
    )
    figures = []
    for name, title, caption, baseline in wanted:
        series = [
            Series(row.method.style, points)
            for row in summary.rows.values()
            if (points := _curve(row, name))
        ]
        if series:
            over_time = f"{title} over training time"
            chart = line_chart(over_time, series, "seconds", title, log=True, baseline=baseline)
            figures.append(Figure(chart, f"{caption} Mean over the seeds; band: one deviation."))
    figures += _slice_figure(summary)
    figures += _dots(
        summary,
        f"Sharpness at radius {RADIUS:g}",
        f"Increase of the training loss within a radius of {RADIUS:g} around the trained weights, by "
        f"one ascent step on {_count(summary.samples)}; the same radius for all. At a small radius it "
        "is about the radius times the norm of the gradient.",
        lambda row: row.sharpness,
    )
    if not figures:
        return None
    legend = [(row.method.style, row.method.title) for row in summary.rows.values() if row.records]
    body = render("compare/templates/curves.html", figures=figures, legend=legend)
    return Section("Curves and sharpness", body)


def _count(samples: float | None) -> str:
    """Return a number of training samples as text; older records do not contain it."""
    return "training samples" if samples is None else f"{samples:,} training samples"


def _slice_figure(summary: Summary) -> list[Figure]:
    """Return a chart of the loss along a line through the trained weights."""
    series = []
    for row in summary.rows.values():
        points = [
            mean_point(distance, [loss for loss in losses if loss is not None])
            for distance, losses in zip(DISTANCES, zip(*row.slices, strict=True), strict=False)
        ]
        if points:
            series.append(Series(row.method.style, points))
    if not series:
        return []
    title = "Training loss around the trained weights"
    x_label = "distance along a random direction"
    caption = (
        f"On {_count(summary.slice_samples)}, with the same direction for all. At distance 1 every "
        "filter is displaced by its own norm. Mean over the seeds; band: one deviation."
    )
    return [Figure(line_chart(title, series, x_label, title, log=True), caption)]


def _curve(row: Row, name: str) -> list[Point]:
    """Return mean and deviation of a figure after each epoch, over the training time."""
    by_epoch = mean_curve(row.records.values(), name)
    points = [point._replace(x=point.x * row.epoch_seconds) for point in by_epoch]
    return points if any(point.mean is not None for point in points) else []


def _search_section(summary: Summary) -> Section:
    """Return the chosen settings and all trials."""
    plan = summary.state.plan
    assert plan is not None
    unit, name = summary.metric["unit"], summary.metric["name"]
    head = f"{summary.metric['split']} {name}"
    chosen = [
        [row.method.title, _point_text(row), _best(row, unit)] for row in summary.rows.values()
    ]
    styles = [row.method.style for row in summary.rows.values()]
    tables = []
    for row in summary.rows.values():
        cells = []
        for trial in row.trials:
            mark = " (chosen)" if trial.point == row.point else ""
            value = trial.failure or MISSING
            if trial.value is not None:
                value = format_figure(trial.value, unit)
            cells.append([_greek(format_point(trial.point)) + mark, value])
        tables.append((row.method, Table(["settings", head], cells)))
    body = render(
        "compare/templates/search.html",
        chosen=Table(["method", "chosen settings", head], chosen, 2, styles),
        tables=tables,
        settings=pluralize(summary.state.trials, "setting"),
        epochs=pluralize(plan.epochs, "epoch"),
        effort=summary.state.request.effort,
    )
    return Section("Search", body)


def _point_text(row: Row) -> str:
    """Return the chosen settings of a method."""
    options = row.method.run.options
    every = f", two passes once in {options['every']} steps" if "every" in options else ""
    return _greek(format_point(row.point)) + every


def _greek(text: str) -> str:
    """Return a text with Greek letters for the names of hyperparameters."""
    return " ".join(GREEK.get(word, word) for word in text.split(" "))


def _best(row: Row, unit: str) -> str:
    """Return the validation figure of the chosen settings."""
    value = next((t.value for t in row.trials if t.point == row.point), None)
    return MISSING if value is None else format_figure(value, unit)


def _method_section(summary: Summary) -> Section:
    """Return the notes, the costs and the command."""
    rows: Sequence[Sequence[str]] = [
        [
            row.method.title,
            format_seconds(row.epoch_seconds),
            f"{row.cost:.2f}",
            str(row.epochs),
            f"{row.planned_time:.2f}",
            MISSING if row.seconds is None else format_seconds(row.seconds),
        ]
        for row in summary.rows.values()
    ]
    heads = ["method", "time per epoch", "cost", "epochs", "planned time", "measured time"]
    styles = [row.method.style for row in summary.rows.values()]
    body = render(
        "compare/templates/method.html",
        notes=summary.notes,
        table=Table(heads, rows, styles=styles),
        by_time=summary.state.request.equal == "time",
        command=command(summary.state.request),
    )
    return Section("How it was compared", body)
