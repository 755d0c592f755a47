"""Charts of the report, drawn by matplotlib as inline SVG: lines, dots and heat maps."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from wsam._utils.plot_style import TEXT_COLOR
from wsam.report.scales import TICK_STEPS, drawable, set_scale, short, usual_range
from wsam.report.svg import FONT_SIZE, WIDTH, color, new_chart, to_svg

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize

HEIGHT = 280
"""Of a chart of lines, in pixels."""
_LINE_WIDTH = 2.1
_MARK_HEIGHT = 15
"""Of the value of an arrow, in pixels."""
_LABEL_CHARACTERS = 44
"""Characters of a bold label that fit into the width of a chart."""
HEAT_COLUMNS = 6
"""Columns of a heat map whose texts fit in the width of a chart; those of more are smaller."""
_HEAT_COLORS = ("#105e7a", "#48a096", "#f0d696", "#db7a44", "#8c2d2a")
"""From low to high; readable in both color schemes."""


@dataclass(frozen=True)
class LineStyle:
    """Color and dashes of a series.

    Args:
        color: A name in `METHOD_STYLES`, or ``ink``.
        dashes: On and off lengths, empty for a solid line; None if no line is drawn.
        shade: Index of a shade of the color (`plot_style.shades`); None for the color itself.
    """

    color: str = "ink"
    dashes: tuple[float, ...] | None = None
    shade: int | None = None

    @property
    def css_name(self) -> str:
        """The CSS variable of the color, without its dashes."""
        return self.color if self.shade is None else f"{self.color}_{self.shade}"


class Point(NamedTuple):
    """A mean with its standard deviation at x. A mean of None, NaN or infinity is a gap."""

    x: float
    mean: float | None
    std: float


@dataclass(frozen=True)
class Series:
    """A line with a band of one standard deviation around it."""

    style: LineStyle
    points: Sequence[Point]


@dataclass(frozen=True)
class DotRow:
    """A mean with its standard deviation, and the values it is computed from."""

    label: str
    style: LineStyle
    values: Sequence[float]
    mean: float
    std: float | None


@dataclass(frozen=True)
class HeatMap:
    """Values over two hyperparameters; the first runs to the right, the second upwards.

    Args:
        names: Of the hyperparameters.
        cells: The value for each pair of hyperparameters, or a text if there is none.
        spec: Format of a value.
    """

    names: tuple[str, str]
    cells: Mapping[tuple[float, float], float | str]
    spec: str = ".1f"

    @property
    def xs(self) -> list[float]:
        """The values of the first hyperparameter."""
        return sorted({x for x, _ in self.cells})

    @property
    def ys(self) -> list[float]:
        """The values of the second hyperparameter."""
        return sorted({y for _, y in self.cells})

    def text(self, x: float, y: float) -> str:
        """Return the text of a cell."""
        value = self.cells.get((x, y), "–")
        return value if isinstance(value, str) else f"{value:{self.spec}}"


# ---- line charts ----


def line_chart(
    description: str,
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    log: bool = False,
    integer_x: bool = False,
    baseline: float = 0.0,
) -> Markup:
    """Return a chart of lines as SVG.

    Args:
        description: Alternative text.
        series: The lines.
        x_label: Below the horizontal axis.
        y_label: Above the vertical axis.
        log: Use a logarithmic vertical axis if the values span more than a factor of 10.
        integer_x: Label integers only on the horizontal axis.
        baseline: A value that a linear vertical axis includes.
    """
    with new_chart(HEIGHT, left=54, right=16, top=30, bottom=44) as axes:
        draw_lines(axes, series, log=log, integer_x=integer_x, baseline=baseline)
        axes.set_xlabel(x_label)
        axes.figure.text(2 / WIDTH, 1 - 15 / HEIGHT, y_label, weight="bold")
        return to_svg(axes, description)


def draw_lines(
    axes: Axes,
    series: Sequence[Series],
    *,
    log: bool = False,
    integer_x: bool = False,
    baseline: float = 0.0,
) -> None:
    """Draw lines, all above all bands. An arrow at the edge shows the extreme of a line beyond it.

    Lines with longer gaps are above the others, so that both show where they coincide.
    """
    from matplotlib.ticker import MaxNLocator

    for one in series:
        _draw_line(axes, one)
    xs = [x for one in series for x, _, _ in _known(one)] or [0.0]
    low, high = min(xs), max(xs)
    axes.set_xlim(*((low, high) if low < high else (low - 0.5, high + 0.5)))
    locator = MaxNLocator(5, steps=TICK_STEPS, integer=integer_x, min_n_ticks=1)
    axes.xaxis.set_major_locator(locator)
    values = [
        [value for _, mean, std in _known(one) for value in _extremes(mean, std, baseline)]
        for one in series
    ]
    set_scale(axes, "y", usual_range(values, baseline), log=log, baseline=baseline)
    _mark_lines(axes, series)
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _draw_line(axes: Axes, series: Series) -> None:
    """Draw a line and its band; a point between two gaps is a dot."""
    style: dict[str, Any] = {"color": color(series.style.css_name)}
    x = [point.x for point in series.points]
    mean = [
        math.nan if p.mean is None or not math.isfinite(p.mean) else drawable(p.mean)
        for p in series.points
    ]
    finite = [not math.isnan(value) for value in mean]
    if any(point.std for point in series.points):
        below = [m - drawable(p.std) for m, p in zip(mean, series.points, strict=True)]
        above = [m + drawable(p.std) for m, p in zip(mean, series.points, strict=True)]
        # The edge keeps overlapping bands distinguishable.
        axes.fill_between(x, below, above, where=finite, alpha=0.15, linewidth=0.8, **style)
    dashes = (0, series.style.dashes) if series.style.dashes else "-"
    above_bands = 3 + _gaps(series.style.dashes) / 2
    axes.plot(x, mean, linewidth=_LINE_WIDTH, linestyle=dashes, zorder=above_bands, **style)
    padded = [False, *finite, False]
    for at in range(len(x)):
        if padded[at : at + 3] == [False, True, False]:  # a line would not show this point
            axes.plot(x[at], mean[at], "o", markersize=7, zorder=3, **style)


def _gaps(dashes: tuple[float, ...] | None) -> float:
    """Return the share of a line that its gaps take."""
    return sum(dashes[1::2]) / sum(dashes) if dashes else 0.0


def _known(series: Series) -> list[tuple[float, float, float]]:
    """Return the points of a line without its gaps."""
    return [
        (x, mean, std) for x, mean, std in series.points if mean is not None and math.isfinite(mean)
    ]


def _extremes(mean: float, std: float, baseline: float) -> list[float]:
    """Return the mean of a point and the end of its band that is farther from the baseline."""
    mean, std = drawable(mean), drawable(std)
    return [mean, mean + math.copysign(std if math.isfinite(std) else 0.0, mean - baseline)]


def _mark_lines(axes: Axes, series: Sequence[Series]) -> None:
    """Draw an arrow with the value of the extreme point of each line that leaves the axes."""
    low, high = axes.get_ylim()
    extremes = []
    for one in series:
        found = [(mean, x) for x, mean, _ in _known(one)]
        if found and max(found)[0] > high:
            extremes.append((True, *max(found), one.style))
        if found and min(found)[0] < low:
            extremes.append((False, *min(found), one.style))
    _add_space(axes, *(sum(upper is side for upper, *_ in extremes) for side in (True, False)))
    rows = {True: 0, False: 0}
    for upper, value, x, line_style in extremes:
        style: dict[str, Any] = {"color": color(line_style.css_name), "zorder": 4}
        edge: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.plot(x, float(upper), "^" if upper else "v", markersize=9, **edge, **style)
        towards_left = x > sum(axes.get_xlim()) / 2
        offset = 4 + _MARK_HEIGHT * rows[upper]
        axes.annotate(
            short(value),
            (x, float(upper)),
            (-9 if towards_left else 9, -offset if upper else offset),
            xycoords=axes.get_xaxis_transform(),
            textcoords="offset points",
            ha="right" if towards_left else "left",
            va="center",
            weight="bold",
            **style,
        )
        rows[upper] += 1


def _add_space(axes: Axes, above: int, below: int) -> None:
    """Extend the vertical axis by rows for the values of arrows."""
    low, high = axes.get_ylim()
    for number, upper in ((above, True), (below, False)):
        share = min(number * _MARK_HEIGHT / HEIGHT * 1.4, 0.4)
        if axes.get_yscale() == "log":
            factor = (high / low) ** share
            low, high = (low, high * factor) if upper else (low / factor, high)
        else:
            extra = share * (high - low)
            low, high = (low, high + extra) if upper else (low - extra, high)
    axes.set_ylim(low, high)


# ---- dot charts ----


def dot_chart(
    description: str,
    rows: Sequence[DotRow],
    label: str,
    *,
    log: bool = False,
    baseline: float = 0.0,
) -> Markup:
    """Return a chart of means with error bars as SVG, one row each, with single values as dots.

    Args:
        description: Alternative text.
        rows: From top to bottom.
        label: Below the axis.
        log: Use a logarithmic axis if the values span more than a factor of 10.
        baseline: A value that a linear axis includes, so that differences are not exaggerated.
    """
    labels = [textwrap.wrap(_shorten(row.label), _LABEL_CHARACTERS) for row in rows]
    lines = max(map(len, labels), default=1)
    step = 30 + 16 * lines
    height = step * len(rows) + 50
    with new_chart(height, left=10, right=18, top=4, bottom=46) as axes:
        draw_dots(axes, rows, log=log, baseline=baseline)
        axes.set_xlabel(label)
        axes.set_ylim(len(rows) - 1 + 14 / step, -1 + 14 / step)  # 14 pixels below each row
        for at, words in enumerate(labels):
            place: Any = (0, at)
            axes.annotate(
                "\n".join(words),
                place,
                (0, 13),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                weight="bold",
            )
        return to_svg(axes, description)


def draw_dots(
    axes: Axes, rows: Sequence[DotRow], *, log: bool = False, baseline: float = 0.0
) -> None:
    """Draw one row of dots for each mean. An arrow at the edge shows a mean or value beyond it."""
    rows = [
        replace(
            row,
            values=[drawable(value) for value in row.values],
            mean=drawable(row.mean),
            std=None if row.std is None else drawable(row.std),
        )
        for row in rows
    ]
    shown = usual_range([_extent(row, log) for row in rows], baseline)
    set_scale(axes, "x", shown, log=log, baseline=baseline)
    low, high = axes.get_xlim()
    for at, row in enumerate(rows):
        style: dict[str, Any] = {"color": color(row.style.css_name), "clip_on": False}
        inside = [value for value in row.values if low <= value <= high]
        axes.plot(inside, [at] * len(inside), "o", alpha=0.45, markersize=6, **style)
        bars: dict[str, Any] = {"elinewidth": _LINE_WIDTH, "capsize": 5, "capthick": _LINE_WIDTH}
        if low <= row.mean <= high:
            std = row.std or 0.0
            ends = [[min(std, row.mean - low)], [min(std, high - row.mean)]]
            error = None if row.std is None else ends
            axes.errorbar(row.mean, at, xerr=error, fmt="o", markersize=11, **bars, **style)
        _mark_row(axes, at, row)
    axes.grid(axis="x")
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    axes.tick_params(axis="x", length=0)


def _extent(row: DotRow, log: bool) -> list[float]:
    """Return the values that a row shows. A bar that reaches zero has no end on a logarithmic axis."""
    ends = [row.mean + side * (row.std or 0.0) for side in (-1, 1)]
    if log and min(row.values, default=0.0) > 0:
        ends = [end for end in ends if end > 0]
    return [*ends, *row.values]


def _mark_row(axes: Axes, at: int, row: DotRow) -> None:
    """Draw an arrow with the mean of a row beyond the axes, or with its extreme value."""
    low, high = axes.get_xlim()
    for edge, marker, outside in (
        (1.0, ">", [v for v in (row.mean, max(row.values, default=row.mean)) if v > high]),
        (0.0, "<", [v for v in (row.mean, min(row.values, default=row.mean)) if v < low]),
    ):
        if not outside:
            continue
        whole = outside[0] == row.mean
        text = short(outside[0])
        if whole and row.std is not None:
            text = f"{text} ± {short(row.std)}"
        style: dict[str, Any] = {"color": color(row.style.css_name)}
        size = 11 if whole else 7
        place: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "clip_on": False}
        axes.plot(edge, at, marker, markersize=size, **place, **style)
        axes.annotate(
            text,
            (edge, at),
            (-10 if edge else 10, 0),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            ha="right" if edge else "left",
            va="center",
            **style,
        )


def _shorten(text: str) -> str:
    """Return a label of at most two lines."""
    words = " ".join(text.split())
    most = 2 * _LABEL_CHARACTERS - 8
    return words if len(words) <= most else f"{words[: most - 1]}…"


# ---- heat maps ----


def heat_chart(description: str, heat_map: HeatMap) -> Markup:
    """Return a heat map as SVG."""
    left, top, bottom, row = 58, 26, 46, 40
    height = top + row * len(heat_map.ys) + bottom
    with new_chart(height, left=left, right=8, top=top, bottom=bottom) as axes:
        draw_heat_map(axes, heat_map)
        axes.set_xlabel(heat_map.names[0])
        axes.figure.text(2 / WIDTH, 1 - 15 / height, heat_map.names[1], weight="bold")
        return to_svg(axes, description)


def draw_heat_map(axes: Axes, heat_map: HeatMap) -> None:
    """Draw a heat map. Cells that have a text instead of a value are outlined."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    xs, ys = heat_map.xs, heat_map.ys
    values = [value for value in heat_map.cells.values() if not isinstance(value, str)]
    norm, colors = heat_norm(values), LinearSegmentedColormap.from_list("heat", _HEAT_COLORS)
    size = FONT_SIZE * min(1.0, HEAT_COLUMNS / len(xs))
    for (x, y), value in heat_map.cells.items():
        column, row = xs.index(x), ys.index(y)
        place: Any = (column - 0.46, row - 0.46)
        if isinstance(value, str):
            ink, shown = color("soft"), "\n".join(value.split())
            style: dict[str, Any] = {"fill": False, "edgecolor": ink, "linestyle": (0, (3, 3))}
        else:
            fill = colors(norm(max(drawable(value), norm.vmin or 0.0)))
            ink, shown = (TEXT_COLOR if _is_light(fill) else "#ffffff"), heat_map.text(x, y)
            style = {"facecolor": fill, "edgecolor": color("card"), "linewidth": 1}
        axes.add_patch(Rectangle(place, 0.92, 0.92, **style))
        words: dict[str, Any] = {"color": ink, "fontsize": size, "zorder": 4}
        axes.text(column, row, shown, ha="center", va="center", **words)
    axes.set_xticks(range(len(xs)), [f"{x:g}" for x in xs])
    axes.set_yticks(range(len(ys)), [f"{y:g}" for y in ys])
    axes.set(xlim=(-0.5, len(xs) - 0.5), ylim=(-0.5, len(ys) - 0.5))
    axes.tick_params(length=0)
    axes.tick_params(axis="x", labelsize=size)
    axes.spines[:].set_visible(False)


def heat_norm(values: Sequence[float]) -> Normalize:
    """Return the logarithmic scale of a heat map. Zero counts as half of the least positive value."""
    from matplotlib.colors import LogNorm

    drawn = [drawable(value) for value in values]
    positive = [value for value in drawn if value > 0] or [1.0]
    low, high = min(positive), max(positive)
    low = low / 2 if 0 in drawn else low
    return LogNorm(low, high) if low < high else LogNorm(low / 2, low * 2)


def _is_light(rgba: Sequence[float]) -> bool:
    """Return whether dark text is more readable on a color than white text."""
    return 0.299 * rgba[0] + 0.587 * rgba[1] + 0.114 * rgba[2] > 0.55
