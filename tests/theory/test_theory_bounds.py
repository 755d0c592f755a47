"""Formulas of the bounds: values, identities, monotonicity and invalid arguments."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wsam.schedule import InverseSqrt
from wsam.theory import (
    Convex,
    Generalization,
    NonConvex,
    effective_weight,
    gamma_for_weight,
    inverse_sqrt,
    parity_gamma,
    sharpness_weight,
)
from wsam.theory.convergence import (
    harmonic_sum_bound,
    inverse_sqrt_sum_bounds,
    square_of_sum,
    sum_of_squares,
)

CONVEX = {
    "gamma": 0.8,
    "lr": 0.5,
    "rho": 0.1,
    "smoothness": 2.0,
    "parameters": 3,
    "gradient": 1.5,
    "distance": 4.0,
}
NONCONVEX = {
    "gamma": 0.8,
    "lr": 0.5,
    "rho": 0.1,
    "smoothness": 2.0,
    "parameters": 3,
    "gradient": 1.5,
    "start_loss": 2.0,
}
GENERAL = {
    "gamma": 0.8,
    "rho": 0.1,
    "samples": 5000,
    "parameters": 20,
    "dimension": 21,
    "delta": 0.05,
    "norm": 3.0,
}
gammas = st.floats(0, 0.99)


class TestWeights:
    def test_invalid_weights(self):
        with pytest.raises(ValueError, match=r"weight must be in \[0, inf\)"):
            gamma_for_weight(-0.5)

    def test_known_values(self):
        assert sharpness_weight(0.0) == 0.0
        assert sharpness_weight(0.5) == 1.0
        assert effective_weight(0.88, 0.9) == pytest.approx(0.7333, abs=1e-4)
        assert effective_weight(0.94, 0.9) == pytest.approx(1.5667, abs=1e-4)
        assert parity_gamma(0.9) == pytest.approx(10 / 11)

    @given(st.floats(0, 0.99))
    def test_parity_gamma_has_sams_weight(self, momentum):
        assert effective_weight(parity_gamma(momentum), momentum) == pytest.approx(1.0)

    @given(gammas)
    def test_weight_and_gamma_are_inverse(self, gamma):
        assert gamma_for_weight(sharpness_weight(gamma)) == pytest.approx(gamma)

    @given(gammas)
    def test_sum_of_squares_equals_the_papers_polynomial(self, gamma):
        polynomial = (5 * gamma**2 - 4 * gamma + 1) / (1 - gamma) ** 2
        assert sum_of_squares(gamma) == pytest.approx(polynomial, rel=1e-9)

    @given(gammas)
    def test_tight_coefficient_is_at_most_the_papers(self, gamma):
        assert square_of_sum(gamma) <= 2 * sum_of_squares(gamma) * (1 + 1e-12)

    @given(st.integers(1, 3000))
    def test_bounds_of_sums(self, steps):
        root = math.fsum(1 / math.sqrt(t) for t in range(1, steps + 1))
        low, high = inverse_sqrt_sum_bounds(steps)
        assert low <= root <= high * (1 + 1e-15)
        assert low == pytest.approx(2 * math.sqrt(steps + 1) - 2)
        assert high == pytest.approx(2 * math.sqrt(steps) - 1)
        assert math.fsum(1 / t for t in range(1, steps + 1)) <= harmonic_sum_bound(steps)

    def test_the_papers_intermediate_sum_is_too_small(self):
        assert 1 + 1 / math.sqrt(2) > 2 * math.sqrt(2 - 1) - 1

    def test_schedule_equals_the_optimizers(self):
        schedule = InverseSqrt(0.3)
        assert [inverse_sqrt(0.3, t) for t in (1, 2, 9)] == [
            schedule.value(step, 0.1) for step in (0, 1, 8)
        ]


class TestConvex:
    def test_constants_by_hand(self):
        # k = 4: k^2 + (1-k)^2 = 25, k + |1-k| = 7
        bound = Convex(**CONVEX)
        start, drift = 3 * 16 / (2 * 0.5), math.sqrt(3) * 4 * 2 * 4
        steps = {
            "printed": 50 * 3 * 2.25,
            "corrected": 50 * 3 * 2.25 * 0.5,
            "tight": 49 * 3 * 2.25 * 0.5,
        }
        for form, step in steps.items():
            assert bound.constants(form)["C1"] == pytest.approx(start + step)
            assert bound.constants(form)["C2"] == pytest.approx(drift)
        expected = (start + steps["corrected"] + 2 * 0.1 * drift) * math.sqrt(50)
        assert bound.corollary(50) == pytest.approx(expected)

    def test_printed_and_corrected_agree_at_lr_one(self):
        bound = Convex(**{**CONVEX, "lr": 1.0})
        assert bound.corollary(10, "printed") == pytest.approx(bound.corollary(10))

    @given(st.integers(2, 500), gammas, st.floats(1e-3, 10))
    def test_theorem_corollary_and_tight_are_ordered(self, T, gamma, lr):
        bound = Convex(**{**CONVEX, "gamma": gamma, "lr": lr})
        radii = [inverse_sqrt(bound.rho, t) for t in range(1, T + 1)]
        assert bound.theorem(radii) <= bound.corollary(T)
        assert bound.theorem(radii, "tight") <= bound.corollary(T, "tight") * (1 + 1e-12)
        assert bound.corollary(T, "tight") <= bound.corollary(T)

    def test_mean_regret_vanishes_only_with_the_radius(self):
        bound = Convex(**CONVEX)
        assert bound.corollary(10**12) / 10**12 < 1e-3
        assert bound.constant_radius(10**12) / 10**12 == pytest.approx(bound.floor(), rel=1e-3)
        assert bound.floor() == pytest.approx(math.sqrt(3) * 4 * 2 * 4 * 0.1)


class TestNonConvex:
    def test_constants_by_hand(self):
        constants = NonConvex(**NONCONVEX, lowest_loss=-1.0).constants()
        assert constants["C3"] == pytest.approx(3.0)
        assert constants["C4"] == pytest.approx(math.sqrt(3) * 1.5 * 2 * 4)
        assert constants["C5"] == pytest.approx(25 / 2 * 3 * 2.25 * 2 * 0.5)
        assert NonConvex(**NONCONVEX, lowest_loss=-1.0).constants("printed")["C3"] == 2.0

    def test_tight_by_hand(self):
        # k = 4: (k + |1-k|)^2 = 49; the sum of 1/sqrt(t), t = 1..8, is at least 2 sqrt(9) - 2 = 4
        bound, steps = NonConvex(**NONCONVEX), 1 + math.log(8)
        c3, c4, c5 = 2.0, math.sqrt(3) * 1.5 * 2 * 4, 49 / 4 * 3 * 2.25 * 2 * 0.5
        total = c3 + c4 * 0.5 * 0.1 * steps + c5 * steps
        assert bound.corollary(8, "tight") == pytest.approx(total / (4 / 2))
        assert bound.theorem([0.1] * 8, "tight") < bound.constant_radius(8, "tight")

    @given(st.integers(2, 500), gammas)
    def test_theorem_corollary_and_tight_are_ordered(self, T, gamma):
        bound = NonConvex(**{**NONCONVEX, "gamma": gamma})
        radii = [inverse_sqrt(bound.rho, t) for t in range(1, T + 1)]
        assert bound.theorem(radii) <= bound.corollary(T) * (1 + 1e-12)
        assert bound.corollary(T, "tight") <= bound.corollary(T) * (1 + 1e-12)

    def test_corollary_equals_the_papers_formula(self):
        bound = NonConvex(**NONCONVEX)
        c, T = bound.constants(), 100
        extra = bound.lr * bound.rho * c["C4"]
        written = (c["C3"] + c["C5"] + extra + (c["C5"] + extra) * math.log(T)) / (math.sqrt(T) - 1)
        assert bound.corollary(T) == pytest.approx(written)

    def test_constant_radius_approaches_the_floor(self):
        bound = NonConvex(**NONCONVEX)
        floor = math.sqrt(3) * 1.5 * 2 * 4 * 0.1
        assert bound.floor() == pytest.approx(floor)
        assert bound.constant_radius(10**16) == pytest.approx(floor, rel=1e-4)
        assert bound.corollary(10**16) < 1e-4


class TestGeneralization:
    def test_corrected_equals_printed_at_half_delta(self):
        half = Generalization(**{**GENERAL, "delta": 0.025})
        assert Generalization(**GENERAL).gap() == pytest.approx(half.gap("printed"), rel=1e-14)

    def test_constants_by_hand(self):
        c = Generalization(**GENERAL).constants()
        assert c["C1"] == pytest.approx(8 * 21 * math.log(math.e * 5000 / 21) + 2 * math.log(160))
        assert c["C3"] == pytest.approx(4 * math.log(200_000) + 8 * math.log(30_060))
        spread = (1 + math.sqrt(math.log(5000) / 20)) ** 2
        assert c["C2"] == pytest.approx(20 * math.log(1 + 900 * spread))

    @pytest.mark.parametrize(
        ("name", "values", "sign"),
        [
            ("samples", (21, 22, 40, 100, 10**4, 10**9), -1),
            ("delta", (1e-9, 0.01, 0.3, 0.99), -1),
            ("rho", (1e-6, 0.01, 1.0, 100.0), -1),
            ("norm", (0.0, 0.1, 10.0, 1e6), +1),
            ("parameters", (1, 2, 50, 10**6), +1),
            ("dimension", (1, 2, 300, 5000), +1),
            ("gamma", (0.5, 0.6, 0.8, 0.99), +1),
        ],
    )
    def test_monotone_in_each_argument(self, name, values, sign):
        gaps = [Generalization(**{**GENERAL, name: value}).gap() for value in values]
        differences = [sign * (b - a) for a, b in pairwise(gaps)]
        assert min(differences) > 0

    @given(
        gammas,
        st.floats(1e-3, 10),
        st.integers(2, 10**6),
        st.integers(1, 10**4),
        st.floats(1e-6, 0.9),
        st.floats(0, 1e3),
    )
    def test_monotone_in_samples(self, gamma, rho, samples, parameters, delta, norm):
        common = {
            "gamma": gamma,
            "rho": rho,
            "parameters": parameters,
            "dimension": 2,
            "delta": delta,
            "norm": norm,
        }
        fewer = Generalization(samples=samples, **common)
        more = Generalization(samples=samples + 1, **common)
        assert more.gap() <= fewer.gap()
        assert fewer.gap("printed") <= fewer.gap()

    def test_gap_of_the_theorem(self):
        c1, c2, c3 = Generalization(**GENERAL).constants().values()
        k = 4  # of gamma 0.8
        expected = 2 * abs(1 - k) * math.sqrt(c1 / 5000) + k * math.sqrt((c2 + c3) / 4999)
        assert Generalization(**GENERAL).gap() == pytest.approx(expected, rel=1e-12)

    def test_unbounded_as_the_radius_vanishes(self):
        gaps = [Generalization(**{**GENERAL, "rho": 10.0**-p}).gap() for p in (10, 100, 150)]
        assert gaps[2] > gaps[1] + 1 > gaps[0] + 2


@pytest.mark.parametrize(
    ("kind", "good", "wrong", "allowed"),
    [
        (Convex, CONVEX, {"gamma": 1.0}, r"gamma must be in \[0, 1\)"),
        (Convex, CONVEX, {"gamma": -0.1}, r"gamma must be in \[0, 1\)"),
        (Convex, CONVEX, {"gamma": math.nan}, r"gamma must be in \[0, 1\)"),
        (Convex, CONVEX, {"rho": 0.0}, r"rho must be in \(0, inf\)"),
        (Convex, CONVEX, {"lr": -1.0}, r"lr must be in \(0, inf\)"),
        (Convex, CONVEX, {"distance": -1.0}, r"distance must be in \[0, inf\)"),
        (Convex, CONVEX, {"smoothness": math.inf}, r"smoothness must be in \[0, inf\)"),
        (Convex, CONVEX, {"gradient": -1.0}, r"gradient must be in \[0, inf\)"),
        (NonConvex, NONCONVEX, {"rho": -0.1}, r"rho must be in \(0, inf\)"),
        (NonConvex, NONCONVEX, {"start_loss": math.nan}, r"start_loss must be in \(-inf, inf\)"),
        (NonConvex, NONCONVEX, {"lowest_loss": -math.inf}, r"lowest_loss must be in \(-inf, inf"),
        (NonConvex, NONCONVEX, {"parameters": 0}, "parameters must be at least 1"),
        (NonConvex, NONCONVEX, {"lowest_loss": 3.0}, "start_loss must be at least"),
        (Generalization, GENERAL, {"delta": 0.0}, r"delta must be in \(0, 1\)"),
        (Generalization, GENERAL, {"rho": 0.0}, r"rho must be in \(0, inf\)"),
        (Generalization, GENERAL, {"gamma": 1.0}, r"gamma must be in \[0, 1\)"),
        (Generalization, GENERAL, {"norm": -1.0}, r"norm must be in \[0, inf\)"),
        (Generalization, GENERAL, {"parameters": 0}, "parameters must be at least 1"),
        (Generalization, GENERAL, {"dimension": 0}, "dimension must be at least 1"),
        (Generalization, GENERAL, {"samples": 20}, "samples must be at least 21"),
        (Generalization, GENERAL, {"samples": 1, "dimension": 1}, "samples must be at least 2"),
    ],
)
def test_invalid_arguments(kind, good, wrong, allowed):
    with pytest.raises(ValueError, match=allowed):
        kind(**{**good, **wrong})


@pytest.mark.parametrize(("kind", "good"), [(Convex, CONVEX), (NonConvex, NONCONVEX)])
def test_invalid_steps_radii_and_forms(kind, good):
    bound = kind(**good)
    for call in (bound.corollary, bound.constant_radius):
        with pytest.raises(ValueError, match="T must be at least 2"):
            call(1)
    with pytest.raises(ValueError, match="T must be at least 2"):
        bound.theorem([0.1])
    with pytest.raises(ValueError, match=r"every radius must be in \(0, 0.1\]"):
        bound.theorem([0.1, 0.2])
    with pytest.raises(ValueError, match="form must be one of printed, corrected, tight"):
        bound.corollary(5, "wrong")
    with pytest.raises(ValueError, match="form must be one of printed, corrected, got 'tight'"):
        Generalization(**GENERAL).gap("tight")
