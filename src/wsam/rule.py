"""Rules: what a step makes of its two gradients.

From g0 = grad l(w) and g1 = grad l(w + d) a rule makes two vectors: the gradient that the base
optimizer receives, and a decoupled term that is applied with the base's learning rate:

    w <- w - base(base_grad) - lr * decoupled

Each vector is a `Part`, `part.g0 * g0 + part.difference * (g1 - g0)`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from wsam._core.mix import G0, G1, NOTHING, Mix, Part, Products, Scalar, is_exactly
from wsam._core.schedule_base import Schedule
from wsam._core.validation import number

Norm = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class Reuse:
    """How the steps between two-pass steps use the sharpness gradient h = g1 - g0 of the last one.

    Args:
        scale_by_norm: use h * norm(g0 of this step) / norm(g0 of the step that computed h).
        average: the share of the earlier h in the kept one: h <- average h + (1 - average)(g1 - g0).
        weight: a factor of k on these steps.
    """

    scale_by_norm: bool = False
    average: float = 0.0
    weight: float = 1.0

    def __post_init__(self) -> None:
        number("average", self.average, 0, 1)
        number("weight", self.weight)


class Rule:
    """Base class of rules. Hyperparameters are dataclass fields and may differ between groups."""

    keeps_g0: ClassVar[bool] = True
    """Whether the update needs g0, which costs a parameter-sized buffer."""
    base_uses_g1: ClassVar[bool] = True
    """Whether the base's step depends on g1. If not, the base may step before the second pass."""
    kept_needs_products: ClassVar[bool] = False
    """Whether `kept` needs the inner products of the gradients."""
    keeps_orthogonal_part: ClassVar[bool] = False
    """Whether the kept vector is orthogonal to g0: with `per_tensor`, 0 for tensors of one element."""
    per_tensor: bool = False
    """Whether vectors are projected, and norms compared, for each tensor instead of globally."""
    options: ClassVar[tuple[str, ...]] = ()
    """Fields that are not hyperparameters: they are the same for all groups."""
    reuse: Reuse | Literal[False] = False
    """How one-pass steps use a vector that the last two-pass step kept; False if it keeps none."""
    precondition: bool = False
    """Whether the decoupled term is divided by the denominator of an adaptive base."""

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

    def kept(self, hyper: dict[str, Scalar], products: Products | None) -> Part:
        """Return the vector that a two-pass step keeps, if the rule has `reuse`."""
        return Part(g0=0.0, difference=1.0)

    def mix_kept(self, hyper: dict[str, Scalar], g0_norm: Norm, kept_norm: Norm) -> Mix:
        """Return what a one-pass step makes of g0 and the kept vector.

        Args:
            hyper: as for `mix`.
            g0_norm: computes the norm of g0.
            kept_norm: computes that of the kept vector, whose coefficient is `difference` of each part.
        """
        raise NotImplementedError

    @classmethod
    @cache
    def hyper(cls) -> tuple[str, ...]:
        """Return the names of the hyperparameters."""
        return tuple(field.name for field in fields(cls) if field.name not in cls.options)  # type: ignore[arg-type]

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

    With `reuse`, one-pass steps apply k h, where h is g1 - g0 of the last two-pass step. With
    `precondition`, k h is divided by the base's denominator, whose squares include (k h)^2.

    Reference: Yue et al., Sharpness-Aware Minimization Revisited, KDD 2023, Algorithm 2.
    """

    gamma: float | Schedule = 0.9
    reuse: "Reuse | Literal[False]" = False
    precondition: bool = False
    base_uses_g1 = False
    options = ("reuse", "precondition")

    @property
    def kept_needs_products(self) -> bool:  # type: ignore[override]
        """Whether h is divided by the norm of g0."""
        return bool(self.reuse and self.reuse.scale_by_norm)

    def kept(self, hyper: dict[str, Scalar], products: Products | None) -> Part:
        """Return h, or h / norm(g0)."""
        if products is None:
            return Part(g0=0.0, difference=1.0)
        # Of float32: a smaller norm of float64 gradients has an infinite inverse in float32 blocks.
        norm = products.g0_g0.sqrt().clamp(min=torch.finfo(torch.float32).tiny)
        return Part(g0=0.0, difference=1 / norm)

    def mix_kept(self, hyper: dict[str, Scalar], g0_norm: Norm, kept_norm: Norm) -> Mix:
        """Return base_grad = g0, decoupled = k h."""
        assert self.reuse
        k = self.reuse.weight * sharpness_weight(hyper["gamma"])
        if self.reuse.scale_by_norm and not is_exactly(k, 0.0):
            k = k * g0_norm()
        return Mix(G0, Part(g0=0.0, difference=k))

    def mix(self, hyper: dict[str, Scalar], products: Products | None) -> Mix:
        """Return base_grad = g0, decoupled = k (g1 - g0)."""
        return Mix(G0, Part(g0=0.0, difference=sharpness_weight(hyper["gamma"])))


@dataclass(frozen=True)
class Coupled(_Gamma):
    """Coupled-WSAM: the base receives g0 + k (g1 - g0). gamma = 1/2 is SAM.

    Reference: Yue et al., KDD 2023, Algorithm 4. With alpha = k it is the gradient-norm penalty
    of Zhao et al., ICML 2022: (1 - alpha) g0 + alpha g1.
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
        return not is_exactly(hyper["alpha"], 0.0)

    def mix(self, hyper: dict[str, Scalar], products: Products | None) -> Mix:
        """Return base_grad = g1 - alpha * (part of g0 orthogonal to g1)."""
        alpha = hyper["alpha"]
        if is_exactly(alpha, 0.0):
            return Mix(G1, NOTHING)
        assert products is not None
        # Where g1 vanishes, all of g0 is orthogonal to it: r = 0 instead of 0/0.
        ratio = products.g0_g1 / products.g1_g1.clamp(min=torch.finfo(products.g1_g1.dtype).tiny)
        return Mix(Part(g0=1 + alpha * (ratio - 1), difference=1 + alpha * ratio), NOTHING)


__all__ = [
    "Coupled",
    "Mix",
    "Part",
    "Perturbed",
    "Products",
    "Reuse",
    "Rule",
    "SurrogateGap",
    "Weighted",
]
