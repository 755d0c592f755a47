"""Spectral density of a symmetric operator by stochastic Lanczos quadrature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wsam._core.validation import count, number
from wsam.curvature.operator import Info, SymmetricOperator
from wsam.curvature.plot_density import save_density
from wsam.curvature.progress import Progress, ProgressCallback
from wsam.curvature.quadrature import LanczosQuadrature, lanczos_quadrature

_CUMULATIVE_POINTS = 400
"""Number of points at which cumulative distributions are compared."""


class Share(NamedTuple):
    """Bounds on a share of the eigenvalues."""

    low: float
    """Lower bound."""
    high: float
    """Upper bound."""
    standard_error: float
    """Standard error of both bounds, from the randomness of the probes."""


@dataclass(frozen=True)
class Density:
    """Distribution of the eigenvalues of an operator A, with total mass one.

    Attributes:
        grid: Eigenvalues at which the density is evaluated.
        values: Density on the grid, smoothed by a Gaussian of width `sigma`.
        standard_error: Standard error of the values, from the spread between probes; NaN with one
            probe.
        nodes: Quadrature nodes, one row per probe.
        weights: Weights of the nodes; every row sums to one.
        sigma: Width of the smoothing.
        cumulative_error: Largest standard error of the cumulative distribution.
        quadrature_error: Largest change of the cumulative distribution against half the steps.
        products: Number of vectors multiplied by A.
        converged: Whether `cumulative_error` and `quadrature_error` are at most `tol`. This is about
            the smoothed curve; `below` returns bounds for shares of the eigenvalues.
        info: Data, mode and precision of A if it is an `Operator`.
        semidefinite: Whether A is known to have no negative eigenvalues.
        quadratures: Lanczos quadrature of each probe, used by `below`.
    """

    grid: Tensor = field(repr=False)
    values: Tensor = field(repr=False)
    standard_error: Tensor = field(repr=False)
    nodes: Tensor = field(repr=False)
    weights: Tensor = field(repr=False)
    sigma: float
    cumulative_error: float
    quadrature_error: float
    products: int
    converged: bool
    info: Info | None = None
    semidefinite: bool = False
    quadratures: tuple[LanczosQuadrature, ...] = field(default=(), repr=False)

    @property
    def mass(self) -> float:
        """Integral of the density over its grid: one."""
        return float(torch.trapezoid(self.values, self.grid))

    def below(self, bound: float) -> Share:
        """Return bounds on the share of eigenvalues below `bound`.

        Equation, for a probe v and unit eigenvectors x_i, and for a share p of n eigenvalues::

            estimate from v = sum over eigenvalues below the bound of (v' x_i)²
            standard error  = sqrt(2 p (1 - p) / ((n + 2) probes))

        After N steps of Lanczos the share is known up to the mass that may be at the bound itself,
        which is its weight in the Gauss-Radau quadrature. The bounds are far apart if many
        eigenvalues are at the bound or too close to it for N steps. Eigenvalues closer than the
        rounding of the products are undecided, too.

        Args:
            bound: An eigenvalue.

        Returns:
            Lower bound, upper bound and standard error.

        References:
            Golub and Meurant, Matrices, Moments and Quadrature, 2010.
        """
        if self.semidefinite and bound <= 0:
            return Share(0.0, 0.0, 0.0)
        bounds = [quadrature.below(bound) for quadrature in self.quadratures]
        count, size = len(bounds), self.quadratures[0].size
        low, high = (sum(ends) / count for ends in zip(*bounds, strict=True))
        widest = min(max(0.5, low), high)  # the share in [low, high] with the largest variance
        error = math.sqrt(2 * widest * (1 - widest) / ((size + 2) * count))
        return Share(low, high, error)

    def as_dict(self) -> dict[str, Any]:
        """Return the result as a dictionary for JSON."""
        single = len(self.nodes) < 2
        return {
            "grid": self.grid.tolist(),
            "values": self.values.tolist(),
            "standard_error": None if single else self.standard_error.tolist(),
            "nodes": self.nodes.tolist(),
            "weights": self.weights.tolist(),
            "sigma": self.sigma,
            "mass": self.mass,
            "semidefinite": self.semidefinite,
            "below_zero": self.below(0.0)._asdict(),
            "below_minus_sigma": self.below(-self.sigma)._asdict(),
            "cumulative_error": None if single else self.cumulative_error,
            "quadrature_error": self.quadrature_error,
            "probes": len(self.nodes),
            "steps": self.nodes.shape[1],
            "products": self.products,
            "converged": self.converged,
        }

    def save(self, path: str | Path, *, marks: Sequence[float] | None = None) -> Path:
        """Write a figure (.png, .svg, .pdf), an interactive page (.html) or the numbers (.json).

        Args:
            path: Its suffix selects the format; the folder is created.
            marks: Eigenvalues to mark in a figure or on a page.

        Returns:
            The path.
        """
        save_density(self, path, marks)
        return Path(path)


def density(
    operator: SymmetricOperator,
    *,
    steps: int = 60,
    tol: float = 0.02,
    max_probes: int = 10,
    sigma: float | None = None,
    points: int = 1001,
    seed: int = 0,
    report: ProgressCallback | None = None,
) -> Density:
    """Estimate the density of the eigenvalues by stochastic Lanczos quadrature.

    Equation, with nodes t_pj and weights c_pj from `steps` of Lanczos started at random probe p::

        density(t) = mean_p  sum_j  c_pj  N(t; t_pj, sigma²)

    The nodes are the eigenvalues of the small Lanczos matrix and the weights are the squared first
    entries of its eigenvectors: a Gauss quadrature of the spectrum, weighted by the probe. Probes are
    added until the smoothed cumulative distribution is known to `tol`.

    Args:
        operator: A curvature operator, or any symmetric matrix.
        steps: Lanczos steps per probe, one product each.
        tol: Stop when the largest standard error of the smoothed cumulative distribution is at most
            this.
        max_probes: Stop after this many probes; at least 3 are used if allowed.
        sigma: Width of the smoothing. Default: a hundredth of the range of the spectrum.
        points: Number of grid points.
        seed: Seed of the random probes.
        report: Called with a `Progress` after every product.

    Returns:
        The density with its errors.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> found = density(torch.diag(torch.linspace(-1, 3, 50)))
        >>> share = found.below(0.0)
        >>> round(found.mass, 4), share.low - 0.1 < 13 / 50 < share.high + 0.1
        (1.0, True)

    References:
        Lin, Saad and Yang, Approximating spectral densities of large matrices, SIAM Review 2016.

        Ghorbani, Krishnan and Xiao, An investigation into neural net optimization via Hessian
        eigenvalue density, ICML 2019.
    """
    count("steps", steps, 2)
    number("tol", tol, low_open=True)
    count("max_probes", max_probes, 1)
    if sigma is not None:
        number("sigma", sigma, low_open=True)
    count("points", points, 2)
    generator = torch.Generator().manual_seed(seed)
    steps = min(steps, operator.shape[0])
    probes: list[LanczosQuadrature] = []
    error = math.nan

    def report_products(done: int) -> None:
        if report is not None:
            report(Progress(len(probes) * steps + done, max_probes * steps, error))

    while len(probes) < max_probes:
        probes.append(lanczos_quadrature(operator, steps, generator, report_products))
        width = sigma or probes[0].default_sigma()
        error = _cumulative_error(probes, width)
        if len(probes) >= 3 and error <= tol:
            break
    curves, grid = _density_curves(probes, width, points)
    change = _quadrature_error(probes, width)
    return Density(
        grid=grid,
        values=curves.mean(0),
        standard_error=_standard_error(curves),
        nodes=torch.stack([probe.nodes for probe in probes]),
        weights=torch.stack([probe.weights for probe in probes]),
        sigma=width,
        cumulative_error=error,
        quadrature_error=change,
        products=len(probes) * steps,
        converged=error <= tol and change <= tol,  # the error of one probe is NaN
        info=getattr(operator, "info", None),
        semidefinite=getattr(operator, "semidefinite", False),
        quadratures=tuple(probes),
    )


def _density_curves(
    probes: list[LanczosQuadrature], sigma: float, points: int
) -> tuple[Tensor, Tensor]:
    """Return the smoothed density of each probe, one per row, and the grid."""
    low, high = _grid(probes, sigma, 2).tolist()
    # Two points per sigma make the trapezoidal rule exact enough for a mass of one.
    grid = _grid(probes, sigma, max(points, math.ceil(2 * (high - low) / sigma)))
    curves = []
    for probe in probes:
        gaussians = torch.exp(-(((grid[:, None] - probe.nodes) / sigma) ** 2) / 2)
        curves.append(gaussians @ probe.weights / (sigma * math.sqrt(2 * math.pi)))
    return torch.stack(curves), grid


def _cumulative_error(probes: list[LanczosQuadrature], sigma: float) -> float:
    """Return the largest standard error of the cumulative distribution; NaN for one probe."""
    grid = _grid(probes, sigma, _CUMULATIVE_POINTS)
    curves = torch.stack([probe.cumulative(grid, sigma) for probe in probes])
    return float(_standard_error(curves).max())


def _quadrature_error(probes: list[LanczosQuadrature], sigma: float) -> float:
    """Return the largest change of the cumulative distribution against half the steps."""
    grid = _grid(probes, sigma, _CUMULATIVE_POINTS)
    changes = [
        probe.cumulative(grid, sigma) - probe.half_cumulative(grid, sigma) for probe in probes
    ]
    return float(torch.stack(changes).mean(0).abs().max())


def _standard_error(curves: Tensor) -> Tensor:
    """Return the standard error of the mean of the rows; NaN for one row."""
    if len(curves) < 2:
        return torch.full_like(curves[0], math.nan)
    return curves.std(0) / math.sqrt(len(curves))


def _grid(probes: list[LanczosQuadrature], sigma: float, points: int) -> Tensor:
    """Return points from 6 sigma below the lowest node to 6 sigma above the highest."""
    low = min(float(p.nodes[0]) for p in probes) - 6 * sigma
    high = max(float(p.nodes[-1]) for p in probes) + 6 * sigma
    return torch.linspace(low, high, points, dtype=torch.float64, device="cpu")
