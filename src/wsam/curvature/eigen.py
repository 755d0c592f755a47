"""Extreme eigenvalues of a symmetric operator, with error bounds: Lanczos and power iteration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from wsam.curvature.krylov import Krylov, random_normal
from wsam.curvature.operator import Info, SymmetricOperator

__all__ = ["Eigenvalues", "Progress", "Report", "top_eigenvalues"]

Which = Literal["largest", "smallest", "both"]


class Progress(NamedTuple):
    """How far an iteration has come: products made, the most it may make, the error so far."""

    products: int
    limit: int
    error: float


Report = Callable[[Progress], None]


@dataclass(frozen=True)
class Eigenvalues:
    """Eigenvalues with their error bounds.

    Attributes:
        values: eigenvalues, largest first.
        vectors: their unit vectors, one a column.
        residuals: `norm(A x - t x)`; some eigenvalue of A lies within it of t.
        converged: whether each residual is at most `tol` times the largest absolute Ritz value.
        products: how many vectors were multiplied by A.
        method: "lanczos" or "power".
        info: what A was computed from, where A is an `Operator`.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    converged: Tensor
    products: int
    method: str
    info: Info | None = None

    @property
    def largest(self) -> float:
        """The largest eigenvalue found: the sharpness of a minimum."""
        return float(self.values[0])

    @property
    def smallest(self) -> float:
        """The smallest eigenvalue found; below zero at a saddle."""
        return float(self.values[-1])

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the vectors, fit for JSON."""
        return {
            "values": self.values.tolist(),
            "residuals": self.residuals.tolist(),
            "converged": self.converged.tolist(),
            "products": self.products,
            "method": self.method,
        }


def top_eigenvalues(
    operator: SymmetricOperator,
    k: int = 1,
    *,
    which: Which = "largest",
    method: Literal["lanczos", "power"] = "lanczos",
    tol: float = 1e-3,
    max_products: int | None = None,
    block: int = 1,
    basis: int | None = None,
    seed: int = 0,
    report: Report | None = None,
) -> Eigenvalues:
    """Find the k largest, the k smallest, or both ends of the eigenvalues of a symmetric operator.

    "Largest" is meant with its sign: strong negative curvature is found by "smallest" and never
    passes for sharpness. A pair (t, x) counts as converged when
    `norm(A x - t x) <= tol * max abs(t)`; the error of t is at most that residual, and near its
    square divided by the gap to the next eigenvalue.

    Args:
        operator: a curvature operator, or any symmetric matrix.
        k: how many eigenvalues at each wanted end.
        which: "largest", "smallest" or "both".
        method: "lanczos" (block, thick-restarted, fully re-orthogonalised) or "power" (one vector
            at a time; a shift keeps the wanted end dominant, found vectors are projected out).
        tol: relative residual to stop at.
        max_products: give up after so many products; default 50 + 30 k at each end, for power
            iteration 1000.
        block: vectors multiplied at a time by Lanczos. With b, copies of an eigenvalue repeated up
            to b times are found like distinct ones.
        basis: the most vectors Lanczos keeps; it restarts from the best when they are full.
        seed: of the random start.
        report: called with a `Progress` after every product.

    Example:
        >>> found = top_eigenvalues(torch.diag(torch.tensor([-9.0, 1.0, 2.0, 4.0])))
        >>> round(found.largest, 4), bool(found.converged[0])
        (4.0, True)

    References: Lanczos 1950; Wu and Simon, Thick-restart Lanczos method, 2000. Power iteration is
    what the WSAM paper's table of minima uses.
    """
    size = operator.shape[0]
    _check_arguments(operator, k, which, method, tol, block)
    k = min(k, size)
    limit = max_products or (1000 if method == "power" else 50 + 30 * k)
    limit *= 2 if which == "both" and not max_products else 1
    settings = _Settings(k, which, tol, limit, block, basis, seed, report)
    found = (_lanczos if method == "lanczos" else _power)(operator, settings)
    order = torch.argsort(found.values, descending=True)
    residuals = found.residuals[order]
    return Eigenvalues(
        values=found.values[order],
        vectors=found.rows[order].T,
        residuals=residuals,
        converged=residuals <= tol * found.scale,
        products=found.products,
        method=method,
        info=getattr(operator, "info", None),
    )


class _Settings(NamedTuple):
    k: int
    which: Which
    tol: float
    limit: int
    block: int
    basis: int | None
    seed: int
    report: Report | None

    def tell(self, products: int, error: float) -> None:
        if self.report is not None:
            self.report(Progress(products, self.limit, error))


class _Found(NamedTuple):
    values: Tensor
    rows: Tensor
    residuals: Tensor
    products: int
    scale: float


def _lanczos(operator: SymmetricOperator, settings: _Settings) -> _Found:
    size = operator.shape[0]
    block = min(settings.block, size)
    ends = 2 if settings.which == "both" else 1
    least = min(size, ends * settings.k + 2 * block + 2)
    capacity = min(size, max(settings.basis or (2 * ends * settings.k + 40 + 2 * block), least))
    krylov = Krylov(operator, capacity, block, torch.Generator().manual_seed(settings.seed))
    while True:
        krylov.extend()
        values, vectors, residuals = krylov.ritz()
        wanted = _wanted(values, settings)
        scale = max(float(values.abs().max()), torch.finfo(torch.float64).tiny)
        error = float(residuals[wanted].max()) / scale
        settings.tell(krylov.products, error)
        enough = krylov.size >= min(size, ends * settings.k)
        if (enough and error <= settings.tol) or krylov.complete:
            break
        if krylov.products >= settings.limit:
            break
        if krylov.full:
            keep = _kept(values, settings, capacity - 2 * block)
            krylov.restart(values[keep], vectors[:, keep])
    rows = krylov.lift(vectors[:, wanted])
    return _Found(values[wanted], rows, residuals[wanted], krylov.products, scale)


def _wanted(values: Tensor, settings: _Settings) -> Tensor:
    """Indices of the wanted ends among ascending Ritz values."""
    count = len(values)
    low = range(min(settings.k, count)) if settings.which != "largest" else range(0)
    high = range(max(0, count - settings.k), count) if settings.which != "smallest" else range(0)
    return torch.tensor(sorted({*low, *high}))


def _kept(values: Tensor, settings: _Settings, room: int) -> Tensor:
    """Indices kept at a restart: the wanted ends and as many neighbours as help convergence."""
    extra = settings._replace(k=settings.k + max(2, (len(values) - settings.k) // 4))
    while len(chosen := _wanted(values, extra)) > room and extra.k > settings.k:
        extra = extra._replace(k=extra.k - 1)
    return chosen


def _power(operator: SymmetricOperator, settings: _Settings) -> _Found:
    generator = torch.Generator().manual_seed(settings.seed)
    signs = {"largest": [1], "smallest": [-1], "both": [1, -1]}[settings.which]
    rows: list[Tensor] = []
    images: list[Tensor] = []
    products, scale = 0, 0.0
    share = settings.limit // (len(signs) * settings.k)
    for sign in signs:
        search = _PowerSearch(operator, settings, generator, sign, rows)
        for _ in range(min(settings.k, operator.shape[0] - len(rows))):
            row, image = search.next(share, products)
            rows.append(row)
            images.append(image)
            products, scale = products + search.spent, max(scale, search.scale)
    return _rayleigh_ritz(torch.stack(rows), torch.stack(images), products, scale)


def _rayleigh_ritz(rows: Tensor, images: Tensor, products: int, scale: float) -> _Found:
    """Return the best pairs in the span of orthonormal rows whose images are known.

    Vectors found one after the other carry the errors of those before; this removes them, and
    gives residuals of the products as they were computed.
    """
    wide_rows, wide_images = rows.double(), images.double()
    inside = wide_rows @ wide_images.T
    values, vectors = torch.linalg.eigh((inside + inside.T) / 2)
    turned = vectors.T @ wide_rows
    left = vectors.T @ wide_images - values[:, None] * turned
    residuals = torch.linalg.vector_norm(left, dim=1)
    return _Found(values.cpu(), turned.to(rows), residuals.cpu(), products, scale)


class _PowerSearch:
    """Largest eigenvalues of `sign * A`, one after the other.

    Plain power iteration finds the eigenvalue of largest absolute value. When that one turns out
    negative, iterating `sign * A - shift` with the shift just below it makes every eigenvalue
    positive and the largest one dominant.
    """

    def __init__(
        self,
        operator: SymmetricOperator,
        settings: _Settings,
        generator: torch.Generator,
        sign: int,
        found: list[Tensor],
    ) -> None:
        self.operator = operator
        self.settings = settings
        self.generator = generator
        self.sign = sign
        self.found = found
        self.shift = 0.0
        self.scale = 0.0
        self.spent = 0

    def next(self, limit: int, before: int) -> tuple[Tensor, Tensor]:
        """Return the next unit vector, orthogonal to those found, and its product with A."""
        self.spent = 0
        row = self._start()
        while True:
            image = self.sign * (self.operator @ row)
            self.spent += 1
            value = float(row @ image)
            residual = float(torch.linalg.vector_norm(self._projected(image - value * row)))
            self.scale = max(self.scale, abs(value))
            error = residual / max(self.scale, torch.finfo(torch.float64).tiny)
            self.settings.tell(before + self.spent, error)
            if value - self.shift < 0 and residual <= 0.1 * (self.shift - value):
                self.shift = value - 2 * residual - 1e-3 * abs(value)
                row = self._start()
            elif error <= self.settings.tol or self.spent >= limit:
                break
            else:
                row = self._cleaned(image - self.shift * row)
        return row, self.sign * image

    def _start(self) -> Tensor:
        return self._cleaned(random_normal(self.operator, 1, self.generator)[0])

    def _projected(self, row: Tensor) -> Tensor:
        for other in self.found + self.found:
            row = row - (other @ row) * other
        return row

    def _cleaned(self, row: Tensor) -> Tensor:
        row = self._projected(row)
        norm = float(torch.linalg.vector_norm(row))
        if norm == 0 or not math.isfinite(norm):
            return self._start()
        return row / norm


def _check_arguments(
    operator: SymmetricOperator, k: int, which: str, method: str, tol: float, block: int
) -> None:
    if len(operator.shape) != 2 or operator.shape[0] != operator.shape[1]:
        raise ValueError(f"expected a square operator, got shape {tuple(operator.shape)}")
    if k < 1 or block < 1:
        raise ValueError(f"k and block must be at least 1, got {k} and {block}")
    if which not in ("largest", "smallest", "both"):
        raise ValueError(f"which must be 'largest', 'smallest' or 'both', not {which!r}")
    if method not in ("lanczos", "power"):
        raise ValueError(f"method must be 'lanczos' or 'power', not {method!r}")
    if not 0 < tol < 1:
        raise ValueError(f"tol must lie between 0 and 1, got {tol}")
