"""Convergence of SGD with WSAM: regret on convex losses, gradient norm on smooth losses."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from wsam._core.validation import count, number
from wsam.theory.weights import sharpness_weight

Form = Literal["printed", "corrected", "tight"]


def check_form(form: str, forms: tuple[str, ...]) -> None:
    """Raise if `form` is not one of `forms`."""
    if form not in forms:
        raise ValueError(f"form must be one of {', '.join(forms)}, got {form!r}")


def check_steps(steps: int) -> int:
    """Return T; raise if it is below 2, since the non-convex bound divides by sqrt(T) - 1."""
    return count("T", steps, 2)


@dataclass(frozen=True, kw_only=True)
class _Assumptions:
    """Quantities of the run that both convergence theorems use."""

    gamma: float
    lr: float
    rho: float
    smoothness: float
    parameters: int
    gradient: float

    forms: ClassVar[tuple[Form, ...]] = ("printed", "corrected", "tight")

    def __post_init__(self) -> None:
        number("gamma", self.gamma, 0, 1)
        number("lr", self.lr, low_open=True)
        number("rho", self.rho, low_open=True)
        number("smoothness", self.smoothness)
        count("parameters", self.parameters, 1)
        number("gradient", self.gradient)

    @property
    def weight(self) -> float:
        """Weight of sharpness, k = gamma / (1 - gamma)."""
        return sharpness_weight(self.gamma)

    def _check_radii(self, radii: Sequence[float]) -> int:
        """Check the radii and return their number T."""
        for radius in radii:
            number("every radius", radius, 0, self.rho, low_open=True, high_open=False)
        return check_steps(len(radii))


@dataclass(frozen=True, kw_only=True)
class Convex(_Assumptions):
    """Regret of SGD with WSAM on convex losses l_1, ..., l_T (Theorem 5.1, Corollary 5.2).

    Equation::

        sum_t l_t(w_t) - l_t(w*)  <=  C1 sqrt(T) + C2 sum_t rho_t,     lr_t = lr / sqrt(t)
        C1 = n D^2 / (2 lr) + 2 (k^2 + (1-k)^2) n G^2 lr,              C2 = sqrt(n) D eta k
        corollary, rho_t = rho / sqrt(t):   (C1 + 2 rho C2) sqrt(T)

    The paper writes 2 (k^2 + (1-k)^2) as (10 gamma^2 - 8 gamma + 2)/(1-gamma)^2, which is equal, and
    **omits the factor lr** of that term, although its proof sums lr_t * (...).
    Counter-example: l_1 = G w, l_2 = -G w, w_1 = 0, lr = 5, gamma = 0. Then w_2 = -5 G, the regret
    is 5 G^2, every w is optimal, and w* = -2.5 G gives D = 2.5 G. Printed bound: 3.71 G^2.
    Corrected bound: 15.03 G^2.

    The tight form bounds the squared step by ``(k + |1-k|)^2 n G^2`` instead of
    2 (k^2 + (1-k)^2) n G^2, and the sum of 1/sqrt(t) by 2 sqrt(T) - 1 instead of 2 sqrt(T). The
    second change is not part of C1: it subtracts ``(k + |1-k|)^2 n G^2 lr / 2`` from the bound, and
    rho C2 from the corollary. The proof does not use that w* is optimal: the bound holds for any
    point, with D measured from it.

    Args:
        gamma: Weight parameter, in [0, 1).
        lr: alpha, the learning rate at t = 1; it decreases as 1/sqrt(t).
        rho: Largest radius.
        smoothness: eta; every l_t has an eta-Lipschitz gradient.
        parameters: n, the number of weights.
        gradient: G, the largest absolute entry of any g0 or g1 of the run.
        distance: D, the largest absolute entry of any w_t - w*.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> toy = Convex(gamma=0.0, lr=5.0, rho=0.1, smoothness=0.0, parameters=1, gradient=1.0,
        ...              distance=2.5)
        >>> [round(toy.corollary(2, form), 2) for form in toy.forms]
        [3.71, 15.03, 5.45]

    References:
        Yue et al., KDD 2023, section 5.1.
    """

    distance: float

    why: ClassVar[str] = (
        "The second term of C1 needs a factor lr: the proof sums lr_t (k^2 + (1-k)^2) n G^2, "
        "and sum lr_t < 2 lr sqrt(T)."
    )
    sharper: ClassVar[str] = (
        "sum 1/sqrt(t) is at most 2 sqrt(T) - 1, so half of C1's second term, (k + |1-k|)^2 n G^2 lr/2,"
        " is subtracted from C1 sqrt(T); for decreasing rho_t, rho C2 is subtracted, too. "
        "C1 has (k + |1-k|)^2 in place of 2 (k^2 + (1-k)^2)."
    )

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        number("distance", self.distance)

    def constants(self, form: Form = "corrected") -> dict[str, float]:
        """Return C1 and C2 of a form."""
        check_form(form, self.forms)
        n, lr = self.parameters, self.lr
        start_term = n * self.distance**2 / (2 * lr)
        c2 = math.sqrt(n) * self.distance * self.smoothness * self.weight
        return {"C1": start_term + self._step_term(form), "C2": c2}

    def theorem(self, radii: Sequence[float], form: Form = "corrected") -> float:
        """Return C1 sqrt(T) + C2 sum rho_t for the radii at t = 1..T, each at most rho.

        The tight form is smaller: see the class.
        """
        return self._value(self._check_radii(radii), math.fsum(radii), form)

    def corollary(self, T: int, form: Form = "corrected") -> float:
        """Return the bound for rho_t = rho / sqrt(t): (C1 + 2 rho C2) sqrt(T); less if tight."""
        radius_sum = 2 * math.sqrt(check_steps(T)) - (1 if form == "tight" else 0)
        return self._value(T, self.rho * radius_sum, form)

    def constant_radius(self, T: int, form: Form = "corrected") -> float:
        """Return the bound for rho_t = rho, which is linear in T: see `floor`."""
        return self._value(check_steps(T), self.rho * T, form)

    def floor(self) -> float:
        """Return the limit of the mean regret's bound at a constant radius: C2 rho."""
        return self.constants()["C2"] * self.rho

    def _step_term(self, form: Form) -> float:
        """Return the term of C1 that bounds the squared lengths of the steps."""
        n, lr = self.parameters, self.lr
        return {
            "printed": 2 * sum_of_squares(self.gamma) * n * self.gradient**2,
            "corrected": 2 * sum_of_squares(self.gamma) * n * self.gradient**2 * lr,
            "tight": square_of_sum(self.gamma) * n * self.gradient**2 * lr,
        }[form]

    def _value(self, T: int, radius_sum: float, form: Form) -> float:
        constants = self.constants(form)
        value = constants["C1"] * math.sqrt(T) + constants["C2"] * radius_sum
        if form == "tight":  # 2 sqrt(T) - 1 instead of 2 sqrt(T) in the sum of lr_t
            value -= self._step_term(form) / 2
        return value


