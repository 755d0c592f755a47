"""Gauss and Gauss-Radau quadrature of a spectrum from a Lanczos run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wsam.curvature.krylov import KrylovBasis
from wsam.curvature.operator import SymmetricOperator

# Relative distance below which a bound and a node are treated as equal.
_NODE_RTOL = 1e-10


@dataclass(frozen=True)
class LanczosQuadrature:
    """Quadrature of the spectrum of A with the weights of one probe vector v.

    The weight of the eigenvalue of a unit eigenvector x_i is `(v' x_i)²`. The nodes are the
    eigenvalues of the Lanczos matrix, the weights the squared first entries of its eigenvectors.

    Attributes:
        matrix: A in the Lanczos basis, whose first vector is the probe.
        nodes: Quadrature nodes, ascending: the eigenvalues of the matrix.
        vectors: Eigenvectors of the matrix, one per column.
        remainder: Coefficient of the Lanczos step that was not made.
        rounding: Bound on the change of an eigenvalue by the rounding of the products.
        size: Number of rows of A.
    """

    matrix: Tensor
    nodes: Tensor
    vectors: Tensor
    remainder: float
    rounding: float
    size: int

    @property
    def weights(self) -> Tensor:
        """Weights of the nodes; the sum is one."""
        return self.vectors[0] ** 2

    def cumulative(self, grid: Tensor, sigma: float) -> Tensor:
        """Return the weight below each point, smoothed by a Gaussian of width `sigma`."""
        return _smoothed_cumulative(self.nodes, self.weights, grid, sigma)

    def half_cumulative(self, grid: Tensor, sigma: float) -> Tensor:
        """Return what `cumulative` returns after half the steps."""
        half = max(1, len(self.matrix) // 2)
        nodes, vectors = torch.linalg.eigh(self.matrix[:half, :half])
        return _smoothed_cumulative(nodes, vectors[0] ** 2, grid, sigma)

    def default_sigma(self) -> float:
        """Return a hundredth of the range of the nodes, or of their size if all are equal."""
        low, high = float(self.nodes[0]), float(self.nodes[-1])
        size = max(abs(low), abs(high))
        return (high - low if high - low > 1e-6 * size else size or 1.0) / 100

    def below(self, bound: float) -> tuple[float, float]:
        """Return a lower and an upper bound of the weight of eigenvalues below `bound`."""
        low = min(1.0, self._weight_up_to(bound - self.rounding)[0])
        return low, min(1.0, max(low, self._weight_up_to(bound + self.rounding)[1]))

    def _weight_up_to(self, bound: float) -> tuple[float, float]:
        """Return the weight below `bound`, without and with the weight at `bound` itself.

        One more row makes the bound an eigenvalue of the Lanczos matrix (Gauss-Radau).

        References:
            Golub, Some modified matrix eigenvalue problems, SIAM Review 1973.
        """
        distance = self.nodes - bound
        near = _NODE_RTOL * float(self.nodes.abs().max())
        if float(distance.abs().min()) <= near:  # already an eigenvalue
            below, up_to = int((distance < -near).sum()), int((distance <= near).sum())
            weights = self.weights
        else:
            steps = len(self.nodes)
            extended = self.matrix.new_zeros(steps + 1, steps + 1)
            extended[:steps, :steps] = self.matrix
            extended[steps, steps - 1] = extended[steps - 1, steps] = self.remainder
            shift = float(((self.remainder * self.vectors[-1]) ** 2 / distance).sum())
            extended[steps, steps] = bound + shift
            # The eigenvalues of both matrices interlace, which gives the index of the bound.
            below = int((distance < 0).sum())
            up_to = below + 1
            weights = torch.linalg.eigh(extended).eigenvectors[0] ** 2
        return float(weights[:below].sum()), float(weights[:up_to].sum())


def lanczos_quadrature(
    operator: SymmetricOperator,
    steps: int,
    generator: torch.Generator,
    report_products: Callable[[int], None],
) -> LanczosQuadrature:
    """Run Lanczos from a random unit vector and return the quadrature it gives.

    Args:
        operator: A.
        steps: Number of Lanczos steps, one product each; at most the number of rows of A.
        generator: Of the random vector.
        report_products: Called with the number of products after each step.
    """
    krylov = KrylovBasis(operator, steps, 1, generator)
    for _ in range(steps):
        krylov.extend()
        report_products(krylov.products)
    matrix, remainder, rounding = krylov.projection()
    nodes, vectors = torch.linalg.eigh(matrix)
    rounding += 10 * torch.finfo(operator.dtype).eps * float(nodes.abs().max())
    return LanczosQuadrature(matrix, nodes, vectors, remainder, rounding, size=operator.shape[0])


def _smoothed_cumulative(nodes: Tensor, weights: Tensor, grid: Tensor, sigma: float) -> Tensor:
    return ((1 + torch.erf((grid[:, None] - nodes) / (sigma * math.sqrt(2)))) / 2) @ weights
