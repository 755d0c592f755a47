"""Spectral density of a symmetric operator by stochastic Lanczos quadrature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wsam.curvature.krylov import Krylov
from wsam.curvature.operator import Info, SymmetricOperator
from wsam.curvature.progress import Progress, Report

__all__ = ["Density", "Share", "density"]


# Nearer than this, relative to the spectrum, a bound and a node are one.
_NEAR = 1e-10


class Share(NamedTuple):
    """A share of the eigenvalues, between bounds."""

    low: float
    """No less than this, by what the probes see."""
    high: float
    """No more than this."""
    standard_error: float
    """Of both, for the probes are random vectors."""


@dataclass(frozen=True)
class Density:
    """How the eigenvalues of an operator are distributed; all of them weigh one together.

    Attributes:
        grid: eigenvalues at which the density is given.
        values: the density there, smoothed by a Gaussian of width `sigma`; integrates to one.
        standard_error: of the values, from the spread between probes (nan with one probe).
        nodes: quadrature nodes of every probe (one a row): points that carry the mass.
        weights: the mass at each node; every row sums to one.
        sigma: width of the smoothing.
        cumulative_error: largest standard error of the cumulative distribution.
        quadrature_error: largest change of the cumulative distribution against half the steps.
        products: how many vectors were multiplied by A.
        converged: whether `cumulative_error` and `quadrature_error` came down to `tol`: the smoothed
            curve is known, not each share of the eigenvalues; `below` has bounds of its own.
        info: what A was computed from, where A is an `Operator`.
        semidefinite: whether A cannot have negative eigenvalues, as it says itself.
        quadratures: the Lanczos matrix of each probe, from which `below` takes its bounds.
    """

    grid: Tensor
    values: Tensor
    standard_error: Tensor
    nodes: Tensor
    weights: Tensor
    sigma: float
    cumulative_error: float
    quadrature_error: float
    products: int
    converged: bool
    info: Info | None = None
    semidefinite: bool = False
    quadratures: tuple[Quadrature, ...] = field(default=(), repr=False)

    @property
    def mass(self) -> float:
        """The integral of the density over its grid, one."""
        return float(torch.trapezoid(self.values, self.grid))

    def below(self, bound: float) -> Share:
        """Return between which bounds the share of eigenvalues below `bound` lies.

        A probe v sees the mass `sum_i (v' x_i)^2` over eigenvalues below the bound. N steps of
        Lanczos leave it open by just as much as could lie at the bound itself, the weight there
        of a Gauss-Radau quadrature: many eigenvalues at the bound, or too near for N steps to
        tell apart, make the bounds wide. What is nearer than the rounding of the products counts
        as undecided too. The probes' mean is off by `sqrt(2 p (1 - p) / ((n + 2) probes))`, the
        spread of a share p of n eigenvalues as random vectors see it.

        Reference: Golub and Meurant, Matrices, Moments and Quadrature, 2010.
        """
        if self.semidefinite and bound <= 0:
            return Share(0.0, 0.0, 0.0)
        bounds = [probe.below(bound) for probe in self.quadratures]
        count, size = len(bounds), self.quadratures[0].size
        low, high = (sum(ends) / count for ends in zip(*bounds, strict=True))
        widest = min(max(0.5, low), high)
        spread = math.sqrt(2 * widest * (1 - widest) / ((size + 2) * count))
        return Share(low, high, spread)

    def as_dict(self) -> dict[str, Any]:
        """Return the result, fit for JSON."""
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
        """Write a picture (.png, .svg, .pdf), an interactive page (.html) or the numbers (.json).

        Args:
            path: the suffix says what to write; the folder is made.
            marks: eigenvalues to point out in a picture or on a page.
        """
        from wsam.curvature.render import save_density

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
    report: Report | None = None,
) -> Density:
    """Estimate how eigenvalues are distributed, by stochastic Lanczos quadrature.

    From a random unit vector, `steps` of Lanczos give a small matrix T whose eigenvalues t_j,
    weighted by the squared first entries of its eigenvectors, are a Gauss quadrature of the
    spectrum as that vector sees it. Probes are added until the cumulative distribution is known
    to `tol`; the density is their mean, smoothed by a Gaussian.

    Args:
        operator: a curvature operator, or any symmetric matrix.
        steps: of Lanczos for each probe, a product each.
        tol: stop when the standard error of the smoothed cumulative distribution is nowhere above it.
        max_probes: give up after so many random vectors; at least 3 are taken if allowed.
        sigma: width of the smoothing; default a hundredth of the spectrum's range.
        points: of the grid.
        seed: of the random vectors.
        report: called with a `Progress` after every product.

    Example:
        >>> found = density(torch.diag(torch.linspace(-1, 3, 50)))
        >>> share = found.below(0.0)
        >>> round(found.mass, 4), share.low - 0.1 < 13 / 50 < share.high + 0.1
        (1.0, True)

    References: Lin, Saad and Yang, Approximating spectral densities, SIAM Review 2016; Ghorbani,
    Krishnan and Xiao, An investigation into neural net optimization via Hessian eigenvalue
    density, ICML 2019.
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
    probes: list[Quadrature] = []
    products, limit, error = 0, max_probes * steps, math.nan

    def told(made: int) -> None:
        if report is not None:
            report(Progress(products + made, limit, error))

    while len(probes) < max_probes:
        probes.append(_probe(operator, steps, generator, told))
        products += probes[-1].products
        seen = _smoothed(probes, sigma or probes[0].default_width())
        error = seen.error
        if len(probes) >= 3 and error <= tol:
            break
    return _summary(operator, probes, seen, points, tol)