@dataclass(frozen=True, kw_only=True)
class NonConvex(_Assumptions):
    """Smallest expected squared gradient of SGD with WSAM (Theorem 5.3, Corollary 5.4).

    Equation::

        min_t E |grad L(w_t)|^2  <=  (C3 + C5 (1 + log T) + C4 sum_t lr_t rho_t) / (sqrt(T) - 1)
        C3 = (L(w_1) - inf L) / (2 lr),   C4 = sqrt(n) G eta k / (2 lr)
        C5 = (k^2 + (1-k)^2) n G^2 eta lr / 2,            lr_t = lr / sqrt(t)
        corollary, rho_t = rho / sqrt(t):   sum_t lr_t rho_t <= lr rho (1 + log T)

    Three corrections:

    * C3 is printed as L(w_1)/(2 lr). Telescoping gives L(w_1) - E L(w_{T+1}), so inf L must be
      subtracted, unless L >= 0.
    * eta must be the smoothness of **every l_t**. The proof uses E[g1] = E[grad L(w + d)], but d is
      computed from the same batch as g1, so the two differ. What holds, batch by batch, is
      ``|g1 - g0| <= eta rho_t``. With eta of L alone the printed bound is false: docs/theory.md has
      a run that stays at ``|grad L|^2`` = 0.99 while the bound falls below 0.2.
    * T must be at least 2, because of the division by sqrt(T) - 1.

    The tight form bounds the squared step by ``(k + |1-k|)^2 n G^2``, so that C5 is
    ``(k + |1-k|)^2 n G^2 eta lr / 4``, and divides by sqrt(T+1) - 1, because
    sum 1/sqrt(t) >= 2 sqrt(T+1) - 2.

    Args:
        gamma: Weight parameter, in [0, 1).
        lr: alpha, the learning rate at t = 1; it decreases as 1/sqrt(t).
        rho: Largest radius.
        smoothness: eta, of every l_t (the printed theorem assumes it of L alone).
        parameters: n, the number of weights.
        gradient: G, the largest absolute entry of any g0, g1 or grad L(w_t) of the run.
        start_loss: L(w_1).
        lowest_loss: A lower bound of L; 0 for the usual losses.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> run = NonConvex(gamma=0.9, lr=0.1, rho=0.05, smoothness=1.0, parameters=1,
        ...                 gradient=1.0, start_loss=1.0)
        >>> run.corollary(10_000) < run.corollary(100)
        True

    References:
        Yue et al., KDD 2023, section 5.1.
    """

    start_loss: float
    lowest_loss: float = 0.0

    why: ClassVar[str] = (
        "C3 needs L(w_1) - inf L in place of L(w_1). eta must hold for every batch's loss: the "
        "perturbation is computed from the batch it is applied to, so E[g1] is not E[grad L(w + d)]."
    )
    sharper: ClassVar[str] = (
        "sum 1/sqrt(t) is at least 2 sqrt(T+1) - 2, so the divisor is sqrt(T+1) - 1 in place of "
        "sqrt(T) - 1. C5 has (k + |1-k|)^2 in place of 2 (k^2 + (1-k)^2)."
    )

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        number("lowest_loss", self.lowest_loss, -math.inf, low_open=True)
        number("start_loss", self.start_loss, -math.inf, low_open=True)
        if self.start_loss < self.lowest_loss:
            raise ValueError(
                f"start_loss must be at least lowest_loss = {self.lowest_loss!r}, "
                f"got {self.start_loss!r}"
            )

    def constants(self, form: Form = "corrected") -> dict[str, float]:
        """Return C3, C4 and C5 of a form."""
        check_form(form, self.forms)
        n, lr, eta = self.parameters, self.lr, self.smoothness
        decrease = self.start_loss - (0.0 if form == "printed" else self.lowest_loss)
        step = square_of_sum(self.gamma) / 2 if form == "tight" else sum_of_squares(self.gamma)
        return {
            "C3": decrease / (2 * lr),
            "C4": math.sqrt(n) * self.gradient * eta * self.weight / (2 * lr),
            "C5": step * n * self.gradient**2 * eta * lr / 2,
        }

    def theorem(self, radii: Sequence[float], form: Form = "corrected") -> float:
        """Return the bound for the radii at t = 1..T, each at most rho."""
        T = self._check_radii(radii)
        products = (self.lr / math.sqrt(t) * rho for t, rho in enumerate(radii, start=1))
        return self._value(T, math.fsum(products), form)

    def corollary(self, T: int, form: Form = "corrected") -> float:
        """Return the bound for rho_t = rho / sqrt(t)."""
        return self._value(check_steps(T), self.lr * self.rho * harmonic_sum_bound(T), form)

    def constant_radius(self, T: int, form: Form = "corrected") -> float:
        """Return the bound for rho_t = rho, which approaches `floor`."""
        products = self.lr * self.rho * inverse_sqrt_sum_bounds(check_steps(T))[1]
        return self._value(T, products, form)

    def floor(self) -> float:
        """Return the limit of the bound at a constant radius: sqrt(n) G eta k rho."""
        return 2 * self.lr * self.rho * self.constants()["C4"]

    def _value(self, T: int, products: float, form: Form) -> float:
        c = self.constants(form)
        total = c["C3"] + c["C4"] * products + c["C5"] * harmonic_sum_bound(T)
        divisor = inverse_sqrt_sum_bounds(T)[0] / 2 if form == "tight" else math.sqrt(T) - 1
        return total / divisor


