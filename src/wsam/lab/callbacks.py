"""Callbacks of a training run: progress bar, log lines, TensorBoard.

Subclass `Callback` and override the methods you need; to log to another tracker, `on_epoch_end` is
usually enough.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, TextIO

from wsam._utils.text import pluralize, printable
from wsam.lab.run import Run
from wsam.lab.settings import BASE_CLASSES

Metrics = dict[str, Any]
"""One epoch of the curve: losses, errors in percent, sharpness, learning rate, seconds."""
_PERCENT = ("error", "accuracy", "macro_f1")


class Callback:
    """Base class of callbacks; all methods are no-ops."""

    def on_train_start(self, run: Run, steps: int, done: int, batch_size: int) -> None:
        """Called before the first step.

        Args:
            run: The run.
            steps: Steps per epoch.
            done: Epochs already trained, restored from a checkpoint.
            batch_size: Samples per step.
        """

    def on_step_end(self, metrics: Metrics | None) -> None:
        """Called after each step; `metrics` of the epoch so far are given about twice a second."""

    def on_epoch_end(self, metrics: Metrics) -> None:
        """Called after each epoch, including its evaluation on the validation or test set."""

    def on_message(self, message: str) -> None:
        """Called with each message for the user."""

    def on_train_end(self) -> None:
        """Called when training ends, also by an exception."""


class LogLines(Callback):
    """Prints one line per epoch.

    Args:
        file: Where to print; default ``sys.stderr``.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self.file = file or sys.stderr
        self.epochs = self.samples = 0

    def on_train_start(self, run: Run, steps: int, done: int, batch_size: int) -> None:
        """Print the title of the run."""
        self.epochs, self.samples = run.epochs, batch_size * steps
        base = f"{BASE_CLASSES[run.base]} lr={run.base_args['lr']:g}"
        self.on_message(
            f"{run.title}, {base}: {pluralize(run.epochs, 'epoch')}, {done} done, key {run.key}"
        )

    def on_epoch_end(self, metrics: Metrics) -> None:
        """Print the metrics of the epoch."""
        speed = self.samples / max(metrics["seconds"], 1e-9)
        epoch = f"epoch {metrics['epoch']}/{self.epochs}"
        self.on_message(f"{epoch}  {format_metrics(metrics)}  {speed:.0f} samples/s")

    def on_message(self, message: str) -> None:
        """Print the message."""
        print(printable(message), file=self.file, flush=True)


class ProgressBar(Callback):
    """A progress bar with loss, error, sharpness, samples per second and remaining time."""

    def __init__(self) -> None:
        from rich import progress
        from rich.console import Console

        self.progress = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(None),
            progress.TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
            progress.TextColumn("{task.fields[metrics]}"),
            progress.TextColumn("{task.fields[speed]}"),
            progress.TimeRemainingColumn(elapsed_when_finished=True),
            console=Console(stderr=True),
        )
        self.batch_size = 0

    def on_train_start(self, run: Run, steps: int, done: int, batch_size: int) -> None:
        """Show the bar."""
        self.batch_size = batch_size
        self.task = self.progress.add_task(
            run.title,
            total=run.epochs * steps,
            completed=done * steps,
            epoch=done,
            epochs=run.epochs,
            metrics="",
            speed="",
        )
        self.progress.start()

    def on_step_end(self, metrics: Metrics | None) -> None:
        """Advance the bar."""
        self.progress.advance(self.task)
        if metrics is not None and self.progress.tasks[0].speed is not None:
            self._show(metrics)

    def on_epoch_end(self, metrics: Metrics) -> None:
        """Show the metrics of the epoch."""
        self.progress.update(self.task, epoch=metrics["epoch"])
        self._show(metrics)

    def _show(self, metrics: Metrics) -> None:
        self.progress.update(self.task, metrics=format_metrics(metrics))
        if (speed := self.progress.tasks[0].speed) is not None:
            self.progress.update(self.task, speed=f"{speed * self.batch_size:.0f} samples/s")

    def on_message(self, message: str) -> None:
        """Print the message above the bar."""
        self.progress.console.print(printable(message), markup=False, highlight=False)

    def on_train_end(self) -> None:
        """Stop updating the bar."""
        self.progress.stop()


class TensorBoard(Callback):
    """Writes TensorBoard events.

    Args:
        folder: Where the events are stored.

    Raises:
        ModuleNotFoundError: The tensorboard package is not installed.
    """

    def __init__(self, folder: Path) -> None:
        if not has_tensorboard():  # raise before the run is locked
            raise ModuleNotFoundError("No module named 'tensorboard'", name="tensorboard")
        self.folder = folder
        self.writer: Any = None

    def on_train_start(self, run: Run, steps: int, done: int, batch_size: int) -> None:
        """Open the events file; events after the restored checkpoint are purged."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.folder), purge_step=done + 1)
        self.writer.add_text("settings", f"    {run.canonical}", 0)

    def on_epoch_end(self, metrics: Metrics) -> None:
        """Write the metrics of the epoch."""
        for name, value in metrics.items():
            if name != "epoch" and value is not None:
                self.writer.add_scalar(name, value, metrics["epoch"])

    def on_train_end(self) -> None:
        """Close the events file."""
        if self.writer is not None:
            self.writer.close()


def has_tensorboard() -> bool:
    """Return whether the tensorboard package is installed, without importing it."""
    from importlib.util import find_spec

    return find_spec("tensorboard") is not None


def format_metrics(metrics: Metrics) -> str:
    """Return the metrics of an epoch in one line."""
    parts = [f"loss {metrics['train_loss']:.4f}"]
    if metrics.get("train_error") is not None:
        parts.append(f"error {metrics['train_error']:.2f}%")
    for name, value in metrics.items():
        split, _, figure = name.partition("_")
        if split in ("validation", "test") and value is not None:
            text = f"{value:.2f}%" if figure in _PERCENT else f"{value:.4g}"
            parts.append(f"{split} {figure.replace('_', '-')} {text}")
    if metrics.get("sharpness") is not None:
        parts.append(f"sharpness {metrics['sharpness']:.4f}")
    return "  ".join(parts)
