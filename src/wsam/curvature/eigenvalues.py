"""Extreme eigenvalues of a symmetric operator, with error bounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from wsam._core.validation import count, number
from wsam.curvature.eigensolvers import SolverOptions, Which, lanczos, power_iteration
from wsam.curvature.operator import Info, SymmetricOperator
from wsam.curvature.progress import ProgressCallback


@dataclass(frozen=True)
class Eigenvalues:
    """Eigenvalues of an operator A, with error bounds.

    Attributes:
        values: Eigenvalues t, largest first.
        vectors: Unit eigenvectors x, one per column.
        residuals: `norm(A x - t x)`. Some eigenvalue of A is within this distance of t.
        converged: Whether each residual is at most `tol` times the largest absolute Ritz value and,
            except for the outermost value of an end, the search was `complete`.
        complete: Whether a second search, orthogonal to the vectors found, found no other eigenvalue
            at a wanted end. There is no second search for k = 1 and for power iteration. False if
            the products were used up before all values were found.
        products: Number of vectors multiplied by A.
        method: "lanczos" or "power".
        info: Data, mode and precision of A if it is an `Operator`.
    """

    values: Tensor
    vectors: Tensor = field(repr=False)
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
        """The smallest eigenvalue found; negative at a saddle."""
        return float(self.values[-1])

    def as_dict(self) -> dict[str, Any]:
        """Return all fields except the vectors as a dictionary for JSON."""
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
    report: ProgressCallback | None = None,
) -> Eigenvalues:
    """Return the k largest and/or smallest eigenvalues of a symmetric operator.

    Equation, for the eigenpairs (t, x) of the operator A::

        A x = t x,        converged if  norm(A x - t x) <= tol * max abs(t)

    Eigenvalues are ordered by sign, not by absolute value: large negative curvature is found by
    `which="smallest"` and is never reported as sharpness. The residual bounds the distance from t to
    the nearest eigenvalue; the true error is about the squared residual divided by the gap to the
    next eigenvalue. For k > 1, Lanczos makes a second search, orthogonal to the vectors found, for
    eigenvalues it missed. Until that search ends, only the outermost value counts as converged.

    Args:
        operator: A curvature operator, or any symmetric matrix.
        k: Number of eigenvalues at each wanted end.
        which: "largest", "smallest" or "both".
        method: "lanczos" (block, thick-restart, fully re-orthogonalized) or "power" (one vector at a
            time; a shift makes the wanted end dominant, vectors found are projected out).
        tol: Relative residual to stop at.
        max_products: Stop after this many products. Default for Lanczos: 50 + 30 k at each end,
            plus 50 if there is a second search, which may also use what the first one left; for
            power iteration 1000 at each end. Lanczos may then return fewer values than wanted. Power
            iteration may exceed the limit: it makes at least one product per value, and one more
            after a shift.
        block: Number of vectors that Lanczos multiplies at a time. A block of b finds b copies of a
            repeated eigenvalue in one search.
        basis: Largest number of vectors Lanczos stores; it restarts from the best when it is full.
        seed: Seed of the random start.
        report: Called with a `Progress` after every product.

    Returns:
        The eigenvalues with their vectors and residuals.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> found = top_eigenvalues(torch.diag(torch.tensor([-9.0, 1.0, 2.0, 4.0])))
        >>> round(found.largest, 4), bool(found.converged[0])
        (4.0, True)

    References:
        Lanczos, An iteration method for the solution of the eigenvalue problem, 1950.

        Wu and Simon, Thick-restart Lanczos method, SIAM J. Matrix Anal. Appl. 2000.

        The WSAM paper's table of minima uses power iteration.
    """
    size = operator.shape[0]
    if which not in ("largest", "smallest", "both"):
        raise ValueError(f"which must be 'largest', 'smallest' or 'both', got {which!r}")
    if method not in ("lanczos", "power"):
        raise ValueError(f"method must be 'lanczos' or 'power', got {method!r}")
    number("tol", tol, 0, 1, low_open=True)
    count("k", k, 1)
    count("block", block, 1)
    if max_products is not None:
        count("max_products", max_products, 1)
    k = min(k, size)
    per_end = 1000 if method == "power" else 50 * min(k, 2) + 30 * k
    limit = max_products or per_end * (2 if which == "both" else 1)
    options = SolverOptions(k, which, tol, limit, block, basis, seed, report)
    found = {"lanczos": lanczos, "power": power_iteration}[method](operator, options)
    order = torch.argsort(found.values, descending=True)
    residuals = found.residuals[order]
    converged = residuals <= tol * found.scale
    if not found.complete:  # a missed eigenvalue changes the rank of all but the outermost values
        outermost = torch.zeros_like(converged)
        outermost[0] |= which != "smallest"
        outermost[-1] |= which != "largest"  # a single value is the first and the last
        converged &= outermost
    return Eigenvalues(
        values=found.values[order],
        vectors=found.rows[order].T,
        residuals=residuals,
        converged=converged,
        complete=found.complete,
        products=found.products,
        method=method,
        info=getattr(operator, "info", None),
    )
