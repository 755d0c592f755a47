"""Runs a benchmark: time, peak memory and memory traffic of all cases, as one record."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import torch

from wsam.accel.triton_backend import triton_is_installed
from wsam.bench import memory_traffic, peak_memory, third_party
from wsam.bench.cases import (
    BASE,
    FLOOR,
    PEER,
    Case,
    baseline_cases,
    every_method,
    method_cases,
    select_cases,
)
from wsam.bench.timing import (
    Quartiles,
    Timer,
    TimingPlan,
    make_clock,
    paired_differences,
    paired_ratios,
    time_interleaved,
)
from wsam.bench.workload import FORMS, SMOKE_BATCH, Workload, default_batch_size, image_workload
from wsam.lab import environment
from wsam.lab.files import no_op
from wsam.lab.step import cudnn_settings

Report = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """Settings of a benchmark.

    Args:
        device: The device.
        model: See `image_workload`; by default ResNet18 on CUDA and a perceptron elsewhere.
        batch: Images per step.
        pixels: Side length of an image; 32 by default.
        peers: Files with optimizers of other libraries, each ``NAME=PATH``.
        only: Prefixes of the cases to measure; all cases if empty.
        rounds: Number of timings of each case.
        clock: ``wall`` or ``cpu``.
        smoke: Use a tiny model and few steps, to check that everything runs.
        all_methods: Time every method eager and, on CUDA, captured, next to other libraries in the same
            form. The model is not compiled.
    """

    device: torch.device
    model: str | None = None
    batch: int | None = None
    pixels: int | None = None
    peers: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    rounds: int | None = None
    clock: str = "wall"
    smoke: bool = False
    all_methods: bool = False

    def workload(self) -> Workload:
        """Return what is trained."""
        on_gpu = self.device.type == "cuda"
        name = self.model or ("cnn" if self.smoke else "resnet18" if on_gpu else "mlp10m")
        default = SMOKE_BATCH if self.smoke else default_batch_size(name, self.device)
        batch_size = default if self.batch is None else self.batch
        workload = image_workload(name, batch_size, self.device, self.pixels)
        return replace(workload, compilable=not self.all_methods)

    def timing_plan(self) -> TimingPlan:
        """Return how often and how long each case is timed."""
        if self.smoke:
            return TimingPlan(self.rounds or 2, 0.0, warmup=3 if self.device.type == "cuda" else 1)
        if self.device.type == "cuda" and self.all_methods:
            return TimingPlan(self.rounds or 11, 0.1)
        if self.device.type == "cuda":
            return TimingPlan(self.rounds or 15, 0.2)
        return TimingPlan(self.rounds or 11, 0.3, warmup=2)

    def forms(self) -> tuple[str, ...]:
        """Return the forms of a step that the device supports."""
        if self.device.type != "cuda":
            return ("eager",)
        return ("eager", "captured") if self.all_methods else FORMS


def measure(settings: Settings, report: Report = no_op) -> dict[str, Any]:
    """Run the benchmark and return its record.

    Args:
        settings: What to measure.
        report: Called with progress messages.

    Returns:
        A record of plain values: workload, hardware, versions, commit and load; and for each case
        times in milliseconds, ratios to the floor and to the plain base, memory and traffic.

    Raises:
        ValueError: Invalid settings.
    """
    timer = Timer(settings.device, make_clock(settings.clock, settings.device))
    plan, workload = settings.timing_plan(), settings.workload()
    cases, notes = all_cases(settings)
    origin, description = provenance(settings, plan), workload.describe()
    with on_device(settings.device):
        cases, not_capturable = capturable(cases, workload)
        report("memory")
        weight_bytes = 4 * description["weights"]
        peaks = peak_memory.measure_peaks(workload, memory_cases(cases), weight_bytes)
        seconds = time_cases(workload, cases, plan, timer, report)
        times = {label: [1e3 * one for one in rounds] for label, rounds in seconds.items()}
        rows = [case_row(case, times, cases) for case in cases]
        bandwidth = memory_traffic.copy_bandwidth(timer, 1 << 20 if settings.smoke else None)
        add_traffic(rows, cases, settings.device, description["weights"], bandwidth)
    return {
        "kind": "step",
        "problem": description,
        **origin,
        "load_after": load_average(),
        "notes": notes,
        "not_capturable": not_capturable,
        "copy_bandwidth": bandwidth,
        "memory_is": peak_memory.COUNTED_BY[settings.device.type],
        "cases": rows,
        "memory": peaks,
    }


def all_cases(settings: Settings) -> tuple[list[Case], list[str]]:
    """Return the selected cases, and notes about cases that cannot be measured."""
    forms = settings.forms()
    if settings.all_methods:
        ours, peer_forms = every_method(forms), list(forms)
        installed, notes = third_party.installed_cases(peer_forms, ("LookSAM", "FriendlySAM"))
    else:
        ours = method_cases(forms, best=forms[-1])
        peer_forms = [form for form in forms if form != "captured"]
        installed, notes = third_party.installed_cases(peer_forms)
        if "captured" in forms and not triton_is_installed():
            notes.append("Triton is not installed: our fused kernels were left out")
    files = third_party.file_cases(settings.peers, peer_forms)
    return select_cases([*baseline_cases(forms), *ours, *installed, *files], settings.only), notes


def capturable(cases: list[Case], workload: Workload) -> tuple[list[Case], dict[str, str]]:
    """Leave out captured steps of other libraries that cannot be captured.

    Returns:
        The other cases, and for each one that was left out the reason.
    """
    found, reasons = [], {}
    for case in cases:
        try:
            if is_captured_peer(case):
                case.build(workload)
            found.append(case)
        except third_party.NotCapturableError as error:
            reasons[case.name] = str(error)
    return found, reasons


def is_captured_peer(case: Case) -> bool:
    """Whether the case is a step of another library in a CUDA graph."""
    return case.kind == PEER and case.form == "captured"


def memory_cases(cases: list[Case]) -> list[Case]:
    """Return the cases whose memory is measured; compilation and intervals do not change it.

    The graphs of other libraries are captured before a measurement would begin.
    """
    found = [c for c in cases if c.kind != FLOOR and c.form != "compiled" and c.period == 1]
    return [c for c in found if not is_captured_peer(c)]


def time_cases(
    workload: Workload, cases: list[Case], plan: TimingPlan, timer: Timer, report: Report
) -> dict[str, list[float]]:
    """Build all cases and time them in one interleaved run; seconds per step, one per round."""
    steps = {}
    for case in cases:
        report(f"building {case.label}")
        steps[case.label] = case.build(workload)
    periods = {case.label: case.period for case in cases}
    return time_interleaved(steps, periods, plan, timer, report)


def case_row(case: Case, times: dict[str, list[float]], cases: list[Case]) -> dict[str, Any]:
    """Return a case's times and its ratios to the floor and the base in the same form.

    Args:
        case: The case.
        times: Milliseconds per step by label, one per round.
        cases: All cases.
    """
    own = times[case.label]
    row: dict[str, Any] = {
        **case.identity(),
        "passes": round(case.passes, 3),
        "ms": Quartiles.of(own).as_dict(),
        "rounds_ms": own,
    }
    floor, base = (
        next(times[c.label] for c in cases if c.kind == kind and c.form == case.form)
        for kind in (FLOOR, BASE)
    )
    row["of_floor"] = paired_ratios(own, floor).as_dict()
    row["of_base"] = paired_ratios(own, base).as_dict()
    floors = [times[c.label] for c in cases if c.kind == FLOOR]
    fastest = min(floors, key=lambda values: Quartiles.of(values).median)
    row["of_best_floor"] = paired_ratios(own, fastest).as_dict()
    # Disturbances only add time, so on a busy machine the fastest rounds are the most accurate.
    row["best_of_floor"] = min(own) / min(floor)
    if case.kind != FLOOR:
        row["own_ms"] = paired_differences(own, floor, case.passes / 2).as_dict()
    return row


def add_traffic(
    rows: list[dict[str, Any]],
    cases: list[Case],
    device: torch.device,
    weights: int,
    bandwidth: float,
) -> None:
    """Add to each row the optimizer's reads, writes and bandwidth."""
    for row, case in zip(rows, cases, strict=True):
        random_subset = case.name.startswith("ESAM")  # perturbs other tensors at each step
        if case.kind == FLOOR or case.form == "compiled" or random_subset:
            continue
        if is_captured_peer(case) or (case.form == "captured" and case.period > 1):
            continue  # a replay cannot be counted
        traffic = memory_traffic.optimizer_traffic(case, device)
        seconds = row["own_ms"]["median"] / 1e3
        share = memory_traffic.bandwidth_share(traffic, weights, seconds, bandwidth)
        row["reads"], row["writes"] = round(traffic.reads, 6), round(traffic.writes, 6)
        row["share_of_copy_bandwidth"] = share


def provenance(settings: Settings, plan: TimingPlan) -> dict[str, Any]:
    """Return hardware, versions, commit and settings; called before the measurement."""
    return {
        "hardware": environment.hardware(settings.device),
        "versions": versions(),
        "commit": environment.commit(),
        "clock": settings.clock,
        "rounds": plan.rounds,
        "smoke": settings.smoke,
        "all_methods": settings.all_methods,
        "only": list(settings.only),
        "peers": third_party.file_digests(settings.peers),
        "load_before": load_average(),
    }


def load_average() -> float | None:
    """Return the load average of the last minute, if the system provides it."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def versions() -> dict[str, str | None]:
    """Return the versions of the compared packages."""
    found = environment.versions()
    try:
        found["pytorch_optimizer"] = metadata.version("pytorch_optimizer")
    except metadata.PackageNotFoundError:
        found["pytorch_optimizer"] = None
    return found


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Make the device the current one, with the cuDNN settings of training runs."""
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with current, cudnn_settings(device):
        yield
