"""Timing runs: what an epoch of a method costs on the machine that trains it."""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from wsam._core.validation import WsamWarning
from wsam.lab import records
from wsam.lab.callbacks import Callback, Metrics
from wsam.lab.execution import ExecutionConfig
from wsam.lab.files import write_atomic
from wsam.lab.records import Record
from wsam.lab.run import Run
from wsam.lab.train import train

_WARM_UP = 3
"""Steps that are not measured: the first ones allocate memory, and may compile or capture."""
_EPOCHS = 1000
"""More than a timing run trains."""
_ENOUGH_EPOCHS, _LEAST_SECONDS = 8, 3.0
"""Epochs that end the measurement, after at least these seconds."""
_EVALUATION = 0.1
"""Assumed time of an evaluation relative to an epoch, if no epoch ended."""


@dataclass(frozen=True)
class Timing:
    """Times in seconds.

    Args:
        setup: From the start of a run to its first step, compilation included.
        epoch: Training steps of an epoch.
        evaluation: Evaluation after an epoch.
        cost: The training time of an epoch by which methods are compared: on a CPU processor time,
            which does not grow if other programs run, else `epoch`.
        cold: Additional setup of the first run of a process.
    """

    setup: float
    epoch: float
    evaluation: float
    cost: float
    cold: float = 0.0

    def seconds(self, epochs: int) -> float:
        """Return the expected duration of a run."""
        return self.setup + epochs * (self.epoch + self.evaluation)

    def final_seconds(self, epochs: int) -> float:
        """Return the expected duration of a final run.

        Measuring its sharpness takes about as long as a setup and an epoch.
        """
        return self.seconds(epochs + 1) + self.setup


class _Stop(BaseException):
    """Ends a timing run."""


class Stopwatch(Callback):
    """Measures steps and epochs, and ends the run after some seconds.

    Args:
        seconds: Time to measure; 0 to end the run after its first step.
        period: Steps after which the cost of a step repeats.
        device: The training device.
    """

    def __init__(self, seconds: float, period: int, device: torch.device) -> None:
        self.seconds, self.period, self.device = seconds, period, device
        self.start = self.epoch_start = time.monotonic()
        self.warm: float | None = None
        self.warm_cpu = self.epoch_cpu = self.step_cpu = 0.0
        self.count = self.steps = 0
        self.step_seconds: tuple[float, float] | None = None
        """Mean duration and processor time of a step."""
        self.epochs: list[tuple[float, float, float]] = []
        """Seconds of training, of evaluation, and processor time of training of each epoch."""

    def on_train_start(self, run: Run, steps: int, done: int, batch_size: int) -> None:
        """Store the number of steps per epoch."""
        self.steps = steps
        self.epoch_start, self.epoch_cpu = time.monotonic(), time.process_time()

    def on_step_end(self, metrics: Metrics | None) -> None:
        """Stop after the given time, at a multiple of the period."""
        self.count += 1
        self.step_cpu = time.process_time()
        if not self.seconds:
            raise _Stop
        if self.epochs:
            return  # epochs are short: measure whole ones
        if self.count == _WARM_UP * self.period:
            self.warm, self.warm_cpu = self._now(), self.step_cpu
        elif self.warm is not None and self.count % self.period == 0:
            if time.monotonic() - self.warm < self.seconds:
                return
            steps = self.count - _WARM_UP * self.period
            used = self.step_cpu - self.warm_cpu
            self.step_seconds = ((self._now() - self.warm) / steps, used / steps)
            raise _Stop

    def on_epoch_end(self, metrics: Metrics) -> None:
        """Store the times of the epoch."""
        now = time.monotonic()
        if self.warm is None:
            self.warm = now - metrics["seconds"]
        training = metrics["seconds"]
        evaluation = max(now - self.epoch_start - training, 0.0)
        self.epochs.append((training, evaluation, self.step_cpu - self.epoch_cpu))
        self.epoch_start, self.epoch_cpu = now, time.process_time()
        measured = now - self.warm
        enough = len(self.epochs) > _ENOUGH_EPOCHS and measured >= _LEAST_SECONDS
        if len(self.epochs) > 1 and (enough or measured >= self.seconds):
            raise _Stop

    def _now(self) -> float:
        """Return the time after all work on the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.monotonic()

    def timing(self) -> Timing:
        """Return the measured times."""
        if self.epochs:
            measured = self.epochs[1:] or self.epochs
            # The plan is reduced later if it does not fit, but search epochs are never increased: a
            # slow moment of a busy machine must not decide.
            epoch, evaluation, used = map(_lower_quartile, zip(*measured, strict=True))
            if self.steps % self.period == 0:  # all epochs have the same steps
                used = min(times[-1] for times in measured)
        else:
            assert self.step_seconds is not None
            epoch, used = (self.steps * seconds for seconds in self.step_seconds)
            evaluation = _EVALUATION * epoch
        assert self.warm is not None
        trained = min(_WARM_UP * self.period, self.steps) / self.steps * epoch
        setup = max(self.warm - self.start - trained, 0.0)
        return Timing(setup, epoch, evaluation, used if self.device.type == "cpu" else epoch)


def _lower_quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]


def measure_time(
    run: Run,
    out: Path,
    execution: ExecutionConfig,
    callbacks: Sequence[Callback],
    *,
    seconds: float,
) -> Record:
    """Train for some seconds and write the measured times: the task of a timing job.

    Args:
        run: The run, of any number of epochs.
        out: The results folder.
        execution: How to execute it.
        callbacks: Called during training.
        seconds: Time to measure.

    Returns:
        Enough of a record for an outcome.
    """
    period = run.options.get("every", 1)
    assert isinstance(period, int)
    long, device = run.replace(epochs=_EPOCHS), execution.resolve_device()
    starts = []
    with tempfile.TemporaryDirectory() as folder:
        for length in (0.0, seconds):  # the first run of a process imports libraries
            starts.append(time.monotonic())
            watch = Stopwatch(length, period, device)
            with suppress(_Stop):
                train_quietly(long, Path(folder), execution, [*callbacks, watch])
    found = watch.timing()
    found = replace(found, cold=max(starts[1] - starts[0] - found.setup, 0.0))
    write_atomic(timing_path(out, run), json.dumps(asdict(found)).encode())
    return {"status": records.FINISHED, "curve": [{}]}


def train_quietly(
    run: Run, out: Path, execution: ExecutionConfig, callbacks: Sequence[Callback]
) -> Record:
    """Train without warnings about the method, which the comparison prints once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WsamWarning)
        return train(run, out, execution, callbacks)


def timing_path(out: Path, run: Run) -> Path:
    """Return the file of the times of a run."""
    return records.work_root(out) / "timing" / f"{run.key}.json"


def read_timing(out: Path, run: Run) -> Timing:
    """Return the measured times of a run."""
    return Timing(**records.read_json(timing_path(out, run)))
