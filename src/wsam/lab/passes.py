"""Gradient computations of a run: a cost that does not depend on the machine."""

from __future__ import annotations

from typing import cast

from wsam.lab.run import Run
from wsam.lab.settings import VANILLA
from wsam.lab.user_code import is_code

FORWARD = 1 / 3
"""Share of a pass that the forward pass takes: the backward pass computes about twice as much."""
ONE_PASS = (VANILLA, "msam")


def passes_per_step(run: Run) -> float | None:
    """Return forward and backward passes over a batch for each step of a run, on average.

    Returns:
        1 for SGD and 2 for SAM; None if gradient norms choose the steps with two passes, or if the
        method is the user's own.

    Example:
        >>> passes_per_step(Run(method="wsam", options={"every": 10, "reuse": True}))
        1.1
    """
    options = run.options
    if options.get("threshold") is not None or is_code(run.method):
        return None
    if run.method in ONE_PASS or run.hyper["rho"] == 0:
        return 1.0
    every = run.hyper.get("n", options.get("every", 1))
    share = (1 - cast(float, options.get("start", 0.0))) / cast(int, every)
    second = 1.0
    if options.get("gather"):  # a forward pass selects samples, the second pass runs on them
        second = FORWARD + cast(float, run.hyper["gamma"])
    first = share * cast(float, options.get("ascent_share", 1.0)) + (1 - share)
    return first + share * second
