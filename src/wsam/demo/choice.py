"""How the demonstration's hyperparameters were chosen: looks on other seeds, kept as a record.

The record ships with the library; `wsam demo --map` makes it again, from runs of its own. It holds
what each run of the looks came to, and where, when and by what it was made.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from wsam._format import mean_and_std
from wsam.demo.setting import LOOK_SEEDS, looks
from wsam.lab import records
from wsam.lab.files import write_atomic
from wsam.lab.run import Run
from wsam.report.gather import failed_of
from wsam.sweep.grid import Point, with_seeds

FORMAT = 1
NAME = "map.json"
TIE = 100 * 3 / 597
"""Of test errors in percent, three of the 597 test images: means no further apart than this are not
told apart by two seeds."""


@dataclass(frozen=True)
class Place:
    """A point of a look, and the final test errors there, one per seed; None for a failed run."""

    point: Mapping[str, float]
    errors: tuple[float | None, ...]

    @property
    def mean(self) -> float | None:
        """The mean error; None where a run failed."""
        known = [error for error in self.errors if error is not None]
        return mean_and_std(known)[0] if len(known) == len(self.errors) else None

    @property
    def failures(self) -> str:
        """How many runs failed, ``failed 1/2``, as a report says it; empty where none did."""
        return failed_of(self.errors.count(None), len(self.errors))


@dataclass(frozen=True)
class Choice:
    """All looks, and where they come from."""

    places: Mapping[str, tuple[Place, ...]]
    facts: Mapping[str, Any]
    """Seeds, time, hardware, versions, commit."""

    def best(self, name: str) -> Place:
        """Return the point of a look that is taken: of those with the smallest error, the gentlest.

        Means within `TIE` of the smallest count as equal: that is three images of the test set.
        """
        whole = [(place.mean, place) for place in self.places[name] if place.mean is not None]
        least = min(mean for mean, _ in whole)
        equal = [place for mean, place in whole if mean <= least + TIE + 1e-9]  # for rounding
        return min(equal, key=lambda place: strength(place.point))


def strength(point: Mapping[str, float]) -> float:
    """Return how hard a point pulls: k times rho, or rho, or the learning rate."""
    gamma = point.get("gamma", 0.5)  # k = 1
    return gamma / (1 - gamma) * point.get("rho", 1.0) * point.get("lr", 1.0)


def look_runs() -> Iterator[tuple[str, Point, tuple[Run, ...]]]:
    """Yield every point of every look with its runs."""
    for name, grid in looks().items():
        for point in grid.points():
            yield name, point, with_seeds(grid.run(name, point), LOOK_SEEDS)


def collect(out: Path) -> dict[str, Any]:
    """Return the record of the looks whose runs lie in a folder.

    Raises:
        ValueError: A run is missing, or they were made by different versions.
    """
    entries: list[dict[str, Any]] = []
    made: list[dict[str, Any]] = []
    for name, point, runs in look_runs():
        found = [records.read(out, run) for run in runs]
        whole = [record for record in found if record is not None]
        if len(whole) < len(runs):
            raise ValueError(f"{out} lacks a run of {name} at {point}: call `wsam demo --map`")
        made += whole
        errors = [records.final_error(record) for record in whole]
        entries.append(
            {"look": name, "point": point, "keys": [r.key for r in runs], "errors": errors}
        )
    facts = {json.dumps([record[f] for f in ("hardware", "versions")]) for record in made}
    if len(facts) > 1:
        raise ValueError(f"the runs in {out} were made on different machines or versions")
    return {
        "format": FORMAT,
        "seeds": list(LOOK_SEEDS),
        "runs": len(made),
        "seconds": round(sum(record["seconds"] for record in made), 1),
        "finished": max(record["finished"] for record in made),
        "hardware": made[0]["hardware"],
        "versions": made[0]["versions"],
        "commit": sorted({str(record["commit"]) for record in made}),
        "places": entries,
    }


def write(out: Path) -> Path:
    """Write the record of the looks beside the folder of their runs; return its path."""
    path = out.parent / NAME
    found = collect(out)
    entries = found.pop("places")
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
    head = json.dumps(found, indent=1)[:-2]
    write_atomic(path, f'{head},\n "places": [\n{lines}\n ]\n}}\n'.encode())
    return path


def read(path: Path | None = None) -> Choice:
    """Return the looks: those of a file, or those that ship with the library.

    Raises:
        ValueError: The file is damaged.
    """
    source = files("wsam.demo").joinpath(NAME) if path is None else path
    try:
        found = json.loads(source.read_text(encoding="utf-8"))
        places: dict[str, list[Place]] = {}
        for entry in found.pop("places"):
            place = Place(entry["point"], tuple(entry["errors"]))
            places.setdefault(entry["look"], []).append(place)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{source} is damaged: call `wsam demo --map` to make it again") from error
    return Choice({name: tuple(mine) for name, mine in places.items()}, found)
