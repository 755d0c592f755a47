"""How sharp the minimum of a finished run is: the top eigenvalue of the Hessian there."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.nn.functional import cross_entropy

from wsam.lab import environment, records
from wsam.lab.batches import Batch, MemoryFeed
from wsam.lab.files import write_atomic
from wsam.lab.means import Means
from wsam.lab.run import Run
from wsam.lab.train import restore

FORMAT = 1
_BATCH = 500
_IMAGES = 10_000  # the top eigenvalue of more of them costs in proportion
_TOLERANCE = 1e-2
"""Of the residual, relative: it bounds the eigenvalue's error, which is about its square."""


def path_of(out: Path, run: Run) -> Path:
    """Return where the measurement of a run's minimum lies: beside its record."""
    return out / f"{run.key}.minimum.json"


def read(out: Path, run: Run) -> dict[str, Any] | None:
    """Return what was measured at a run's minimum; None if nothing was.

    Raises:
        ValueError: What lies there is damaged, or of another run.
    """
    path = path_of(out, run)
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        key, value = found["key"], found["top_eigenvalue"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged; remove it to measure again") from error
    if key != run.key or not isinstance(value, float):
        raise ValueError(f"{path} is not a measurement of {run.key}; remove it to measure again")
    return dict(found)


def measure(run: Run, out: Path, means: Means) -> dict[str, Any]:
    """Measure the minimum of a finished run, unless that was done before.

    The Hessian is that of the mean loss over the first 10,000 training images, as they are (no
    crops, no mirror images), with the labels that were trained on, in float32 (on a GPU with torch's
    defaults for convolutions, that is TF32), BatchNorm in evaluation.

    Args:
        run: A finished run whose weights were kept.
        out: The folder of the results.
        means: Says the device and where data is.

    Raises:
        FileNotFoundError: Its weights were not kept.
    """
    if (found := read(out, run)) is not None:
        return found
    from wsam.curvature import hessian, top_eigenvalues

    begin = time.monotonic()
    if not records.weights_path(out, run).exists():
        raise FileNotFoundError(
            f"its weights were not kept; remove {records.record_path(out, run)} to train it again"
        )
    model, feed = restore(run, out, means)
    assert isinstance(feed, MemoryFeed)
    images = TrainingImages(feed)
    curvature = hessian(model, cross_entropy, images)
    top = top_eigenvalues(curvature, tol=_TOLERANCE)
    found = {
        "format": FORMAT,
        "key": run.key,
        "title": run.title,
        "top_eigenvalue": top.largest,
        "residual": float(top.residuals[0]),
        "converged": bool(top.converged[0]),
        "products": top.products,
        "loss": float(curvature.objective.loss),
        "images": images.count,
        "seconds": time.monotonic() - begin,
        "hardware": environment.hardware(means.place()),
        "versions": environment.versions(),
        "commit": environment.commit(),
    }
    text = json.dumps(found, indent=1, allow_nan=False) + "\n"
    write_atomic(path_of(out, run), text.encode())
    return found


class TrainingImages:
    """The first training images in order and as they are, in batches, to be gone through repeatedly.

    Args:
        feed: The data of a run.
    """

    def __init__(self, feed: MemoryFeed) -> None:
        self.feed = feed
        self.count = min(feed.train_count, _IMAGES)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches."""
        feed, border = self.feed, self.feed.padding
        _, rows, columns = feed.shape
        images = feed.train_images[:, border : border + rows, border : border + columns]
        for at in range(0, self.count, _BATCH):
            part = slice(at, min(at + _BATCH, self.count))
            yield feed.normalise(images[part]), feed.train_labels[part]
