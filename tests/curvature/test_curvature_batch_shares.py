"""The share of eigenvalues below a bound: between bounds that hold, against dense matrices."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wsam.curvature import density, empirical_fisher, gauss_newton, hessian


def matrix(values: Tensor) -> Tensor:
    q = torch.linalg.qr(torch.randn(len(values), len(values)).double()).Q
    dense = (q * values.double()) @ q.T
    return (dense + dense.T) / 2


CLUSTERS = torch.cat(
    [torch.full((90,), -1.0), torch.zeros(60), torch.full((60,), 0.004), torch.full((90,), 1.0)]
)
SPECTRA = {
    "uniform": torch.linspace(-1, 3, 300),
    "two bumps": torch.cat([torch.linspace(-1, -0.5, 75), torch.linspace(1, 2, 225)]),
    "many zeros": torch.cat([torch.zeros(200), torch.linspace(-1, -0.5, 30), torch.ones(70)]),
    "near zero": torch.cat([1e-3 * torch.linspace(-1, 1, 200), torch.linspace(0.5, 9, 100)]),
    "clusters": CLUSTERS,
    "negative": torch.linspace(-2, -1, 100),
}


def probe(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(1, size, generator=generator, dtype=torch.float32)[0].double()
    return drawn / drawn.norm()


@pytest.mark.parametrize("steps", [5, 20, 60])
@pytest.mark.parametrize("name", SPECTRA)
def test_the_mass_a_probe_sees_lies_between_the_bounds(name, steps):
    dense = matrix(SPECTRA[name])
    values, vectors = torch.linalg.eigh(dense)
    scale = float(values.abs().max())
    for seed in range(3):
        found = density(dense, steps=steps, max_probes=1, seed=seed)
        mass = (vectors.T @ probe(len(dense), seed)) ** 2
        grid = torch.linspace(-1.2 * scale, 1.2 * scale, 41).tolist()
        for bound in [*grid, 0.0, 0.002, -1e-3, *found.nodes[0].tolist()]:
            low, high, _ = found.below(bound)
            # Rounding may put an eigenvalue at the bound on either side of it.
            assert low <= float(mass[values < bound + 1e-12].sum()) + 1e-9
            assert high >= float(mass[values < bound - 1e-12].sum()) - 1e-9
            assert 0 <= low <= high <= 1


def test_bounds_are_narrow_where_the_spectrum_is_resolved():
    found = density(matrix(CLUSTERS), max_probes=1)
    assert found.sigma > 4 * 0.004  # what is told apart here is lost in the smoothed curve
    shares = [found.below(bound) for bound in (-0.002, 0.002, 0.006)]
    for share, truth in zip(shares, (0.3, 0.5, 0.7), strict=True):
        assert share.high - share.low < 1e-6
        assert abs(share.low - truth) < 4 * share.standard_error
    at_zero = found.below(0.0)  # sixty eigenvalues are at the bound itself
    assert at_zero.low == pytest.approx(shares[0].low, abs=1e-6)
    assert at_zero.high == pytest.approx(shares[1].high, abs=1e-6)


def test_more_steps_narrow_the_bounds():
    dense = matrix(SPECTRA["near zero"])
    widths = [
        share.high - share.low
        for share in (
            density(dense, steps=steps, max_probes=3).below(0.0) for steps in (8, 60, 150)
        )
    ]
    assert widths[0] > 1.5 * widths[1] > 1.5**2 * widths[2]


@pytest.mark.parametrize("probes", [1, 4])
def test_the_standard_error_is_the_spread_between_runs(probes):
    dense = matrix(SPECTRA["two bumps"])
    found = [
        density(dense, steps=20, max_probes=probes, tol=1e-9, seed=seed).below(0.0)
        for seed in range(60)
    ]
    low = torch.tensor([share.low for share in found])
    assert 0.75 < float(low.std()) / found[0].standard_error < 1.3
    assert abs(float(low.mean()) - 0.25) < 4 * found[0].standard_error / math.sqrt(60)


def network(dead: int = 0) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    with torch.no_grad():
        net[0].bias[:dead] = -100  # a unit that never fires has no curvature at all
    return net, [(torch.randn(8, 8), torch.randint(0, 3, (8,)))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("steps", [30, 60, 120])
@pytest.mark.parametrize("dead", [0, 8])
def test_hessian_of_a_network_with_many_zeros(dtype, steps, dead):
    net, data = network(dead)
    H = hessian(net, F.cross_entropy, data, dtype=dtype)
    values = torch.linalg.eigvalsh(H.dense().double())
    scale = float(values.abs().max())
    surely = float((values < -1e-5 * scale).double().mean())
    at_most = float((values < 1e-5 * scale).double().mean())
    assert at_most - surely > 0.4  # so many are zero but for rounding
    low, high, error = density(H, steps=steps).below(0.0)
    assert surely - 4 * error < high
    assert low < surely + 4 * error  # a rounding error is not a negative eigenvalue
    assert high > at_most - 4 * error - 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_cannot_be_negative_has_nothing_below_zero(dtype):
    net, data = network()
    for build, loss in (
        (empirical_fisher, F.cross_entropy),
        (gauss_newton, F.cross_entropy),
        (gauss_newton, nn.CrossEntropyLoss()),
    ):
        A = build(net, loss, data, dtype=dtype)
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


def test_what_may_be_negative_leaves_its_zeros_undecided():
    net, data = network()
    assert not hessian(net, F.cross_entropy, data).semidefinite
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.5, 1.0]))
    assert not gauss_newton(net, weighted, data).semidefinite
    unknown = gauss_newton(net, lambda z, y: 2 * F.cross_entropy(z, y), data)
    assert not unknown.semidefinite
    low, high, _ = density(unknown).below(0.0)
    assert low == pytest.approx(0, abs=1e-6)
    assert high > 0.8
