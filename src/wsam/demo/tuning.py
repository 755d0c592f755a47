"""How the hyperparameters of the demonstration were chosen: results of grids on other seeds.

The results ship with the library as ``map.json``; `wsam demo --map` computes them again. The file
holds the error of each run, and when, where and by which version it was computed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from wsam._format import mean_and_std
from wsam.demo.config import TUNING_SEEDS, tuning_grids
from wsam.lab import records
from wsam.lab.files import write_atomic
from wsam.lab.run import Run
from wsam.report.results import format_failures
from wsam.sweep.grid import Point, with_seeds

FORMAT = 1
FILE_NAME = "map.json"
TIE_MARGIN = 100 * 3 / 597
"""In percent test error: three of the 597 test images. Two seeds cannot resolve smaller differences."""


@dataclass(frozen=True)
class GridPoint:
    """A point of a grid with its final test errors, one per seed; None for a failed run."""

    hyper: Mapping[str, float]
    errors: tuple[float | None, ...]

    @property
    def mean(self) -> float | None:
        """The mean error; None if a run failed."""
        known = [error for error in self.errors if error is not None]
        return mean_and_std(known)[0] if len(known) == len(self.errors) else None

    @property
    def failures(self) -> str:
        """The number of failed runs, ``failed 1/2``; empty if none failed."""
        return format_failures(self.errors.count(None), len(self.errors))


@dataclass(frozen=True)
class TuningResults:
    """The points of all grids, by the name of the tuned row.

    Args:
        points: The points.
        metadata: Seeds, time, hardware, versions and commit.
    """

    points: Mapping[str, tuple[GridPoint, ...]]
    metadata: Mapping[str, Any]

    def best(self, name: str) -> GridPoint:
        """Return the chosen point: of those with the smallest error, the weakest perturbation.

        Means within `TIE_MARGIN` of the smallest count as equal.
        """
        finished = [(point.mean, point) for point in self.points[name] if point.mean is not None]
        least = min(mean for mean, _ in finished)
        tied = [point for mean, point in finished if mean <= least + TIE_MARGIN + 1e-9]  # rounding
        return min(tied, key=lambda point: strength(point.hyper))


def strength(hyper: Mapping[str, float]) -> float:
    """Return the strength of the regularization: k times rho, or rho, or the learning rate."""
    gamma = hyper.get("gamma", 0.5)  # k = 1
    return gamma / (1 - gamma) * hyper.get("rho", 1.0) * hyper.get("lr", 1.0)


def tuning_runs() -> Iterator[tuple[str, Point, tuple[Run, ...]]]:
    """Yield every point of every grid with its runs."""
    for name, grid in tuning_grids().items():
        for point in grid.points():
            yield name, point, with_seeds(grid.run(name, point), TUNING_SEEDS)


def collect(out: Path) -> dict[str, Any]:
    """Return the results of the tuning runs in a folder, as JSON data.

    Raises:
        ValueError: A run is missing, or the runs are from different machines or versions.
    """
    entries: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for name, point, runs in tuning_runs():
        mine = [record for run in runs if (record := records.read(out, run)) is not None]
        if len(mine) < len(runs):
            raise ValueError(f"{out} lacks a run of {name} at {point}: call `wsam demo --map`")
        found += mine
        errors = [records.objective(record) for record in mine]
        entries.append(
            {"look": name, "point": point, "keys": [r.key for r in runs], "errors": errors}
        )
    if len({json.dumps([record["hardware"], record["versions"]]) for record in found}) > 1:
        raise ValueError(f"the runs in {out} are from different machines or versions")
    return {
        "format": FORMAT,
        "seeds": list(TUNING_SEEDS),
        "runs": len(found),
        "seconds": round(sum(record["seconds"] for record in found), 1),
        "finished": max(record["finished"] for record in found),
        "hardware": found[0]["hardware"],
        "versions": found[0]["versions"],
        "commit": sorted({str(record["commit"]) for record in found}),
        "places": entries,
    }


def write(out: Path) -> Path:
    """Write the results of the tuning runs next to their folder; return the path."""
    path = out.parent / FILE_NAME
    found = collect(out)
    entries = found.pop("places")
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
    head = json.dumps(found, indent=1)[:-2]
    write_atomic(path, f'{head},\n "places": [\n{lines}\n ]\n}}\n'.encode())
    return path


def read(path: Path | None = None) -> TuningResults:
    """Return the tuning results of a file, or those that ship with the library.

    Raises:
        ValueError: The file is damaged.
    """
    source = files("wsam.demo").joinpath(FILE_NAME) if path is None else path
    try:
        found = json.loads(source.read_text(encoding="utf-8"))
        points: dict[str, list[GridPoint]] = {}
        for entry in found.pop("places"):
            point = GridPoint(entry["point"], tuple(entry["errors"]))
            points.setdefault(entry["look"], []).append(point)
    except (ValueError, KeyError, TypeError) as error:
        message = f"{source} is damaged: call `wsam demo --map` to create it again"
        raise ValueError(message) from error
    return TuningResults({name: tuple(mine) for name, mine in points.items()}, found)
