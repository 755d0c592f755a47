"""Charts of the report: what is drawn, and what the SVG contains."""

import math
import re

import pytest

from wsam._utils.plot_style import METHOD_STYLES
from wsam.report import charts
from wsam.report.charts import DotRow, HeatMap, LineStyle, Point, Series, heat_norm
from wsam.report.elements import heat_table
from wsam.report.scales import short, usual_range
from wsam.report.svg import color, new_chart, to_svg

WSAM = LineStyle("wsam", ())
HOSTILE = '</svg><script>alert(1)</script> & "q" $x^{'


@pytest.fixture
def axes():
    with new_chart(280, left=50, right=10, top=10, bottom=40) as found:
        yield found


def series(*means, std=0.0, style=WSAM):
    return Series(style, [Point(float(x), mean, std) for x, mean in enumerate(means, 1)])


def tick_labels(axis):
    axis.axes.figure.canvas.draw()
    low, high = sorted(axis.get_view_interval())
    pairs = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
    return [label.get_text() for at, label in pairs if low <= at <= high]


# ---- lines ----


@pytest.mark.parametrize("epochs", [1, 2, 3, 5, 12, 13, 200, 12_000])
def test_epochs_are_integers(axes, epochs):
    charts.draw_lines(axes, [series(*[1.0] * epochs)], integer_x=True)
    labels = tick_labels(axes.xaxis)
    assert 1 <= len(labels) <= 8
    assert all(label.isdigit() for label in labels)


def test_lines_are_above_all_bands(axes):
    charts.draw_lines(axes, [series(1.0, 2.0, std=0.5), series(2.0, 1.0, std=0.5)])
    assert len(axes.collections) == 2
    assert max(band.zorder for band in axes.collections) < min(line.zorder for line in axes.lines)


@pytest.mark.parametrize("log", [False, True])
def test_bands_are_not_cut_off(axes, log):
    lines = [series(60.0, 20.0, std=15.0), series(50.0, 2.0, std=1.0)]
    charts.draw_lines(axes, lines, log=log)
    assert axes.get_yscale() == ("log" if log else "linear")
    assert axes.get_ylim()[1] > 75
    assert axes.get_ylim()[0] > (1 if log else -1)


def test_bands_of_accuracies_are_not_cut_off(axes):
    charts.draw_lines(axes, [series(80.0, 90.0, std=15.0)], baseline=100.0)
    low, high = axes.get_ylim()
    assert low < 65
    assert high == 100


def test_coinciding_lines_are_both_visible(axes):
    styles = [METHOD_STYLES[name].dashes for name in ("vanilla", "sam", "wsam")]
    charts.draw_lines(axes, [series(1.0, 2.0, style=LineStyle("sam", one)) for one in styles])
    base, sam, solid = axes.lines
    assert base.zorder > sam.zorder > solid.zorder


def test_an_isolated_point_is_a_dot(axes):
    charts.draw_lines(axes, [series(3.0, None, 2.0, 1.0)])
    assert [line.get_marker() for line in axes.lines] == ["None", "o"]
    assert axes.lines[1].get_xydata().tolist() == [[1.0, 3.0]]


@pytest.mark.parametrize("gap", [math.inf, math.nan, None])
def test_a_band_has_the_gaps_of_its_line(axes, gap):
    charts.draw_lines(axes, [series(1.0, 2.0, gap, 3.0, 4.0, std=0.5)])
    (band,) = axes.collections
    (line,) = axes.lines
    assert len(band.get_paths()) == 2
    assert [math.isnan(y) for y in line.get_ydata()] == [False, False, True, False, False]
    text = str(to_svg(axes, "t"))
    assert "nan" not in text
    assert "inf" not in text


def test_dashes_and_colors_are_those_of_the_style():
    dashed = series(1.0, 2.0, style=LineStyle("sam", (7, 5), 2))
    text = str(charts.line_chart("t", [dashed, series(2.0, 1.0)], "epoch", "loss"))
    assert re.search(r"stroke-dasharray: 7,5;[^\"]*stroke: var\(--sam_2\)", text)
    assert re.search(r"stroke: var\(--wsam\)", text)
    assert "#00" not in text, "every placeholder is replaced"


# ---- dots ----


def test_a_row_shows_mean_deviation_and_values(axes):
    rows = [
        DotRow("a", WSAM, [1.0, 3.0], 2.0, 1.41),
        DotRow("b", LineStyle("sam"), [4.0], 4.0, None),
    ]
    charts.draw_dots(axes, rows)
    drawn = {tuple(line.get_xdata()) for line in axes.lines}
    assert {(1.0, 3.0), (2.0,), (4.0,)} <= drawn
    assert len(axes.containers) == 2
    low, high = axes.get_xlim()
    assert 0 <= low < 2.0 - 1.41
    assert high > 4.0