# Terms of the proofs ----------------------------------------------------------------------------


def sum_of_squares(gamma: float) -> float:
    """Return k^2 + (1 - k)^2 = (5 gamma^2 - 4 gamma + 1) / (1 - gamma)^2.

    The proofs bound the squared step k g1 + (1 - k) g0 by this times 2 n G^2.
    """
    weight = sharpness_weight(gamma)
    return weight**2 + (1 - weight) ** 2


def square_of_sum(gamma: float) -> float:
    """Return ``(k + |1 - k|)^2``, the largest squared length of k g1 + (1 - k) g0 for unit g0, g1."""
    weight = sharpness_weight(gamma)
    return (weight + abs(1 - weight)) ** 2


def inverse_sqrt_sum_bounds(steps: int) -> tuple[float, float]:
    """Return a lower and an upper bound of the sum of 1/sqrt(t), t = 1..T.

    Equation::

        2 sqrt(T+1) - 2  <=  sum_t 1/sqrt(t)  <=  2 sqrt(T) - 1

    Both follow from comparison with the integral of 1/sqrt(s). The paper uses 2 sqrt(T-1) - 1, which
    is too small: at T = 2 it is 1 < 1.707.
    """
    return 2 * math.sqrt(steps + 1) - 2, 2 * math.sqrt(steps) - 1


def harmonic_sum_bound(steps: int) -> float:
    """Return an upper bound of the sum of 1/t, t = 1..T: 1 + log T."""
    return 1 + math.log(steps)
