"""The toy example: loss, end points and their significant digits, figure and command."""

import json
import math

import numpy as np
import pytest
import torch
from command import wsam_command

from wsam.toy import FLAT, RULES, SADDLE, SHARP, Setting, loss, minimum_near, places, trace
from wsam.toy.plot_trajectories import STROKES, plot_trajectories
from wsam.toy.stable_digits import stable_decimals, stable_digits, thousandths
from wsam.toy.trajectory import verdict

PAPER = [
    ("sam", None, SHARP),
    ("gsam", None, SHARP),
    ("wsam", 0.6, SHARP),
    ("coupled_wsam", 0.6, SHARP),
    ("wsam", 0.95, SHARP),  # the paper reports flat, which the coupled form reaches
    ("coupled_wsam", 0.95, FLAT),
]


def setting_of(rule, gamma):
    return {"rule": rule} if gamma is None else {"rule": rule, "gamma": gamma}


class TestLandscape:
    def test_stationary_points(self):
        sharp, flat, saddle = places()
        assert sharp.point == pytest.approx((-16.805, 12.803), abs=1e-3)
        assert flat.point == pytest.approx((19.810, 29.937), abs=1e-3)
        assert saddle.point == pytest.approx((0.310, 22.499), abs=1e-3)
        assert (sharp.loss, flat.loss, saddle.loss) == pytest.approx(
            (0.27523, 0.35645, 0.39767), abs=1e-5
        )
        assert sharp.eigenvalues == pytest.approx((2.38e-3, 4.87e-3), rel=2e-3)
        assert flat.eigenvalues == pytest.approx((3.26e-4, 6.81e-4), rel=2e-3)
        assert saddle.eigenvalues[0] < 0 < saddle.eigenvalues[1]
        assert [place.name for place in places()] == [SHARP, FLAT, SADDLE]

    def test_gradient_vanishes_at_stationary_points(self):
        for place in places():
            gradient = torch.func.grad(loss)(torch.tensor(place.point, dtype=torch.float64))
            assert gradient.norm() < 1e-15

    def test_loss_equals_the_papers_formula(self):
        mu, sigma = 3.0, 17.0
        likelihood = 0.0
        for weight, width, mean, deviation in ((0.7, 1.8, 20, 30), (0.3, 1.2, -20, 10)):
            kl = (
                math.log(deviation / sigma)
                + (sigma**2 + (mu - mean) ** 2) / (2 * deviation**2)
                - 0.5
            )
            likelihood += weight * math.exp(-kl / width**2)
        point = torch.tensor([[mu, sigma]], dtype=torch.float64)
        assert loss(point).item() == pytest.approx(-math.log(likelihood), rel=1e-14)

    def test_minimum_near(self):
        assert minimum_near((-17.5, 13.5)) == SHARP
        assert minimum_near((20.5, 29.0)) == FLAT
        assert minimum_near((0.3, 22.5)) is None
        assert minimum_near((math.nan, math.nan)) is None


def numpy_run(setting, steps):
    """Return the points of the same run, computed with numpy and a gradient written by hand."""
    mean, deviation = np.array([20.0, -20.0]), np.array([30.0, 10.0])
    weight, width = np.array([0.7, 0.3]), np.array([1.8**2, 1.2**2])

    def gradient(w):
        kl = np.log(deviation / w[1]) + (w[1] ** 2 + (w[0] - mean) ** 2) / (2 * deviation**2) - 0.5
        share = weight * np.exp(-kl / width)
        share /= share.sum() * width
        slopes = np.array([(w[0] - mean) / deviation**2, w[1] / deviation**2 - 1 / w[1]])
        return slopes @ share

    k = setting.gamma / (1 - setting.gamma)
    w, velocity, points = np.array(setting.start), np.zeros(2), []
    for _ in range(steps):
        g0 = gradient(w)
        metric = {
            "euclidean": np.ones(2),
            "adaptive": (abs(w) + 0.01) ** 2,
            "fisher": 1 / (1 + g0**2),
        }[setting.geometry]
        g1 = gradient(w + setting.rho * metric * g0 / (math.sqrt(g0 @ (metric * g0)) + 1e-12))
        base_grad = {
            "sgd": g0,
            "sam": g1,
            "gsam": g1 - setting.alpha * (g0 - (g0 @ g1) / (g1 @ g1) * g1),
            "wsam": g0,
            "coupled_wsam": k * g1 + (1 - k) * g0,
        }[setting.rule]
        velocity = setting.momentum * velocity + base_grad
        decoupled = k * (g1 - g0) if setting.rule == "wsam" else 0.0
        w = w - setting.lr * (velocity + decoupled)
        points.append(tuple(w))
    return points


