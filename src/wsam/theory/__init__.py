"""The paper's bounds, as printed and as they hold, and what gamma weighs.

`Convex` bounds the regret, `NonConvex` the smallest expected squared gradient, `Generalization` the
distance from training to true error. Each gives every form by name:

* ``printed``: the formula of the paper, kept to compare with. It does not hold in general.
* ``corrected``: the same formula with the least change that makes it hold.
* ``tight``: the same proof with nothing given away (convergence only).

Reference: Yue et al., Sharpness-Aware Minimization Revisited, KDD 2023, section 5.
"""

from wsam.theory.convergence import Convex, NonConvex
from wsam.theory.generalization import Generalization
from wsam.theory.weights import (
    effective_weight,
    gamma_for_weight,
    inverse_sqrt,
    parity_gamma,
    sharpness_weight,
)

__all__ = [
    "Convex",
    "Generalization",
    "NonConvex",
    "effective_weight",
    "gamma_for_weight",
    "inverse_sqrt",
    "parity_gamma",
    "sharpness_weight",
]
