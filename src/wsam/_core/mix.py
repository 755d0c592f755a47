"""Linear combinations of the two gradients of a step.

`wsam.rule` describes their use. In the basis of g0 and g1 - g0 the coefficients are those of the
paper's objective, loss plus k times sharpness. Identities between methods hold bit for bit, such as
WSAM with gamma = 0 and its base: where g1 = g0, the difference is exactly zero.
"""

from typing import NamedTuple

from torch import Tensor

Scalar = float | Tensor
"""A number, or a 0-d tensor whose value must not be read on the host."""


def is_exactly(value: Scalar, wanted: float) -> bool:
    """Whether `value` is a Python number equal to `wanted`. False for tensors, which are not read."""
    return not isinstance(value, Tensor) and value == wanted


class Part(NamedTuple):
    """The vector `part.g0 * g0 + part.difference * (g1 - g0)`."""

    g0: Scalar
    difference: Scalar

    @property
    def is_zero(self) -> bool:
        """Whether both coefficients are the number 0."""
        return is_exactly(self.g0, 0.0) and is_exactly(self.difference, 0.0)

    @property
    def is_g0(self) -> bool:
        """Whether this is g0 itself."""
        return is_exactly(self.g0, 1.0) and is_exactly(self.difference, 0.0)

    @property
    def is_g1(self) -> bool:
        """Whether this is g1 itself."""
        return is_exactly(self.g0, 1.0) and is_exactly(self.difference, 1.0)


NOTHING = Part(g0=0.0, difference=0.0)
G0 = Part(g0=1.0, difference=0.0)
G1 = Part(g0=1.0, difference=1.0)


class Mix(NamedTuple):
    """What a rule makes of the two gradients."""

    base_grad: Part
    """The gradient that the base optimizer receives."""
    decoupled: Part
    """The term applied directly, with the base's learning rate."""

    @property
    def is_base_only(self) -> bool:
        """Whether the step is the base optimizer's own, which must then hold bit for bit."""
        return self.base_grad.is_g0 and self.decoupled.is_zero


class Products(NamedTuple):
    """Global inner products of the two gradients: <g0,g0>, <g0,g1>, <g1,g1>."""

    g0_g0: Tensor
    g0_g1: Tensor
    g1_g1: Tensor

    @classmethod
    def of_squares(cls, g0: Tensor, g1: Tensor, difference: Tensor) -> "Products":
        """Compute them from the squared norms of g0, g1 and g1 - g0.

        2<g0,g1> = norm(g0)^2 + norm(g1)^2 - norm(g1 - g0)^2, which is exact where g1 = g0.
        """
        return cls(g0, (g0 + g1 - difference) / 2, g1)
