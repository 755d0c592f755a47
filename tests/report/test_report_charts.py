"""What the charts of a report are made of: axes, lines and maps."""

import math
import re

import pytest

from wsam.report import svg
from wsam.report.heat import heat, shares
from wsam.report.scale import Scale, fit, short


def test_scale_holds_and_orders():
    scale = fit([1.0, 2.0, 500.0], 0, 100, log=True)
    assert scale.log
    assert 0 < scale(1.0) < scale(2.0) < scale(500.0) < 100
    assert scale(0.0) == 0
    assert {1.0, 10.0, 100.0} <= set(scale.ticks())
    assert fit([3.0, 3.0], 0, 10).low < 3 < fit([3.0, 3.0], 0, 10).high
    assert fit([float("nan"), 0.0], 0, 10)(0.5) == pytest.approx(4.76, abs=0.01)
    assert Scale(0, 1, 0, 10).ticks() == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert [short(v) for v in (0.0, 12.5, 3e-7, 2.5e7)] == ["0", "12.5", "3e-7", "2e7"]


def test_map_shows_what_failed_and_what_is_missing():
    cells = {(1.0, 1.0): 5.0, (2.0, 1.0): "failed 4/<5", (1.0, 2.0): 50.0}
    made = heat("<t>", (("x", [1.0, 2.0]), ("y", [1.0, 2.0])), cells, (1.0, 2.0))
    assert made.count("<rect") == 4
    assert made.count(">failed<") == made.count(">4/&lt;5<") == 1
    assert made.count('class="gone"') == 1
    assert made.count('class="chosen"') == 1
    assert "&lt;t&gt;" in made


def test_a_map_can_be_read_as_a_table():
    """The picture is one image to a reader of the screen: its numbers must stand beside it."""
    cells = {(0.1, 0.5): 5.04, (0.2, 0.5): "failed 4/<5", (0.1, 0.8): 50.0}
    made = heat("t", (("ρ", [0.1, 0.2]), ("γ", [0.5, 0.8])), cells, (0.1, 0.8))
    table = made.partition("</svg>")[2]
    assert table.startswith("<details><summary>")
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in table.split("<tr>")[1:]]
    assert rows == [
        ["γ ↓ ρ →", "ρ 0.1", "ρ 0.2"],
        ["γ 0.8", "50.0 (chosen)", "–"],
        ["γ 0.5", "5.0", "failed 4/&lt;5"],
    ]
    assert table.count('scope="col"') == 3
    assert table.count('scope="row"') == 2


def test_numbers_of_a_map_have_as_many_decimals():
    """10 between 9.5 and 12.4 looks like a number of another kind."""
    cells = {(1.0, 1.0): 9.5, (2.0, 1.0): 10.0, (3.0, 1.0): 12.44, (4.0, 1.0): 4.04}
    made = heat("t", (("x", [1.0, 2.0, 3.0, 4.0]), ("y", [1.0])), cells)
    shown = re.findall(r'class="mid value"[^>]*>([^<]*)<', made)
    assert shown == ["9.5", "10.0", "12.4", "4.0"]


def below(chart):
    """Return what is written below a chart's horizontal axis."""
    return re.findall(rf'y="{svg.HEIGHT - 24}" class="mid">([^<]*)<', chart)


@pytest.mark.parametrize("epochs", [1, 2, 3, 4, 5, 10, 12, 13, 30, 200, 12_000])
def test_epochs_are_whole_numbers(epochs):
    points = [(float(x), 1.0, 1.0, 1.0) for x in range(1, epochs + 1)]
    series = [svg.Series("WSAM", svg.Look("wsam"), points)]
    shown = below(svg.lines("t", series, "epoch", "loss", whole=True))
    assert 1 <= len(shown) <= 8
    assert all(re.fullmatch(r"\d+k?", text) for text in shown)
    assert len(set(shown)) == len(shown)


def test_numbers_of_an_axis_have_as_many_decimals():
    assert [text for _, text in Scale(0, 10, 0, 1).marks(4)] == ["0.0", "2.5", "5.0", "7.5", "10.0"]
    assert [text for _, text in Scale(0, 4, 0, 1).marks(4)] == ["0", "1", "2", "3", "4"]
    logarithmic = [text for _, text in Scale(0.1, 20, 0, 1, log=True).marks()]
    assert logarithmic == ["0.1", "0.2", "0.5", "1", "2", "5", "10", "20"]


def test_lines_lie_above_all_bands():
    points = [(1.0, 1.0, 0.5, 1.5), (2.0, 1.0, 0.5, 1.5)]
    two = [svg.Series(name, svg.Look("wsam", "", tone), points) for tone, name in enumerate("ab")]
    made = svg.lines("t", two, "epoch", "loss")
    assert made.rindex("<polygon") < made.index('class="c-wsam_0"') < made.index('class="c-wsam_1"')


def test_an_error_of_zero_leaves_the_other_cells_their_colours():
    found = shares([0.0, 5.0, 50.0])
    assert found[0.0] == 0.0 < found[5.0] < found[50.0] == 1.0
    assert shares([5.0, 50.0]) == {5.0: 0.0, 50.0: 1.0}
    assert shares([3.0, 3.0]) == {3.0: 0.5}
    assert shares([0.0, 0.0]) == {0.0: 0.5}


def line_of(*middles, spread=0.0):
    """Return a chart of one line, a band of the given half width around it."""
    points = [
        (float(x), middle, (middle or 0.0) - spread, (middle or 0.0) + spread)
        for x, middle in enumerate(middles, 1)
    ]
    series = svg.Series("WSAM <1>", svg.Look("wsam"), points)
    return svg.lines("t", [series], "epoch", "loss")


def test_a_point_alone_is_a_dot():
    """Of runs of one epoch there is nothing else to see."""
    made = line_of(3.0)
    assert made.count("<circle") == 1
    assert "WSAM &lt;1&gt;" in made
    assert 'class="c-wsam"' not in made, "no path that draws nothing"
    assert line_of(3.0, None, 2.0, 1.0).count("<circle") == 1
    assert line_of(3.0, 2.0).count("<circle") == 0


@pytest.mark.parametrize("gap", [math.inf, math.nan, None])
def test_a_band_has_the_gaps_of_its_line(gap):
    made = line_of(1.0, 2.0, gap, 3.0, 4.0, spread=0.5)
    assert made.count("<polygon") == 2
    assert "nan" not in made
    assert "inf" not in made
    assert line_of(1.0, 2.0, 3.0, 4.0, spread=0.5).count("<polygon") == 1
