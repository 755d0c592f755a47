"""The loss along a line through the minima of an experiment, as far as it was measured."""

from __future__ import annotations

from wsam._format import mean_and_std
from wsam.paper import minima
from wsam.report import svg
from wsam.report.charts import spread
from wsam.report.gather import Group
from wsam.report.html import figure
from wsam.report.labels import Experiment, Line


def slices(experiment: Experiment) -> str:
    """Return a chart of the measured slices; nothing where there are none."""
    shown = [line for line in experiment.drawn if slices_of(line.group)]
    if not shown:
        return ""
    series = [_series(line) for line in shown]
    title = f"Training loss along a random direction: {experiment.title}"
    chart = svg.lines(
        title,
        series,
        "distance along a filter-normalised direction",
        "Training loss around the minimum",
    )
    told = (
        "The training loss around each minimum; at distance 1 every filter has moved by as much "
        "as it is long."
    )
    return figure(chart, told + spread(shown))


def slices_of(group: Group) -> list[tuple[list[float], list[float]]]:
    """Return distances and losses of every slice that was taken at a group's minima."""
    found = []
    for result in group.finished:
        line = minima.read_slice(dict(result.minimum or {}), minima.SLICE)
        if line is not None:
            found.append((line.coordinates[0], list(line.losses)))
    return found


def mean_slice(group: Group) -> list[tuple[float, float | None, float, float]]:
    """Return (distance, mean, mean less and plus a deviation) over a group's slices."""
    found = slices_of(group)
    points: list[tuple[float, float | None, float, float]] = []
    for place, losses in zip(found[0][0], zip(*(f[1] for f in found), strict=True), strict=True):
        mean, deviation = mean_and_std(list(losses))
        middle, spread = mean or 0.0, deviation or 0.0
        points.append((place, mean, middle - spread, middle + spread))
    return points


def _series(line: Line) -> svg.Series:
    return svg.Series(line.told, line.look, mean_slice(line.group))
