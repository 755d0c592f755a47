"""How gamma turns one update, measured on the optimizer itself."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import SGD

from wsam._core.validation import number
from wsam.methods import WSAM
from wsam.toy.landscape import loss

Vector = tuple[float, float]


@dataclass(frozen=True)
class Updates:
    """Two gradients at a point, and the update that each gamma makes of them."""

    point: Vector
    rho: float
    first: Vector
    """g0, the gradient at the point."""
    second: Vector
    """g1, the gradient at the perturbed point."""
    by_gamma: dict[float, Vector]
    """What SGD with WSAM subtracts from the weights at lr = 1: g0 + k (g1 - g0)."""

    def angle(self, gamma: float) -> float:
        """Return the angle in degrees by which gamma's update is turned from g0 towards g1."""
        (ax, ay), (bx, by) = self.first, self.by_gamma[gamma]
        turned = math.atan2(ax * by - ay * bx, ax * bx + ay * by)
        gx, gy = self.second
        towards = math.copysign(1.0, ax * gy - ay * gx)
        return math.degrees(turned) * towards + 0.0  # no minus zero


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
    """Take one step of SGD with WSAM for each gamma and return what it subtracted.

    The base has lr 1 and no momentum, so the step is the update of the paper's Algorithm 3:
    gamma 0 gives g0, below 1/2 a vector between g0 and g1, 1/2 gives g1, above it goes beyond.

    Args:
        gammas: each in [0, 1).
        point: (mu, sigma), sigma positive.
        rho: radius, positive.

    Example:
        >>> turned = updates((0.0, 0.5))
        >>> turned.by_gamma[0.0] == turned.first
        True
    """
    number("rho", rho, low_open=True)
    number("sigma", point[1], low_open=True)
    first = gradient(point)
    length = math.hypot(*first) + 1e-12
    ahead = (point[0] + rho * first[0] / length, point[1] + rho * first[1] / length)
    made = {number("gamma", gamma, 0, 1): _step(gamma, point, rho) for gamma in gammas}
    return Updates(point, rho, first, gradient(ahead), made)


def _step(gamma: float, point: Vector, rho: float) -> Vector:
    w = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    origin = torch.tensor(point, dtype=torch.float64)
    # The weights are the offset from the point, so that the step is read off without cancellation.
    optimizer = WSAM(SGD([w], lr=1.0), rho=rho, gamma=gamma)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(origin + w)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(closure)
    x, y = (-w.detach()).tolist()
    return x, y
