"""Which perturbation: the shape of the neighbourhood that is explored.

One diagonal metric S >= 0 covers all of them:

    d = rho * S g0 / (sqrt(<g0, S g0>) + eps)

with one global norm over all parameters, in at least float32. A geometry says what the square root
of S is, tensor by tensor; with z = sqrt(S) g0 the perturbation is rho * sqrt(S) z / (norm(z) + eps).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wsam.block import Block, widened
from wsam.checks import count, flag, number

EPSILON = 1e-12
"""Keeps d finite where g0 vanishes."""


@dataclass(frozen=True)
class Geometry:
    """The metric of the neighbourhood."""

    def root(self, block: Block, first: list[Tensor]) -> list[Tensor] | None:
        """Return sqrt(S) for the block's shards, given their g0, at least in float32; None is 1."""
        raise NotImplementedError

    def mask(self, step: int, tensors: int) -> list[bool] | None:
        """Return which of all tensors are perturbed at this step; None for all."""
        return None

    @property
    def boost(self) -> float:
        """A factor on the radius."""
        return 1.0

    def check_names(self, blocks: Sequence[Block]) -> None:
        """Raise if the geometry needs parameters' names and there are none."""


@dataclass(frozen=True)
class Euclidean(Geometry):
    """A ball: S = 1 (SAM).

    Reference: Foret et al., ICLR 2021.
    """

    def root(self, block: Block, first: list[Tensor]) -> None:
        """Return None: S is 1."""


@dataclass(frozen=True)
class Adaptive(Geometry):
    """An ellipsoid that scales with the weights: S = (abs(w) + eta)^2 (ASAM).

    Invariant to rescalings of the weights that leave the function as it was (eta = 0). Radii are
    larger here than in a ball, 0.5 to 5.

    Args:
        eta: keeps the ellipsoid from collapsing where a weight is zero.
        weights_only: use it only for tensors whose name holds "weight" and a ball elsewhere, as the
            original does; needs names: pass `model=` or build the base from named parameters.

    Reference: Kwon et al., ASAM, ICML 2021.
    """

    eta: float = 0.01
    weights_only: bool = False

    def __post_init__(self) -> None:
        """Check the arguments."""
        number("eta", self.eta)
        flag("weights_only", self.weights_only)

    def check_names(self, blocks: Sequence[Block]) -> None:
        """Require names where they are needed."""
        if self.weights_only and any(block.names is None for block in blocks):
            raise ValueError(
                "weights_only=True looks for 'weight' in parameters' names and there are none: "
                "pass model=, or build the base from model.named_parameters()"
            )

    def root(self, block: Block, first: list[Tensor]) -> list[Tensor]:
        """Return abs(w) + eta."""
        scale = list(torch._foreach_abs(widened(block.weights())))
        if self.eta > 0:
            torch._foreach_add_(scale, self.eta)
        if self.weights_only and block.names is not None:
            for name, tensor in zip(block.names, scale, strict=True):
                if "weight" not in name:
                    tensor.fill_(1.0)
        return scale


@dataclass(frozen=True)
class Fisher(Geometry):
    """An ellipsoid shaped by the empirical Fisher information: S = 1/(1 + eta g0^2).

    Not invariant to a scaling of the loss: gradients must be unscaled first.

    Reference: Kim et al., Fisher SAM, ICML 2022.
    """

    eta: float = 1.0

    def __post_init__(self) -> None:
        """Check eta."""
        number("eta", self.eta)

    def root(self, block: Block, first: list[Tensor]) -> list[Tensor]:
        """Return 1/sqrt(1 + eta g0^2)."""
        wide = widened(first)
        scale = list(torch._foreach_mul(wide, wide))
        torch._foreach_mul_(scale, self.eta)
        torch._foreach_add_(scale, 1.0)
        torch._foreach_sqrt_(scale)
        torch._foreach_reciprocal_(scale)
        return scale


@dataclass(frozen=True)
class Masked(Geometry):
    """A ball in the space of randomly chosen tensors, its radius divided by beta (ESAM).

    Each tensor is chosen with probability beta, anew at each step. The choice is a function of the
    seed and the step's number alone: it resumes exactly, is the same on every rank and leaves the
    global generators as they are.

    Reference: Du et al., Efficient Sharpness-aware Minimization, ICLR 2022.
    """

    beta: float = 0.6
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the arguments."""
        object.__setattr__(self, "seed", count("seed", self.seed))  # numpy's integers overflow
        number("beta", self.beta, 0, 1, low_open=True, high_open=False)

    @property
    def boost(self) -> float:
        """Return 1/beta."""
        return 1.0 / self.beta

    def mask(self, step: int, tensors: int) -> list[bool]:
        """Return a Bernoulli(beta) choice for each tensor."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) % 2**63)
        chosen: list[bool] = (torch.rand(tensors, generator=generator) < self.beta).tolist()
        return chosen

    def root(self, block: Block, first: list[Tensor]) -> None:
        """Return None: among the chosen tensors S is 1."""


__all__ = ["Adaptive", "Euclidean", "Fisher", "Geometry", "Masked"]
