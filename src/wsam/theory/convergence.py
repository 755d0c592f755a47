"""How fast SGD with WSAM converges: the regret on convex losses, the gradient on smooth ones."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from wsam._core.validation import count, number
from wsam.theory.weights import (
    harmonic_root_sum,
    harmonic_sum,
    sharpness_weight,
    square_of_sum,
    squares,
)

Form = Literal["printed", "corrected", "tight"]


def known_form(form: str, forms: tuple[str, ...]) -> None:
    """Raise where a form of a bound is asked for that there is not."""
    if form not in forms:
        raise ValueError(f"form must be one of {', '.join(forms)}, got {form!r}")


def horizon(steps: int) -> int:
    """Return T, which must be at least 2: the non-convex bound divides by sqrt(T) - 1."""
    return count("T", steps, 2)


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """What both convergence theorems are told of the run."""

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
        """The weight of sharpness, k = gamma / (1 - gamma)."""
        return sharpness_weight(self.gamma)

    def _checked(self, radii: Sequence[float]) -> int:
        for radius in radii:
            number("every radius", radius, 0, self.rho, low_open=True, high_open=False)
        return horizon(len(radii))


@dataclass(frozen=True, kw_only=True)
class Convex(_Setting):
    """The regret of SGD with WSAM on convex losses l_1, ..., l_T (Theorem 5.1, Corollary 5.2).

    Equation::

        sum_t l_t(w_t) - l_t(w*)  <=  C1 sqrt(T) + C2 sum_t rho_t,     lr_t = lr / sqrt(t)
        C1 = n D^2 / (2 lr) + 2 (k^2 + (1-k)^2) n G^2 lr,              C2 = sqrt(n) D eta k
        corollary, rho_t = rho / sqrt(t):   (C1 + 2 rho C2) sqrt(T)

    The paper writes 2 (k^2 + (1-k)^2) as (10 gamma^2 - 8 gamma + 2)/(1-gamma)^2, which is the same,
    and **loses the factor lr** beside it: its own proof sums lr_t * (...) and needs it.
    Counter-example: l_1 = G w, l_2 = -G w, w_1 = 0, lr = 5, gamma = 0. Then w_2 = -5 G, the regret
    is 5 G^2, every w is optimal, and w* = -2.5 G gives D = 2.5 G. Printed: 3.71 G^2. Corrected:
    15.03 G^2.

    The tight form bounds the squared step by ``(k + |1-k|)^2 n G^2`` instead of
    2 (k^2 + (1-k)^2) n G^2, and the sum of 1/sqrt(t) by 2 sqrt(T) - 1 instead of 2 sqrt(T). The
    second change is not in C1: it takes ``(k + |1-k|)^2 n G^2 lr / 2`` off the bound, and off the
    corollary rho C2 as well. The proof uses no optimality of w*: the bound holds against any point,
    with D measured from it.

    Args:
        gamma: weight of sharpness, in [0, 1).
        lr: alpha, the step size at t = 1; it falls as 1/sqrt(t).
        rho: the largest radius.
        smoothness: eta; every l_t has an eta-Lipschitz gradient.
        parameters: n, the number of weights.
        gradient: G, the largest entry of any g0 or g1 along the run.
        distance: D, the largest entry of any w_t - w*.

    Example:
        >>> toy = Convex(gamma=0.0, lr=5.0, rho=0.1, smoothness=0.0, parameters=1, gradient=1.0,
        ...              distance=2.5)
        >>> [round(toy.corollary(2, form), 2) for form in toy.forms]
        [3.71, 15.03, 5.45]

    Reference: Yue et al., KDD 2023, section 5.1.
    """

    distance: float

    why: ClassVar[str] = (
        "The second term of C1 needs a factor lr: the proof sums lr_t (k^2 + (1-k)^2) n G^2, "
        "and sum lr_t < 2 lr sqrt(T)."
    )
    sharper: ClassVar[str] = (
        "sum 1/sqrt(t) is at most 2 sqrt(T) - 1, so half of C1's second term, (k + |1-k|)^2 n G^2 lr/2,"
        " is taken off C1 sqrt(T); where rho_t falls, rho C2 is taken off, too."
    )

    def __post_init__(self) -> None:
        """Check every number."""
        super().__post_init__()
        number("distance", self.distance)

    def constants(self, form: Form = "corrected") -> dict[str, float]:
        """Return C1 and C2 of a form."""
        known_form(form, self.forms)
        n, lr = self.parameters, self.lr
        start = n * self.distance**2 / (2 * lr)
        drift = math.sqrt(n) * self.distance * self.smoothness * self.weight
        return {"C1": start + self._steps(form), "C2": drift}

    def theorem(self, radii: Sequence[float], form: Form = "corrected") -> float:
        """Return C1 sqrt(T) + C2 sum rho_t for the radii used at t = 1..T, each at most rho.

        The tight form is smaller than that: see the class.
        """
        return self._value(self._checked(radii), math.fsum(radii), form)

    def corollary(self, T: int, form: Form = "corrected") -> float:
        """Return the bound for rho_t = rho / sqrt(t): (C1 + 2 rho C2) sqrt(T); less if tight."""
        total = 2 * math.sqrt(horizon(T)) - (1 if form == "tight" else 0)
        return self._value(T, self.rho * total, form)

    def constant_radius(self, T: int, form: Form = "corrected") -> float:
        """Return the bound for rho_t = rho. It grows with T itself: see `floor`."""
        return self._value(horizon(T), self.rho * T, form)

    def floor(self) -> float:
        """Return what the mean regret's bound keeps for ever at a constant radius: C2 rho."""
        return self.constants()["C2"] * self.rho

    def _steps(self, form: Form) -> float:
        """Return the term of C1 that bounds the squared lengths of the steps."""
        n, lr = self.parameters, self.lr
        return {
            "printed": 2 * squares(self.gamma) * n * self.gradient**2,
            "corrected": 2 * squares(self.gamma) * n * self.gradient**2 * lr,
            "tight": square_of_sum(self.gamma) * n * self.gradient**2 * lr,
        }[form]

    def _value(self, T: int, radii: float, form: Form) -> float:
        constants = self.constants(form)
        value = constants["C1"] * math.sqrt(T) + constants["C2"] * radii
        if form == "tight":  # 2 sqrt(T) - 1 instead of 2 sqrt(T) in the sum of lr_t
            value -= self._steps(form) / 2
        return value


