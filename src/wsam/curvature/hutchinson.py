"""Trace of a symmetric operator from random products, with its standard error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from wsam.curvature.operator import Info, SymmetricOperator
from wsam.curvature.progress import Progress, Report

__all__ = ["Trace", "trace"]

# A spread estimated from a handful of probes is too often far too small.
_FEWEST_PROBES = 12


@dataclass(frozen=True)
class Trace:
    """An estimate of a trace.

    Attributes:
        value: the estimate.
        standard_error: its standard deviation, estimated from the spread of the probes.
        probes: random vectors the spread is taken over.
        products: how many vectors were multiplied by A.
        converged: whether the standard error came down to `tol` times the value.
        method: "hutchinson" or "hutch++".
        info: what A was computed from, where A is an `Operator`.
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
        """Bounds that hold the trace in about 95 of 100 runs (Student's t)."""
        if not self.standard_error:
            return (self.value, self.value)
        reach = student_95(self.probes - 1) * self.standard_error
        return (self.value - reach, self.value + reach)

    def as_dict(self) -> dict[str, Any]:
        """Return the result, fit for JSON: None for an error that too few probes leave unknown."""
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
    report: Report | None = None,
) -> Trace:
    """Estimate the trace of a symmetric operator until its standard error is small enough.

    Hutchinson: `tr A = E[z' A z]` for random signs z. Hutch++ finds a space Q that holds most of A
    from a sketch A S, takes its share `tr(Q' A Q)` exactly and leaves only the rest to chance, so
    a few large eigenvalues no longer make the estimate jump.

    Args:
        operator: a curvature operator, or any symmetric matrix.
        method: "hutchinson" or "hutch++".
        tol: stop when the standard error is at most `tol * abs(value)`.
        max_products: give up after so many products.
        sketch: width of Q for Hutch++, two products each.
        columns: vectors multiplied at a time.
        seed: of the random vectors.
        report: called with a `Progress` after every few products.

    Example:
        >>> found = trace(torch.diag(torch.tensor([1.0, 2.0, 3.0])), method="hutchinson")
        >>> round(found.value, 6), found.standard_error < 1e-6
        (6.0, True)

    References: Hutchinson 1990; Meyer, Musco, Musco and Woodruff, Hutch++, SOSA 2021.
    """
    if method not in ("hutchinson", "hutch++"):
        raise ValueError(f"method must be 'hutchinson' or 'hutch++', not {method!r}")
    if not tol > 0 or max_products < 2 or columns < 1 or sketch < 1:
        raise ValueError(
            "tol must be above 0, max_products at least 2, columns and sketch at least 1, got "
            f"{tol}, {max_products}, {columns} and {sketch}"
        )
    size = operator.shape[0]
    generator = torch.Generator().manual_seed(seed)
    space, exact, products = torch.zeros(size, 0).to(operator.device, operator.dtype), 0.0, 0
    if method == "hutch++":
        wide = min(size, sketch, max(1, (max_products - 2) // 2))
        space, exact = _sketched(operator, wide, generator)
        products = 2 * wide
    samples: list[float] = []
    error = math.inf if space.shape[1] < size else 0.0
    while products < max_products and space.shape[1] < size:
        several = min(columns, max_products - products)
        samples += _samples(operator, space, several, generator)
        products += several
        error = _standard_error(samples)
        value = exact + sum(samples) / len(samples)
        if report is not None:
            report(Progress(products, max_products, error / max(abs(value), 1e-300)))
        if len(samples) >= _FEWEST_PROBES and error <= tol * abs(value):
            break
    value = exact + (sum(samples) / len(samples) if samples else 0.0)
    enough = len(samples) >= _FEWEST_PROBES or space.shape[1] == size
    return Trace(
        value=value,
        standard_error=error,
        probes=len(samples),
        products=products,
        converged=enough and error <= tol * abs(value),
        method=method,
        info=getattr(operator, "info", None),
    )


def random_signs(operator: SymmetricOperator, count: int, generator: torch.Generator) -> Tensor:
    """Draw columns of random signs; the same on every device for the same generator."""
    bits = torch.randint(0, 2, (operator.shape[0], count), generator=generator, dtype=torch.int8)
    return (2 * bits - 1).to(operator.device, operator.dtype)


def _sketched(
    operator: SymmetricOperator, wide: int, generator: torch.Generator
) -> tuple[Tensor, float]:
    """Return an orthonormal basis of most of A's range, and the trace of A inside it."""
    space = torch.linalg.qr(operator @ random_signs(operator, wide, generator)).Q
    return space, float(torch.sum(space.double() * (operator @ space).double()))


def _samples(
    operator: SymmetricOperator, space: Tensor, count: int, generator: torch.Generator
) -> list[float]:
    """Return `z' A z` for random signs with their part inside `space` removed."""
    probes = random_signs(operator, count, generator)
    probes = probes - space @ (space.T @ probes)
    images = operator @ (probes if count > 1 else probes[:, 0])
    found: list[float] = (probes.double() * images.reshape(probes.shape).double()).sum(0).tolist()
    return found


def _standard_error(samples: list[float]) -> float:
    count = len(samples)
    if count < 2:
        return math.inf
    mean = sum(samples) / count
    return math.sqrt(sum((s - mean) ** 2 for s in samples) / (count - 1) / count)


def student_95(freedom: int) -> float:
    """Return the 97.5% quantile of Student's t, by its expansion about the normal's.

    >>> [round(student_95(n), 2) for n in (5, 11, 100)]
    [2.57, 2.2, 1.98]
    """
    if freedom < 4:
        return {1: 12.706, 2: 4.303, 3: 3.182}.get(freedom, math.inf)
    z = 1.959964
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
