"""Updates for several gammas: values, figure and command."""

import json
import math

import pytest
from command import wsam_command
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.text import Text

from wsam.toy import updates
from wsam.toy.plot_updates import plot_updates

UPDATES = updates((0.0, 0.3, 0.5, 0.75))


def test_updates_at_known_gammas():
    assert UPDATES.by_gamma[0.0] == UPDATES.first
    assert UPDATES.by_gamma[0.5] == pytest.approx(UPDATES.second, rel=1e-12)
    assert 0 < UPDATES.angle(0.3) < UPDATES.angle(0.5) < UPDATES.angle(0.75)
    assert UPDATES.angle(0.0) == 0.0


def test_gradients_are_distinguishable_in_the_figure():
    assert 15 < UPDATES.angle(0.5) < 40


@given(st.floats(0, 0.99), st.floats(-25, 25), st.floats(5, 35), st.floats(0.1, 3))
def test_update_equals_the_papers(gamma, mu, sigma, rho):
    found = updates((gamma,), point=(mu, sigma), rho=rho)
    k = gamma / (1 - gamma)
    expected = [a + k * (b - a) for a, b in zip(found.first, found.second, strict=True)]
    assert found.by_gamma[gamma] == pytest.approx(expected, rel=1e-9, abs=1e-12 * (1 + k))


def test_angle_is_positive_towards_the_second_gradient():
    for point in ((-6.0, 10.0), (-25.0, 9.0)):
        found = updates((0.5,), point=point, rho=2.0)
        cosine = sum(a * b for a, b in zip(found.first, found.second, strict=True))
        cosine /= math.hypot(*found.first) * math.hypot(*found.second)
        assert found.angle(0.5) == pytest.approx(math.degrees(math.acos(cosine)))


@pytest.mark.parametrize(
    ("wrong", "allowed"),
    [
        ({"gammas": (1.0,)}, r"gamma must be in \[0, 1\)"),
        ({"rho": -1.0}, r"rho must be in"),
    ],
)
def test_invalid_arguments(wrong, allowed):
    with pytest.raises(ValueError, match=allowed):
        updates(**wrong)


class TestCommand:
    def test_json_and_files(self, tmp_path):
        record = json.loads(wsam_command("directions", "--json", "--out", tmp_path).stdout)
        assert [row["gamma"] for row in record["updates"]] == [0.0, 0.3, 0.5, 0.65, 0.75]
        assert record["updates"][0]["update"] == record["g0"]
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "directions.png",
            "directions.svg",
        ]
        figure = (tmp_path / "directions.svg").read_text(encoding="utf-8")
        for text in ("γ = 0", "g₀: SGD", "γ = 0.3", "γ = 0.5", "g₁: SAM", "γ = 0.75", "67°"):
            assert f">{text}<" in figure

    def test_labels_do_not_touch(self):
        figure = plot_updates(updates((0.0, 0.3, 0.5, 0.65, 0.75)))
        figure.draw_without_rendering()
        texts = [text for text in figure.axes[0].texts if text.get_text()]
        boxes = [Text.get_window_extent(text) for text in texts]  # without arrow and leader
        assert len(boxes) == 5
        assert not any(a.overlaps(b) for a in boxes for b in boxes if a is not b)

    def test_text(self):
        text = wsam_command("directions", "--gamma", "0.5", "--rho", "2").stdout
        assert "rho 2" in text
        assert text.count("degrees from g0") == 1

    def test_invalid_radius_is_a_one_line_error(self):
        answer = wsam_command("directions", "--rho", "-1", status=2)
        assert answer.stderr == "wsam: rho must be in [0, inf), got -1.0\n"

    def test_radius_without_a_finite_loss(self):
        found = json.loads(wsam_command("directions", "--rho", "1e9", "--json").stdout)
        assert found["g1"] == [None, None]
