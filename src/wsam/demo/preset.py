"""The comparison of the demonstration."""

from __future__ import annotations

from collections.abc import Sequence

from wsam.compare import Request
from wsam.lab.run import Run
from wsam.lab.settings import VANILLA

SEEDS = tuple(range(8))
TRIALS = 6
BUDGET = 1800.0
"""Seconds. Two free cores need a tenth of it; only very slow machines reduce trials and epochs."""
PROBLEM = Run(
    data="digits",
    model="mlp",
    method=VANILLA,
    epochs=80,
    batch_size=64,
    noise=0.4,
    validation=0.2,
)
"""Digits with 40% of the training labels redrawn. The labels of validation and test are correct."""


def demo_request(seeds: Sequence[int] = SEEDS) -> Request:
    """Return the comparison of SGD, SAM and WSAM, at equal passes: no figure depends on the load.

    Args:
        seeds: Seeds of the final runs. Each draws its own wrong labels.
    """
    methods = ("base", "sam", "wsam")
    return Request(PROBLEM, methods, tuple(seeds), BUDGET, TRIALS, equal="passes")
