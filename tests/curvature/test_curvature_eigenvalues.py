"""Extreme eigenvalues and their error bounds, compared with dense eigensolvers."""

import math

import numpy as np
import pytest
import torch
from curvature_cases import relu_network, symmetric_matrix
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn
from torch.nn import functional as F

from wsam.curvature import empirical_fisher, gauss_newton, hessian, top_eigenvalues
from wsam.curvature.eigensolvers import rayleigh_ritz
from wsam.curvature.krylov import KrylovBasis

BULK = torch.linspace(-0.2, 0.3, 90).tolist()
SPECTRA = {
    "sharp": [*BULK, 1.0, 2.0, 4.0],
    "negative": [-9.0, -3.0, *BULK, 1.0, 2.0],
    "all negative": [-5.0, -4.0, -3.0, -1.0, -0.5],
    "one": [2.5],
    "two": [-1.0, 3.0],
    "zero": [0.0] * 6,
    "same": [3.0] * 6,
}


ENDS = [(name, "both") for name in SPECTRA] + [("negative", "largest"), ("sharp", "smallest")]


@pytest.mark.parametrize("method", ["lanczos", "power"])
@pytest.mark.parametrize(("name", "which"), ENDS)
def test_ends_of_a_spectrum(name, which, method):
    dense = symmetric_matrix(SPECTRA[name])
    truth = torch.linalg.eigvalsh(dense).flip(0)
    k = min(2, len(truth))
    slow = method == "power"
    found = top_eigenvalues(
        dense, k, which=which, method=method, tol=1e-3 if slow else 1e-8,
        max_products=6000 if slow else None,
    )  # fmt: skip
    high, low = truth[:k], truth[max(k, len(truth) - k) if which == "both" else len(truth) - k :]
    expected = {"largest": high, "smallest": low, "both": torch.cat([high, low])}[which]
    scale = float(truth.abs().max())
    torch.testing.assert_close(
        found.values, expected, rtol=0, atol=(1e-3 if slow else 1e-6) * scale
    )
    assert found.converged.all()
    assert found.complete
    assert found.method == method
    true_residuals = torch.linalg.vector_norm(
        dense @ found.vectors - found.vectors * found.values, dim=0
    )
    assert (true_residuals <= found.residuals * 1.001 + 1e-12).all()
    gram = found.vectors.T @ found.vectors
    torch.testing.assert_close(gram, torch.eye(len(gram)).double(), rtol=0, atol=1e-6)


@given(
    st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=14),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 3),
    st.sampled_from(["largest", "smallest"]),
)
def test_residuals_bound_the_error_for_any_spectrum(spectrum, k, block, seed, which):
    dense = symmetric_matrix(spectrum, seed)
    truth = torch.linalg.eigvalsh(dense)
    found = top_eigenvalues(dense, k, tol=1e-9, block=block, seed=seed, which=which)
    assert len(found.values) == min(k, len(spectrum))
    for value, residual in zip(found.values, found.residuals, strict=True):
        assert (truth - value).abs().min() <= residual + 1e-9
    ends = truth.flip(0)[:k] if which == "largest" else truth[:k].flip(0)
    assert found.complete
    torch.testing.assert_close(found.values, ends, rtol=0, atol=1e-7)


def test_repr_has_values_and_residuals_but_no_vectors():
    text = repr(top_eigenvalues(symmetric_matrix(BULK), 2))
    assert "values=tensor(" in text
    assert "residuals=tensor(" in text
    assert "vectors" not in text
    assert len(text) < 300


def test_negative_curvature_is_not_reported_as_sharpness():
    dense = symmetric_matrix(SPECTRA["negative"])  # the largest in absolute value is -9
    for method in ("lanczos", "power"):
        found = top_eigenvalues(dense, 1, method=method, tol=1e-4)
        assert found.largest == pytest.approx(2.0, rel=1e-3)
        assert top_eigenvalues(dense, 1, which="smallest", method=method).smallest == pytest.approx(
            -9.0, rel=1e-3
        )


