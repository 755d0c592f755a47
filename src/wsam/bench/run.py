"""One benchmark from its settings to its record: times, memory and traffic of all cases."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from wsam import launch
from wsam.bench import cases as listing
from wsam.bench import memory, peers, traffic
from wsam.bench.cases import BASE, FLOOR, Case
from wsam.bench.problem import FORMS, SMOKE_BATCH, Problem, default_batch, image_problem
from wsam.bench.timing import Spread, Visitor, Visits, clock_of, differences, interleave, ratios
from wsam.lab import environment
from wsam.lab.files import quiet
from wsam.lab.step import fast_convolutions

Report = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Args:
        device: Where.
        model: One of `problem.MODELS`; by default ResNet18 on CUDA, a perceptron elsewhere.
        batch: Images per step.
        pixels: The side of an image; 32 by default.
        peers: Files of other people's optimizers, each ``NAME=PATH``.
        only: Beginnings of the names of the cases wanted; all if empty.
        rounds: How often each case is visited.
        clock: ``wall`` or ``cpu``.
        smoke: Only show that everything runs: a tiny model, hardly any steps.
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

    def problem(self) -> Problem:
        """Return what is trained."""
        on_gpu = self.device.type == "cuda"
        name = self.model or ("cnn" if self.smoke else "resnet18" if on_gpu else "mlp10m")
        usual = SMOKE_BATCH if self.smoke else default_batch(name, self.device)
        batch = usual if self.batch is None else self.batch
        return image_problem(name, batch, self.device, self.pixels)

    def visits(self) -> Visits:
        """Return how often and how long a case is visited."""
        if self.rounds is not None and self.rounds < 1:
            raise ValueError(f"--rounds must be at least 1, not {self.rounds}")
        if self.smoke:
            return Visits(self.rounds or 2, 0.0, warmup=3 if self.device.type == "cuda" else 1)
        if self.device.type == "cuda":
            return Visits(self.rounds or 15, 0.2)
        return Visits(self.rounds or 11, 0.3, warmup=2)

    def forms(self) -> tuple[str, ...]:
        """Return the forms a step can take on the device."""
        return FORMS if self.device.type == "cuda" else ("eager",)


def measure(settings: Settings, report: Report = quiet) -> dict[str, Any]:
    """Measure everything and return the record.

    Args:
        settings: What, where, how often.
        report: Told what is going on.

    Returns:
        A record of plain values: problem, hardware, versions, commit, load, and for each case times
        in milliseconds, ratios to the floor and to the plain base, memory and traffic.

    Raises:
        ValueError: Settings that cannot be measured.
    """
    visitor = Visitor(settings.device, clock_of(settings.clock, settings.device))
    visits, problem = settings.visits(), settings.problem()
    found, notes = every_case(settings)
    origin, facts = origin_of(settings, visits), problem.facts()
    with on(settings.device):
        report("memory")
        held = memory.peaks(problem, memory_cases(found), 4 * facts["weights"])
        times = timed(problem, found, visits, visitor, report)
        rows = [row_of(case, times, found) for case in found]
        bandwidth = traffic.copy_bandwidth(visitor, 1 << 20 if settings.smoke else None)
        add_traffic(rows, found, settings.device, facts["weights"], bandwidth)
    return {
        "kind": "step",
        "problem": facts,
        **origin,
        "load_after": load_average(),
        "notes": notes,
        "copy_bandwidth": bandwidth,
        "memory_is": memory.HOW[settings.device.type],
        "cases": rows,
        "memory": held,
    }


def every_case(settings: Settings) -> tuple[list[Case], list[str]]:
    """Return the chosen cases, and notes on those that cannot be measured here."""
    forms = settings.forms()
    eager = [form for form in forms if form != "captured"]
    installed, notes = peers.installed(eager)
    if "captured" in forms and not launch.available():
        notes.append("Triton is not installed: our fused kernels were left out")
    cases = [
        *listing.floors(forms),
        *listing.ours(forms, best=forms[-1]),
        *installed,
        *peers.by_path(settings.peers, eager),
    ]
    return listing.chosen(cases, settings.only), notes


def memory_cases(cases: list[Case]) -> list[Case]:
    """Return the cases whose memory is measured: compiling and intervals change nothing of it."""
    return [c for c in cases if c.kind != FLOOR and c.form != "compiled" and c.period == 1]


def timed(
    problem: Problem, cases: list[Case], visits: Visits, visitor: Visitor, report: Report
) -> dict[str, list[float]]:
    """Build all cases and time them in one interleaved run; seconds per step, one per round."""
    steps = {}
    for case in cases:
        report(f"building {case.label}")
        steps[case.label] = case.build(problem)
    periods = {case.label: case.period for case in cases}
    return interleave(steps, periods, visits, visitor, report)


def row_of(case: Case, times: dict[str, list[float]], cases: list[Case]) -> dict[str, Any]:
    """Return a case's times and its ratios to the floor and the base of its form."""
    own = times[case.label]
    row: dict[str, Any] = {
        "name": case.name,
        "form": case.form,
        "kind": case.kind,
        "ms": Spread.of([1e3 * t for t in own]).as_dict(),
        "rounds_ms": [1e3 * t for t in own],
    }
    for other in cases:
        if other.form == case.form and other.kind in (FLOOR, BASE):
            key = "of_floor" if other.kind == FLOOR else "of_base"
            row[key] = ratios(own, times[other.label]).as_dict()
    floors = [times[c.label] for c in cases if c.kind == FLOOR]
    fastest = min(floors, key=lambda values: Spread.of(values).median)
    row["of_best_floor"] = ratios(own, fastest).as_dict()
    same = next(times[c.label] for c in cases if c.kind == FLOOR and c.form == case.form)
    # Whatever disturbs only adds: on a busy machine the best rounds are nearest to the truth.
    row["best_of_floor"] = min(own) / min(same)
    if case.kind != FLOOR:
        beyond = differences(own, same, case.passes / 2)
        row["own_ms"] = {key: 1e3 * value for key, value in beyond.as_dict().items()}
    return row