@dataclass(frozen=True, kw_only=True)
class NonConvex(_Setting):
    """The smallest expected squared gradient of SGD with WSAM (Theorem 5.3, Corollary 5.4).

    Equation::

        min_t E |grad L(w_t)|^2  <=  (C3 + C5 (1 + log T) + C4 sum_t lr_t rho_t) / (sqrt(T) - 1)
        C3 = (L(w_1) - inf L) / (2 lr),   C4 = sqrt(n) G eta k / (2 lr)
        C5 = (k^2 + (1-k)^2) n G^2 eta lr / 2,            lr_t = lr / sqrt(t)
        corollary, rho_t = rho / sqrt(t):   sum_t lr_t rho_t <= lr rho (1 + log T)

    Three corrections:

    * C3 is printed as L(w_1)/(2 lr). Telescoping leaves L(w_1) - E L(w_{T+1}), so inf L must be
      taken off; only for L >= 0 may it be left out.
    * eta must be the smoothness of **every l_t**. The proof puts E[g1] = E[grad L(w + d)], but d is
      made from the same batch as g1, so the two differ; what does hold, batch by batch, is
      ``|g1 - g0| <= eta rho_t``. With eta of L alone the printed bound is false: docs/theory.md has
      a run that stays at ``|grad L|^2`` = 0.99 for ever while it falls under 0.2.
    * T must be at least 2, since sqrt(T) - 1 divides.

    The tight form bounds the squared step by ``(k + |1-k|)^2 n G^2``, so that C5 is
    ``(k + |1-k|)^2 n G^2 eta lr / 4``, and divides by sqrt(T+1) - 1, because
    sum 1/sqrt(t) >= 2 sqrt(T+1) - 2.

    Args:
        gamma: weight of sharpness, in [0, 1).
        lr: alpha, the step size at t = 1; it falls as 1/sqrt(t).
        rho: the largest radius.
        smoothness: eta, of every l_t (the printed theorem asks it of L alone).
        parameters: n, the number of weights.
        gradient: G, the largest entry of any g0, g1 or grad L(w_t) along the run.
        start_loss: L(w_1).
        lowest_loss: a number below every value of L; 0 for the usual losses.

    Example:
        >>> run = NonConvex(gamma=0.9, lr=0.1, rho=0.05, smoothness=1.0, parameters=1,
        ...                 gradient=1.0, start_loss=1.0)
        >>> run.corollary(10_000) < run.corollary(100)
        True

    Reference: Yue et al., KDD 2023, section 5.1.
    """

    start_loss: float
    lowest_loss: float = 0.0

    why: ClassVar[str] = (
        "C3 needs L(w_1) - inf L in place of L(w_1). eta must hold for every batch's loss: the "
        "perturbation is made from the batch it is tried on, so E[g1] is not E[grad L(w + d)]."
    )
    sharper: ClassVar[str] = (
        "sum 1/sqrt(t) is at least 2 sqrt(T+1) - 2, so sqrt(T+1) - 1 divides in place of sqrt(T) - 1."
    )

    def __post_init__(self) -> None:
        """Check every number."""
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
        known_form(form, self.forms)
        n, lr, eta = self.parameters, self.lr, self.smoothness
        drop = self.start_loss - (0.0 if form == "printed" else self.lowest_loss)
        step = square_of_sum(self.gamma) / 2 if form == "tight" else squares(self.gamma)
        return {
            "C3": drop / (2 * lr),
            "C4": math.sqrt(n) * self.gradient * eta * self.weight / (2 * lr),
            "C5": step * n * self.gradient**2 * eta * lr / 2,
        }

    def theorem(self, radii: Sequence[float], form: Form = "corrected") -> float:
        """Return the bound for the radii used at t = 1..T, each at most rho."""
        T = self._checked(radii)
        products = (self.lr / math.sqrt(t) * rho for t, rho in enumerate(radii, start=1))
        return self._value(T, math.fsum(products), form)

    def corollary(self, T: int, form: Form = "corrected") -> float:
        """Return the bound for rho_t = rho / sqrt(t)."""
        return self._value(horizon(T), self.lr * self.rho * harmonic_sum(T), form)

    def constant_radius(self, T: int, form: Form = "corrected") -> float:
        """Return the bound for rho_t = rho. It does not fall under `floor`."""
        return self._value(horizon(T), self.lr * self.rho * harmonic_root_sum(T)[1], form)

    def floor(self) -> float:
        """Return what the bound keeps for ever at a constant radius: sqrt(n) G eta k rho."""
        return 2 * self.lr * self.rho * self.constants()["C4"]

    def _value(self, T: int, products: float, form: Form) -> float:
        c = self.constants(form)
        total = c["C3"] + c["C4"] * products + c["C5"] * harmonic_sum(T)
        lower = harmonic_root_sum(T)[0] / 2 if form == "tight" else math.sqrt(T) - 1
        return total / lower