def test_eigenvalues_of_a_network_equal_scipys():
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    data = [(torch.randn(20, 6).double(), torch.randint(0, 3, (20,))) for _ in range(2)]
    H = hessian(net, F.cross_entropy, data)
    found = top_eigenvalues(H, 4, which="both", tol=1e-8)
    high = eigsh(H.to_scipy(), 4, which="LA", return_eigenvectors=False)
    low = eigsh(H.to_scipy(), 4, which="SA", return_eigenvectors=False)
    expected = np.sort(np.concatenate([high, low]))[::-1]
    np.testing.assert_allclose(found.values, expected, rtol=0, atol=1e-6)
    power = top_eigenvalues(H, 1, method="power", tol=1e-6)
    assert power.largest == pytest.approx(expected[0], abs=1e-6)
    assert found.info == H.info
    keys = {"values", "residuals", "converged", "complete", "products", "method"}
    assert set(found.as_dict()) == keys


class ToyLoss(nn.Module):
    """The paper's toy loss as a model with the weights (mu, sigma)."""

    def __init__(self, mu: float, sigma: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([mu, sigma], dtype=torch.float64))

    def forward(self, _: Tensor) -> Tensor:
        mu, sigma = self.w

        def divergence(m: float, s: float) -> Tensor:
            return torch.log(s / sigma) + (sigma**2 + (mu - m) ** 2) / (2 * s**2) - 0.5

        first = 0.7 * torch.exp(-divergence(20.0, 30.0) / 1.8**2)
        return -torch.log(first + 0.3 * torch.exp(-divergence(-20.0, 10.0) / 1.2**2))


@pytest.mark.parametrize("method", ["lanczos", "power"])
@pytest.mark.parametrize(
    ("point", "loss", "low", "high"),
    [
        ((-16.805, 12.803), 0.27523, 2.38e-3, 4.87e-3),
        ((19.810, 29.937), 0.35645, 3.26e-4, 6.81e-4),
    ],
)
def test_curvature_at_the_minima_of_the_toy_loss(point, loss, low, high, method):
    H = hessian(ToyLoss(*point), lambda value: value, [torch.zeros(1)])
    found = top_eigenvalues(H, 1, which="both", method=method, tol=1e-6)
    assert H.info.loss == pytest.approx(loss, abs=1e-5)
    assert found.largest == pytest.approx(high, rel=2e-3)
    assert found.smallest == pytest.approx(low, rel=2e-3)


def test_power_iteration_exceeds_a_small_limit_as_documented():
    """It makes at least one product per value, and one more after a shift."""
    negative = torch.diag(torch.tensor([-9.0, -1e-3, -1e-4], dtype=torch.float64))
    for limit, products in ((1, 1), (2, 3), (3, 3)):
        found = top_eigenvalues(negative, 1, method="power", max_products=limit, tol=1e-9, seed=4)
        assert found.products == products, limit
        assert not found.converged.any()
    several = top_eigenvalues(negative, 3, method="power", which="largest", max_products=1, seed=4)
    assert several.products == 4
    assert "one more after a shift" in " ".join(top_eigenvalues.__doc__.split())


def test_power_iteration_converges_for_several_eigenvalues():
    dense = symmetric_matrix([*BULK, 1.0, 2.0, 4.0])
    found = top_eigenvalues(dense, 3, method="power", tol=1e-6)
    assert found.converged.all()
    assert found.products < 150  # errors of earlier vectors do not slow down later ones
    torch.testing.assert_close(
        found.values, torch.tensor([4.0, 2.0, 1.0]).double(), atol=1e-9, rtol=0
    )


@pytest.mark.parametrize("negative", [-3.0, -3.01, -2.99])
def test_power_iteration_with_eigenvalues_of_both_signs_and_about_equal_size(negative):
    dense = symmetric_matrix([negative, -1.0, 0.1, 0.5, 2.0, 3.0])
    for seed in range(5):
        found = top_eigenvalues(dense, 2, which="both", method="power", tol=1e-6, seed=seed)
        expected = torch.tensor([3.0, 2.0, -1.0, negative], dtype=torch.float64)
        torch.testing.assert_close(found.values, expected, rtol=0, atol=1e-6)
        assert found.converged.all()
        assert found.products < 400


