"""A basis of a Krylov space, built block by block with full re-orthogonalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from wsam.curvature.operator import SymmetricOperator

__all__ = ["Krylov", "random_normal"]


def random_normal(operator: SymmetricOperator, rows: int, generator: torch.Generator) -> Tensor:
    """Draw Gaussian vectors, one a row; the same on every device for the same generator."""
    drawn = torch.randn(rows, operator.shape[0], generator=generator, dtype=torch.float32)
    return drawn.to(operator.device, operator.dtype)


class Krylov:
    """Orthonormal rows Q and their image under A: `A Q' = Q' M + R`, R touching the last block.

    The coefficients M are measured, not assumed tridiagonal: their asymmetry shows the rounding of
    A itself, so a residual formed from M and R is that of the products as they were computed.

    Rows may be locked: then A stands for its part on the vectors orthogonal to them.

    Attributes:
        size: rows of Q in use.
        products: vectors multiplied by A so far.
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
        self._measured = torch.zeros(capacity, capacity, dtype=torch.float64)
        self._tail = torch.zeros(0, 0, dtype=torch.float64)
        self._carried = 0.0
        self._next = self._orthonormal(random_normal(operator, block, generator), scale=0.0)[0]

    @property
    def basis(self) -> Tensor:
        """The orthonormal vectors, one a row."""
        return self._rows[: self.size]

    @property
    def full(self) -> bool:
        """Whether the next block would not fit."""
        return self.size + len(self._next) > len(self._rows)

    @property
    def complete(self) -> bool:
        """Whether the basis spans a space that A does not leave."""
        return self.size > 0 and not len(self._next)

    def extend(self) -> None:
        """Multiply the next block and add it to the basis."""
        block, old = self._next, self.size
        self.size = old + len(block)
        self._rows[old : self.size] = block
        # A lone vector goes as a vector: a matrix of one column may take a slower path.
        image = (self.operator @ block[0])[None] if len(block) == 1 else (self.operator @ block.T).T
        self.products += len(block)
        coefficients, image = self._remove_basis(image)
        self._measured[: self.size, old : self.size] = coefficients
        scale = float(self._measured[: self.size, : self.size].abs().max())
        self._next, self._tail = self._orthonormal(image, scale)
        # By construction the new block's rows of M are what was left of the block before it.
        fresh = min(len(self._next), len(self._rows) - self.size)
        self._measured[self.size : self.size + fresh, old : self.size] = self._tail[:fresh]

    def ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return Ritz values (ascending), their coordinates in the basis, and residual norms.

        `norm(A x - t x)` of the pair (t, x = Q' y) is `norm([(M - T) y; R y])`, T the symmetric
        part of M: no product is spent on it.
        """
        measured = self._measured[: self.size, : self.size]
        symmetric = (measured + measured.T) / 2
        values, vectors = torch.linalg.eigh(symmetric)
        rounding = torch.linalg.vector_norm((measured - symmetric) @ vectors, dim=0)
        last = self._tail.shape[1]
        leak = torch.linalg.vector_norm(self._tail @ vectors[self.size - last :], dim=0)
        carried = torch.full_like(leak, self._carried)
        return values, vectors, torch.sqrt(rounding**2 + leak**2 + carried**2)

    def projected(self) -> tuple[Tensor, float, float]:
        """Return the symmetric part of M, the size of R, and of M's asymmetry: the rounding of A."""
        measured = self._measured[: self.size, : self.size]
        symmetric = (measured + measured.T) / 2
        left = float(torch.linalg.vector_norm(self._tail))
        return symmetric, left, float(torch.linalg.matrix_norm(measured - symmetric, ord=2))

    def lift(self, coordinates: Tensor) -> Tensor:
        """Return vectors of the whole space, one a row, from columns of coordinates."""
        return _combined(coordinates.T.to(self.basis), self.basis)

    def restart(self, values: Tensor, vectors: Tensor) -> None:
        """Shrink the basis to chosen Ritz vectors; what comes next stays as it was.

        Reference: Wu and Simon, Thick-restart Lanczos method, SIAM J. Matrix Anal. Appl. 2000.
        """
        kept = len(values)
        measured = self._measured[: self.size, : self.size]
        lost = (measured - measured.T) / 2 @ vectors
        self._carried = max(self._carried, float(torch.linalg.matrix_norm(lost, ord=2)))
        last = self._tail.shape[1]
        coupling = self._tail @ vectors[self.size - last :]
        self._rows[:kept] = self.lift(vectors)
        self.size = kept
        self._measured.zero_()
        self._measured[:kept, :kept] = torch.diag(values)
        self._measured[kept : kept + len(coupling), :kept] = coupling
        self._tail = coupling

    def _remove_basis(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Subtract the part inside the basis, twice: once leaves rounding errors behind."""
        total = torch.zeros(self.size, len(rows), dtype=torch.float64)
        for _ in range(2):
            coefficients = torch.stack([torch.mv(self.basis, row) for row in rows], dim=1)
            outside = torch.stack([torch.mv(self._locked, row) for row in rows])
            rows = rows - _combined(coefficients.T, self.basis) - _combined(outside, self._locked)
            total += coefficients.double().cpu()
        return total, rows

    def _orthonormal(self, rows: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return `(Z, C)` with orthonormal rows Z, orthogonal to the basis, and `rows = C' Z`.

        A row that vanishes (the space is invariant) is replaced by a random one with coefficient
        zero, so that copies of a repeated eigenvalue are still found.
        """
        tiny = 10 * torch.finfo(rows.dtype).eps * scale
        done: list[Tensor] = []
        tail = torch.zeros(len(rows), len(rows), dtype=torch.float64)
        for column, original in enumerate(rows):
            row = original
            for index, other in enumerate(done):
                overlap = float(other @ row)
                tail[index, column] = overlap
                row = row - overlap * other
            if len(self._locked) + self.size + len(done) >= self.operator.shape[0]:
                continue  # the basis spans the whole space: nothing new can be left
            norm = float(torch.linalg.vector_norm(row))
            if norm > tiny:
                tail[len(done), column] = norm
                row = row / norm
            else:
                row = random_normal(self.operator, 1, self.generator)[0]
                row = self._polish(row / torch.linalg.vector_norm(row), done)
            # Normalising a small remainder magnifies what it still shares with the basis.
            done.append(self._polish(row, done))
        found = torch.stack(done) if done else rows[:0]
        return found, tail[: len(done)]

    def _polish(self, row: Tensor, done: list[Tensor]) -> Tensor:
        for other in (self._locked, self.basis, *(vector[None] for vector in done)):
            row = row - torch.mv(other.T, torch.mv(other, row))
        unit: Tensor = row / torch.linalg.vector_norm(row)
        return unit


def _combined(coefficients: Tensor, rows: Tensor) -> Tensor:
    """Return `coefficients @ rows`, a row at a time.

    A GPU may round a product of two matrices to TF32, but not one of a matrix and a vector; memory
    bounds both, so nothing is lost.
    """
    return torch.stack([torch.mv(rows.T, row) for row in coefficients])