@dataclass(frozen=True)
class Quadrature:
    """Nodes and weights of one probe, those of half as many steps, and what both come from.

    Attributes:
        matrix: A in the Lanczos basis, whose first vector is the probe.
        tail: the coefficient of the step that was not made.
        rounding: how far the products' rounding may move an eigenvalue.
        size: of A.
    """

    nodes: Tensor
    weights: Tensor
    half_nodes: Tensor
    half_weights: Tensor
    products: int
    matrix: Tensor
    tail: float
    rounding: float
    size: int

    def below(self, bound: float) -> tuple[float, float]:
        """Return the least and the most mass that can lie below a bound."""
        low = min(1.0, self._split(bound - self.rounding)[0])
        return low, min(1.0, max(low, self._split(bound + self.rounding)[1]))

    @cached_property
    def _ritz(self) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(self.matrix)
        return values, vectors

    def _split(self, bound: float) -> tuple[float, float]:
        """Return the mass below a bound, and that with what can lie at the bound itself.

        One more row makes the bound an eigenvalue of the Lanczos matrix (Golub 1973).
        """
        values, vectors = self._ritz
        distance = values - bound
        near = _NEAR * float(values.abs().max())
        if float(distance.abs().min()) <= near:  # it is an eigenvalue already
            under, upto = int((distance < -near).sum()), int((distance <= near).sum())
            weights = vectors[0] ** 2
        else:
            steps = len(values)
            extended = torch.zeros(steps + 1, steps + 1, dtype=torch.float64)
            extended[:steps, :steps] = self.matrix
            extended[steps, steps - 1] = extended[steps - 1, steps] = self.tail
            shift = float(((self.tail * vectors[-1]) ** 2 / distance).sum())
            extended[steps, steps] = bound + shift
            # Eigenvalues of the two matrices alternate, so the bound's own place is known.
            under = int((distance < 0).sum())
            upto = under + 1
            weights = torch.linalg.eigh(extended).eigenvectors[0] ** 2
        return float(weights[:under].sum()), float(weights[:upto].sum())

    def default_width(self) -> float:
        """A hundredth of the range; of the size of the values where all are one."""
        low, high = float(self.nodes[0]), float(self.nodes[-1])
        size = max(abs(low), abs(high))
        return (high - low if high - low > 1e-6 * size else size or 1.0) / 100

    def cumulative(self, grid: Tensor, width: float, half: bool = False) -> Tensor:
        """Mass below each point, smoothed like the density."""
        nodes = self.half_nodes if half else self.nodes
        weights = self.half_weights if half else self.weights
        return ((1 + torch.erf((grid[:, None] - nodes) / (width * math.sqrt(2)))) / 2) @ weights


