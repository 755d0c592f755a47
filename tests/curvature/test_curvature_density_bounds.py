"""Bounds on the share of eigenvalues below a value, compared with dense matrices."""

import math

import pytest
import torch
from curvature_cases import relu_network, symmetric_matrix
from torch import Tensor, nn
from torch.nn import functional as F

from wsam.curvature import density, empirical_fisher, gauss_newton, hessian

CLUSTERS = torch.cat(
    [torch.full((90,), -1.0), torch.zeros(60), torch.full((60,), 0.004), torch.full((90,), 1.0)]
)
SPECTRA = {
    "uniform": torch.linspace(-1, 3, 300),
    "two intervals": torch.cat([torch.linspace(-1, -0.5, 75), torch.linspace(1, 2, 225)]),
    "many zeros": torch.cat([torch.zeros(200), torch.linspace(-1, -0.5, 30), torch.ones(70)]),
    "near zero": torch.cat([1e-3 * torch.linspace(-1, 1, 200), torch.linspace(0.5, 9, 100)]),
    "clusters": CLUSTERS,
    "negative": torch.linspace(-2, -1, 100),
}


def probe(size: int, seed: int) -> Tensor:
    """Return the first probe vector of `density`."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(1, size, generator=generator, dtype=torch.float32)[0].double()
    return drawn / drawn.norm()


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("uniform", 5), ("two intervals", 20), ("many zeros", 60), ("near zero", 5),
        ("clusters", 20), ("negative", 60), ("near zero", 60), ("many zeros", 5),
    ],
)  # fmt: skip
def test_bounds_contain_the_weight_that_a_probe_sees(name, steps):
    dense = symmetric_matrix(SPECTRA[name])
    values, vectors = torch.linalg.eigh(dense)
    scale = float(values.abs().max())
    for seed in range(2):
        found = density(dense, steps=steps, max_probes=1, seed=seed)
        mass = (vectors.T @ probe(len(dense), seed)) ** 2
        grid = torch.linspace(-1.2 * scale, 1.2 * scale, 41).tolist()
        for bound in [*grid, 0.0, 0.002, -1e-3, *found.nodes[0].tolist()]:
            low, high, _ = found.below(bound)
            # Rounding decides on which side of the bound an eigenvalue equal to it is.
            assert low <= float(mass[values < bound + 1e-12].sum()) + 1e-9
            assert high >= float(mass[values < bound - 1e-12].sum()) - 1e-9
            assert 0 <= low <= high <= 1


def test_bounds_are_narrow_between_resolved_clusters():
    found = density(symmetric_matrix(CLUSTERS), max_probes=1)
    assert found.sigma > 4 * 0.004  # the smoothed curve does not separate these clusters
    shares = [found.below(bound) for bound in (-0.002, 0.002, 0.006)]
    for share, truth in zip(shares, (0.3, 0.5, 0.7), strict=True):
        assert share.high - share.low < 1e-6
        assert abs(share.low - truth) < 4 * share.standard_error
    at_zero = found.below(0.0)  # sixty eigenvalues are equal to the bound
    assert at_zero.low == pytest.approx(shares[0].low, abs=1e-6)
    assert at_zero.high == pytest.approx(shares[1].high, abs=1e-6)


def test_more_steps_narrow_the_bounds():
    dense = symmetric_matrix(SPECTRA["near zero"])
    shares = (density(dense, steps=steps, max_probes=3).below(0.0) for steps in (8, 60, 150))
    widths = [share.high - share.low for share in shares]
    assert widths[0] > 1.5 * widths[1] > 1.5**2 * widths[2]


@pytest.mark.parametrize(("probes", "runs"), [(1, 60), (3, 40)])
def test_standard_error_is_the_spread_between_runs(probes, runs):
    dense = symmetric_matrix(SPECTRA["two intervals"])
    found = [
        density(dense, steps=8, max_probes=probes, tol=1e-9, points=2, seed=seed).below(0.0)
        for seed in range(runs)
    ]
    low = torch.tensor([share.low for share in found])
    assert 0.75 < float(low.std()) / found[0].standard_error < 1.3
    assert abs(float(low.mean()) - 0.25) < 4 * found[0].standard_error / math.sqrt(runs)


@pytest.mark.parametrize(
    ("dtype", "steps", "dead_units"),
    [
        (torch.float32, 30, 0),
        pytest.param(torch.float64, 60, 8, marks=pytest.mark.slow),
        pytest.param(torch.float32, 120, 8, marks=pytest.mark.slow),
        pytest.param(torch.float64, 120, 0, marks=pytest.mark.slow),
    ],
)
def test_hessian_with_many_zero_eigenvalues(dtype, steps, dead_units):
    net, data = relu_network(dead_units)
    H = hessian(net, F.cross_entropy, data, dtype=dtype)
    values = torch.linalg.eigvalsh(H.dense().double())
    scale = float(values.abs().max())
    negative = float((values < -1e-5 * scale).double().mean())
    not_positive = float((values < 1e-5 * scale).double().mean())
    assert not_positive - negative > 0.4  # zero up to rounding
    low, high, error = density(H, steps=steps).below(0.0)
    assert negative - 4 * error < high
    assert low < negative + 4 * error  # rounding errors do not count as negative eigenvalues
    assert high > not_positive - 4 * error - 0.01


@pytest.mark.parametrize(
    ("build", "dtype"),
    [
        (empirical_fisher, torch.float32),
        pytest.param(gauss_newton, torch.float64, marks=pytest.mark.slow),
    ],
)
def test_semidefinite_operators_have_no_eigenvalues_below_zero(build, dtype):
    net, data = relu_network()
    A = build(net, F.cross_entropy, data, dtype=dtype)
    found = density(A)
    assert A.semidefinite
    assert found.nodes.min() < 0  # by rounding
    assert found.below(0.0) == found.below(-1.0) == (0.0, 0.0, 0.0)
    values = torch.linalg.eigvalsh(A.dense().double())
    bound = 0.1 * float(values[-1])
    low, high, error = found.below(bound)
    truth = float((values < bound).double().mean())
    assert low - 4 * error <= truth <= high + 4 * error
    assert low > 0.8


class Negative(nn.CrossEntropyLoss):
    def forward(self, output, target):
        return -super().forward(output, target)


def test_which_operators_are_known_to_be_semidefinite():
    net, data = relu_network()
    assert gauss_newton(net, nn.CrossEntropyLoss(), data).semidefinite
    assert not hessian(net, F.cross_entropy, data).semidefinite
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.5, 1.0]))
    assert not gauss_newton(net, weighted, data).semidefinite
    assert not gauss_newton(net, Negative(), data).semidefinite
    unknown = gauss_newton(net, lambda z, y: 2 * F.cross_entropy(z, y), data)
    assert not unknown.semidefinite
    low, high, _ = density(unknown).below(0.0)  # zeros are undecided
    assert low == pytest.approx(0, abs=1e-6)
    assert high > 0.8