@pytest.mark.parametrize(
    ("rule", "geometry"),
    [*((rule, "euclidean") for rule in RULES), ("wsam", "adaptive"), ("coupled_wsam", "fisher")],
)
def test_trajectory_equals_numpy(rule, geometry):
    rho = 0.1 if geometry == "adaptive" else 2.0
    setting = Setting(rule=rule, geometry=geometry, rho=rho, gamma=0.8, steps=40)
    run = trace(setting)
    assert run.points[0] == (-6.0, 10.0)
    np.testing.assert_allclose(run.points[1:], numpy_run(setting, 40), rtol=0, atol=1e-8)


class TestEndPoints:
    @pytest.mark.parametrize(("rule", "gamma", "minimum"), PAPER)
    def test_which_minimum(self, rule, gamma, minimum):
        run = trace(**setting_of(rule, gamma))
        assert len(run.points) == 151
        assert run.minimum == minimum
        low, high = run.eigenvalues
        assert (high < 1e-3) == (minimum == FLAT)
        assert low > 0

    def test_coupled_end_point(self):
        run = trace(rule="coupled_wsam", gamma=0.95)
        assert run.end == pytest.approx((19.815, 29.766), abs=5e-4)
        assert run.end_text == "(19.8150, 29.7656)"
        assert run.loss_text == "0.35646"
        assert run.eigenvalues_text == "0.326, 0.685"
        assert run.spread < 1e-6

    def test_decoupled_run_is_chaotic_near_the_sharp_minimum(self):
        run = trace(rule="wsam", gamma=0.95)
        sharp = places()[0].point
        assert all(math.dist(point, sharp) < 2 for point in run.points[50:])
        assert run.spread > 0.1
        assert run.decimals == 0
        assert "±" in run.end_text
        assert run.loss_text == "0.28", "0.275 to 0.277 over the last steps"
        assert run.eigenvalues_text[:3] == "2, "

    def test_stable_decimals(self):
        assert [stable_decimals(s) for s in (0.0, 4e-5, 2e-4, 0.04, 3.0, math.nan)] == [
            4,
            4,
            3,
            1,
            0,
            0,
        ]

    @pytest.mark.parametrize(
        ("value", "spread", "digits", "text"),
        [
            (4.9012e-3, 0.0, 3, "4.90"),
            (4.9012e-3, 4e-6, 3, "4.90"),
            (4.9012e-3, 6e-6, 2, "4.9"),
            (4.9012e-3, 4e-4, 1, "5"),
            (4.9012e-3, 6e-4, 0, "5 ± 0.6"),
            (-8.32e-4, 1e-9, 3, "-0.832"),
            (0.0, 1e-9, 3, "0.00"),
            (math.nan, math.nan, 0, "nan"),
            (4.9012e-3, math.nan, 0, "5"),  # the shifted run left the domain
        ],
    )
    def test_stable_digits(self, value, spread, digits, text):
        assert stable_digits(value, spread) == digits
        assert thousandths(value, spread) == text

    def test_labels(self):
        assert Setting(rule="wsam", gamma=0.95).label == "WSAM, γ = 0.95"
        assert Setting(rule="sam").label == "SAM"

    def test_run_that_leaves_the_domain(self):
        at_the_last_step = trace(rule="sgd", lr=5e3, start=(-10.0, 20.0), steps=1)
        assert at_the_last_step.end[1] < 0
        for run in (trace(geometry="adaptive", rho=2.0, steps=3), at_the_last_step):
            assert run.end_text == "left the domain"
            assert run.minimum is None
            assert all(math.isnan(value) for value in run.eigenvalues)


