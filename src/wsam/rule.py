"""What becomes of the two gradients.

Of g0 = grad l(w) and g1 = grad l(w + d) a rule makes two vectors: what the base optimizer is *fed*,
and what is applied *beside* it with the base's learning rate:

    w <- w - base(fed) - lr * beside

Each is a loss part and a sharpness part, `loss * g0 + sharp * (g1 - g0)`. Written in the basis
(g0, g1 - g0) instead of (g0, g1), the paper's objective L + k * sharpness is read off directly, and
the family's identities hold to the last bit: where g1 = g0 the sharpness part is exactly zero.
"""

from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from wsam.checks import number
from wsam.schedule import Scalar, Schedule


class Part(NamedTuple):
    """The vector `loss * g0 + sharp * (g1 - g0)`."""

    loss: Scalar
    sharp: Scalar

    @property
    def is_zero(self) -> bool:
        """Whether nothing is applied; a tensor is never asked, for that would wait for the device."""
        return is_number(self.loss, 0.0) and is_number(self.sharp, 0.0)

    @property
    def is_second(self) -> bool:
        """Whether this is g1 as it stands."""
        return is_number(self.loss, 1.0) and is_number(self.sharp, 1.0)


NOTHING = Part(0.0, 0.0)
FIRST = Part(1.0, 0.0)
SECOND = Part(1.0, 1.0)


def is_number(value: Scalar, wanted: float) -> bool:
    """Whether `value` is a plain number equal to `wanted` (a tensor never is)."""
    return not isinstance(value, Tensor) and value == wanted


class Mix(NamedTuple):
    """What a rule makes of the two gradients."""

    fed: Part
    beside: Part

    @property
    def is_base_alone(self) -> bool:
        """Whether the base steps as it would without us, which then must be so bit for bit."""
        first = is_number(self.fed.loss, 1.0) and is_number(self.fed.sharp, 0.0)
        return first and self.beside.is_zero


class Products(NamedTuple):
    """Global inner products of the two gradients: <g0,g0>, <g0,g1>, <g1,g1>."""

    first: Tensor
    cross: Tensor
    second: Tensor

    @classmethod
    def of_squares(cls, first: Tensor, second: Tensor, apart: Tensor) -> "Products":
        """Return them by the squared norms of g0, g1 and g1 - g0.

        2<g0,g1> = norm(g0)^2 + norm(g1)^2 - norm(g1 - g0)^2: exact where g1 = g0. Where one norm is
        many times the other, as many times the rounding is lost.
        """
        return cls(first, (first + second - apart) / 2, second)


class Rule:
    """A rule's hyperparameters are its dataclass fields; they may differ from group to group."""

    keeps_first: ClassVar[bool] = True
    """Whether g0 must outlive the perturbation: it costs a parameter-sized buffer."""
    feeds_second: ClassVar[bool] = True
    """Whether the base's step depends on g1; if not, the base may step before the second pass."""

    def needs_products(self, hyper: dict[str, Scalar]) -> bool:
        """Whether `mix` is to be given the inner products."""
        return False

    def mix(self, hyper: dict[str, Scalar], products: Products | None) -> Mix:
        """Return what is fed and what is beside, for a group whose hyperparameters are `hyper`."""
        raise NotImplementedError

    @classmethod
    def hyper(cls) -> tuple[str, ...]:
        """Return the names of the rule's hyperparameters."""
        return tuple(field.name for field in fields(cls))  # type: ignore[arg-type]

    @classmethod
    def check(cls, name: str, value: float) -> float:
        """Return a hyperparameter's value, or raise saying what is allowed."""
        return number(name, value)


@dataclass(frozen=True)
class Perturbed(Rule):
    """SAM: the base is fed g1.

    Reference: Foret et al., Sharpness-Aware Minimization, ICLR 2021.
    """

    keeps_first = False

    def mix(self, hyper: dict[str, Scalar], products: Products | None) -> Mix:
        """Return fed = g1."""
        return Mix(SECOND, NOTHING)


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
    """WSAM: the base is fed g0; k(g1 - g0) is applied beside it, undistorted by its history.

    Reference: Yue et al., Sharpness-Aware Minimization Revisited, KDD 2023, Algorithm 2.
    """

    gamma: float | Schedule = 0.9
    feeds_second = False

    def mix(self, hyper: dict[str, Scalar], products: Products | None) -> Mix:
        """Return fed = g0, beside = k(g1 - g0)."""
        return Mix(FIRST, Part(0.0, sharpness_weight(hyper["gamma"])))


@dataclass(frozen=True)
class Coupled(_Gamma):
    """Coupled-WSAM: the base is fed g0 + k(g1 - g0); gamma = 1/2 is SAM.

    Reference: Yue et al., KDD 2023, Algorithm 4; with weight k it is the gradient-norm penalty of
    Zhao et al., ICML 2022.
    """

    gamma: float | Schedule = 0.5

    def mix(self, hyper: dict[str, Scalar], products: Products | None) -> Mix:
        """Return fed = g0 + k(g1 - g0)."""
        return Mix(Part(1.0, sharpness_weight(hyper["gamma"])), NOTHING)


@dataclass(frozen=True)
class SurrogateGap(Rule):
    """GSAM: the base is fed g1 less alpha times the part of g0 that is orthogonal to g1.

    With r = <g0,g1>/<g1,g1> that is g1 - alpha(g0 - r g1), here written as
    (1 + alpha(r - 1)) g0 + (1 + alpha r)(g1 - g0). alpha = 0 is SAM.

    Reference: Zhuang et al., Surrogate Gap Minimization, ICLR 2022.
    """

    alpha: float | Schedule = 0.1

    def needs_products(self, hyper: dict[str, Scalar]) -> bool:
        """Whether there is anything to project."""
        return not is_number(hyper["alpha"], 0.0)

    def mix(self, hyper: dict[str, Scalar], products: Products | None) -> Mix:
        """Return fed = g1 - alpha * (g0 orthogonal to g1)."""
        alpha = hyper["alpha"]
        if is_number(alpha, 0.0):
            return Mix(SECOND, NOTHING)
        assert products is not None
        # Where g1 vanishes all of g0 is orthogonal to it: r = 0 instead of 0/0.
        ratio = products.cross / products.second.clamp(min=torch.finfo(products.second.dtype).tiny)
        return Mix(Part(1 + alpha * (ratio - 1), 1 + alpha * ratio), NOTHING)


__all__ = ["Coupled", "Mix", "Part", "Perturbed", "Products", "Rule", "SurrogateGap", "Weighted"]