def test_values_of_different_magnitude_get_a_logarithmic_axis(axes):
    charts.draw_dots(axes, [DotRow("a", WSAM, [v], v, None) for v in (1.0, 20.0, 500.0)], log=True)
    assert axes.get_xscale() == "log"
    assert {"1", "10", "100"} <= set(tick_labels(axes.xaxis))


def test_long_labels_are_wrapped_and_shortened():
    text = str(charts.dot_chart("t", [DotRow("word " * 40, WSAM, [1.0], 1.0, None)], "error"))
    lines = re.findall(r">(word[^<]*)<", text)
    assert len(lines) == 2
    assert lines[-1].endswith("…")
    assert max(map(len, lines)) <= 44


# ---- outliers and baselines ----


def dots(*means, **options):
    """Return rows of one run each."""
    return [DotRow(str(n), WSAM, [mean], mean, None) for n, mean in enumerate(means)]


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([4.0, 4.2, 4.5, 90.0], (4.0, 4.5)),
        ([4.0, 4.1, 4.2, 60.0, 90.0], (4.0, 4.2)),
        ([7.2, 7.3, 7.4, 12.0, 14.0, 89.8], (7.2, 14.0)),
        ([3.0, 4.0, 5.0, 10.0, 30.0, 60.0, 90.0], (3.0, 90.0)),
        ([6.9, 7.1, 31.8], (6.9, 31.8)),
        ([4.0, 90.0], (4.0, 90.0)),
        ([0.001, 0.01, 0.1, 1.0], (0.001, 1.0)),
        ([0.0, 0.1, 0.2, 30.0], (0.0, 0.2)),
        ([0.1, 0.2, 0.1, -40.0], (0.1, 0.2)),
        ([math.nan, math.inf], (0.0, 0.0)),
    ],
)
def test_the_range_without_outliers(values, shown):
    assert usual_range([[value] for value in values]) == shown


def test_an_outlier_of_a_metric_whose_best_value_is_100():
    assert usual_range([[95.0], [96.0], [95.5], [10.0]], 100.0) == (95.0, 96.0)


def test_a_diverged_row_is_marked_at_the_edge(axes):
    charts.draw_dots(
        axes, [*dots(4.0, 4.2, 4.5), DotRow("x", WSAM, [80, 90], 85.0, 7.07)], log=True
    )
    assert axes.get_xscale() == "linear"
    low, high = axes.get_xlim()
    assert low == 0
    assert high < 5
    assert [text.get_text() for text in axes.texts] == ["85 ± 7.07"]
    marks = [line for line in axes.lines if line.get_marker() == ">"]
    assert [line.get_xydata().tolist() for line in marks] == [[[1.0, 3.0]]]
    inside = [x for line in axes.lines if line not in marks for x in line.get_xdata()]
    assert all(low <= x <= high for x in inside)


def test_one_diverged_seed_is_marked(axes):
    rows = [*dots(4.0, 4.1, 4.2, 4.3), DotRow("x", WSAM, [4.0, 4.1, 4.2, 60.0], 18.1, 28.0)]
    charts.draw_dots(axes, rows)
    assert [text.get_text() for text in axes.texts] == ["18.1 ± 28"]
    drawn = [tuple(line.get_xdata()) for line in axes.lines]
    assert (4.0, 4.1, 4.2) in drawn, "the other seeds"


def test_a_diverged_line_is_marked_at_the_edge(axes):
    lines = [series(2.0, 1.0), series(2.1, 0.9), series(2.2, 1.1), series(3.0, 5e6)]
    charts.draw_lines(axes, lines, log=True)
    assert axes.get_yscale() == "linear"
    assert axes.get_ylim()[1] < 4
    assert [text.get_text() for text in axes.texts] == ["5e6"]
    (mark,) = (line for line in axes.lines if line.get_marker() == "^")
    assert mark.get_xydata().tolist() == [[2.0, 1.0]], "at its epoch, on the upper edge"


def test_values_of_marks_do_not_cover_each_other_or_lines(axes):
    calm = [series(2.0, 1.0) for _ in range(6)]
    charts.draw_lines(axes, [*calm, series(1.0, 1e5), series(1.0, 2e5)])
    axes.figure.canvas.draw()
    one, other = (text.get_window_extent() for text in axes.texts)
    assert not one.overlaps(other)
    top = axes.transData.transform((1.0, 2.0))[1]
    assert min(one.y0, other.y0) > top


