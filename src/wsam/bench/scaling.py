"""How the optimizer's own part of a step grows: with the number of tensors, with that of weights.

There is no network: gradients are copied from given tensors, and what the copies cost is taken off
round by round. What is left is the launches (flat in the weights) and the memory traffic (linear).
"""

from __future__ import annotations

import gc
from typing import Any

import torch

from wsam.bench import cases as listing
from wsam.bench import peers
from wsam.bench.cases import FLOOR, Case
from wsam.bench.problem import bag_problem
from wsam.bench.run import Report, Settings, load_average, on, origin_of, timed
from wsam.bench.timing import Spread, Visitor, Visits, clock_of, differences
from wsam.lab.files import quiet

AXES = ("tensors", "weights")
TENSORS = (10, 30, 100, 300, 1000, 3000, 10_000)
WEIGHTS = {
    "cuda": tuple(int(x) for x in (1e5, 1e6, 1e7, 1e8, 3e8, 1e9)),
    "cpu": tuple(int(x) for x in (1e5, 3e5, 1e6, 3e6, 1e7, 3e7)),
}
FIXED_WEIGHTS = {"cuda": 10_000_000, "cpu": 1_000_000}
CHIEF = ("WSAM", "WSAM lean", "WSAM not fused", "SAM")
FIXED_TENSORS = 60  # about ResNet18's


def sizes(axis: str, device: torch.device, smoke: bool) -> list[tuple[int, int]]:
    """Return the points of an axis, each tensors and weights.

    Raises:
        ValueError: No such axis.
    """
    if axis not in AXES:
        raise ValueError(f"--scaling must be one of {', '.join(AXES)}, not {axis}")
    if axis == "tensors":
        if smoke:
            return [(n, 1000) for n in (10, 100)]
        return [(n, FIXED_WEIGHTS[device.type]) for n in TENSORS]
    if smoke:
        return [(10, n) for n in (1000, 10_000)]
    return [(FIXED_TENSORS, n) for n in WEIGHTS[device.type]]


def scaling_cases(settings: Settings) -> tuple[list[Case], list[str]]:
    """Return floor, base, chief members and peers; captured ones first, they are the ones to keep."""
    forms = [form for form in reversed(settings.forms()) if form != "compiled"]
    cases = listing.floors(forms)
    cases += [case for case in listing.ours(forms, best=forms[0]) if case.name in CHIEF]
    installed, notes = peers.installed(["eager"])
    cases += [*installed, *peers.by_path(settings.peers, ["eager"])]
    return listing.chosen(cases, settings.only), notes


def measure_scaling(axis: str, settings: Settings, report: Report = quiet) -> dict[str, Any]:
    """Measure the optimizer's own part along an axis and return the record.

    Args:
        axis: ``tensors`` (10 to 10,000 with a fixed number of weights) or ``weights`` (1e5 to 1e9 on
            CUDA, to 3e7 elsewhere, in 60 tensors).
        settings: Where and how often; model and batch are not used.
        report: Told what is going on.
    """
    visitor = Visitor(settings.device, clock_of(settings.clock, settings.device))
    visits = settings.visits()
    cases, notes = scaling_cases(settings)
    origin, points = origin_of(settings, visits), []
    for tensors, weights in sizes(axis, settings.device, settings.smoke):
        report(f"{tensors} tensors, {weights:,} weights")
        with on(settings.device):
            rows, left_out = point(cases, tensors, weights, visits, visitor)
        notes += [f"{name} did not fit at {weights:,} weights" for name in left_out]
        points.append({"tensors": tensors, "weights": weights, "cases": rows})
    return {
        "kind": "scaling",
        "axis": axis,
        **origin,
        "load_after": load_average(),
        "notes": notes,
        "points": points,
    }


def point(
    cases: list[Case], tensors: int, weights: int, visits: Visits, visitor: Visitor
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return each case's own part at one point, and the names of those that did not fit."""
    try:
        return own_parts(cases, tensors, weights, visits, visitor), []
    except torch.OutOfMemoryError:
        left = [case for case in cases if case.form == "captured"]
    gc.collect()
    torch.cuda.empty_cache()
    out = [case.label for case in cases if case not in left]
    try:
        return own_parts(left, tensors, weights, visits, visitor), out
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return [], [case.label for case in cases]


def own_parts(
    cases: list[Case], tensors: int, weights: int, visits: Visits, visitor: Visitor
) -> list[dict[str, Any]]:
    """Return what each case's step costs beyond the copies of its passes, in microseconds."""
    problem = bag_problem(tensors, weights, visitor.device)
    times = timed(problem, cases, visits, visitor, quiet)
    rows = []
    for case in cases:
        if case.kind == FLOOR:
            continue
        floor = next(c for c in cases if c.kind == FLOOR and c.form == case.form)
        beyond = differences(times[case.label], times[floor.label], case.passes / 2)
        rows.append(
            {
                "name": case.name,
                "form": case.form,
                "kind": case.kind,
                "own_us": {key: 1e6 * value for key, value in beyond.as_dict().items()},
                "step_us": Spread.of([1e6 * t for t in times[case.label]]).as_dict(),
            }
        )
    return rows
