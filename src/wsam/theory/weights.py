"""What gamma weighs, and the sums over the steps that every convergence proof needs."""

import math

from wsam._core.validation import count, number


def sharpness_weight(gamma: float) -> float:
    """Return the weight of sharpness in the objective.

    Equation: k = gamma / (1 - gamma), in L + k * (L_SAM - L).

    Args:
        gamma: in [0, 1); 0 is the base optimizer, 1/2 is SAM's weight 1.

    Example:
        >>> sharpness_weight(0.5)
        1.0
    """
    gamma = number("gamma", gamma, 0, 1)
    return gamma / (1 - gamma)


def gamma_for_weight(weight: float) -> float:
    """Return the gamma whose sharpness weight k is `weight`: gamma = k / (1 + k).

    Example:
        >>> gamma_for_weight(1.0)
        0.5
    """
    weight = number("weight", weight)
    return weight / (1 + weight)


def effective_weight(gamma: float, momentum: float) -> float:
    """Return how much decoupled WSAM over SGD weighs sharpness once momentum has built up.

    Equation: k (1 - mu). The base sums its gradients with weights 1, mu, mu^2, ..., so a constant
    g0 counts 1/(1 - mu) times; the decoupled term k (g1 - g0) counts once.

    Args:
        gamma: in [0, 1).
        momentum: mu of the base SGD (without dampening), in [0, 1).

    Example:
        >>> round(effective_weight(0.88, 0.9), 2), round(effective_weight(0.94, 0.9), 2)
        (0.73, 1.57)
    """
    return sharpness_weight(gamma) * (1 - number("momentum", momentum, 0, 1))


def parity_gamma(momentum: float) -> float:
    """Return the gamma at which decoupled WSAM weighs sharpness as SAM does.

    Equation: k (1 - mu) = 1, so gamma = 1 / (2 - mu): 1/2 without momentum, 10/11 at mu = 0.9.

    Example:
        >>> parity_gamma(0.0), round(parity_gamma(0.9) * 11, 12)
        (0.5, 10.0)
    """
    return 1 / (2 - number("momentum", momentum, 0, 1))


def inverse_sqrt(value: float, step: int) -> float:
    """Return `value / sqrt(t)`: the fall of lr and radius that the convergence theorems assume.

    The optimizer's own `wsam.schedule.InverseSqrt` is the same with t = 1 at the first step.

    Args:
        value: the value at t = 1.
        step: t, at least 1.

    Example:
        >>> inverse_sqrt(0.2, 4)
        0.1
    """
    return number("value", value) / math.sqrt(count("step", step, 1))


def squares(gamma: float) -> float:
    """Return k^2 + (1 - k)^2 = (5 gamma^2 - 4 gamma + 1) / (1 - gamma)^2.

    The proofs use half of it times 2 n G^2 to bound the squared step k g1 + (1 - k) g0.
    """
    weight = sharpness_weight(gamma)
    return weight**2 + (1 - weight) ** 2


def square_of_sum(gamma: float) -> float:
    """Return ``(k + |1 - k|)^2``: the squared length of k g1 + (1 - k) g0 for unit g0, g1, at most."""
    weight = sharpness_weight(gamma)
    return (weight + abs(1 - weight)) ** 2


def harmonic_root_sum(steps: int) -> tuple[float, float]:
    """Return numbers below and above the sum of 1/sqrt(t), t = 1..T.

    Equation: 2 sqrt(T+1) - 2 <= sum <= 2 sqrt(T) - 1, both from comparing with the integral of
    1/sqrt(s). The paper's intermediate 2 sqrt(T-1) - 1 is too small: at T = 2 it is 1 < 1.707.
    """
    return 2 * math.sqrt(steps + 1) - 2, 2 * math.sqrt(steps) - 1


def harmonic_sum(steps: int) -> float:
    """Return a number above the sum of 1/t, t = 1..T: 1 + log T."""
    return 1 + math.log(steps)