@pytest.mark.parametrize(
    ("values", "baseline", "included"), [((4.30, 4.35), 0.0, 0.0), ((95.1, 95.6), 100.0, 100.0)]
)
def test_differences_are_not_exaggerated(axes, values, baseline, included):
    """The axis includes the baseline, so a length is proportional to its value."""
    charts.draw_dots(axes, dots(*values), log=True, baseline=baseline)
    low, high = axes.get_xlim()
    assert low <= included <= high
    share = abs(values[0] - values[1]) / (high - low)
    assert share < 0.11
    charts.draw_lines(axes, [series(*values)], baseline=baseline)
    low, high = axes.get_ylim()
    assert low <= included <= high


# ---- heat maps ----

CELLS = {(0.1, 0.5): 5.04, (0.2, 0.5): "failed 4/<5", (0.1, 0.8): 50.0}
HEAT_MAP = HeatMap(("ρ", "γ"), CELLS)


def test_a_heat_map_shows_values_and_failures(axes):
    charts.draw_heat_map(axes, HEAT_MAP)
    assert [text.get_text() for text in axes.texts] == ["5.0", "failed\n4/<5", "50.0"]
    filled = [patch for patch in axes.patches if patch.get_fill()]
    outlined = [patch for patch in axes.patches if not patch.get_fill()]
    assert len(filled) == 2
    assert len(outlined) == 1, "the failure"
    text = str(charts.heat_chart("t", HEAT_MAP))
    assert "4/&lt;5" in text


def test_a_heat_map_is_readable_as_a_table():
    """A screen reader announces the chart as one image."""
    table = heat_table(HEAT_MAP)
    assert list(table.heads) == ["γ ↓ ρ →", "ρ 0.1", "ρ 0.2"]
    assert table.rows == [["γ 0.8", "50.0", "–"], ["γ 0.5", "5.0", "failed 4/<5"]]


def test_an_error_of_zero_keeps_the_other_colors_apart():
    norm = heat_norm([0.0, 5.0, 50.0])
    assert norm.vmin == 2.5
    assert 0 < norm(5.0) < norm(50.0) == 1.0
    assert [heat_norm([5.0, 50.0])(value) for value in (5.0, 50.0)] == [0.0, 1.0]
    assert heat_norm([3.0, 3.0])(3.0) == pytest.approx(0.5)
    assert heat_norm([]).vmin > 0


# ---- numbers and SVG ----


def test_labels_of_an_axis_have_equally_many_decimals(axes):
    charts.draw_lines(axes, [series(0.0, 10.0)])
    assert tick_labels(axes.yaxis) == ["0.0", "2.5", "5.0", "7.5", "10.0"]


def test_labels_of_extreme_values_are_short(axes):
    charts.draw_lines(axes, [series(0.0, 4e9)])
    assert all(len(label) <= 5 for label in tick_labels(axes.yaxis))
    assert [short(v) for v in (0.0, 12.5, 3e-7, 2.5e7)] == ["0", "12.5", "3e-7", "2.5e7"]


def test_hostile_text_is_inert():
    row = DotRow(HOSTILE, WSAM, [1.0], 1.0, None)
    for text in (
        str(charts.dot_chart(HOSTILE, [row], HOSTILE)),
        str(charts.line_chart(HOSTILE, [series(1.0, 2.0)], HOSTILE, HOSTILE)),
        str(charts.heat_chart(HOSTILE, HeatMap((HOSTILE, HOSTILE), {(0.0, 0.0): HOSTILE}))),
    ):
        assert text.count("<svg") == text.count("</svg>") == 1
        assert "<script" not in text
        assert "$x^{" in text, "shown as it is, not as a formula"
        label = re.search(r'aria-label="([^"]*)"', text)[1]
        assert "&#34;q&#34;" in label


@pytest.mark.parametrize("label", ["\udc80\ud800", "\x00\x1b", "日本語 😀", "", "\n\n"])
def test_any_text_can_be_drawn(label, recwarn):
    charts.dot_chart(label, [DotRow(label, WSAM, [1.0], 1.0, None)], label)
    assert not recwarn.list


def test_an_svg_affects_only_itself():
    one, other = (str(charts.line_chart(t, [series(1.0, 2.0)], "x", "y")) for t in ("a", "b"))
    assert "<style" not in one
    assert not re.search("https?:|<!--", one)
    assert not re.search("font-family", one), "the font of the page"
    ids = [set(re.findall(r' id="([^"]*)"', text)) for text in (one, other)]
    assert ids[0]
    assert not ids[0] & ids[1]
    for text, known in zip((one, other), ids, strict=True):
        assert set(re.findall(r'#(\w+)[")]', text)) <= known


def test_colors_are_css_variables():
    placeholders = [color(name) for name in ("ink", "soft", "grid", "card", "wsam", "sam_3")]
    assert len(set(placeholders)) == len(placeholders)
