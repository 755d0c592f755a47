"""Direction of one update as a function of gamma, measured on the optimizer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import SGD

from wsam.methods import WSAM
from wsam.toy.landscape import loss

Vector = tuple[float, float]


@dataclass(frozen=True)
class Updates:
    """Two gradients at a point, and the update for each gamma."""

    point: Vector
    rho: float
    first: Vector
    """g0, the gradient at the point."""
    second: Vector
    """g1, the gradient at the perturbed point."""
    by_gamma: dict[float, Vector]
    """Step that SGD with WSAM subtracts from the weights at lr = 1: g0 + k (g1 - g0)."""

    def angle(self, gamma: float) -> float:
        """Return the angle in degrees between g0 and the update for gamma, positive towards g1."""
        (ax, ay), (bx, by) = self.first, self.by_gamma[gamma]
        angle = math.atan2(ax * by - ay * bx, ax * bx + ay * by)
        gx, gy = self.second
        sign = math.copysign(1.0, ax * gy - ay * gx)
        return math.degrees(angle) * sign + 0.0  # + 0.0 turns -0.0 into 0.0


def gradient(point: Vector) -> Vector:
    """Return the gradient of the toy loss at a point."""
    w = torch.tensor(point, dtype=torch.float64)
    x, y = torch.func.grad(loss)(w).tolist()
    return x, y


def updates(
    gammas: Sequence[float] = (0.0, 0.25, 0.5, 0.75),
    *,
    point: Vector = (-10.0, 20.0),
    rho: float = 4.0,
) -> Updates:
    """Take one step of SGD with WSAM for each gamma and return the updates.

    Equation, for a base with lr 1 and no momentum::

        update = g0 + k (g1 - g0),        k = gamma / (1 - gamma)

    It is g0 for gamma = 0, between g0 and g1 below 1/2, g1 at 1/2, and beyond g1 above.

    Args:
        gammas: Values of gamma, each in [0, 1).
        point: Weights (mu, sigma), sigma positive.
        rho: Radius, positive.

    Returns:
        Both gradients and the update for each gamma.

    Example:
        >>> found = updates((0.0, 0.5))
        >>> found.by_gamma[0.0] == found.first
        True
    """
    first = gradient(point)
    length = math.hypot(*first) + 1e-12
    ahead = (point[0] + rho * first[0] / length, point[1] + rho * first[1] / length)
    steps = {gamma: _step(gamma, point, rho) for gamma in gammas}
    return Updates(point, rho, first, gradient(ahead), steps)


def _step(gamma: float, point: Vector, rho: float) -> Vector:
    w = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    origin = torch.tensor(point, dtype=torch.float64)
    # The weights are the offset from the point, so that reading the step has no cancellation.
    optimizer = WSAM(SGD([w], lr=1.0), rho=rho, gamma=gamma)

    def closure() -> Tensor:
        value = loss(origin + w)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(closure)
    x, y = (-w.detach()).tolist()
    return x, y
