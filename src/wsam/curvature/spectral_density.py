"""Spectral density of a symmetric operator by stochastic Lanczos quadrature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wsam.curvature import plotting
from wsam.curvature.operator import TITLES, Info, SymmetricOperator
from wsam.curvature.progress import Progress, ProgressCallback
from wsam.curvature.quadrature import LanczosQuadrature, lanczos_quadrature

__all__ = ["Density", "Share", "density", "save_density"]


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

            share seen by v = sum over eigenvalues below the bound of (v' x_i)²
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
    entries of its eigenvectors: a Gauss quadrature of the spectrum as the probe sees it. Probes are
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
    if steps < 2 or max_probes < 1 or points < 2 or not tol > 0:
        raise ValueError(
            "steps and points must be at least 2, max_probes at least 1 and tol above 0, got "
            f"{steps}, {points}, {max_probes} and {tol}"
        )
    if sigma is not None and not (sigma > 0 and math.isfinite(sigma)):
        raise ValueError(f"sigma must be a positive number, got {sigma}")
    generator = torch.Generator().manual_seed(seed)
    steps = min(steps, operator.shape[0])
    probes: list[LanczosQuadrature] = []
    products, limit, error = 0, max_probes * steps, math.nan

    def report_products(done: int) -> None:
        if report is not None:
            report(Progress(products + done, limit, error))

    while len(probes) < max_probes:
        probes.append(lanczos_quadrature(operator, steps, generator, report_products))
        products += probes[-1].products
        smoothed = _smooth(probes, sigma or probes[0].default_sigma())
        error = smoothed.error
        if len(probes) >= 3 and error <= tol:
            break
    return _summarise(operator, probes, smoothed, points, tol)


class _Smoothed(NamedTuple):
    """Smoothed cumulative distributions of all probes on one grid, and their standard error."""

    sigma: float
    grid: Tensor
    curves: list[Tensor]
    error: float


def _smooth(probes: list[LanczosQuadrature], sigma: float) -> _Smoothed:
    grid = _grid(probes, sigma, 400)
    curves = [probe.cumulative(grid, sigma) for probe in probes]
    return _Smoothed(sigma, grid, curves, _largest_standard_error(curves))


def _grid(probes: list[LanczosQuadrature], sigma: float, points: int) -> Tensor:
    """Return points from 6 sigma below the lowest node to 6 sigma above the highest."""
    low = min(float(p.nodes[0]) for p in probes) - 6 * sigma
    high = max(float(p.nodes[-1]) for p in probes) + 6 * sigma
    return torch.linspace(low, high, points, dtype=torch.float64, device="cpu")


def _largest_standard_error(curves: list[Tensor]) -> float:
    if len(curves) < 2:
        return math.nan
    return float(torch.stack(curves).std(0).max()) / math.sqrt(len(curves))


def _summarise(
    operator: SymmetricOperator,
    probes: list[LanczosQuadrature],
    smoothed: _Smoothed,
    points: int,
    tol: float,
) -> Density:
    sigma, coarse_grid, cumulative, error = smoothed
    # Two points per sigma make the trapezoidal rule exact enough for a mass of one.
    needed = math.ceil(2 * float(coarse_grid[-1] - coarse_grid[0]) / sigma)
    grid = _grid(probes, sigma, max(points, needed))
    curves = []
    for probe in probes:
        gaussians = torch.exp(-(((grid[:, None] - probe.nodes) / sigma) ** 2) / 2)
        curves.append(gaussians @ probe.weights / (sigma * math.sqrt(2 * math.pi)))
    stacked = torch.stack(curves)
    changes = [
        curve - probe.cumulative(coarse_grid, sigma, half=True)
        for curve, probe in zip(cumulative, probes, strict=True)
    ]
    change = float(torch.stack(changes).mean(0).abs().max())
    several = len(probes) > 1
    return Density(
        grid=grid,
        values=stacked.mean(0),
        standard_error=(
            stacked.std(0) / math.sqrt(len(probes)) if several else torch.full_like(grid, math.nan)
        ),
        nodes=_pad([p.nodes for p in probes]),
        weights=_pad([p.weights for p in probes]),
        sigma=sigma,
        cumulative_error=error,
        quadrature_error=change,
        products=sum(p.products for p in probes),
        converged=several and error <= tol and change <= tol,
        info=getattr(operator, "info", None),
        semidefinite=getattr(operator, "semidefinite", False),
        quadratures=tuple(probes),
    )


def _pad(rows: list[Tensor]) -> Tensor:
    """Stack rows of different lengths, padded with zeros."""
    longest = max(len(row) for row in rows)
    return torch.stack([torch.cat([row, row.new_zeros(longest - len(row))]) for row in rows])


# Output -----------------------------------------------------------------------------------------


def save_density(found: Density, path: str | Path, marks: Sequence[float] | None = None) -> None:
    """Write a spectral density as a figure, an interactive page (`.html`) or numbers (`.json`).

    Args:
        found: The density.
        path: Its suffix selects the format: .png, .svg, .pdf, .html or .json. The folder is created.
        marks: Eigenvalues to mark in a figure or on a page.
    """
    path = plotting.output_path(path)
    info = found.info.as_dict() if found.info else {}
    if path.suffix.lower() == ".json":
        plotting.write_json(path, {"info": info, **found.as_dict()})
        return
    marked = [float(mark) for mark in (() if marks is None else marks)]
    title = f"Density of the eigenvalues of the {TITLES.get(info.get('kind', ''), 'operator')}"
    note = plotting.data_note(info)
    if path.suffix.lower() == ".html":
        band = "Band: within two standard errors. " if _has_standard_error(found) else ""
        page = {
            "surface": False,
            "x": found.grid.tolist(),
            "y": _clipped_values(found),
            "error": found.standard_error.tolist() if band else None,
            "labels": ["eigenvalue"],
            "value": "density",
            "log": True,
            "marks": marked,
            "legend": band + (f"Dotted: {_marks_label(marked)}." if marked else ""),
        }
        plotting.write_page(path, title, note, page)
        return
    with plotting.saved_figure(path, title, note) as (_, axes):
        _draw_density(axes, found, marked)


def _has_standard_error(found: Density) -> bool:
    return len(found.nodes) > 1


def _clipped_values(found: Density) -> list[float]:
    """Return the density clipped from below.

    The tails of the Gaussians would extend a logarithmic axis by many decades.
    """
    values: list[float] = found.values.tolist()
    lowest = _lowest_shown(values)
    return [max(value, lowest) for value in values]


def _lowest_shown(values: Sequence[float]) -> float:
    return 1e-8 * max(values)


def _marks_label(marks: Sequence[float]) -> str:
    if len(marks) > 4:
        return f"{len(marks)} eigenvalues from {min(marks):.4g} to {max(marks):.4g}"
    return f"eigenvalue{'s' if len(marks) > 1 else ''} " + ", ".join(f"{m:.4g}" for m in marks)


def _draw_density(axes: Any, found: Density, marks: Sequence[float]) -> None:
    grid, values = found.grid.tolist(), _clipped_values(found)
    lowest = _lowest_shown(values)
    label = f"density, smoothed by a Gaussian of width {found.sigma:.2g}"
    axes.semilogy(grid, values, color=plotting.CURVE_COLOR, linewidth=1.8, label=label)
    if _has_standard_error(found):
        pairs = list(zip(found.values.tolist(), found.standard_error.tolist(), strict=True))
        ends = [[max(v + side * 2 * error, lowest) for v, error in pairs] for side in (-1, 1)]
        label = "within two standard errors"
        color = plotting.CURVE_COLOR
        axes.fill_between(grid, *ends, color=color, alpha=0.2, linewidth=0, label=label)
    for number, mark in enumerate(marks):
        legend = None if number else _marks_label(marks)  # one legend entry for all
        axes.axvline(mark, color=plotting.MARK_COLOR, linewidth=1, linestyle=":", label=legend)
    axes.set(xlabel="eigenvalue", ylabel="density", ylim=(lowest, None))