def test_power_iteration_is_incomplete_if_a_value_does_not_converge():
    close = symmetric_matrix([0.0, 1.0, 2.0, 2.9999, 3.0])
    found = top_eigenvalues(close, 3, method="power", tol=1e-6, max_products=30)
    assert not found.complete
    assert not found.converged[1:].any()


@pytest.mark.parametrize(
    ("k", "which", "block", "basis"), [(3, "largest", 1, 12), (1, "both", 1, 6), (3, "both", 2, 12)]
)
def test_restarts_with_a_small_basis(k, which, block, basis):
    dense = symmetric_matrix(torch.linspace(-1, 1, 150) ** 3)
    truth = torch.linalg.eigvalsh(dense).flip(0)
    options = {"which": which, "block": block, "tol": 1e-7, "max_products": 2000}
    found = top_eigenvalues(dense, k, basis=basis, **options)
    assert found.converged.all()
    assert found.products > top_eigenvalues(dense, k, **options).products, "it restarts"
    expected = torch.cat([truth[:k], truth[-k:]]) if which == "both" else truth[:k]
    torch.testing.assert_close(found.values, expected, rtol=0, atol=1e-6)


def test_block_finds_copies_of_a_repeated_eigenvalue():
    dense = symmetric_matrix([*BULK, 2.0, 3.0, 3.0, 3.0])
    found = top_eigenvalues(dense, 3, tol=1e-8, block=3)
    torch.testing.assert_close(found.values, torch.full((3,), 3.0).double())


@pytest.mark.parametrize("seed", range(3))
def test_second_search_finds_copies_of_a_repeated_eigenvalue(seed):
    dense = symmetric_matrix([*BULK, 2.0, 2.0, 3.0, 3.0, 3.0, 4.0])
    found = top_eigenvalues(dense, 6, tol=1e-6, seed=seed)
    expected = torch.tensor([4.0, 3.0, 3.0, 3.0, 2.0, 2.0]).double()
    torch.testing.assert_close(found.values, expected, rtol=0, atol=1e-5)
    assert found.complete
    assert found.converged.all()
    gram = found.vectors.T @ found.vectors
    torch.testing.assert_close(gram, torch.eye(6).double(), rtol=0, atol=1e-9)
    true_residuals = torch.linalg.vector_norm(
        dense @ found.vectors - found.vectors * found.values, dim=0
    )
    assert (true_residuals <= found.residuals * 1.001 + 1e-12).all()


@pytest.mark.parametrize(
    ("build", "dtype", "k"),
    [
        (gauss_newton, torch.float64, 3),
        pytest.param(empirical_fisher, torch.float32, 3, marks=pytest.mark.slow),
        pytest.param(gauss_newton, torch.float32, 10, marks=pytest.mark.slow),
    ],
)
def test_repeated_zero_eigenvalue(build, dtype, k):
    net, data = relu_network()
    A = build(net, F.cross_entropy, data, dtype=dtype)
    truth = torch.linalg.eigvalsh(A.dense().double())
    scale = float(truth[-1])
    assert (truth[:150].abs() < 1e-6 * scale).all()
    found = top_eigenvalues(A, k, which="smallest")
    assert found.complete
    assert found.converged.all()
    assert found.values.abs().max() < 1e-3 * scale
    # Beyond the rank there are only rounding errors, which must not use up the products.
    many = top_eigenvalues(A, 30, which="largest")
    assert many.complete
    assert many.products < 100
    torch.testing.assert_close(many.values, truth.flip(0)[:30], rtol=0, atol=1e-3 * scale)


