"""Orthonormal bases of block Krylov spaces, with full re-orthogonalization."""

from __future__ import annotations

import torch
from torch import Tensor

from wsam.curvature.operator import SymmetricOperator
from wsam.curvature.random_vectors import normal_rows


class KrylovBasis:
    """Basis of a block Krylov space of a symmetric operator A, grown block by block.

    Equation, with orthonormal rows Q::

        A Q' = Q' M + R,        M = Q A Q'

    R is zero except in the columns of the last block. M is measured, not assumed to be tridiagonal:
    its asymmetry is the rounding error of the products with A, so residuals computed from M and R
    include that rounding.

    Args:
        operator: A.
        capacity: Largest number of rows of Q.
        block: Number of vectors multiplied at a time.
        generator: Of the random start.
        locked: Orthonormal rows to exclude. A is then restricted to vectors orthogonal to them.

    Attributes:
        size: Number of rows of Q.
        products: Number of vectors multiplied by A so far.
    """

    def __init__(
        self,
        operator: SymmetricOperator,
        capacity: int,
        block: int,
        generator: torch.Generator,
        locked: Tensor | None = None,
    ) -> None:
        self.operator = operator
        self.generator = generator
        self.products = 0
        self.size = 0
        self._rows = torch.empty(
            capacity, operator.shape[0], dtype=operator.dtype, device=operator.device
        )
        self._locked = self._rows[:0] if locked is None else locked
        self._projection = _zeros(capacity, capacity)  # M
        self._remainder = _zeros(0, 0)  # R in the next block's vectors
        self._restart_error = 0.0
        start = normal_rows(operator, block, generator)
        self._next_block = self._orthonormalize(start, scale=0.0)[0]

    @property
    def basis(self) -> Tensor:
        """The orthonormal vectors Q, one per row."""
        return self._rows[: self.size]

    @property
    def full(self) -> bool:
        """Whether the next block exceeds the capacity."""
        return self.size + len(self._next_block) > len(self._rows)

    @property
    def spans_all(self) -> bool:
        """Whether the basis and the locked vectors span the full space."""
        return not len(self._next_block)

    def extend(self) -> None:
        """Multiply the next block by A and add it to the basis."""
        block, old = self._next_block, self.size
        self.size = old + len(block)
        self._rows[old : self.size] = block
        # A single vector is passed as a vector: a matrix of one column may use a slower kernel.
        image = (self.operator @ block[0])[None] if len(block) == 1 else (self.operator @ block.T).T
        self.products += len(block)
        coefficients, image = self._remove_basis(image)
        self._projection[: self.size, old : self.size] = coefficients
        scale = float(self._projection[: self.size, : self.size].abs().max())
        self._next_block, self._remainder = self._orthonormalize(image, scale)
        # The rows of M that belong to the next block are the remainder of this one.
        fresh = min(len(self._next_block), len(self._rows) - self.size)
        self._projection[self.size : self.size + fresh, old : self.size] = self._remainder[:fresh]

    def ritz_pairs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return Ritz values (ascending), their coordinates in the basis, and residual norms.

        Equation, with T the symmetric part of M and x = Q' y::

            T y = t y,        norm(A x - t x) = norm([(M - T) y; R y])

        No product with A is needed.
        """
        symmetric, asymmetric = self._parts()
        values, vectors = torch.linalg.eigh(symmetric)
        rounding = torch.linalg.vector_norm(asymmetric @ vectors, dim=0)
        outside = torch.linalg.vector_norm(self._coupling(vectors), dim=0)
        restarts = torch.full_like(outside, self._restart_error)
        return values, vectors, torch.sqrt(rounding**2 + outside**2 + restarts**2)

    def projection(self) -> tuple[Tensor, float, float]:
        """Return the symmetric part of M, the norm of R, and the norm of M's asymmetry."""
        symmetric, asymmetric = self._parts()
        remainder = float(torch.linalg.vector_norm(self._remainder))
        return symmetric, remainder, float(torch.linalg.matrix_norm(asymmetric, ord=2))

    def lift(self, coordinates: Tensor) -> Tensor:
        """Return vectors of the full space, one per row, from columns of coordinates."""
        return _matmul_by_rows(coordinates.T.to(self.basis), self.basis)

    def restart(self, values: Tensor, vectors: Tensor) -> None:
        """Shrink the basis to the given Ritz vectors; the next block stays the same.

        Args:
            values: Ritz values to keep.
            vectors: Their coordinates in the basis, one column each.

        References:
            Wu and Simon, Thick-restart Lanczos method, SIAM J. Matrix Anal. Appl. 2000.
        """
        kept = len(values)
        error = torch.linalg.matrix_norm(self._parts()[1] @ vectors, ord=2)
        self._restart_error = max(self._restart_error, float(error))
        coupling = self._coupling(vectors)
        self._rows[:kept] = self.lift(vectors)
        self.size = kept
        self._projection.zero_()
        self._projection[:kept, :kept] = torch.diag(values)
        self._projection[kept : kept + len(coupling), :kept] = coupling
        self._remainder = coupling

    def _parts(self) -> tuple[Tensor, Tensor]:
        """Return the symmetric part of M and the rest."""
        projection = self._projection[: self.size, : self.size]
        symmetric = (projection + projection.T) / 2
        return symmetric, projection - symmetric

    def _coupling(self, vectors: Tensor) -> Tensor:
        """Return R times columns of coordinates, in the next block's vectors."""
        last = self._remainder.shape[1]
        return self._remainder @ vectors[self.size - last :]

    def _remove_basis(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Subtract the part inside the basis, twice: one pass leaves rounding errors."""
        total = _zeros(self.size, len(rows))
        for _ in range(2):
            inside = torch.stack([torch.mv(self.basis, row) for row in rows], dim=1)
            locked = torch.stack([torch.mv(self._locked, row) for row in rows])
            rows = rows - _matmul_by_rows(inside.T, self.basis)
            rows = rows - _matmul_by_rows(locked, self._locked)
            total += inside.double().cpu()
        return total, rows

    def _orthonormalize(self, rows: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return `(Z, C)` with `rows = C' Z`, rows of Z orthonormal and orthogonal to the basis.

        A row that vanishes (the space is invariant) is replaced by a random one with coefficient
        zero, so that further copies of a repeated eigenvalue can be found.
        """
        tiny = 10 * torch.finfo(rows.dtype).eps * scale
        done: list[Tensor] = []
        coefficients = _zeros(len(rows), len(rows))
        for column, original in enumerate(rows):
            row = original
            for index, other in enumerate(done):
                overlap = float(other @ row)
                coefficients[index, column] = overlap
                row = row - overlap * other
            if len(self._locked) + self.size + len(done) >= self.operator.shape[0]:
                continue  # the basis already spans the full space
            norm = float(torch.linalg.vector_norm(row))
            if norm > tiny:
                coefficients[len(done), column] = norm
            else:
                row = normal_rows(self.operator, 1, self.generator)[0]
                row = self._reorthogonalize(row, done)
            # Normalizing a small remainder magnifies its overlap with the basis.
            done.append(self._reorthogonalize(row, done))
        found = torch.stack(done) if done else rows[:0]
        return found, coefficients[: len(done)]

    def _reorthogonalize(self, row: Tensor, done: list[Tensor]) -> Tensor:
        """Subtract the part along the locked vectors, the basis and `done`; return a unit vector."""
        for other in (self._locked, self.basis, *(vector[None] for vector in done)):
            row = row - torch.mv(other.T, torch.mv(other, row))
        unit: Tensor = row / torch.linalg.vector_norm(row)
        return unit


def _zeros(rows: int, columns: int) -> Tensor:
    """Return a small matrix: on the CPU, whatever PyTorch's default device is."""
    return torch.zeros(rows, columns, dtype=torch.float64, device="cpu")


def _matmul_by_rows(coefficients: Tensor, rows: Tensor) -> Tensor:
    """Return `coefficients @ rows`, one matrix-vector product per row.

    A GPU may round matrix-matrix products to TF32 but not matrix-vector products. Both are bound by
    memory bandwidth here, so this costs no time.
    """
    return torch.stack([torch.mv(rows.T, row) for row in coefficients])
