"""Results of a folder: groups of runs that differ only in their seeds, and the problems found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wsam._utils.plot_style import METHOD_STYLES, variant_name
from wsam._utils.text import mean_and_std
from wsam.lab import attempts, records
from wsam.lab.checkpoint import Checkpoints
from wsam.lab.records import Record
from wsam.lab.run import Run, with_seed
from wsam.lab.titles import run_titles
from wsam.lab.values import is_number
from wsam.paper import minima

UNFINISHED, DAMAGED, FAILED = "unfinished", "damaged", "failed"


@dataclass(frozen=True)
class Result:
    """A run with its record and the measurement of its minimum, if there is one."""

    run: Run
    record: Record
    minimum: Mapping[str, Any] | None = None

    @property
    def finished(self) -> bool:
        """Whether training completed."""
        return records.is_finished(self.record)


@dataclass(frozen=True)
class Group:
    """Runs with the same settings and different seeds."""

    run: Run
    results: tuple[Result, ...]

    @property
    def variant(self) -> str:
        """The method, or its variant with a style of its own, such as ``wsam_reuse``."""
        return variant_name(self.run.method, self.run.options)

    @property
    def finished(self) -> tuple[Result, ...]:
        """The runs that completed."""
        return tuple(result for result in self.results if result.finished)

    @property
    def metric(self) -> dict[str, Any]:
        """Name, unit, direction and split of the metric; see `records.metric`."""
        return records.metric((self.finished or self.results)[0].record)

    def metric_values(self, split: str = "test") -> list[float]:
        """Return the metric on a split after the last epoch, for all finished runs."""
        found = (records.final_figure(result.record, split) for result in self.finished)
        return [value for value in found if value is not None]

    @property
    def objective(self) -> float | None:
        """What a search minimizes, the mean of the finished runs; see `records.objective`."""
        found = (records.objective(result.record) for result in self.finished)
        return mean_and_std([value for value in found if value is not None])[0]

    def values(self, name: str) -> list[float]:
        """Return a figure of the last epoch for all finished runs that have it."""
        found = (result.record["curve"][-1].get(name) for result in self.finished)
        return [float(value) for value in found if value is not None]

    @property
    def eigenvalues(self) -> list[float]:
        """The measured top eigenvalues of the Hessian."""
        return [r.minimum["top_eigenvalue"] for r in self.finished if r.minimum is not None]

    @property
    def slices(self) -> list[tuple[list[float], list[float]]]:
        """Distances and losses of every measured slice through a minimum."""
        measured = (minima.read_slice(r.minimum or {}, minima.SLICE) for r in self.finished)
        return [(line.coordinates[0], list(line.losses)) for line in measured if line is not None]

    @property
    def failures(self) -> str:
        """The number of failed runs, ``failed 4/5``; empty if none failed."""
        failed = len(self.results) - len(self.finished)
        return f"failed {failed}/{len(self.results)}" if failed else ""

    @property
    def seconds(self) -> float | None:
        """The mean training time of the finished runs; None if there is none."""
        return mean_and_std([float(result.record["seconds"]) for result in self.finished])[0]


@dataclass(frozen=True)
class Trouble:
    """A problem with a run or a file.

    Args:
        what: The run or the file.
        kind: "unfinished", "damaged" or "failed".
        why: The reason.
    """

    what: str
    kind: str
    why: str


@dataclass
class Folder:
    """The contents of a results folder."""

    path: Path
    groups: list[Group] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)

    @property
    def results(self) -> list[Result]:
        """All runs that have a record."""
        return [result for group in self.groups for result in group.results]

    def count(self, kind: str) -> int:
        """Return the number of problems of a kind."""
        return sum(trouble.kind == kind for trouble in self.troubles)


def gather(folder: Path) -> Folder:
    """Read a results folder. Unreadable records are listed as problems.

    Args:
        folder: The output folder of `wsam train`, `compare`, `sweep`, `paper run` or `demo`. The final
            runs of a comparison are in its subfolder ``runs``, which is read instead.

    Raises:
        ValueError: The folder contains neither a record nor an unfinished run, or does not exist.
    """
    folder = records_folder(folder)
    found = Folder(folder)
    by_group: dict[Run, list[Result]] = {}  # by their settings without the seeds
    for path in sorted(folder.glob("*.json")):
        if records.is_named_by_key(path):
            try:
                result = _read_result(path, found.troubles)
            except (OSError, ValueError) as error:
                found.troubles.append(Trouble(path.name, DAMAGED, _reason(path, error)))
                continue
            by_group.setdefault(with_seed(result.run, 0), []).append(result)
    for results in by_group.values():
        ordered = sorted(results, key=lambda result: result.run.seed)
        found.groups.append(Group(ordered[0].run, tuple(ordered)))
    found.groups.sort(key=_sort_key)
    titles = run_titles(result.run for result in found.results)
    found.troubles += [
        Trouble(titles[result.run.key], FAILED, records.failure_reason(result.record))
        for result in found.results
        if not result.finished
    ]
    found.troubles += _unfinished(folder)
    if folder.is_file():
        raise ValueError(f"{folder} is a file: pass its folder, {folder.parent}")
    if not found.groups and not found.troubles:
        raise ValueError(f"{folder} holds no records: train something with --out {folder} first")
    return found


def records_folder(folder: Path) -> Path:
    """Return the folder, or its subfolder ``runs`` if only that contains records.

    The folder of a comparison may contain timing runs that failed; its records are in ``runs``.
    """
    for pattern in ("*.json", "work/*"):  # records, then unfinished runs
        for place in (folder, folder / "runs"):
            if any(map(records.is_named_by_key, place.glob(pattern))):
                return place
    return folder


def _reason(path: Path, error: Exception) -> str:
    """Return why a record cannot be read."""
    if path.is_dir():
        return f"{path} is a folder, not a record"
    return f"{path}: {error.strerror}" if isinstance(error, OSError) else str(error)


def _read_result(path: Path, troubles: list[Trouble]) -> Result:
    """Read a record and the measurement of its minimum.

    Raises:
        ValueError: The record is damaged, or its run is unknown to this version.
    """
    record = records.read_named(path)
    run = Run.from_dict(record["settings"])
    try:
        measured = minima.read_measurement(path.parent, run)
    except ValueError as error:
        troubles.append(Trouble(f"{run.key}.minimum.json", DAMAGED, str(error)))
        measured = None
    return Result(run, record, measured)


def _unfinished(folder: Path) -> list[Trouble]:
    """Return the runs that were started and have no record."""
    found = []
    for work in sorted(records.work_root(folder).glob("*")):
        has_record = (folder / f"{work.name}.json").exists()
        if has_record or not work.is_dir() or not records.is_named_by_key(work):
            continue
        name, failure, progress = work.name, None, ""
        try:
            if (attempt := attempts.read(work)) is not None:
                run, failure = attempt
                name = run.title
            if (state := Checkpoints(records.checkpoints_folder(work)).load()) is not None:
                run, done = Run.from_dict(records.parse_json(state["run"])), len(state["curve"])
                name = run.title
                progress = f"{done} of {run.epochs} epochs done; run the same command to resume"
        except (OSError, ValueError, KeyError, TypeError) as error:
            found.append(Trouble(name, DAMAGED, f"its checkpoint cannot be read: {error}"))
            continue
        if failure is None:
            found.append(Trouble(name, UNFINISHED, progress or "started; no checkpoint yet"))
        else:
            found.append(Trouble(name, FAILED, "; ".join(filter(None, (failure, progress)))))
    return found


def _sort_key(group: Group) -> tuple[Any, ...]:
    """Sort groups by experiment, then by method, then by hyperparameters."""
    run = group.run
    known = list(METHOD_STYLES)
    place = known.index(group.variant) if group.variant in known else len(known)
    hyper = tuple(float(value) if is_number(value) else 0.0 for value in run.hyper.values())
    experiment = (run.data, run.target or "", run.model, run.noise)
    return (
        *experiment,
        place,
        run.method,
        run.base,
        hyper,
        run.epochs,
        run.base_args["lr"],
        run.key,
    )
