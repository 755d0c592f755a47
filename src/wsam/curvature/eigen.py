"""Extreme eigenvalues of a symmetric operator, with error bounds: Lanczos and power iteration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from wsam._core.validation import count
from wsam.curvature.krylov import random_normal
from wsam.curvature.lanczos import Found, Settings, Which, lanczos, rayleigh_ritz
from wsam.curvature.operator import Info, SymmetricOperator
from wsam.curvature.progress import Report

__all__ = ["Eigenvalues", "top_eigenvalues"]


@dataclass(frozen=True)
class Eigenvalues:
    """Eigenvalues with their error bounds.

    Attributes:
        values: eigenvalues, largest first.
        vectors: their unit vectors, one a column.
        residuals: `norm(A x - t x)`; some eigenvalue of A lies within it of t.
        converged: whether each residual is at most `tol` times the largest absolute Ritz value,
            and, but for the outermost value of an end, `complete`.
        complete: whether a second search, orthogonal to the vectors found, saw no other eigenvalue
            that belongs to a wanted end; for one value an end, and for power iteration, no second
            search is made. False where the products ran out with fewer values than asked for.
        products: how many vectors were multiplied by A.
        method: "lanczos" or "power".
        info: what A was computed from, where A is an `Operator`.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    converged: Tensor
    complete: bool
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
            "complete": self.complete,
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
    `norm(A x - t x) <= tol * max abs(t)`: some eigenvalue is that near, and mostly far nearer, by
    the square of the residual divided by the gap to the next one. With k above 1, Lanczos then
    searches once more, orthogonal to what it found, for an eigenvalue it passed over; until that
    search is done none but the outermost counts as converged.

    Args:
        operator: a curvature operator, or any symmetric matrix.
        k: how many eigenvalues at each wanted end.
        which: "largest", "smallest" or "both".
        method: "lanczos" (block, thick-restarted, fully re-orthogonalised) or "power" (one vector
            at a time; a shift keeps the wanted end dominant, found vectors are projected out).
        tol: relative residual to stop at.
        max_products: give up after so many products; default 50 + 30 k at each end, and 50 more
            where there is a second search, which may take what the first has left; for power
            iteration 1000 at each end. Lanczos returns fewer values than asked for where the
            products do not reach for all of them; power iteration may exceed them: it makes at
            least one product a value, and one more after a shift.
        block: vectors multiplied at a time by Lanczos. With b, copies of an eigenvalue repeated up
            to b times are found at once rather than one a search.
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
    if max_products is not None:
        count("max_products", max_products, 1)
    k = min(k, size)
    limit = _default_limit(k, which, method) if max_products is None else max_products
    settings = Settings(k, which, tol, limit, block, basis, seed, report)
    found = (lanczos if method == "lanczos" else _power)(operator, settings)
    order = torch.argsort(found.values, descending=True)
    residuals = found.residuals[order]
    good = residuals <= tol * found.scale
    if not found.complete:  # a missed eigenvalue would shift all but the ends themselves
        sure = torch.zeros_like(good)
        sure[0] |= which != "smallest"
        sure[-1] |= which != "largest"  # a lone value is at both ends of the list
        good &= sure
    return Eigenvalues(
        values=found.values[order],
        vectors=found.rows[order].T,
        residuals=residuals,
        converged=good,
        complete=found.complete,
        products=found.products,
        method=method,
        info=getattr(operator, "info", None),
    )


def _default_limit(k: int, which: Which, method: str) -> int:
    """Return after how many products to give up where nobody says."""
    at_one_end = 1000 if method == "power" else 50 * min(k, 2) + 30 * k
    return at_one_end * (2 if which == "both" else 1)


def _power(operator: SymmetricOperator, settings: Settings) -> Found:
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
    return rayleigh_ritz(torch.stack(rows), torch.stack(images), products, scale)


class _PowerSearch:
    """Largest eigenvalues of `sign * A`, one after the other.

    Plain power iteration finds the eigenvalue of largest absolute value. When that one turns out
    negative, iterating `sign * A - shift` with the shift just below it makes every eigenvalue
    positive and the largest one dominant.
    """

    def __init__(
        self,
        operator: SymmetricOperator,
        settings: Settings,
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
