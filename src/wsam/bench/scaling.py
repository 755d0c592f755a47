"""How the optimizer's time grows with the number of tensors and with the number of weights.

There is no network: a pass only copies given gradients, and the time of these copies is subtracted
round by round. The rest is the cost of kernel launches (constant in the number of weights) and of
memory traffic (linear).
"""

from __future__ import annotations

import gc
from typing import Any

import torch

from wsam.bench import third_party
from wsam.bench.cases import FLOOR, Case, baseline_cases, method_cases, select_cases
from wsam.bench.run import Report, Settings, load_average, on_device, provenance, time_cases
from wsam.bench.timing import Quartiles, Timer, TimingPlan, make_clock, paired_differences
from wsam.bench.workload import synthetic_workload
from wsam.lab.files import no_op

TENSORS = (10, 30, 100, 300, 1000, 3000, 10_000)
WEIGHTS = {
    "cuda": tuple(int(x) for x in (1e5, 1e6, 1e7, 1e8, 3e8, 1e9)),
    "cpu": tuple(int(x) for x in (1e5, 3e5, 1e6, 3e6, 1e7, 3e7)),
}
FIXED_WEIGHTS = {"cuda": 10_000_000, "cpu": 1_000_000}
FIXED_TENSORS = 60  # about as many as ResNet18 has
METHODS = ("WSAM", "WSAM lean", "WSAM not fused", "SAM")


def scaling_points(axis: str, device: torch.device, smoke: bool) -> list[tuple[int, int]]:
    """Return the points of an axis as pairs of (tensors, weights)."""
    if axis == "tensors":
        if smoke:
            return [(n, 1000) for n in (10, 100)]
        return [(n, FIXED_WEIGHTS[device.type]) for n in TENSORS]
    if smoke:
        return [(10, n) for n in (1000, 10_000)]
    return [(FIXED_TENSORS, n) for n in WEIGHTS[device.type]]


def scaling_cases(settings: Settings) -> tuple[list[Case], list[str]]:
    """Return baselines, `METHODS` and other libraries; captured cases come first."""
    forms = [form for form in reversed(settings.forms()) if form != "compiled"]
    cases = baseline_cases(forms)
    cases += [case for case in method_cases(forms, best=forms[0]) if case.name in METHODS]
    installed, notes = third_party.installed_cases(["eager"])
    cases += [*installed, *third_party.file_cases(settings.peers, ["eager"])]
    return select_cases(cases, settings.only), notes


def measure_scaling(axis: str, settings: Settings, report: Report = no_op) -> dict[str, Any]:
    """Measure the optimizer's time along an axis and return the record.

    Args:
        axis: ``tensors`` (10 to 10,000 with a fixed number of weights) or ``weights`` (1e5 to 1e9 on
            CUDA, to 3e7 on a CPU, in 60 tensors).
        settings: Device and rounds; model and batch are not used.
        report: Called with progress messages.
    """
    timer = Timer(settings.device, make_clock(settings.clock, settings.device))
    plan = settings.timing_plan()
    cases, notes = scaling_cases(settings)
    origin, points = provenance(settings, plan), []
    for tensors, weights in scaling_points(axis, settings.device, settings.smoke):
        report(f"{tensors} tensors, {weights:,} weights")
        with on_device(settings.device):
            rows, out_of_memory = measure_point(cases, tensors, weights, plan, timer)
        notes += [f"{name} did not fit at {weights:,} weights" for name in out_of_memory]
        points.append({"tensors": tensors, "weights": weights, "cases": rows})
    return {
        "kind": "scaling",
        "axis": axis,
        **origin,
        "load_after": load_average(),
        "notes": notes,
        "points": points,
    }


def measure_point(
    cases: list[Case], tensors: int, weights: int, plan: TimingPlan, timer: Timer
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the optimizer's time for each case, and the labels of cases that did not fit.

    If the memory does not suffice for all cases, only the captured ones are measured.
    """
    try:
        return optimizer_times(cases, tensors, weights, plan, timer), []
    except torch.OutOfMemoryError:
        captured = [case for case in cases if case.form == "captured"]
    gc.collect()
    torch.cuda.empty_cache()
    others = [case.label for case in cases if case not in captured]
    try:
        return optimizer_times(captured, tensors, weights, plan, timer), others
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return [], [case.label for case in cases]


def optimizer_times(
    cases: list[Case], tensors: int, weights: int, plan: TimingPlan, timer: Timer
) -> list[dict[str, Any]]:
    """Return the time of each case's step less that of its passes, in microseconds."""
    workload = synthetic_workload(tensors, weights, timer.device)
    seconds = time_cases(workload, cases, plan, timer, no_op)
    times = {label: [1e6 * one for one in rounds] for label, rounds in seconds.items()}
    rows = []
    for case in cases:
        if case.kind == FLOOR:
            continue
        floor = next(c for c in cases if c.kind == FLOOR and c.form == case.form)
        own = times[case.label]
        optimizer = paired_differences(own, times[floor.label], case.passes / 2)
        rows.append(
            {
                **case.identity(),
                "own_us": optimizer.as_dict(),
                "step_us": Quartiles.of(own).as_dict(),
            }
        )
    return rows
