"""How a run is executed: device, data location, compilation. Not part of the run's key."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import nn

from wsam._core import validation
from wsam.lab import datasets, models
from wsam.lab.data_feed import DataFeed, MemoryFeed, add_label_noise, split_validation
from wsam.lab.image_folder import FolderFeed, find_root
from wsam.lab.run import Run


@dataclass(frozen=True)
class ExecutionConfig:
    """How a run is executed. Nothing here changes the run's settings or its key.

    Args:
        device: ``auto`` (a GPU if available), ``cpu``, ``cuda`` or ``cuda:N``.
        compile: Compile the model; None: on CUDA only.
        capture: Replay the whole step from a CUDA graph; None: on CUDA only.
        keep_weights: Keep the final weights.
        checkpoint_seconds: Minimum time between checkpoints, which are saved after an epoch.
        source: Where data is stored and whether it may be downloaded.
        retry: Train a run again whose record is marked as failed.
        workers: Processes that decode image files; None: one per core.
    """

    device: str = "auto"
    compile: bool | None = None
    capture: bool | None = None
    keep_weights: bool = False
    checkpoint_seconds: float = 60.0
    source: datasets.DataSource = field(
        default_factory=lambda: datasets.DataSource(datasets.default_folder())
    )
    retry: bool = False
    workers: int | None = None

    def __post_init__(self) -> None:
        """Check the time between checkpoints; infinity means no checkpoints."""
        validation.number("checkpoint_seconds", self.checkpoint_seconds, high_open=False)

    def resolve_device(self) -> torch.device:
        """Return the device.

        Raises:
            ValueError: The device does not exist or is not available.
        """
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        unknown = f"device {self.device!r} cannot be used: it must be auto, cpu, cuda or cuda:N"
        try:
            device = torch.device(self.device)
        except RuntimeError as error:  # torch's message lists twenty device types
            raise ValueError(unknown) from error
        if device.type == "meta" or (device.type == "cpu" and device.index):
            raise ValueError(unknown)  # valid for torch, but nothing can be trained there
        try:
            torch.zeros(1, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"device {self.device!r} cannot be used: {reason}") from error
        return device


def make_data_feed(run: Run, execution: ExecutionConfig, device: torch.device) -> DataFeed:
    """Return the run's data, with its label noise and limits, as batches on the device."""
    if run.data in datasets.LOADERS:
        images = datasets.load(run.data, execution.source)
        images = images.limited(run.train_limit, run.test_limit)
        if run.validation is not None:
            count = len(images.train_labels)
            seed = run.validation_seed or 0
            images = images.split(*split_validation(count, run.validation, seed))
        labels = add_label_noise(
            images.train_labels, images.info.classes, run.noise, run.noise_seed
        )
        images = replace(images, train_labels=labels)
        return MemoryFeed(images, run.batch_size, device, run.seed, run.augment)
    return FolderFeed(
        find_root(execution.source.folder, run.data.removeprefix("folder:")),
        run.batch_size,
        device,
        run.seed,
        run.augment,
        noise=(run.noise, run.noise_seed),
        limits=(run.train_limit, run.test_limit),
        workers=execution.workers,
        validation=None if run.validation is None else (run.validation, run.validation_seed or 0),
    )


def make_model(run: Run, feed: DataFeed, device: torch.device) -> nn.Module:
    """Return the run's initial model on the device, in channels-last memory format."""
    task = models.Task(feed.shape, feed.info.classes, run.data)
    model = models.build_model(run.model, task, run.seed, run.pretrained)
    placed: nn.Module = model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return placed
