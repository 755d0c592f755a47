"""Rules: what a step makes of its two gradients.

From g0 = grad l(w) and g1 = grad l(w + d) a rule makes two vectors: the gradient that the base
optimizer receives, and a decoupled term that is applied with the base's learning rate:

    w <- w - base(base_grad) - lr * decoupled

Each vector is a `Part`, `part.g0 * g0 + part.difference * (g1 - g0)`.
"""

from dataclasses import dataclass, fields
from typing import ClassVar

import torch

from wsam._core.mix import G0, G1, NOTHING, Mix, Part, Products, Scalar, is_number
from wsam._core.schedule_base import Schedule
from wsam._core.validation import number


class Rule:
    """Base class of rules. Hyperparameters are dataclass fields and may differ between groups."""

    keeps_g0: ClassVar[bool] = True
    """Whether the update needs g0, which costs a parameter-sized buffer."""
    base_uses_g1: ClassVar[bool] = True
    """Whether the base's step depends on g1. If not, the base may step before the second pass."""

    def needs_products(self, hyper: dict[str, Scalar]) -> bool:
        """Whether `mix` needs the inner products of the gradients."""
        return False

    def mix(self, hyper: dict[str, Scalar], products: Products | None) -> Mix:
        """Return the base's gradient and the decoupled term.

        Args:
            hyper: values of the rule's hyperparameters in a parameter group. In a captured step they
                are tensors: compute with them, but do not branch on them.
            products: inner products of the gradients, if `needs_products`.
        """
        raise NotImplementedError

    @classmethod
    def hyper(cls) -> tuple[str, ...]:
        """Return the names of the hyperparameters."""
        return tuple(field.name for field in fields(cls))  # type: ignore[arg-type]

    @classmethod
    def check(cls, name: str, value: float) -> float:
        """Return a valid value of a hyperparameter, or raise an error that states what is allowed."""
        return number(name, value)


@dataclass(frozen=True)
class Perturbed(Rule):
    """SAM: the base receives g1.

    Reference: Foret et al., Sharpness-Aware Minimization, ICLR 2021.
    """

    keeps_g0 = False

    def mix(self, hyper: dict[str, Scalar], products: Products | None) -> Mix:
        """Return base_grad = g1."""
        return Mix(G1, NOTHING)


def sharpness_weight(gamma: Scalar) -> Scalar:
    """Return k = gamma / (1 - gamma), the weight of sharpness in L + k * sharpness."""
    return gamma / (1 - gamma)


class _Gamma(Rule):
    @classmethod
    def check(cls, name: str, value: float) -> float:
        """Require gamma in [0, 1)."""
        return number(name, value, 0, 1)


@dataclass(frozen=True)
class Weighted(_Gamma):
    """WSAM: the base receives g0, and k (g1 - g0) is applied directly.

    Reference: Yue et al., Sharpness-Aware Minimization Revisited, KDD 2023, Algorithm 2.
    """

    gamma: float | Schedule = 0.9
    base_uses_g1 = False

    def mix(self, hyper: dict[str, Scalar], products: Products | None) -> Mix:
        """Return base_grad = g0, decoupled = k (g1 - g0)."""
        return Mix(G0, Part(g0=0.0, difference=sharpness_weight(hyper["gamma"])))


@dataclass(frozen=True)
class Coupled(_Gamma):
    """Coupled-WSAM: the base receives g0 + k (g1 - g0). gamma = 1/2 is SAM.

    Reference: Yue et al., KDD 2023, Algorithm 4. It equals the gradient-norm penalty of Zhao et al.,
    ICML 2022, with weight k.
    """

    gamma: float | Schedule = 0.5

    def mix(self, hyper: dict[str, Scalar], products: Products | None) -> Mix:
        """Return base_grad = g0 + k (g1 - g0)."""
        return Mix(Part(g0=1.0, difference=sharpness_weight(hyper["gamma"])), NOTHING)


@dataclass(frozen=True)
class SurrogateGap(Rule):
    """GSAM: the base receives g1 minus alpha times the part of g0 that is orthogonal to g1.

    With r = <g0,g1>/<g1,g1> that is g1 - alpha (g0 - r g1), written here as
    (1 + alpha (r - 1)) g0 + (1 + alpha r)(g1 - g0). alpha = 0 is SAM.

    Reference: Zhuang et al., Surrogate Gap Minimization, ICLR 2022.
    """

    alpha: float | Schedule = 0.1

    def needs_products(self, hyper: dict[str, Scalar]) -> bool:
        """Whether alpha is not zero."""
        return not is_number(hyper["alpha"], 0.0)

    def mix(self, hyper: dict[str, Scalar], products: Products | None) -> Mix:
        """Return base_grad = g1 - alpha * (part of g0 orthogonal to g1)."""
        alpha = hyper["alpha"]
        if is_number(alpha, 0.0):
            return Mix(G1, NOTHING)
        assert products is not None
        # Where g1 vanishes, all of g0 is orthogonal to it: r = 0 instead of 0/0.
        ratio = products.g0_g1 / products.g1_g1.clamp(min=torch.finfo(products.g1_g1.dtype).tiny)
        return Mix(Part(g0=1 + alpha * (ratio - 1), difference=1 + alpha * ratio), NOTHING)


__all__ = ["Coupled", "Mix", "Part", "Perturbed", "Products", "Rule", "SurrogateGap", "Weighted"]
