"""Solvers for extreme eigenvalues: thick-restart Lanczos and power iteration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from wsam.curvature.krylov import KrylovBasis
from wsam.curvature.operator import SymmetricOperator
from wsam.curvature.progress import Progress, ProgressCallback
from wsam.curvature.random_vectors import normal_rows

Which = Literal["largest", "smallest", "both"]
CHUNK_COLUMNS = 1 << 16
"""Columns converted to double precision at a time, to limit memory."""


class SolverOptions(NamedTuple):
    """Arguments of `top_eigenvalues` that the solvers need.

    Residuals are compared with `tol` times the largest absolute Ritz value, or times `min_scale`
    if that is larger.
    """

    k: int
    which: Which
    tol: float
    limit: int
    block: int
    basis: int | None
    seed: int
    report: ProgressCallback | None
    min_scale: float = 0.0

    @property
    def wanted(self) -> int:
        """Number of eigenvalues to find, at both ends together."""
        return self.k * (2 if self.which == "both" else 1)

    def report_progress(self, products: int, error: float) -> None:
        """Call `report`, if given."""
        if self.report is not None:
            self.report(Progress(products, self.limit, error))


class RitzPairs(NamedTuple):
    """Approximate eigenpairs.

    Attributes:
        values: Ritz values.
        rows: Ritz vectors, one per row.
        residuals: `norm(A x - t x)` of each pair.
        products: Number of vectors multiplied by A.
        scale: Largest absolute Ritz value of the search.
        complete: Whether no eigenvalue is known to be missing between a pair and its end.
    """

    values: Tensor
    rows: Tensor
    residuals: Tensor
    products: int
    scale: float
    complete: bool = True


# Lanczos ----------------------------------------------------------------------------------------


def lanczos(operator: SymmetricOperator, options: SolverOptions) -> RitzPairs:
    """Find the wanted ends of the spectrum, then search for eigenvalues that were missed.

    A small residual shows that an eigenvalue is close to the Ritz value, not that none was missed:
    a Krylov space from one start vector contains one copy of a repeated eigenvalue, and close
    eigenvalues converge late. For k > 1 the search is therefore repeated from a new random start
    orthogonal to the vectors found. Eigenvalues beyond the k-th are added, and the search is
    repeated with a larger block until it finds none or the products are used up.

    References:
        Wu and Simon, Thick-restart Lanczos method, SIAM J. Matrix Anal. Appl. 2000.
    """
    found = _thick_restart_lanczos(operator, options, None, 0)
    if len(found.values) < min(options.wanted, operator.shape[0]):  # no products left
        return found._replace(complete=False)
    block = options.block
    while options.k > 1 and len(found.rows) < operator.shape[0]:
        if found.products >= options.limit:
            return found._replace(complete=False)
        # Compare residuals with the scale of the remaining spectrum: a random start has little
        # overlap with a missed eigenvector, so the scale of all of A would stop the search too
        # early. But never require less than the rounding of A.
        rounding = 10 * torch.finfo(operator.dtype).eps / options.tol
        again = options._replace(
            k=min(block, options.k),
            block=block,
            seed=options.seed + 1 + found.products,
            min_scale=found.scale * max(options.tol, rounding),
        )
        more = _thick_restart_lanczos(operator, again, found.rows, found.products)
        found = found._replace(products=more.products, scale=max(found.scale, more.scale))
        missed = _missed_indices(found, more, options)
        if not len(missed):
            converged = bool((more.residuals <= options.tol * found.scale).all())
            return found._replace(complete=converged)
        rows = torch.cat([found.rows, more.rows[missed]])
        if found.products + len(rows) > options.limit:
            return found._replace(complete=False)
        images = torch.stack([operator @ row for row in rows])
        found = rayleigh_ritz(rows, images, found.products + len(rows), found.scale)
        keep = _end_indices(found.values, options)
        found = found._replace(
            values=found.values[keep], rows=found.rows[keep], residuals=found.residuals[keep]
        )
        block = min(2 * block, options.k)
    return found


def _thick_restart_lanczos(
    operator: SymmetricOperator, options: SolverOptions, locked: Tensor | None, products_before: int
) -> RitzPairs:
    """Find the wanted ends from one random start, among vectors orthogonal to the locked ones."""
    size = operator.shape[0] - (0 if locked is None else len(locked))
    block = min(options.block, size, options.limit - products_before)
    least = min(size, options.wanted + 2 * block + 2)
    capacity = min(size, max(options.basis or (2 * options.wanted + 40 + 2 * block), least))
    generator = torch.Generator().manual_seed(options.seed)
    krylov = KrylovBasis(operator, capacity, block, generator, locked)
    while True:
        krylov.extend()
        values, vectors, residuals = krylov.ritz_pairs()
        wanted = _end_indices(values, options)
        tiny = torch.finfo(torch.float64).tiny
        scale = max(float(values.abs().max()), options.min_scale, tiny)
        error = float(residuals[wanted].max()) / scale
        products = products_before + krylov.products
        options.report_progress(products, error)
        enough = krylov.size >= min(size, options.wanted)
        if (enough and error <= options.tol) or krylov.spans_all:
            break
        if products + block > options.limit:
            break
        if krylov.full:
            keep = _restart_indices(values, options, capacity - 2 * block)
            krylov.restart(values[keep], vectors[:, keep])
    rows = krylov.lift(vectors[:, wanted])
    return RitzPairs(values[wanted], rows, residuals[wanted], products, scale)


def _missed_indices(found: RitzPairs, more: RitzPairs, options: SolverOptions) -> Tensor:
    """Return the indices of new values beyond the k-th at a wanted end by more than `tol`."""
    slack = options.tol * found.scale
    missed = torch.zeros_like(more.values, dtype=torch.bool)
    if options.which != "smallest":
        missed |= more.values > found.values[-options.k] + slack
    if options.which != "largest":
        missed |= more.values < found.values[options.k - 1] - slack
    return torch.nonzero(missed)[:, 0]


def _end_indices(values: Tensor, options: SolverOptions) -> Tensor:
    """Return the indices of the wanted ends among ascending Ritz values."""
    count = len(values)
    low = range(min(options.k, count)) if options.which != "largest" else range(0)
    high = range(max(0, count - options.k), count) if options.which != "smallest" else range(0)
    return torch.tensor(sorted({*low, *high}), device="cpu")


def _restart_indices(values: Tensor, options: SolverOptions, most: int) -> Tensor:
    """Return the indices kept at a restart: the wanted ends and neighbors that speed it up."""
    extra = options._replace(k=options.k + max(2, (len(values) - options.k) // 4))
    while len(kept := _end_indices(values, extra)) > most:
        extra = extra._replace(k=extra.k - 1)
    return kept


def rayleigh_ritz(rows: Tensor, images: Tensor, products: int, scale: float) -> RitzPairs:
    """Return the best approximate eigenpairs in the span of orthonormal vectors.

    Vectors found one after another carry the errors of the earlier ones. This removes them.
    Residuals are those of the products as computed.

    Args:
        rows: Orthonormal vectors, one per row.
        images: Their products with A, one per row.
        products: Number of products so far.
        scale: Largest absolute Ritz value so far.
    """
    chunks = list(zip(_column_chunks(rows), _column_chunks(images), strict=True))
    projection = torch.stack([row.double() @ image.double().T for row, image in chunks]).sum(0)
    values, vectors = torch.linalg.eigh((projection + projection.T) / 2)
    rotated, squares = torch.empty_like(rows), torch.zeros_like(values)
    for target, (row, image) in zip(_column_chunks(rotated), chunks, strict=True):
        ritz_vectors = vectors.T @ row.double()
        residual = vectors.T @ image.double() - values[:, None] * ritz_vectors
        squares += residual.square().sum(dim=1)
        target.copy_(ritz_vectors)
    return RitzPairs(values.cpu(), rotated, squares.sqrt().cpu(), products, scale)


def _column_chunks(rows: Tensor) -> tuple[Tensor, ...]:
    """Return views of a few columns each."""
    return torch.split(rows, CHUNK_COLUMNS, dim=1)


# Power iteration --------------------------------------------------------------------------------


def power_iteration(operator: SymmetricOperator, options: SolverOptions) -> RitzPairs:
    """Find the wanted ends one eigenvector at a time, projecting out those already found."""
    generator = torch.Generator().manual_seed(options.seed)
    signs = {"largest": [1], "smallest": [-1], "both": [1, -1]}[options.which]
    rows: list[Tensor] = []
    images: list[Tensor] = []
    products, scale, complete = 0, 0.0, True
    for sign in signs:
        search = _PowerIteration(operator, options, generator, sign, rows)
        for _ in range(min(options.k, operator.shape[0] - len(rows))):
            found = search.next_vector(products)
            rows.append(found.row)
            images.append(found.image)
            products += found.products
            complete &= found.converged
        scale = max(scale, search.scale)
    pairs = rayleigh_ritz(torch.stack(rows), torch.stack(images), products, scale)
    return pairs._replace(complete=complete)


class _PowerVector(NamedTuple):
    """A unit vector found by power iteration, its product with A, and the products it took."""

    row: Tensor
    image: Tensor
    products: int
    converged: bool


@dataclass
class _PowerIteration:
    """Largest eigenvalues of `sign * A`, one after another.

    Plain power iteration finds the eigenvalue of largest absolute value. If that one is negative,
    iterating with `sign * A - shift`, the shift just below it, makes all eigenvalues positive and
    the largest one dominant. Between t and about -t it does not decide: the norm of the product
    settles, the vector does not. A shift by that norm then makes the positive one dominant.
    """

    operator: SymmetricOperator
    options: SolverOptions
    generator: torch.Generator
    sign: int
    found: list[Tensor]
    shift: float = 0.0
    scale: float = 0.0

    def next_vector(self, products_before: int) -> _PowerVector:
        """Return the next vector, orthogonal to those found."""
        limit = self.options.limit // self.options.wanted
        row, last_norm, products = self._random_start(), 0.0, 0
        while True:
            image = self.sign * (self.operator @ row)
            products += 1
            value = float(row @ image)
            residual = float(torch.linalg.vector_norm(self._project_out(image - value * row)))
            self.scale = max(self.scale, abs(value))
            error = residual / max(self.scale, torch.finfo(torch.float64).tiny)
            self.options.report_progress(products_before + products, error)
            if value - self.shift < 0 and residual <= 0.1 * (self.shift - value):
                self.shift = value - 2 * residual - 1e-3 * abs(value)
                row = self._random_start()
                continue
            converged = error <= self.options.tol
            if converged or products >= limit:
                return _PowerVector(row, self.sign * image, products, converged)
            norm = math.hypot(value, residual)  # of the image
            if not self.shift and residual > 0.1 * norm and norm <= 1.001 * last_norm:
                self.shift = -norm
            last_norm = norm
            row = self._normalize(image - self.shift * row)

    def _random_start(self) -> Tensor:
        return self._normalize(normal_rows(self.operator, 1, self.generator)[0])

    def _project_out(self, row: Tensor) -> Tensor:
        """Subtract the part along the vectors found, twice: one pass leaves rounding errors."""
        for other in self.found + self.found:
            row = row - (other @ row) * other
        return row

    def _normalize(self, row: Tensor) -> Tensor:
        row = self._project_out(row)
        norm = float(torch.linalg.vector_norm(row))
        if norm == 0 or not math.isfinite(norm):
            return self._random_start()
        return row / norm