def add_traffic(
    rows: list[dict[str, Any]],
    cases: list[Case],
    device: torch.device,
    weights: int,
    bandwidth: float,
) -> None:
    """Add to each row what the optimizer's own part reads and writes, and how fast."""
    for row, case in zip(rows, cases, strict=True):
        by_chance = case.name == "ESAM"  # which tensors move is drawn anew each step
        if case.kind == FLOOR or case.form == "compiled" or case.period > 1 or by_chance:
            continue
        moved = traffic.count(case, device)
        seconds = row["own_ms"]["median"] / 1e3
        share = traffic.share_of_bandwidth(moved, weights, seconds, bandwidth)
        row["reads"], row["writes"] = round(moved.reads, 6), round(moved.writes, 6)
        row["share_of_copy_bandwidth"] = share


def origin_of(settings: Settings, visits: Visits) -> dict[str, Any]:
    """Return what a record says of where it comes from, as it is before the measurement."""
    return {
        "hardware": environment.hardware(settings.device),
        "versions": versions(),
        "commit": environment.commit(),
        "clock": settings.clock,
        "rounds": visits.rounds,
        "smoke": settings.smoke,
        "only": list(settings.only),
        "peers": peers.digests(settings.peers),
        "load_before": load_average(),
    }


def load_average() -> float | None:
    """Return how many processes wanted a core in the last minute, where the system tells."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def versions() -> dict[str, str | None]:
    """Return the versions of what is compared."""
    found = environment.versions()
    try:
        found["pytorch_optimizer"] = metadata.version("pytorch_optimizer")
    except metadata.PackageNotFoundError:
        found["pytorch_optimizer"] = None
    return found


@contextmanager
def on(device: torch.device) -> Iterator[None]:
    """Make the device the current one, and let cuDNN choose its fastest kernels."""
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with current, fast_convolutions(device):
        yield
