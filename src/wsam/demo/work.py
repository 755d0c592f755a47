"""Carrying the demonstration out: its runs in processes of this machine, each measured at its end."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from wsam.demo.choice import look_runs
from wsam.demo.setting import contenders
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
"""Of the sharpness that all rows are compared by, whatever radius they were trained with."""
_SECONDS = 1.0
"""Between checkpoints: what the live display counts epochs by."""


def measure(run: Run, out: Path, means: ExecutionConfig) -> dict[str, Any]:
    """Measure a finished run's minimum: top eigenvalue, slice, and sharpness at one common radius.

    What was measured before is not measured again.
    """
    minima.measure(run, out, means, more_eigenvalues=False)
    path = sharpness_path(out, run)
    if path.exists():
        return read_sharpness(out, run)
    from torch.nn.functional import cross_entropy

    from wsam.curvature import sharpness

    model, feed = restore(run, out, means)
    images = FixedBatches(feed, "train", None, minima.BATCH_SIZE)
    found = sharpness(model, cross_entropy, images, RADIUS)
    text = json.dumps({"key": run.key, **found.as_dict()}, allow_nan=False)
    write_atomic(path, f"{text}\n".encode())
    return read_sharpness(out, run)


def sharpness_path(out: Path, run: Run) -> Path:
    """Return where the sharpness of a run's minimum lies."""
    return out / f"{run.key}.sharpness.json"


def read_sharpness(out: Path, run: Run) -> dict[str, Any]:
    """Return what was measured.

    Raises:
        ValueError: It is missing, or damaged.
    """
    path = sharpness_path(out, run)
    if not path.exists():
        raise ValueError(f"there is no {path}")
    try:
        found = records.read_json(path)
        right = found["key"] == run.key and isinstance(found["value"], float)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged; remove it to measure again") from error
    if not right:
        raise ValueError(f"{path} is not a measurement of {run.key}; remove it to measure again")
    return dict(found)


def means(keep: bool = True) -> ExecutionConfig:
    """Return how the runs are carried out: on the CPU, nothing downloaded.

    Args:
        keep: Keep the weights, and train a run again that failed before.
    """
    source = DataSource(default_folder(), download=False)
    return ExecutionConfig(
        device="cpu", keep_weights=keep, checkpoint_seconds=_SECONDS, source=source, retry=keep
    )


def demo_jobs(out: Path, seeds: Sequence[int]) -> list[Job]:
    """Return the jobs of the demonstration, the longest first."""
    out = out.resolve()
    runs = [run for row in contenders().values() for run in row.runs(seeds)]
    runs.sort(key=lambda run: (run.method != "vanilla", run.seed))
    return [Job(run, out, means(), measure) for run in runs]


def map_jobs(out: Path) -> list[Job]:
    """Return the jobs of the looks that the hyperparameters were chosen by."""
    out = out.resolve()
    return [Job(run, out, means(keep=False)) for _, _, runs in look_runs() for run in runs]


def unheard(outcome: Outcome) -> None:
    """Take no notice: stands where somebody would hear that a job has ended."""


def carry_out(
    jobs: Sequence[Job],
    workers: int | None,
    say: Callable[[str], None],
    ended: Callable[[Outcome], None] = unheard,
) -> list[Outcome]:
    """Carry out those jobs that are not done yet, one worker per core unless said otherwise.

    A record whose weights were lost before it was measured is made again, and so is what is damaged.

    Args:
        jobs: All jobs.
        workers: How many at a time.
        say: Takes a message for the user.
        ended: Hears of each job as it ends.

    Raises:
        ValueError: A run failed; the message says which.
    """
    left = [job for job in jobs if not is_done(job)]
    if not left:
        return []
    for job in left:
        forget_damaged(job)
        forget_unmeasurable(job)
    count = min(len(left), workers or available_cores())
    outcomes = []
    for outcome in sweep(left, Processes(["cpu"] * count, log=say)):
        outcomes.append(outcome)
        ended(outcome)
    for outcome in outcomes:
        if not outcome.has_record and outcome.job.after is not None:
            raise ValueError(f"{outcome.job.run.title}: {outcome.status}: {outcome.detail}")
    return outcomes


def forget_unmeasurable(job: Job) -> None:
    """Remove a record that cannot be measured any more, because its weights are gone."""
    if job.after is not None and not records.weights_path(job.out, job.run).exists():
        _forget_all(job)


def forget_damaged(job: Job) -> None:
    """Remove those files of a job that cannot be read, so that they are made again."""
    out, run = job.out, job.run
    if not _readable(records.read, job):
        _forget_all(job)
    if not _readable(minima.read_measurement, job):
        minima.measurement_path(out, run).unlink()
    if sharpness_path(out, run).exists() and not _readable(read_sharpness, job):
        sharpness_path(out, run).unlink()


def _forget_all(job: Job) -> None:
    """Remove a record and what was measured at its minimum, which is another once it is remade."""
    out, run = job.out, job.run
    for path in (
        records.record_path(out, run),
        minima.measurement_path(out, run),
        sharpness_path(out, run),
    ):
        path.unlink(missing_ok=True)


def _readable(read: Callable[[Path, Run], object], job: Job) -> bool:
    try:
        read(job.out, job.run)
    except ValueError:
        return False
    return True


def is_done(job: Job) -> bool:
    """Tell whether a job's record, and what is measured after it, are there and can be read."""
    try:
        record = records.read(job.out, job.run)
        if record is None or job.after is None:
            return record is not None
        check_measured(job.out, job.run)
    except ValueError:
        return False
    return records.is_finished(record)


def check_measured(out: Path, run: Run) -> None:
    """Raise where something of what `measure` leaves cannot be read.

    Raises:
        ValueError: A file is missing, or damaged; the message names it.
    """
    found = minima.read_measurement(out, run)
    if found is None or minima.read_slice(found, minima.SLICE) is None:
        raise ValueError(f"{minima.measurement_path(out, run)} lacks what is measured at a minimum")
    read_sharpness(out, run)
