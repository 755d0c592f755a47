"""How far the true error may lie above the training objective."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from wsam._core.validation import count, number
from wsam.theory.convergence import known_form
from wsam.theory.weights import sharpness_weight

Form = Literal["printed", "corrected"]


@dataclass(frozen=True, kw_only=True)
class Generalization:
    """The gap between the true 0-1 error and L_WSAM on the training set (Theorem 5.5).

    Equation, with probability at least 1 - delta over the m training samples::

        L_D(w) <= L_S^WSAM(w) + 2 |1-k| sqrt(C1 / m) + k sqrt((C2 + C3) / (m-1))
        C1 = 8 d log(e m / d) + 2 log(8 / delta)
        C2 = n log(1 + |w|^2/rho^2 (1 + sqrt(log(m)/n))^2)
        C3 = 4 log(2 m / delta) + 8 log(6 m + 3 n)

    The paper prints log(4/delta) in C1 and log(m/delta) in C3. Those are the constants of two
    theorems that hold with probability 1 - delta **each**; both must hold at once here, which has
    probability 1 - 2 delta. Giving each delta/2 is the correction, so the corrected bound at delta
    is the printed one at delta/2. Where one of the two terms has weight zero (gamma = 0 and
    gamma = 1/2) only one event is used and the printed constants are already right.

    Args:
        gamma: weight of sharpness, in [0, 1).
        rho: the radius. The bound grows without limit as it falls to zero.
        samples: m, at least `dimension` (the form (e m / d)^d of Sauer's lemma needs it) and 2.
        parameters: n, the number of weights.
        dimension: d, the Vapnik-Chervonenkis dimension of the hypotheses.
        delta: the probability that may go wrong, in (0, 1).
        norm: ``|w|``, the Euclidean norm of the weights.

    Example:
        >>> bound = Generalization(gamma=0.8, rho=0.2, samples=10**9, parameters=10, dimension=11,
        ...                        delta=0.05, norm=1.0)
        >>> bound.gap("printed") < bound.gap("corrected") < 0.02
        True

    Reference: Yue et al., KDD 2023, section 5.2.
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
        """Check every number."""
        number("gamma", self.gamma, 0, 1)
        number("rho", self.rho, low_open=True)
        count("parameters", self.parameters, 1)
        count("dimension", self.dimension, 1)
        count("samples", self.samples, max(2, self.dimension))
        number("delta", self.delta, 0, 1, low_open=True)
        number("norm", self.norm)

    def constants(self, form: Form = "corrected") -> dict[str, float]:
        """Return C1, C2 and C3 of a form."""
        known_form(form, self.forms)
        m, n, d = self.samples, self.parameters, self.dimension
        delta = self.delta if form == "printed" else self.delta / 2
        spread = (1 + math.sqrt(math.log(m) / n)) ** 2
        return {
            "C1": 8 * d * math.log(math.e * m / d) + 2 * math.log(4 / delta),
            "C2": n * math.log1p((self.norm / self.rho) ** 2 * spread),
            "C3": 4 * math.log(m / delta) + 8 * math.log(6 * m + 3 * n),
        }

    def gap(self, form: Form = "corrected") -> float:
        """Return the bound's excess over the training objective. From 1 on it says nothing."""
        weight, c = sharpness_weight(self.gamma), self.constants(form)
        plain = 2 * abs(1 - weight) * math.sqrt(c["C1"] / self.samples)
        sharp = weight * math.sqrt((c["C2"] + c["C3"]) / (self.samples - 1))
        return plain + sharp
