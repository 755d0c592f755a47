"""What the charts of a report are made of: axes and maps."""

import pytest

from wsam.report.heat import heat
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
    cells = {(1.0, 1.0): 5.0, (2.0, 1.0): None, (1.0, 2.0): 50.0}
    made = heat("<t>", (("x", [1.0, 2.0]), ("y", [1.0, 2.0])), cells, (1.0, 2.0))
    assert made.count("<rect") == 4
    assert made.count("failed") == 1
    assert made.count('class="chosen"') == 1
    assert "&lt;t&gt;" in made
