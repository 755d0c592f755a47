"""The weight of sharpness in the objective and in the update, as a function of gamma."""

import math

from wsam._core.validation import count, number


def sharpness_weight(gamma: float) -> float:
    """Return the weight of sharpness in the objective.

    Equation::

        L_WSAM = L + k (L_SAM - L),        k = gamma / (1 - gamma)

    Args:
        gamma: In [0, 1). 0 is the base optimizer, 1/2 is SAM with weight 1.

    Example:
        >>> sharpness_weight(0.5)
        1.0
    """
    gamma = number("gamma", gamma, 0, 1)
    return gamma / (1 - gamma)


def gamma_for_weight(weight: float) -> float:
    """Return the gamma with sharpness weight k: gamma = k / (1 + k).

    Args:
        weight: k, at least 0.

    Example:
        >>> gamma_for_weight(1.0)
        0.5
    """
    weight = number("weight", weight)
    return weight / (1 + weight)


def effective_weight(gamma: float, momentum: float) -> float:
    """Return the weight of sharpness in decoupled WSAM over SGD with momentum, in a steady state.

    Equation::

        k (1 - mu)

    Momentum sums the gradients with weights 1, mu, mu^2, ..., so a constant g0 is counted
    1/(1 - mu) times; the decoupled term k (g1 - g0) is counted once.

    Args:
        gamma: In [0, 1).
        momentum: mu of the base SGD (without dampening), in [0, 1).

    Example:
        >>> round(effective_weight(0.88, 0.9), 2), round(effective_weight(0.94, 0.9), 2)
        (0.73, 1.57)
    """
    return sharpness_weight(gamma) * (1 - number("momentum", momentum, 0, 1))


def parity_gamma(momentum: float) -> float:
    """Return the gamma at which decoupled WSAM weights sharpness as SAM does.

    Equation::

        k (1 - mu) = 1,        gamma = 1 / (2 - mu)

    This is 1/2 without momentum and 10/11 at mu = 0.9.

    Args:
        momentum: mu of the base SGD, in [0, 1).

    Example:
        >>> parity_gamma(0.0), round(parity_gamma(0.9) * 11, 12)
        (0.5, 10.0)
    """
    return 1 / (2 - number("momentum", momentum, 0, 1))


def inverse_sqrt(value: float, step: int) -> float:
    """Return `value / sqrt(t)`, the schedule of lr and radius in the convergence theorems.

    `wsam.schedule.InverseSqrt` is the same schedule for the optimizer, with t = 1 at the first step.

    Args:
        value: The value at t = 1.
        step: t, at least 1.

    Example:
        >>> inverse_sqrt(0.2, 4)
        0.1
    """
    return number("value", value) / math.sqrt(count("step", step, 1))
