"""How a run is carried out: device, data, compilation. None of it is part of its settings."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from wsam import checks
from wsam.lab import data, models
from wsam.lab.batches import Feed, MemoryFeed, noisy
from wsam.lab.folder import FolderFeed, find_root
from wsam.lab.run import Run


@dataclass(frozen=True)
class Means:
    """How a run is carried out: nothing here changes its settings or its key.

    Args:
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda``, ``cuda:1``.
        compile: Compile the model; None for yes on CUDA.
        capture: Replay the whole step from a CUDA graph; None for yes on CUDA.
        keep_weights: Keep the final weights beside the record.
        checkpoint_seconds: Least time between checkpoints, which are made after an epoch.
        source: Where data is looked for.
        retry: Run a run again that failed before.
        workers: Processes that decode images from files; None for one per core.
    """

    device: str = "auto"
    compile: bool | None = None
    capture: bool | None = None
    keep_weights: bool = False
    checkpoint_seconds: float = 60.0
    source: data.Source = field(default_factory=lambda: data.Source(data.default_folder()))
    retry: bool = False
    workers: int | None = None

    def __post_init__(self) -> None:
        """Check the time between checkpoints; infinity means none at all."""
        checks.number("checkpoint_seconds", self.checkpoint_seconds, high_open=False)

    def place(self) -> torch.device:
        """Return the device.

        Raises:
            ValueError: There is no such device, or not here.
        """
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        unknown = f"device {self.device!r} cannot be used: it must be auto, cpu, cuda or cuda:N"
        try:
            device = torch.device(self.device)
        except RuntimeError as error:  # torch's own words list twenty kinds
            raise ValueError(unknown) from error
        if device.type == "meta" or (device.type == "cpu" and device.index):
            raise ValueError(unknown)  # torch takes both; neither is a place to train
        try:
            torch.zeros(1, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"device {self.device!r} cannot be used: {reason}") from error
        return device


def make_feed(run: Run, means: Means, device: torch.device) -> Feed:
    """Load the run's data, with its label noise and limits, and put it on the device."""
    if run.data in data.LOADERS:
        images = data.load(run.data, means.source).limited(run.train_limit, run.test_limit)
        classes = images.traits.classes
        images = images.relabelled(noisy(images.train_labels, classes, run.noise, run.noise_seed))
        return MemoryFeed(images, run.batch_size, device, run.seed, run.augment)
    return FolderFeed(
        find_root(means.source.folder, run.data.removeprefix("folder:")),
        run.batch_size,
        device,
        run.seed,
        run.augment,
        noise=(run.noise, run.noise_seed),
        limits=(run.train_limit, run.test_limit),
        workers=means.workers,
    )


def make_model(run: Run, feed: Feed, device: torch.device) -> nn.Module:
    """Build the run's model for its data, as it is before the first step, on the device."""
    task = models.Task(feed.shape, feed.traits.classes, run.data)
    model = models.build(run.model, task, run.seed, run.pretrained)
    placed: nn.Module = model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return placed
