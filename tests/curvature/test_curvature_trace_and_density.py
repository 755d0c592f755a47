"""Trace within its confidence interval; density with the mass and shape of the spectrum."""

import json
import math

import pytest
import torch
from curvature_cases import symmetric_matrix
from scipy.stats import t as student_t
from torch import nn
from torch.nn import functional as F

from wsam.curvature import density, empirical_fisher, hessian, trace
from wsam.curvature.hutchinson import student_t_quantile

SPIKED = torch.cat([torch.linspace(-0.05, 0.1, 190), torch.linspace(1, 10, 10)])


def test_repr_of_a_density_has_no_tensors():
    text = repr(density(symmetric_matrix([-1.0, 0.0, 2.0]), max_probes=2))
    assert "sigma=" in text
    assert "converged=" in text
    assert "tensor" not in text


@pytest.mark.parametrize("method", ["hutchinson", "hutch++"])
def test_interval_contains_the_trace(method):
    dense = symmetric_matrix(SPIKED)
    truth = float(SPIKED.double().sum())
    results = [trace(dense, method=method, seed=seed, tol=0.04) for seed in range(40)]
    covered = sum(low <= truth <= high for low, high in (r.interval for r in results))
    assert covered >= 34  # 95% of 40 is 38; fewer than 34 has probability 0.001
    assert all(abs(r.value - truth) <= 6 * r.standard_error for r in results)
    assert all(r.converged == (r.standard_error <= 0.04 * abs(r.value)) for r in results)
    spread = torch.tensor([r.value for r in results]).std()
    assert 0.5 < spread / results[0].standard_error < 2  # the error bar is the true spread


def test_hutch_plus_plus_needs_fewer_products_if_few_eigenvalues_dominate():
    dense = symmetric_matrix(SPIKED)
    plain = trace(dense, method="hutchinson", tol=0.01, max_products=2000)
    better = trace(dense, method="hutch++", tol=0.01, max_products=2000)
    assert better.converged
    assert better.products < plain.products / 4


def test_trace_of_a_network():
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    data = [(torch.randn(9, 4).double(), torch.randint(0, 3, (9,))) for _ in range(2)]
    for build in (hessian, empirical_fisher):
        H = build(net, F.cross_entropy, data, differentiation="reverse")
        truth = float(H.dense().trace())
        found = trace(H, tol=0.02, max_products=200)
        assert abs(found.value - truth) <= 5 * found.standard_error + 1e-9
        assert found.info == H.info


def test_exact_traces():
    diagonal = torch.diag(torch.arange(5.0))
    exact = trace(diagonal, method="hutchinson")  # signs square to one
    assert (exact.value, exact.standard_error, exact.converged) == (10.0, 0.0, True)
    whole = trace(diagonal)  # the sketch spans the full space
    assert whole.value == pytest.approx(10.0, abs=1e-5)
    assert whole.as_dict()["interval95"] == [whole.value, whole.value]


def test_trace_reports_that_it_did_not_converge():
    swings = symmetric_matrix(torch.cat([torch.linspace(-1, -0.1, 50), torch.linspace(0.1, 1, 50)]))
    reports = []
    found = trace(swings, tol=1e-3, max_products=60, report=reports.append)
    assert not found.converged
    assert found.products == 60 == reports[-1].products


@pytest.mark.parametrize("method", ["hutchinson", "hutch++"])
def test_unknown_standard_error_is_null_in_json(method):
    few = trace(symmetric_matrix(SPIKED), max_products=2, columns=1, method=method)
    found = json.loads(json.dumps(few.as_dict(), allow_nan=False))
    if method == "hutch++":  # both products were used for the sketch
        assert (found["standard_error"], found["interval95"], found["probes"]) == (None, None, 0)
    else:
        assert (found["probes"], len(found["interval95"])) == (2, 2)


@pytest.mark.parametrize(
    "arguments", [{"tol": 0}, {"max_products": 1}, {"columns": 0}, {"sketch": 0}]
)
def test_invalid_arguments_of_trace(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name} must be"):
        trace(torch.eye(3), **arguments)
    with pytest.raises(TypeError, match=f"{name} must be"):
        trace(torch.eye(3), **{name: "3"})


def test_an_unknown_method_of_trace():
    with pytest.raises(ValueError, match=r"method must be 'hutchinson' or .*, got 'hutchpp'"):
        trace(torch.eye(3), method="hutchpp")


@pytest.mark.parametrize("probes", [2, 3, 6, 30])
def test_interval_uses_students_t(probes):
    dense = symmetric_matrix(SPIKED)
    found = trace(dense, method="hutchinson", tol=1e-9, columns=1, max_products=probes)
    assert found.probes == probes
    half_width = student_t.ppf(0.975, probes - 1) * found.standard_error
    low, high = found.interval
    expected = pytest.approx((half_width, half_width), rel=4e-3)
    assert (high - found.value, found.value - low) == expected


def test_quantiles_of_students_t():
    for degrees in (1, 2, 3, 4, 11, 99):
        expected = student_t.ppf(0.975, degrees)
        assert student_t_quantile(degrees) == pytest.approx(expected, rel=4e-3)


