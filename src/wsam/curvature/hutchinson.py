"""Trace of a symmetric operator from random products, with its standard error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from wsam._core.validation import count, number
from wsam.curvature.operator import Info, SymmetricOperator
from wsam.curvature.progress import Progress, ProgressCallback
from wsam.curvature.random_vectors import sign_columns

# A standard error estimated from fewer probes is often far too small.
_MIN_PROBES = 12


@dataclass(frozen=True)
class Trace:
    """Estimate of the trace of an operator A.

    Attributes:
        value: The estimate.
        standard_error: Its standard deviation, estimated from the spread of the probes.
        probes: Number of random vectors in that spread.
        products: Number of vectors multiplied by A.
        converged: Whether the standard error is at most `tol` times the value.
        method: "hutchinson" or "hutch++".
        info: Data, mode and precision of A if it is an `Operator`.
    """

    value: float
    standard_error: float
    probes: int
    products: int
    converged: bool
    method: str
    info: Info | None = None

    @property
    def interval(self) -> tuple[float, float]:
        """95% confidence interval, by Student's t."""
        if not self.standard_error:
            return (self.value, self.value)
        half_width = student_t_quantile(self.probes - 1) * self.standard_error
        return (self.value - half_width, self.value + half_width)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary for JSON; an unknown standard error is None."""
        known = math.isfinite(self.standard_error)
        return {
            "value": self.value,
            "standard_error": self.standard_error if known else None,
            "interval95": list(self.interval) if known else None,
            "probes": self.probes,
            "products": self.products,
            "converged": self.converged,
            "method": self.method,
        }


def trace(
    operator: SymmetricOperator,
    *,
    method: Literal["hutchinson", "hutch++"] = "hutch++",
    tol: float = 0.02,
    max_products: int = 300,
    sketch: int = 20,
    columns: int = 4,
    seed: int = 0,
    report: ProgressCallback | None = None,
) -> Trace:
    """Estimate the trace of a symmetric operator to a given standard error.

    Equation, for random signs z and an orthonormal basis Q of the range of a sketch A S::

        Hutchinson:  tr A = E[z' A z]
        Hutch++:     tr A = tr(Q' A Q) + E[z' (I - Q Q') A (I - Q Q') z]

    Hutch++ computes the first term exactly, so a few large eigenvalues do not increase the variance.

    Args:
        operator: A curvature operator, or any symmetric matrix.
        method: "hutchinson" or "hutch++".
        tol: Stop when the standard error is at most `tol * abs(value)`.
        max_products: Stop after this many products.
        sketch: Number of columns of Q for Hutch++; each costs two products.
        columns: Number of vectors multiplied at a time.
        seed: Seed of the random vectors.
        report: Called with a `Progress` after every block of probes.

    Returns:
        The estimate with its standard error.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> found = trace(torch.diag(torch.tensor([1.0, 2.0, 3.0])), method="hutchinson")
        >>> round(found.value, 6), found.standard_error < 1e-6
        (6.0, True)

    References:
        Hutchinson, A stochastic estimator of the trace of the influence matrix, 1990.

        Meyer, Musco, Musco and Woodruff, Hutch++: optimal stochastic trace estimation, SOSA 2021.
    """
    if method not in ("hutchinson", "hutch++"):
        raise ValueError(f"method must be 'hutchinson' or 'hutch++', got {method!r}")
    number("tol", tol, low_open=True)
    count("max_products", max_products, 2)
    count("sketch", sketch, 1)
    count("columns", columns, 1)
    size = operator.shape[0]
    generator = torch.Generator().manual_seed(seed)
    basis = torch.zeros(size, 0, device=operator.device, dtype=operator.dtype)
    exact, products = 0.0, 0
    if method == "hutch++":
        width = min(size, sketch, max(1, (max_products - 2) // 2))
        basis = torch.linalg.qr(operator @ sign_columns(operator, width, generator)).Q
        exact = float(torch.sum(basis.double() * (operator @ basis).double()))
        products = 2 * width
    samples: list[float] = []
    converged = basis.shape[1] == size  # the first term is then the trace
    value, error = exact, 0.0 if converged else math.inf
    while products < max_products and not converged:
        block = min(columns, max_products - products)
        samples += _quadratic_forms(operator, basis, block, generator)
        products += block
        value, error = exact + sum(samples) / len(samples), _standard_error(samples)
        if report is not None:
            report(Progress(products, max_products, error / max(abs(value), 1e-300)))
        converged = len(samples) >= _MIN_PROBES and error <= tol * abs(value)
    return Trace(
        value=value,
        standard_error=error,
        probes=len(samples),
        products=products,
        converged=converged,
        method=method,
        info=getattr(operator, "info", None),
    )


def _quadratic_forms(
    operator: SymmetricOperator, basis: Tensor, count: int, generator: torch.Generator
) -> list[float]:
    """Return `z' A z` for random signs z with their part inside the basis removed."""
    probes = sign_columns(operator, count, generator)
    probes = probes - basis @ (basis.T @ probes)
    images = operator @ (probes if count > 1 else probes[:, 0])
    found: list[float] = (probes.double() * images.reshape(probes.shape).double()).sum(0).tolist()
    return found


def _standard_error(samples: list[float]) -> float:
    count = len(samples)
    if count < 2:
        return math.inf
    mean = sum(samples) / count
    return math.sqrt(sum((s - mean) ** 2 for s in samples) / (count - 1) / count)


def student_t_quantile(degrees: int) -> float:
    """Return the 97.5% quantile of Student's t, by a series around the normal quantile.

    scipy, which has it, is an optional dependency.

    Args:
        degrees: Degrees of freedom.

    Example:
        >>> [round(student_t_quantile(n), 2) for n in (5, 11, 100)]
        [2.57, 2.2, 1.98]
    """
    if degrees < 4:
        return {1: 12.706, 2: 4.303, 3: 3.182}.get(degrees, math.inf)
    z = 1.959964
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3
