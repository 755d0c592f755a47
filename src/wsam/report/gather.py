"""What a results folder holds: groups of runs that differ in their seeds alone, and what went wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wsam.lab import records
from wsam.lab.checkpoint import Checkpoints
from wsam.lab.records import Record
from wsam.lab.run import Run
from wsam.lab.settings import is_number
from wsam.paper import minima
from wsam.plot_style import METHOD_STYLES


@dataclass(frozen=True)
class Result:
    """A run with its record and, where it was measured, its minimum."""

    run: Run
    record: Record
    minimum: Mapping[str, Any] | None = None

    @property
    def finished(self) -> bool:
        """Whether training went to the end."""
        return records.is_finished(self.record)

    def final(self, name: str) -> float | None:
        """Return a figure of the last epoch."""
        value = self.record["curve"][-1].get(name)
        return None if value is None else float(value)


@dataclass(frozen=True)
class Group:
    """Runs with the same settings and different seeds."""

    run: Run
    results: tuple[Result, ...]

    @property
    def finished(self) -> tuple[Result, ...]:
        """Those that went to the end."""
        return tuple(result for result in self.results if result.finished)

    def values(self, name: str) -> list[float]:
        """Return a figure of the last epoch for all finished runs that have it."""
        found = (result.final(name) for result in self.finished)
        return [value for value in found if value is not None]

    @property
    def eigenvalues(self) -> list[float]:
        """The top eigenvalues that were measured."""
        return [r.minimum["top_eigenvalue"] for r in self.finished if r.minimum is not None]

    @property
    def failures(self) -> str:
        """How many of its runs failed, ``failed 4/5``; empty where none did."""
        return failed_of(len(self.results) - len(self.finished), len(self.results))

    @property
    def seconds(self) -> list[float]:
        """The time of each finished run."""
        return [float(r.record["seconds"]) for r in self.finished if r.record.get("seconds")]


def failed_of(failed: int, runs: int) -> str:
    """Say how many of some runs failed, ``failed 4/5``; nothing where none did."""
    return f"failed {failed}/{runs}" if failed else ""


@dataclass(frozen=True)
class Trouble:
    """A file or a run that is not as it should be."""

    what: str
    kind: str
    why: str


@dataclass
class Folder:
    """All that a results folder holds."""

    path: Path
    groups: list[Group] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)

    @property
    def results(self) -> list[Result]:
        """All runs that have a record."""
        return [result for group in self.groups for result in group.results]

    def count(self, kind: str) -> int:
        """Return how many troubles there are of a kind."""
        return sum(trouble.kind == kind for trouble in self.troubles)


UNFINISHED, DAMAGED, FAILED = "unfinished", "damaged", "failed"


def group_key(run: Run) -> str:
    """Return what the runs of a group share: the key of their settings without the seeds."""
    return run.replace(seed=0, noise_seed=0).key


def gather(folder: Path) -> Folder:
    """Read a results folder; a record that cannot be read is told of, not passed over.

    Args:
        folder: Where `wsam train`, `wsam paper run`, `wsam sweep` or `wsam demo` put records; those
            of the demonstration are in its folder ``runs``, which is looked into.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: It holds neither a record nor a run under way.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    folder = records_folder(folder)
    found = Folder(folder)
    by_group: dict[str, list[Result]] = {}
    for path in sorted(folder.glob("*.json")):
        if records.is_named_by_key(path):
            try:
                result = read_result(path, found.troubles)
            except (OSError, ValueError) as error:
                found.troubles.append(Trouble(path.name, DAMAGED, _why(path, error)))
                continue
            by_group.setdefault(group_key(result.run), []).append(result)
            if not result.finished:
                why = records.failure_reason(result.record)
                found.troubles.append(Trouble(result.run.title, FAILED, why))
    for results in by_group.values():
        ordered = sorted(results, key=lambda result: result.run.seed)
        found.groups.append(Group(ordered[0].run, tuple(ordered)))
    found.groups.sort(key=_order)
    found.troubles += unfinished(folder)
    if not found.groups and not found.troubles:
        raise ValueError(f"{folder} holds no records: train something with --out {folder} first")
    return found


def records_folder(folder: Path) -> Path:
    """Return the folder itself or, where it holds no record but its folder ``runs`` does, that."""
    below = folder / "runs"
    return below if not _holds_records(folder) and _holds_records(below) else folder


def _holds_records(folder: Path) -> bool:
    """Tell whether records, or runs under way, lie in a folder."""
    paths = (*folder.glob("*.json"), *records.work_root(folder).glob("*"))
    return any(map(records.is_named_by_key, paths))


def _why(path: Path, error: Exception) -> str:
    """Say what is wrong with a file that should be a record."""
    if path.is_dir():
        return f"{path} is a folder, not a record"
    return f"{path}: {error.strerror}" if isinstance(error, OSError) else str(error)


def read_result(path: Path, troubles: list[Trouble]) -> Result:
    """Read one record and what was measured beside it.

    Raises:
        ValueError: Damaged, or of a run that this version cannot make.
    """
    record = records.read_named(path)
    run = Run.from_dict(record["settings"])
    try:
        measured = minima.read_measurement(path.parent, run)
    except ValueError as error:
        troubles.append(Trouble(f"{run.key}.minimum.json", DAMAGED, str(error)))
        measured = None
    return Result(run, record, measured)


def unfinished(folder: Path) -> list[Trouble]:
    """Return the runs that were begun and have no record."""
    found = []
    for work in sorted(records.work_root(folder).glob("*")):
        if not work.is_dir() or (folder / f"{work.name}.json").exists():
            continue
        if not records.is_named_by_key(work):
            continue
        what, why = work.name, "begun; no checkpoint yet"
        try:
            state = Checkpoints(records.checkpoints_folder(work)).load()
            if state is not None:
                run, done = Run.from_dict(json.loads(state["run"])), len(state["curve"])
                what = run.title
                why = f"{done} of {run.epochs} epochs done; train it again to go on"
        except (OSError, ValueError, KeyError, TypeError) as error:
            found.append(Trouble(what, DAMAGED, f"its checkpoint cannot be read: {error}"))
            continue
        found.append(Trouble(what, UNFINISHED, why))
    return found


def _order(group: Group) -> tuple[Any, ...]:
    """Sort groups by experiment, then by method, the base first, then by their numbers."""
    run = group.run
    known = list(METHOD_STYLES)
    place = known.index(run.method) if run.method in known else len(known)
    hyper = tuple(float(value) if is_number(value) else 0.0 for value in run.hyper.values())
    rate = run.base_args.get("lr")
    last = (run.epochs, rate if isinstance(rate, float) else 0.0, run.key)
    return (run.data, run.model, run.noise, place, run.method, hyper, *last)
