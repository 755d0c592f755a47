"""Bound on the gap between the true error and the training objective."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from wsam._core.validation import count, number
from wsam.theory.convergence import check_form
from wsam.theory.weights import sharpness_weight

Form = Literal["printed", "corrected"]


@dataclass(frozen=True, kw_only=True)
class Generalization:
    """Gap between the true 0-1 error and L_WSAM on the training set (Theorem 5.5).

    Equation, with probability at least 1 - delta over the m training samples::

        L_D(w) <= L_S^WSAM(w) + 2 |1-k| sqrt(C1 / m) + k sqrt((C2 + C3) / (m-1))
        C1 = 8 d log(e m / d) + 2 log(8 / delta)
        C2 = n log(1 + |w|^2/rho^2 (1 + sqrt(log(m)/n))^2)
        C3 = 4 log(2 m / delta) + 8 log(6 m + 3 n)

    The paper prints log(4/delta) in C1 and log(m/delta) in C3. These are the constants of two
    theorems that hold with probability 1 - delta **each**. The bound needs both at once, which has
    probability 1 - 2 delta. The correction replaces delta by delta/2, so the corrected bound at
    delta equals the printed one at delta/2. If one of the two terms has weight zero (gamma = 0 and
    gamma = 1/2), one theorem is enough and the printed constants hold.

    Args:
        gamma: Weight parameter, in [0, 1).
        rho: Radius. The bound grows without limit as it approaches zero.
        samples: m, at least 2 and at least `dimension`, as Sauer's lemma in the form (e m / d)^d
            requires.
        parameters: n, the number of weights.
        dimension: d, the Vapnik-Chervonenkis dimension of the hypotheses.
        delta: Probability that the bound fails, in (0, 1).
        norm: ``|w|``, the Euclidean norm of the weights.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> bound = Generalization(gamma=0.8, rho=0.2, samples=10**9, parameters=10, dimension=11,
        ...                        delta=0.05, norm=1.0)
        >>> bound.gap("printed") < bound.gap("corrected") < 0.02
        True

    References:
        Yue et al., KDD 2023, section 5.2.
    """

    gamma: float
    rho: float
    samples: int
    parameters: int
    dimension: int
    delta: float
    norm: float

    forms: ClassVar[tuple[Form, ...]] = ("printed", "corrected")
    why: ClassVar[str] = (
        "Two events of probability 1 - delta are joined, which leaves 1 - 2 delta; each is given "
        "delta/2: log(8/delta) in C1 and log(2m/delta) in C3."
    )

    def __post_init__(self) -> None:
        """Check the arguments."""
        number("gamma", self.gamma, 0, 1)
        number("rho", self.rho, low_open=True)
        count("parameters", self.parameters, 1)
        count("dimension", self.dimension, 1)
        count("samples", self.samples, max(2, self.dimension))
        number("delta", self.delta, 0, 1, low_open=True)
        number("norm", self.norm)

    def constants(self, form: Form = "corrected") -> dict[str, float]:
        """Return C1, C2 and C3 of a form."""
        check_form(form, self.forms)
        m, n, d = self.samples, self.parameters, self.dimension
        delta = self.delta if form == "printed" else self.delta / 2
        factor = (1 + math.sqrt(math.log(m) / n)) ** 2
        return {
            "C1": 8 * d * math.log(math.e * m / d) + 2 * math.log(4 / delta),
            "C2": n * math.log1p((self.norm / self.rho) ** 2 * factor),
            "C3": 4 * math.log(m / delta) + 8 * math.log(6 * m + 3 * n),
        }

    def gap(self, form: Form = "corrected") -> float:
        """Return the bound minus the training objective. It is vacuous from 1 on."""
        weight, c = sharpness_weight(self.gamma), self.constants(form)
        loss_term = 2 * abs(1 - weight) * math.sqrt(c["C1"] / self.samples)
        sharpness_term = weight * math.sqrt((c["C2"] + c["C3"]) / (self.samples - 1))
        return loss_term + sharpness_term