@pytest.mark.parametrize(
    "which",
    ["both", *(pytest.param(end, marks=pytest.mark.slow) for end in ("largest", "smallest"))],
)
def test_incomplete_search_does_not_count_as_converged(which):
    dense = symmetric_matrix([-3.0, -3.0, -3.0, *BULK, 3.0, 3.0, 3.0])
    enough = top_eigenvalues(dense, 3, which=which, tol=1e-4)
    assert enough.complete
    assert enough.values.abs() == pytest.approx(3.0, abs=1e-3)
    first = top_eigenvalues(dense, 1, which=which, tol=1e-4)
    assert first.complete
    few = top_eigenvalues(dense, 3, which=which, tol=0.05, max_products=enough.products // 3)
    assert not few.complete
    assert few.products <= enough.products // 3
    ends = {0} if which == "largest" else {len(few.values) - 1}
    ends = {0, len(few.values) - 1} if which == "both" else ends
    assert set(torch.nonzero(few.converged)[:, 0].tolist()) == ends
    assert few.as_dict()["complete"] is False
    complete = []
    for limit in range(3, enough.products, 4):  # stopped before or during a second search
        short = top_eigenvalues(dense, 3, which=which, tol=1e-4, max_products=limit)
        complete.append(short.complete)
        assert short.products <= limit
        assert not short.complete or short.values.abs() == pytest.approx(3.0, abs=1e-3)
    assert sum(complete) < len(complete) / 4, "only if the last search had nearly ended"


@pytest.mark.parametrize("block", [1, 2])
def test_locked_vectors_are_excluded(block):
    dense = symmetric_matrix(torch.linspace(-1, 2, 12), seed=5)
    basis = torch.linalg.qr(torch.randn(12, 12).double()).Q.T
    locked, rest = basis[:4], basis[4:]
    krylov = KrylovBasis(dense, 8, block, torch.Generator().manual_seed(0), locked)
    while not krylov.spans_all:
        krylov.extend()
    values, vectors, residuals = krylov.ritz_pairs()
    torch.testing.assert_close(values, torch.linalg.eigvalsh(rest @ dense @ rest.T))
    assert residuals.max() < 1e-12
    assert (locked @ krylov.lift(vectors).T).abs().max() < 1e-12


class Noisy:
    """A matrix whose products have a relative error of 1e-3."""

    def __init__(self, exact: Tensor) -> None:
        self.exact = exact
        self.shape, self.dtype, self.device = exact.shape, exact.dtype, exact.device

    def __matmul__(self, v: Tensor) -> Tensor:
        image = self.exact @ v
        return image + 1e-3 * torch.randn_like(image) * image.norm() / math.sqrt(len(image))


@pytest.mark.parametrize("block", [1, 2])
def test_restarted_basis_keeps_ritz_pairs_and_their_errors(block):
    noisy = Noisy(symmetric_matrix([*BULK, 1.0, 4.0]))
    krylov = KrylovBasis(noisy, 10, block, torch.Generator().manual_seed(0))
    while not krylov.full:
        krylov.extend()
    values, vectors, residuals = krylov.ritz_pairs()
    krylov.restart(values[-4:], vectors[:, -4:])
    kept, kept_vectors, kept_residuals = krylov.ritz_pairs()
    torch.testing.assert_close(kept, values[-4:])
    assert (kept_residuals >= residuals[-4:] - 1e-12).all()
    rows = krylov.lift(kept_vectors)
    torch.testing.assert_close(rows @ rows.T, torch.eye(4).double())


def test_residual_includes_the_rounding_of_the_operator():
    exact = symmetric_matrix([*BULK, 1.0, 4.0])
    small = top_eigenvalues(Noisy(symmetric_matrix([1.0, 2.0, 3.0])), 1, tol=1e-6)
    assert small.products == 3, "it stops when the basis is complete"
    assert not small.converged.any()
    found = top_eigenvalues(Noisy(exact), 1, tol=1e-6)
    assert not found.converged.any()
    assert abs(found.largest - 4.0) <= found.residuals[0]


def test_stopping_at_the_limit_is_reported():
    dense = symmetric_matrix(torch.linspace(0, 1, 200))
    for method in ("lanczos", "power"):
        found = top_eigenvalues(dense, 2, method=method, tol=1e-8, max_products=6)
        assert found.products == 6
        assert not found.converged.all()


@pytest.mark.parametrize(
    ("k", "block", "which"),
    [
        (1, 1, "largest"), (1, 4, "both"), (2, 3, "smallest"), (2, 2, "both"),
        (3, 2, "largest"), (3, 4, "smallest"), (4, 1, "both"), (4, 3, "largest"),
    ],
)  # fmt: skip
def test_few_products_return_fewer_values(k, block, which):
    dense = symmetric_matrix(torch.linspace(-1, 2, 40))
    wanted = k * (2 if which == "both" else 1)
    short = []
    for limit in range(1, 11):
        found = top_eigenvalues(dense, k, which=which, block=block, max_products=limit)
        assert 1 <= len(found.values) <= wanted
        assert found.products <= limit
        short.append(len(found.values) < wanted)
        assert not (short[-1] and found.complete), "values are missing"
    assert short[-1] is False
    assert short[0] is (wanted > 1)


def test_one_eigenvalue_needs_no_second_search():
    found = top_eigenvalues(3 * torch.eye(5), 1)
    assert (found.products, found.complete) == (1, True)


@pytest.mark.parametrize("which", ["largest", "smallest", "both"])
def test_single_value_is_the_outermost(which):
    found = top_eigenvalues(3 * torch.eye(5), 2, which=which, max_products=1)
    assert found.values.tolist() == pytest.approx([3.0])
    assert not found.complete
    assert found.converged.tolist() == [True], "its residual is zero"


def test_progress_reports_and_reproducibility():
    dense = symmetric_matrix(SPECTRA["sharp"])
    reports = []
    first = top_eigenvalues(dense, 1, seed=3, report=reports.append)
    assert [p.products for p in reports] == list(range(1, first.products + 1))
    assert reports[-1].error <= 1e-3
    powers = []
    power = top_eigenvalues(dense, 1, method="power", tol=0.1, report=powers.append)
    assert [p.products for p in powers] == list(range(1, power.products + 1))
    again = top_eigenvalues(dense, 1, seed=3)
    assert torch.equal(first.values, again.values)
    assert torch.equal(first.vectors, again.vectors)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "at least 1"),
        ({"block": 0}, "at least 1"),
        ({"which": "top"}, "which must be"),
        ({"method": "arnoldi"}, "method must be 'lanczos' or 'power', got 'arnoldi'"),
        ({"tol": 0.0}, r"tol must be in \(0, 1\), got 0.0"),
        ({"tol": 1.0}, r"tol must be in \(0, 1\), got 1.0"),
        ({"max_products": 0}, "max_products must be at least 1, got 0"),
        ({"max_products": -5, "method": "power"}, "max_products must be at least 1, got -5"),
    ],
)
def test_invalid_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        top_eigenvalues(torch.eye(3), **arguments)


def test_rayleigh_ritz_in_chunks(monkeypatch):
    dense = symmetric_matrix(torch.linspace(-1, 5, 12), seed=5)
    rows = torch.linalg.qr(
        torch.randn(12, 4, generator=torch.Generator().manual_seed(1)).double()
    ).Q.T
    whole = rayleigh_ritz(rows, rows @ dense, 4, 5.0)
    monkeypatch.setattr("wsam.curvature.eigensolvers.CHUNK_COLUMNS", 5)
    chunked = rayleigh_ritz(rows, rows @ dense, 4, 5.0)
    torch.testing.assert_close(chunked.values, whole.values)
    torch.testing.assert_close(chunked.residuals, whole.residuals)
    torch.testing.assert_close(chunked.rows.abs(), whole.rows.abs())
    residual = whole.rows @ dense - whole.values[:, None] * whole.rows
    torch.testing.assert_close(whole.residuals, residual.norm(dim=1))
