"""Bounds of the WSAM paper, as printed and corrected, and the weight that gamma gives sharpness.

`Convex` bounds the regret, `NonConvex` the smallest expected squared gradient, `Generalization` the
gap between training and true error. Each bound is available in several forms:

* ``printed``: the formula of the paper, for comparison. It does not hold in general.
* ``corrected``: the formula with the smallest change that makes it hold.
* ``tight``: the same proof with sharper inequalities (convergence only).

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