def _grid(probes: list[Quadrature], width: float, points: int) -> Tensor:
    """Points from six widths below the lowest node, where a Gaussian ends, to six above."""
    low = min(float(p.nodes[0]) for p in probes) - 6 * width
    high = max(float(p.nodes[-1]) for p in probes) + 6 * width
    return torch.linspace(low, high, points, dtype=torch.float64)


def _probe(
    operator: SymmetricOperator, steps: int, generator: torch.Generator, told: Any
) -> Quadrature:
    krylov = Krylov(operator, steps, 1, generator)
    half: tuple[Tensor, Tensor] | None = None
    while krylov.size < steps and not krylov.complete:
        krylov.extend()
        told(krylov.products)
        if krylov.size == max(1, steps // 2):
            half = _gauss(krylov)
    nodes, weights = _gauss(krylov)
    half_nodes, half_weights = half or (nodes, weights)
    matrix, tail, rounding = krylov.projected()
    rounding += 10 * torch.finfo(operator.dtype).eps * float(nodes.abs().max())
    return Quadrature(
        nodes, weights, half_nodes, half_weights, krylov.products, matrix, tail, rounding,
        operator.shape[0],
    )  # fmt: skip


def _gauss(krylov: Krylov) -> tuple[Tensor, Tensor]:
    nodes, vectors, _ = krylov.ritz()
    return nodes, vectors[0] ** 2


def _spread(curves: list[Tensor]) -> float:
    if len(curves) < 2:
        return math.nan
    return float(torch.stack(curves).std(0).max()) / math.sqrt(len(curves))


class _Smoothed(NamedTuple):
    """The cumulative distributions that probes see, on one grid, and how far they are apart."""

    width: float
    support: Tensor
    curves: list[Tensor]
    error: float


def _smoothed(probes: list[Quadrature], width: float) -> _Smoothed:
    support = _grid(probes, width, 400)
    curves = [probe.cumulative(support, width) for probe in probes]
    return _Smoothed(width, support, curves, _spread(curves))


def _summary(
    operator: SymmetricOperator,
    probes: list[Quadrature],
    seen: _Smoothed,
    points: int,
    tol: float,
) -> Density:
    width, support, cumulative, error = seen
    # Two points a width are enough for the sum over the grid to be the integral.
    needed = math.ceil(2 * float(support[-1] - support[0]) / width)
    grid = _grid(probes, width, max(points, needed))
    curves = []
    for probe in probes:
        bumps = torch.exp(-(((grid[:, None] - probe.nodes) / width) ** 2) / 2)
        curves.append(bumps @ probe.weights / (width * math.sqrt(2 * math.pi)))
    stacked = torch.stack(curves)
    halved = [
        curve - probe.cumulative(support, width, half=True)
        for curve, probe in zip(cumulative, probes, strict=True)
    ]
    change = float(torch.stack(halved).mean(0).abs().max())
    several = len(probes) > 1
    return Density(
        grid=grid,
        values=stacked.mean(0),
        standard_error=(
            stacked.std(0) / math.sqrt(len(probes)) if several else torch.full_like(grid, math.nan)
        ),
        nodes=_padded([p.nodes for p in probes]),
        weights=_padded([p.weights for p in probes]),
        sigma=width,
        cumulative_error=error,
        quadrature_error=change,
        products=sum(p.products for p in probes),
        converged=several and error <= tol and change <= tol,
        info=getattr(operator, "info", None),
        semidefinite=getattr(operator, "semidefinite", False),
        quadratures=tuple(probes),
    )


def _padded(rows: list[Tensor]) -> Tensor:
    """Stack rows of several lengths; the padding carries no weight."""
    longest = max(len(row) for row in rows)
    return torch.stack(
        [torch.cat([row, torch.zeros(longest - len(row), dtype=row.dtype)]) for row in rows]
    )
