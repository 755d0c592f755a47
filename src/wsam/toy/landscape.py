"""The loss of the toy example and its three stationary points."""

import math
from dataclasses import astuple, dataclass
from functools import cache

import torch
from torch import Tensor

SHARP, FLAT, SADDLE = "sharp", "flat", "saddle"

BASIN_RADIUS = 3.0
"""Largest distance of an end point from its minimum: at a constant radius runs do not settle."""


@dataclass(frozen=True)
class Component:
    """One of the two Gaussians in the loss: weight * exp(-KL / width^2)."""

    mean: float
    deviation: float
    weight: float
    width: float


COMPONENTS = (Component(20.0, 30.0, 0.7, 1.8), Component(-20.0, 10.0, 0.3, 1.2))
_MEAN, _DEVIATION, _WEIGHT, _WIDTH = torch.tensor(
    [astuple(c) for c in COMPONENTS], dtype=torch.float64
).T


def loss(w: Tensor) -> Tensor:
    """Return the toy loss at w = (mu, sigma), or at each of a batch of points.

    Equation, with K_i the KL divergence of N(mu, sigma^2) from N(20, 30^2) and N(-20, 10^2)::

        L(w) = -log(0.7 exp(-K1(w)/1.8^2) + 0.3 exp(-K2(w)/1.2^2))
        K_i = log(sigma_i/sigma) + (sigma^2 + (mu - mu_i)^2)/(2 sigma_i^2) - 1/2

    Args:
        w: Shape (..., 2), float64. The loss is NaN if sigma is not positive.

    Returns:
        A tensor of shape (...).

    Example:
        >>> round(loss(torch.tensor([-16.805, 12.803], dtype=torch.float64)).item(), 4)
        0.2752

    References:
        Yue et al., KDD 2023, section 4.2, after Kim et al., Fisher SAM, 2022.
    """
    mu, sigma = w[..., 0:1], w[..., 1:2]  # broadcast against both components
    distance = (sigma**2 + (mu - _MEAN) ** 2) / (2 * _DEVIATION**2)
    divergence = torch.log(_DEVIATION / sigma) + distance - 0.5
    return -torch.log((_WEIGHT * torch.exp(-divergence / _WIDTH**2)).sum(-1))


def hessian(point: tuple[float, float]) -> Tensor:
    """Return the exact 2 x 2 Hessian of the toy loss at a point, in float64."""
    w = torch.tensor(point, dtype=torch.float64)
    matrix: Tensor = torch.autograd.functional.hessian(loss, w)  # type: ignore[no-untyped-call]
    return matrix


def eigenvalues(point: tuple[float, float]) -> tuple[float, float]:
    """Return the eigenvalues of the Hessian at a point, ascending; NaN outside the domain."""
    matrix = hessian(point)
    if not bool(matrix.isfinite().all()):
        return math.nan, math.nan
    low, high = torch.linalg.eigvalsh(matrix).tolist()
    return low, high


@dataclass(frozen=True)
class Place:
    """A stationary point of the toy loss."""

    name: str
    point: tuple[float, float]
    loss: float
    eigenvalues: tuple[float, float]


def _newton(point: tuple[float, float]) -> tuple[float, float]:
    w = torch.tensor(point, dtype=torch.float64)
    for _ in range(20):
        gradient = torch.func.grad(loss)(w)
        w = w - torch.linalg.solve(hessian((w[0].item(), w[1].item())), gradient)
    return w[0].item(), w[1].item()


@cache
def places() -> tuple[Place, ...]:
    """Return the stationary points: sharp minimum, flat minimum and the saddle between them.

    Each is found by Newton's method on the gradient, started at the point given in the paper.

    Example:
        >>> [(place.name, round(place.loss, 4)) for place in places()]
        [('sharp', 0.2752), ('flat', 0.3564), ('saddle', 0.3977)]
    """
    found = []
    for name, guess in ((SHARP, (-16.8, 12.8)), (FLAT, (19.8, 29.9)), (SADDLE, (0.3, 22.5))):
        point = _newton(guess)
        value = loss(torch.tensor(point, dtype=torch.float64)).item()
        found.append(Place(name, point, value, eigenvalues(point)))
    return tuple(found)


def minimum_near(point: tuple[float, float]) -> str | None:
    """Return the name of the minimum within `BASIN_RADIUS` of the point, or None."""
    for place in places():
        if place.name != SADDLE and math.dist(place.point, point) <= BASIN_RADIUS:
            return place.name
    return None
