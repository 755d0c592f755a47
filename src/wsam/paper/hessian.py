"""Top Hessian eigenvalues of trained models in eight ways; the paper does not state its own.

BatchNorm in training or evaluation mode, images with or without augmentation, and either one product
over all batches or one mini-batch for each step of a power iteration, as some tools do it. Precision,
images, batch size and tolerance are the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, cast

import torch
from torch import nn

from wsam.lab import environment
from wsam.lab.data.feed import Batch, DataFeed
from wsam.lab.execution import ExecutionConfig
from wsam.lab.loaded_model import restore
from wsam.lab.metrics import mean_loss
from wsam.lab.problem import make_data_feed
from wsam.lab.run import Run
from wsam.paper import minima
from wsam.paper.cifar import scratch_run
from wsam.paper.minima import TOLERANCE
from wsam.paper.table import PAPER_SEEDS, Cell, Kind, Measure, Table
from wsam.sweep.grid import with_seeds

IMAGES = 10_000
STEPS = 100
"""Steps of a power iteration with one mini-batch each."""
MODES = {"train": "training", "eval": "evaluation"}
METHODS = ("SGDM", "SAM", "WSAM")
FULL, BY_BATCH = "all batches", "one batch a step"
AUGMENTED, PLAIN = "augmented", "plain"
MEASURES = {
    (mode, images, way): Measure(f"top eigenvalue, {mode}, {images}, {way}")
    for mode, images, way in product(MODES, (AUGMENTED, PLAIN), (FULL, BY_BATCH))
}
Mode = Literal["train", "eval"]


def hessian_table() -> Table:
    """The top Hessian eigenvalue at the minima of ResNet18 on CIFAR-10, in eight ways."""
    ways = product(("eval", "train"), (AUGMENTED, PLAIN), METHODS, (FULL, BY_BATCH))
    cells = tuple(
        Cell(
            (MODES[mode], images, method),
            way,
            with_seeds(scratch_run("ResNet18", "CIFAR-10", method), PAPER_SEEDS),
            measure=MEASURES[mode, images, way],
        )
        for mode, images, method, way in ways
    )
    notes = (
        f"Of the mean loss over {IMAGES:,} training images, the same for all rows, in batches of the "
        "training batch size, in float32 (TF32 convolutions on a GPU).",
        f"{FULL.capitalize()}: Lanczos, to a relative residual of {TOLERANCE:g}.",
        f"{BY_BATCH.capitalize()}: {STEPS} steps of power iteration, each with the Hessian of one "
        "mini-batch; the mean of the last half of the Rayleigh quotients.",
    )
    title = "Top Hessian eigenvalue of ResNet18 on CIFAR-10 by the way of measuring"
    heads = ("BatchNorm", "images", "optimizer")
    return Table("hessian", title, heads, cells, Kind.STUDY, notes=notes)


def measure(run: Run, out: Path, execution: ExecutionConfig) -> dict[str, Any]:
    """Measure the kept weights of a run in all eight ways; those measured before are kept.

    Args:
        run: A finished run whose weights were kept.
        out: Folder of the results.
        execution: Device and data folder.

    Raises:
        FileNotFoundError: A reading is missing, and the weights were not kept.
    """
    measurement = minima.measure(run, out, execution)
    readings: dict[str, Any] = dict(measurement.get(minima.READINGS, {}))
    missing = {way: name for way, name in MEASURES.items() if str(name) not in readings}
    if not missing:
        return measurement
    model, plain = restore(run, out, execution)
    device = execution.resolve_device()
    augmented = make_data_feed(run.replace(augment=True), execution)
    feeds = {PLAIN: plain, AUGMENTED: augmented}
    batches = {images: fixed_batches(feed, run.batch_size) for images, feed in feeds.items()}
    loss = mean_loss(plain.loss)
    for (mode, images, way), name in missing.items():
        read = full_eigenvalue if way == FULL else eigenvalue_by_batches
        begin = time.monotonic()
        reading = read(model, loss, batches[images], cast(Mode, mode))
        readings[str(name)] = {
            **reading,
            "mode": mode,
            "augmented": images == AUGMENTED,
            "images": sum(len(targets) for _, targets in batches[images]),
            "batch": run.batch_size,
            "seconds": time.monotonic() - begin,
            **environment.describe_environment(device),
        }
        measurement[minima.READINGS] = readings
        minima.write_measurement(out, run, measurement)
    return measurement


def fixed_batches(feed: DataFeed, batch_size: int) -> list[Batch]:
    """Return the first batches of an epoch; with and without augmentation they have the same images."""
    count = max(1, min(IMAGES, feed.counts["train"]) // batch_size)
    return list(islice(feed.epoch(), count))


def full_eigenvalue(
    model: nn.Module, loss: Any, batches: Sequence[Batch], mode: Mode
) -> dict[str, Any]:
    """Return the top eigenvalue of the Hessian over all batches."""
    from wsam.curvature import hessian

    return minima.top_eigenvalue(hessian(model, loss, batches, mode=mode))


def eigenvalue_by_batches(
    model: nn.Module, loss: Any, batches: Sequence[Batch], mode: Mode
) -> dict[str, Any]:
    """Return the eigenvalue of a power iteration that uses the next mini-batch in each step.

    Returns:
        ``top_eigenvalue``, the mean of the last half of the Rayleigh quotients, and their
        ``deviation``; ``stopped``, the quotient at which a tool would stop that compares it with the
        one before.
    """
    from wsam.curvature import hessian

    operators = [hessian(model, loss, [batch], mode=mode) for batch in batches[:STEPS]]
    size = operators[0].shape[0]
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(size, generator=generator).to(operators[0].device, operators[0].dtype)
    vector /= vector.norm()
    quotients: list[float] = []
    stopped = None
    for step in range(STEPS):
        product = operators[step % len(operators)] @ vector
        quotients.append(float(vector @ product))
        vector = product / product.norm()
        if stopped is None and step and _is_close(*quotients[-2:]):
            stopped = quotients[-1]
    last = quotients[STEPS // 2 :]
    return {
        "top_eigenvalue": fmean(last),
        "deviation": stdev(last),
        "stopped": stopped,
        "products": STEPS,
    }


def _is_close(before: float, now: float) -> bool:
    return abs(now - before) <= TOLERANCE * abs(before)