@pytest.mark.parametrize(
    ("wrong", "allowed"),
    [
        ({"gamma": 1.0}, r"gamma must be in \[0, 1\)"),
        ({"gamma": -0.01}, r"gamma must be in \[0, 1\)"),
        ({"rho": -1.0}, r"rho must be in"),
        ({"lr": -1.0}, "Invalid learning rate"),
        ({"rule": "gsam", "alpha": -0.1}, r"alpha must be in \[0, inf\)"),
    ],
)
def test_invalid_settings(wrong, allowed):
    with pytest.raises(ValueError, match=allowed):
        trace(**wrong)


class TestFigure:
    def test_every_rule_has_a_stroke(self):
        assert set(STROKES) == set(RULES)

    def test_one_panel_without_gamma(self):
        drawn = plot_trajectories([trace(rule="sgd", steps=5), trace(rule="sam", steps=5)])
        (panel,) = drawn.axes
        assert panel.get_title(loc="left") == ""
        assert {"SGD", "SAM"} <= {line.get_label() for line in panel.lines}

    def test_title_with_one_form_of_wsam(self):
        drawn = plot_trajectories([trace(rule="sgd"), trace(rule="coupled_wsam", gamma=0.95)])
        (panel,) = drawn.axes
        assert panel.get_title(loc="left") == "γ = 0.95: Coupled-WSAM ends at the flat minimum"
        assert verdict([trace(rule="wsam", steps=1)]) == "WSAM ends at neither minimum"


class TestCommand:
    @pytest.mark.slow
    def test_json_and_files(self, tmp_path):
        record = json.loads(wsam_command("toy", "--json", "--out", tmp_path / "new" / "toy").stdout)
        ends = [(run["rule"], run["gamma"], run["minimum"]) for run in record["runs"]]
        assert ends == PAPER
        assert [place["name"] for place in record["places"]] == [SHARP, FLAT, SADDLE]
        assert record["setting"]["steps"] == 150
        written = {path.name: path for path in (tmp_path / "new" / "toy").iterdir()}
        assert sorted(written) == ["toy.html", "toy.png", "toy.svg"]
        assert sorted(record["files"]) == sorted(map(str, written.values()))
        assert written["toy.png"].read_bytes().startswith(b"\x89PNG")
        figure = written["toy.svg"].read_text(encoding="utf-8")
        assert "γ = 0.95: only the coupled form reaches the flat minimum" in figure
        assert "γ = 0.6: both forms of WSAM end at the sharp minimum" in figure
        for name in ("SAM", "GSAM", "WSAM", "Coupled-WSAM", "μ", "σ"):
            assert f">{name}<" in figure

    def test_table(self):
        text = wsam_command("toy", "--gamma", "0.95").stdout
        assert "gamma 0.95: only the coupled form reaches the flat minimum." in text
        assert "gamma 0.6" not in text
        assert "0.39767" in text
        (row,) = (line for line in text.splitlines() if line.split()[:2] == ["WSAM", "0.95"])
        assert " 0.28 " in row
        assert "shown to the digits that do not change" in text

    @pytest.mark.slow
    def test_run_that_leaves_the_domain_is_valid_json(self):
        record = json.loads(wsam_command("toy", "--json", "--gamma", "0.9999").stdout)
        coupled = record["runs"][-1]
        assert coupled["end"] == [None, None]
        assert coupled["loss"] is None

    def test_invalid_gamma_is_a_one_line_error(self):
        answer = wsam_command("toy", "--gamma", "1", status=2)
        assert answer.stderr == "wsam: gamma must be in [0, 1), got 1.0\n"
        assert answer.stdout == ""

    def test_unwritable_folder_is_a_one_line_error(self, tmp_path):
        (tmp_path / "file").write_text("")
        answer = wsam_command("toy", "--out", tmp_path / "file", "--gamma", "0.5", status=2)
        assert answer.stderr.startswith("wsam: ")
        assert answer.stderr.count("\n") == 1
