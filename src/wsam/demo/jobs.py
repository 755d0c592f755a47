"""The jobs of the demonstration: training in local processes, then measurements at the minimum."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from wsam.demo.config import contenders
from wsam.demo.tuning import tuning_runs
from wsam.lab import records
from wsam.lab.datasets import DataSource, default_folder
from wsam.lab.environment import available_cores
from wsam.lab.execution import ExecutionConfig
from wsam.lab.files import write_atomic
from wsam.lab.loaded_model import FixedBatches
from wsam.lab.run import Run
from wsam.lab.train import restore
from wsam.paper import minima
from wsam.sweep import Job, Outcome, Processes, sweep

RADIUS = 0.2
"""Radius at which the sharpness of all rows is compared, whatever radius they were trained with."""
_CHECKPOINT_SECONDS = 1.0
"""Time between checkpoints, from which the progress display reads the epoch."""


def measure(run: Run, out: Path, execution: ExecutionConfig) -> dict[str, Any]:
    """Measure the minimum of a finished run: top eigenvalue, slice, sharpness at a common radius.

    Existing measurements are not repeated.
    """
    minima.measure(run, out, execution, more_eigenvalues=False)
    path = sharpness_path(out, run)
    if path.exists():
        return read_sharpness(out, run)
    from torch.nn.functional import cross_entropy

    from wsam.curvature import sharpness

    model, feed = restore(run, out, execution)
    images = FixedBatches(feed, "train", None, minima.BATCH_SIZE)
    found = sharpness(model, cross_entropy, images, RADIUS)
    text = json.dumps({"key": run.key, **found.as_dict()}, allow_nan=False)
    write_atomic(path, f"{text}\n".encode())
    return read_sharpness(out, run)


def sharpness_path(out: Path, run: Run) -> Path:
    """Return the file with the sharpness of a run's minimum."""
    return out / f"{run.key}.sharpness.json"


def read_sharpness(out: Path, run: Run) -> dict[str, Any]:
    """Return the measured sharpness of a run's minimum.

    Raises:
        ValueError: The file is missing or damaged.
    """
    path = sharpness_path(out, run)
    if not path.exists():
        raise ValueError(f"there is no {path}")
    try:
        found = records.read_json(path)
        valid = found["key"] == run.key and isinstance(found["value"], float)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged; remove it to measure again") from error
    if not valid:
        raise ValueError(f"{path} is not a measurement of {run.key}; remove it to measure again")
    return dict(found)


def execution_config(keep: bool = True) -> ExecutionConfig:
    """Return the configuration of the runs: on the CPU, without downloads.

    Args:
        keep: Keep the weights, and repeat runs that failed before.
    """
    source = DataSource(default_folder(), download=False)
    return ExecutionConfig(
        device="cpu",
        keep_weights=keep,
        checkpoint_seconds=_CHECKPOINT_SECONDS,
        source=source,
        retry=keep,
    )


def demo_jobs(out: Path, seeds: Sequence[int]) -> list[Job]:
    """Return the jobs of the demonstration, the longest first."""
    out = out.resolve()
    runs = [run for row in contenders().values() for run in row.runs(seeds)]
    runs.sort(key=lambda run: (run.method != "vanilla", run.seed))
    return [Job(run, out, execution_config(), measure) for run in runs]


def tuning_jobs(out: Path) -> list[Job]:
    """Return the jobs of the tuning grids."""
    out = out.resolve()
    config = execution_config(keep=False)
    return [Job(run, out, config) for _, _, runs in tuning_runs() for run in runs]


def ignore_outcome(outcome: Outcome) -> None:
    """No-op callback."""


def run_jobs(
    jobs: Sequence[Job],
    workers: int | None,
    message: Callable[[str], None],
    finished: Callable[[Outcome], None] = ignore_outcome,
) -> list[Outcome]:
    """Run the jobs that are not done, by default one worker per core.

    Damaged files are created again, and so is a record whose weights were lost before they were
    measured.

    Args:
        jobs: All jobs.
        workers: The number of processes.
        message: Receives messages for the user.
        finished: Receives the outcome of each job.

    Raises:
        ValueError: A run failed.
    """
    left = [job for job in jobs if not is_done(job)]
    if not left:
        return []
    for job in left:
        remove_damaged(job)
        remove_unmeasurable(job)
    count = min(len(left), workers or available_cores())
    outcomes = []
    for outcome in sweep(left, Processes(["cpu"] * count, log=message)):
        outcomes.append(outcome)
        finished(outcome)
    for outcome in outcomes:
        if not outcome.has_record and outcome.job.after is not None:
            raise ValueError(f"{outcome.job.run.title}: {outcome.status}: {outcome.detail}")
    return outcomes


def remove_unmeasurable(job: Job) -> None:
    """Remove a record that cannot be measured because its weights are missing."""
    if job.after is not None and not records.weights_path(job.out, job.run).exists():
        _remove_files(job)


def remove_damaged(job: Job) -> None:
    """Remove the unreadable files of a job, so that they are created again."""
    out, run = job.out, job.run
    if not _is_readable(records.read, job):
        _remove_files(job)
    if not _is_readable(minima.read_measurement, job):
        minima.measurement_path(out, run).unlink()
    if sharpness_path(out, run).exists() and not _is_readable(read_sharpness, job):
        sharpness_path(out, run).unlink()


def _remove_files(job: Job) -> None:
    """Remove a record and the measurements, which are invalid for a new record."""
    for path_of in (records.record_path, minima.measurement_path, sharpness_path):
        path_of(job.out, job.run).unlink(missing_ok=True)


def _is_readable(read: Callable[[Path, Run], object], job: Job) -> bool:
    try:
        read(job.out, job.run)
    except ValueError:
        return False
    return True


def is_done(job: Job) -> bool:
    """Return whether the record of a job and its measurements exist and are readable."""
    try:
        record = records.read(job.out, job.run)
        if record is None or job.after is None:
            return record is not None
        check_measurements(job.out, job.run)
    except ValueError:
        return False
    return records.is_finished(record)


def check_measurements(out: Path, run: Run) -> None:
    """Raise if a measurement of `measure` is not readable.

    Raises:
        ValueError: A file is missing or damaged; the message names it.
    """
    found = minima.read_measurement(out, run)
    if found is None or minima.read_slice(found, minima.SLICE) is None:
        raise ValueError(
            f"{minima.measurement_path(out, run)} lacks a measurement: call `wsam demo` again"
        )
    read_sharpness(out, run)
