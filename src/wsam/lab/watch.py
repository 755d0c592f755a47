"""Those who watch a run: a progress bar, plain lines, TensorBoard.

A watcher is a class with the methods of `Watcher`, all of which do nothing by default; one for
another tracker is usually `epoch` alone.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from wsam._format import pluralize
from wsam.lab.files import make_folder
from wsam.lab.run import Run

if TYPE_CHECKING:
    from rich.progress import Progress

Row = dict[str, Any]
"""An epoch of the curve: losses, errors in percent, sharpness, learning rate, seconds."""


class Watcher:
    """Hears of a run as it goes."""

    def start(self, run: Run, steps: int, done: int, images: int) -> None:
        """Training begins.

        Args:
            run: What is trained.
            steps: Steps of an epoch.
            done: Epochs that a checkpoint already holds.
            images: Images of a step.
        """

    def step(self, row: Row | None) -> None:
        """A step was made; `row` now and then holds the epoch's figures so far."""

    def epoch(self, row: Row) -> None:
        """An epoch was made and tested."""

    def say(self, message: str) -> None:
        """Something its user should know."""

    def close(self) -> None:
        """Training ended, for whatever reason."""


class Lines(Watcher):
    """One line per epoch, for logs."""

    def __init__(self, file: TextIO | None = None) -> None:
        self.file = file or sys.stderr
        self.epochs = self.images = 0

    def start(self, run: Run, steps: int, done: int, images: int) -> None:
        """Remember what the lines need."""
        self.epochs, self.images = run.epochs, images * steps
        self.say(f"{run.title}: {pluralize(run.epochs, 'epoch')}, {done} done, key {run.key}")

    def epoch(self, row: Row) -> None:
        """Print a line."""
        speed = self.images / max(row["seconds"], 1e-9)
        self.say(f"epoch {row['epoch']}/{self.epochs}  {figures(row)}  {speed:.0f} images/s")

    def say(self, message: str) -> None:
        """Print a line."""
        print(message, file=self.file, flush=True)


class Bar(Watcher):
    """A progress bar with loss, error, sharpness, images per second and time left."""

    def __init__(self) -> None:
        self.progress: Progress | None = None
        self.images = 0

    def start(self, run: Run, steps: int, done: int, images: int) -> None:
        """Show the bar."""
        from rich import progress
        from rich.console import Console

        self.images = images
        self.progress = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(None),
            progress.TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
            progress.TextColumn("{task.fields[figures]}"),
            progress.TextColumn("{task.fields[speed]}"),
            progress.TimeRemainingColumn(elapsed_when_finished=True),
            console=Console(stderr=True),
        )
        self.task = self.progress.add_task(
            run.title,
            total=run.epochs * steps,
            completed=done * steps,
            epoch=done,
            epochs=run.epochs,
            figures="",
            speed="",
        )
        self.progress.start()

    def step(self, row: Row | None) -> None:
        """Move the bar."""
        if self.progress is None:
            return
        self.progress.advance(self.task)
        speed = self.progress.tasks[0].speed
        if row is not None and speed is not None:
            shown = f"{speed * self.images:.0f} images/s"
            self.progress.update(self.task, figures=figures(row), speed=shown)

    def epoch(self, row: Row) -> None:
        """Show the epoch's figures."""
        if self.progress is None:
            return
        self.progress.update(self.task, epoch=row["epoch"], figures=figures(row))
        if (speed := self.progress.tasks[0].speed) is not None:
            self.progress.update(self.task, speed=f"{speed * self.images:.0f} images/s")

    def say(self, message: str) -> None:
        """Print above the bar."""
        if self.progress is None:
            print(message, file=sys.stderr)
        else:
            self.progress.console.print(message, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self.progress is not None:
            self.progress.stop()


class TensorBoard(Watcher):
    """Writes TensorBoard events; needs the tensorboard package.

    Args:
        folder: Where the events go.

    Raises:
        ModuleNotFoundError: It is not installed.
    """

    def __init__(self, folder: Path) -> None:
        if not has_tensorboard():  # now, and not once a run is claimed
            raise ModuleNotFoundError("No module named 'tensorboard'", name="tensorboard")
        self.folder = folder
        self.writer: Any = None
        self._opened = ExitStack()

    def start(self, run: Run, steps: int, done: int, images: int) -> None:
        """Open the file; events after the checkpoint a run resumes from are taken back."""
        from torch.utils.tensorboard import SummaryWriter

        folder = self._opened.enter_context(_spelt(self.folder))
        self.writer = SummaryWriter(folder, purge_step=done + 1)
        self.writer.add_text("settings", f"    {run.canonical}", 0)

    def epoch(self, row: Row) -> None:
        """Write every figure of the epoch."""
        for name, value in row.items():
            if name != "epoch" and value is not None:
                self.writer.add_scalar(name, value, row["epoch"])

    def close(self) -> None:
        """Close the file."""
        if self.writer is not None:
            self.writer.close()
        self._opened.close()


@contextmanager
def _spelt(folder: Path) -> Iterator[str]:
    """Yield a name of a folder that is UTF-8, as TensorBoard wants it: if need be, of a link."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        make_folder(folder)
        with tempfile.TemporaryDirectory(prefix="wsam-") as scratch:
            link = Path(scratch) / "events"
            link.symlink_to(folder.absolute(), target_is_directory=True)
            yield str(link)
    else:
        yield str(folder)


def has_tensorboard() -> bool:
    """Tell whether the tensorboard package is installed, without importing it."""
    from importlib.util import find_spec

    return find_spec("tensorboard") is not None


def figures(row: Row) -> str:
    """Return the figures of an epoch, or of one so far, in one line."""
    parts = [f"loss {row['train_loss']:.4f}", f"error {row['train_error']:.2f}%"]
    if row.get("test_error") is not None:
        parts.append(f"test error {row['test_error']:.2f}%")
    if row.get("sharpness") is not None:
        parts.append(f"sharpness {row['sharpness']:.4f}")
    return "  ".join(parts)
