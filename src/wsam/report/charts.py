"""The charts of an experiment: errors with their deviations, curves, sharpness, a map."""

from __future__ import annotations

from collections.abc import Sequence

from wsam._format import format_mean_std, mean_and_std
from wsam.plot_style import method_title
from wsam.report import svg
from wsam.report.gather import Group
from wsam.report.heat import heat
from wsam.report.html import escape, figure, paragraph
from wsam.report.labels import GREEK, MOST_OF_ONE, Experiment, Line, best

_MOST_BARS = 12
NO_FIGURE = "–"
_SPREAD = "Mean and sample deviation; small dots: the runs."
CURVES = {
    "test_error": ("Test error (%)", "Test error after each epoch."),
    "train_loss": ("Training loss", "Mean training loss of each epoch, at w."),
    "sharpness": (
        "Sharpness",
        "Mean sharpness in training, L(w + d) − L(w), of each epoch, each at its own radius: "
        "not to be compared between radii.",
    ),
}


def legend(lines: Sequence[Line]) -> str:
    """Return the names of lines with their strokes."""
    items = (f"<li>{svg.swatch(line.look)}{escape(line.told)}</li>" for line in lines)
    return f'<ul class="legend">{"".join(items)}</ul>'


def series(line: Line, figure_name: str) -> svg.Series | None:
    """Return the mean curve of a group with the deviation as its band; None where it has none."""
    curves = [result.record["curve"] for result in line.group.finished]
    points: list[tuple[float, float | None, float, float]] = []
    for rows in zip(*curves, strict=False):
        values = [float(row[figure_name]) for row in rows if row.get(figure_name) is not None]
        mean, deviation = mean_and_std(values)
        spread = deviation or 0.0
        middle = mean or 0.0
        points.append((rows[0]["epoch"], mean, middle - spread, middle + spread))
    if not any(point[1] is not None for point in points):
        return None
    return svg.Series(line.told, line.look, points)


def curves(experiment: Experiment, also: str = "") -> str:
    """Return error, loss and sharpness over the epochs, with one legend.

    Args:
        experiment: The experiment.
        also: Further figures of the same lines, as HTML.
    """
    shown = experiment.drawn
    charts = []
    for name, (label, told) in CURVES.items():
        found = [made for line in shown if (made := series(line, name)) is not None]
        if found:
            title = f"{label}: {experiment.title}"
            chart = svg.lines(title, found, "epoch", label, log=True, whole=True)
            charts.append(figure(chart, f"{told}{spread(shown)}"))
    if not charts:
        return ""
    head = legend(shown) + some(experiment.lines, shown)
    return f'{head}<div class="charts">{"".join(charts)}{also}</div>'


def some(lines: Sequence[Line], shown: Sequence[Line]) -> str:
    """Say that not all groups are shown, where that is so."""
    if len(shown) == len(lines):
        return ""
    told = (
        f"{len(shown)} of {len(lines)} groups: those that fail and err least, at most "
        f"{MOST_OF_ONE} a method."
    )
    return paragraph(told, "note")


def spread(lines: Sequence[Line]) -> str:
    """Say what the bands are, where there are any, and that failed runs are in no mean."""
    several = any(len(line.group.finished) > 1 for line in lines)
    bands = " Mean over the seeds; band: one deviation." if several else ""
    return bands + survivors(lines)


def survivors(lines: Sequence[Line]) -> str:
    """Say that figures are of the finished runs alone, where others failed."""
    return " Failed runs are left out." if any(line.group.failures for line in lines) else ""


def errors(experiment: Experiment) -> str:
    """Return final test errors and, where measured, top eigenvalues, with deviations; then maps."""
    shown = best(experiment.lines, _MOST_BARS)
    charts = []
    for label, get, log in (
        ("Test error (%)", _errors, False),
        ("Top eigenvalue of the Hessian", _eigenvalues, True),
    ):
        rows = [_bar(line, get(line.group)) for line in shown if get(line.group)]
        if rows:
            chart = svg.bars(f"{label}: {experiment.title}", rows, label, log=log)
            several = any(len(row.values) > 1 for row in rows)
            told = _SPREAD if several else "One run each."
            charts.append(figure(chart, told + survivors(shown)))
    if not charts:
        return ""
    inside = "".join(charts) + maps(experiment)
    return f'{some(experiment.lines, shown)}<div class="charts">{inside}</div>'


def _errors(group: Group) -> list[float]:
    return group.values("test_error")


def _eigenvalues(group: Group) -> list[float]:
    return group.eigenvalues


def _bar(line: Line, values: list[float]) -> svg.Bar:
    mean, deviation = mean_and_std(values)
    assert mean is not None
    return svg.Bar(line.told, line.look, values, mean, deviation)


def maps(experiment: Experiment) -> str:
    """Return a map of the error for every method that was run over two settings."""
    made = []
    by_method: dict[str, list[Group]] = {}
    for line in experiment.lines:
        by_method.setdefault(line.group.run.method, []).append(line.group)
    for method, groups in by_method.items():
        axes = _two_axes(groups)
        if axes is None:
            continue
        first, second = axes
        cells = {(_number(g, first), _number(g, second)): _place(g) for g in groups}
        sides = ((GREEK.get(first, first), _values(groups, first)),
                 (GREEK.get(second, second), _values(groups, second)))  # fmt: skip
        title = f"Test error (%) of {method_title(method)} by {first} and {second}"
        made.append(figure(heat(title, sides, cells), f"{title}: {experiment.title}."))
    return "".join(made)


def _place(group: Group) -> float | str:
    """Return what a map shows of a group: a mean over all its runs, or how many failed.

    The mean of the survivors has no colour there: it would pass for the best where most failed.
    """
    mean = mean_and_std(group.values("test_error"))[0]
    return group.failures or (NO_FIGURE if mean is None else mean)


def _two_axes(groups: Sequence[Group]) -> tuple[str, str] | None:
    """Return the two hyperparameters that a grid varies, if it varies these alone."""
    rest = {g.run.replace(hyper={}, seed=0, noise_seed=0).key for g in groups}
    varied = [n for n in groups[0].run.hyper if len({str(g.run.hyper[n]) for g in groups}) > 1]
    if len(groups) < 4 or len(rest) > 1 or len(varied) != 2:
        return None
    first, second = sorted(varied, key=lambda name: name != "rho")  # rho to the right
    return first, second


def _number(group: Group, name: str) -> float:
    value = group.run.hyper[name]
    return float(value) if isinstance(value, int | float) else 0.0


def _values(groups: Sequence[Group], name: str) -> list[float]:
    return sorted({_number(group, name) for group in groups})


def told(values: list[float], form: str) -> str:
    """Return ``4.3 ± 0.2``, the mean alone, or a dash; `form` is a number's, as ``.1f``."""
    mean, deviation = mean_and_std(values)
    if mean is None:
        return NO_FIGURE
    return format_mean_std(mean, deviation, f"{{:{form}}}".format)
