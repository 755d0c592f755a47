"""The `wsam bounds` commands: every bound, JSON and table output, and errors."""

import json
import math

import pytest
from command import error_of, wsam_command

from wsam.theory import Convex, Generalization, NonConvex


def bounds(*words):
    return json.loads(wsam_command("bounds", *words, "--json").stdout)


def test_convex():
    record = bounds("convex", "--gamma", 0, "--lr", 5, "--distance", 2.5, "-T", 2)
    assert record["bound"]["printed"] == pytest.approx(3.712, abs=1e-3)
    assert record["bound"]["corrected"] == pytest.approx(15.026, abs=1e-3)
    assert record["bound"]["corrected"] == Convex(**record["setting"]).corollary(2)
    assert record["schedules"] == "lr_t = lr/sqrt(t), rho_t = rho/sqrt(t)"
    assert "factor lr" in record["why"]


@pytest.mark.parametrize("radius", ["falling", "constant"])
def test_tight_bound_can_be_recomputed(radius):
    """From C1, C2 and the printed formula."""
    words = ("--gamma", 0.8, "--lr", 5, "--distance", 2.5, "-n", 3, "--radius", radius, "-T", 7)
    record = bounds("convex", *words)
    setting, (C1, C2) = record["setting"], record["constants"]["tight"].values()
    rho, root, k = setting["rho"], 7**0.5, 4.0
    half = (
        (k + abs(1 - k)) ** 2 * setting["parameters"] * setting["gradient"] ** 2 * setting["lr"] / 2
    )
    if radius == "falling":
        expected = (C1 + 2 * rho * C2) * root - half - rho * C2
    else:
        expected = C1 * root + C2 * rho * 7 - half
    assert record["bound"]["tight"] == pytest.approx(expected)
    assert "2 sqrt(T) - 1" in record["tight"]


def test_tight_gradient_bound_can_be_recomputed():
    record = bounds("nonconvex", "--gamma", 0.8, "-T", 7, "--rho", 0.5)
    setting, (C3, C4, C5) = record["setting"], record["constants"]["tight"].values()
    growth = 1 + math.log(7)
    total = C3 + C5 * growth + C4 * setting["lr"] * setting["rho"] * growth
    assert record["bound"]["tight"] == pytest.approx(total / (8**0.5 - 1))
    assert "sqrt(T+1) - 1" in record["tight"]


def test_nonconvex_at_a_constant_radius():
    words = ("--radius", "constant", "--steps", 10**15, "--start-loss", 2, "--lowest-loss", -1)
    record = bounds("nonconvex", *words)
    assert record["constants"]["printed"]["C3"] == pytest.approx(10.0)
    assert record["constants"]["corrected"]["C3"] == pytest.approx(15.0)
    bound = NonConvex(**record["setting"])
    assert record["bound"]["tight"] == bound.constant_radius(10**15, "tight")
    assert record["bound"]["corrected"] == pytest.approx(record["floor"], rel=1e-3)


@pytest.mark.parametrize(
    ("verb", "what"), [("convex", "mean regret"), ("nonconvex", "E|grad L|^2")]
)
def test_the_floor_of_a_constant_radius(verb, what):
    """Of the mean regret, while the bound is that of the sum over T steps."""
    text = wsam_command("bounds", verb, "--radius", "constant").stdout
    assert f"a constant radius leaves a floor of 0.45 for the {what}, for any T" in text


@pytest.mark.parametrize("verb", ["convex", "nonconvex"])
def test_the_note_on_the_tight_form_names_the_constant_that_differs(verb):
    record = bounds(verb)
    tight, corrected = (record["constants"][form] for form in ("tight", "corrected"))
    assert tight != corrected
    for name, value in tight.items():
        assert (f"{name} has (k + |1-k|)^2" in record["tight"]) == (value != corrected[name])


def test_generalization():
    record = bounds("generalization", "-m", 10**9, "-n", 10, "--dimension", 11)
    assert record["bound"]["corrected"] == Generalization(**record["setting"]).gap()
    assert record["bound"]["printed"] < record["bound"]["corrected"]
    assert record["vacuous"] is False
    assert bounds("generalization")["vacuous"] is True


@pytest.mark.parametrize("verb", ["convex", "nonconvex", "generalization"])
def test_tables_show_every_form_and_the_reason(verb):
    text = wsam_command("bounds", verb).stdout
    for word in ("printed", "corrected", "assumes:", "C1" if verb != "nonconvex" else "C5"):
        assert word in text
    assert ("tight" in text) == (verb != "generalization")
    assert ("\ntight: sum 1/sqrt(t)" in text) == (verb != "generalization")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("convex --gamma 1", "gamma must be in [0, 1), got 1.0"),
        ("convex -T 1", "T must be at least 2, got 1"),
        ("nonconvex -T 1", "T must be at least 2, got 1"),
        ("nonconvex --rho -1", "rho must be in (0, inf), got -1.0"),
        ("nonconvex --radius odd", "'odd' is not one of 'falling', 'constant'"),
        ("generalization --delta 1", "delta must be in (0, 1), got 1.0"),
        ("generalization -m 5", "samples must be at least 100, got 5"),
        ("convex --rho 1e200 --distance 1e200", "too large or too close to zero"),
        ("convex --lr=1e-320", "too large or too close to zero"),
        ("nonconvex --lr 1e308 --json", "too large or too close to zero"),
        (f"nonconvex -T {10**400}", "too large or too close to zero"),
        ("generalization --norm 1e200", "too large or too close to zero"),
    ],
)
def test_wrong_values(words, message):
    assert message in error_of("bounds", *words.split())