SPECTRA = {
    "two intervals": torch.cat([torch.linspace(-1, -0.5, 100), torch.linspace(1, 2, 300)]),
    "spiked": SPIKED,
    "uniform": torch.linspace(-1, 3, 300),
}


@pytest.mark.parametrize("name", SPECTRA)
def test_density_has_mass_one_and_the_shape_of_the_spectrum(name):
    values = SPECTRA[name].double()
    found = density(symmetric_matrix(values), steps=50, tol=0.01, max_probes=12)
    assert found.mass == pytest.approx(1, abs=1e-6)
    assert (found.values >= 0).all()
    torch.testing.assert_close(found.weights.sum(1), torch.ones(len(found.weights)).double())
    low, high = float(values[0]), float(values[-1])
    edges = torch.linspace(low, high, 9, dtype=torch.float64)[1:-1]
    share = torch.stack([(values < edge).double().mean() for edge in edges])
    cumulative = torch.cumulative_trapezoid(found.values, found.grid)
    at = torch.stack([cumulative[int((found.grid[1:] <= edge).sum()) - 1] for edge in edges])
    assert (at - share).abs().max() < 0.05
    assert found.nodes.min() >= low - 1e-9
    assert found.nodes.max() <= high + 1e-9
    mean = float((found.nodes * found.weights).sum() / len(found.nodes))
    assert mean == pytest.approx(float(values.mean()), abs=0.1)


def test_density_of_operators_with_one_eigenvalue():
    for dense, eigenvalue in (
        (torch.eye(40) * 3, 3.0),
        (torch.zeros(7, 7), 0.0),
        (torch.ones(1, 1), 1.0),
    ):
        found = density(dense.double(), max_probes=2)
        assert found.mass == pytest.approx(1, abs=1e-6)
        assert found.sigma == pytest.approx((eigenvalue or 1.0) / 100)
        assert float(found.grid[found.values.argmax()]) == pytest.approx(eigenvalue, abs=0.02)
        assert found.below(eigenvalue + 0.5) == pytest.approx((1, 1, 0))
        assert found.below(eigenvalue - 0.5) == pytest.approx((0, 0, 0), abs=1e-12)
        assert found.below(eigenvalue)[:2] == pytest.approx((0, 1))  # undecided at the bound itself


def test_density_stops_at_the_tolerance_and_reports_progress():
    dense = symmetric_matrix(SPECTRA["uniform"])
    reports = []
    found = density(dense, steps=40, tol=0.05, max_probes=10, report=reports.append)
    assert found.converged
    assert max(found.cumulative_error, found.quadrature_error) <= 0.05
    assert found.products == 40 * len(found.nodes) == reports[-1].products
    short = density(dense, steps=8, tol=0.05, max_probes=10)
    assert short.cumulative_error <= 0.05 < short.quadrature_error
    assert not short.converged
    assert len(found.nodes) < 10
    strict = density(dense, steps=20, tol=1e-6, max_probes=4)
    assert not strict.converged
    assert len(strict.nodes) == 4
    assert strict.standard_error.max() > 0
    one = density(dense, steps=20, max_probes=1)
    assert math.isnan(one.cumulative_error)
    assert not one.converged
    assert one.as_dict()["standard_error"] is None


def test_width_of_the_smoothing():
    dense = torch.diag(torch.tensor([-1.0, 1.0], dtype=torch.float64))
    found = density(dense, sigma=0.5)
    assert found.sigma == 0.5
    gaussians = [torch.distributions.Normal(mean, 0.5) for mean in (-1.0, 1.0)]
    share = float((found.weights * (found.nodes > 0)).sum() / found.weights.sum())
    expected = (1 - share) * gaussians[0].log_prob(found.grid).exp()
    expected += share * gaussians[1].log_prob(found.grid).exp()
    torch.testing.assert_close(found.values, expected, rtol=0, atol=1e-9)


def test_more_steps_lower_the_quadrature_error():
    dense = symmetric_matrix(SPECTRA["two intervals"])
    errors = [density(dense, steps=steps, max_probes=1).quadrature_error for steps in (8, 60)]
    assert errors[1] < errors[0] / 3


def test_density_of_a_network():
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    data = [(torch.randn(9, 4).double(), torch.randint(0, 3, (9,)))]
    H = hessian(net, F.cross_entropy, data)
    found = density(H, steps=43, max_probes=3)
    truth = torch.linalg.eigvalsh(H.dense())
    assert float(found.nodes.max()) == pytest.approx(float(truth[-1]), abs=1e-8)
    assert found.info == H.info
    saved = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert saved["below_zero"] == found.below(0.0)._asdict()
    assert saved["below_minus_sigma"] == found.below(-found.sigma)._asdict()
    assert (saved["steps"], saved["semidefinite"]) == (43, False)


@pytest.mark.parametrize(
    "arguments", [{"steps": 1}, {"max_probes": 0}, {"tol": 0}, {"points": 1}, {"sigma": 0.0}]
)
def test_invalid_arguments_of_density(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name} must be"):
        density(torch.eye(3), **arguments)
    with pytest.raises(TypeError, match=f"{name} must be"):
        density(torch.eye(3), **{name: "3"})
