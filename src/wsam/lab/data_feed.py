"""Batches prepared on the training device: shuffling, crops, flips and normalization.

All batches of an epoch have the same size, so that one captured step fits all of them. The images
left over after the last full batch (80 of CIFAR's 50,000 at batch size 128) differ in each epoch.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from wsam.lab.datasets import DatasetInfo, Images
from wsam.lab.metrics import ERROR, Loss, Metric, cross_entropy
from wsam.lab.models import Task

Batch = tuple[Any, Any]
"""What the model is called with, and the targets."""
Validation = tuple[float | int, int] | None
"""Size (a fraction, or a number of samples) and seed of the validation split; None for none."""
TRAIN, VALIDATION, TEST = SPLITS = ("train", "validation", "test")
_TEST_BATCH_CUDA, _TEST_BATCH_CPU = 2000, 500


class DataFeed(ABC):
    """The data of a run, in memory or in files, with its loss and its metric."""

    batch_size: int
    steps: int
    """Steps per epoch."""
    train_count: int
    validation_count: int
    """0 if the run has no validation split."""
    test_count: int
    verified: str
    generator: torch.Generator
    """Source of all randomness in order and augmentation; its state is all a resume needs."""
    loss: Loss
    metric: Metric
    task: Task
    """What a named model must know of the data."""
    name: str = "the data"
    """Name of the data, for messages."""
    units: tuple[float, float] | None = None
    """Mean and deviation that real targets were standardised by; metrics are in the original unit."""

    @abstractmethod
    def example(self, count: int) -> Batch:
        """Return a batch of the shape of `count` samples, to check the model with."""

    @abstractmethod
    def epoch(self) -> Iterator[Batch]:
        """Yield the training batches of the next epoch."""

    @abstractmethod
    def fixed(self, split: str, count: int, size: int) -> Iterator[Batch]:
        """Yield the first `count` samples of a split without augmentation, in batches of `size`."""

    @abstractmethod
    def evaluation(self, split: str) -> Iterator[Batch]:
        """Yield a whole split without augmentation, in large batches."""


def batch_loader(
    dataset: Any,
    samples: list[Any],
    size: int,
    workers: int,
    device: torch.device,
    generator: torch.Generator | None = None,
    **options: Any,
) -> DataLoader[Any]:
    """Return a loader of ``dataset[sample]`` for the given samples, in their order.

    The seeds of the workers depend on the state of `generator`, which is not advanced.
    """
    seeds = torch.Generator()  # not the global one, which must not advance
    if generator is not None:
        seeds.set_state(generator.get_state())
    return DataLoader(
        dataset,
        batch_sampler=[samples[at : at + size] for at in range(0, len(samples), size)],
        num_workers=workers,
        pin_memory=device.type == "cuda",
        generator=seeds,
        **options,
    )


def split_validation(count: int, size: float | int, seed: int) -> tuple[Tensor, Tensor]:
    """Divide training samples at random into a training and a validation part.

    Args:
        count: Number of samples.
        size: Fraction or number of samples for validation.
        seed: Seed of the choice.

    Returns:
        The indices of the training and of the validation samples, both ascending.

    Raises:
        ValueError: One of the two parts would be empty.
    """
    chosen = round(size * count) if isinstance(size, float) else size
    if not 0 < chosen < count:
        raise ValueError(
            f"a validation split of {size:g} leaves {chosen} of {count} samples for validation "
            f"and {count - chosen} for training; both parts need at least one"
        )
    generator = torch.Generator().manual_seed(derive_seed(seed, "validation"))
    order = torch.randperm(count, generator=generator)
    return order[chosen:].sort().values, order[:chosen].sort().values


def fixed_order(count: int) -> Tensor:
    """Return a random order of samples that is the same for every run."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))


def derive_seed(seed: int, name: str) -> int:
    """Return a seed for one use of randomness, independent of the seeds of other uses."""
    digest = hashlib.sha256(f"{name}:{seed}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def add_label_noise(labels: Tensor, classes: int, fraction: float, seed: int) -> Tensor:
    """Return labels with symmetric noise.

    A random subset of the labels is redrawn uniformly over all classes. The new label may equal the
    old one, so a fraction f leaves about ``1 - f + f/classes`` of the labels correct.

    Args:
        labels: The labels, on the CPU.
        classes: Number of classes.
        fraction: Fraction of labels to redraw.
        seed: Seed of the subset and of the new labels.

    Reference:
        Arazo et al., Unsupervised label noise modeling and loss correction, ICML 2019.
    """
    count = round(fraction * len(labels))
    generator = torch.Generator().manual_seed(derive_seed(seed, "label noise"))
    chosen = torch.randperm(len(labels), generator=generator)[:count]
    changed = labels.clone()
    changed[chosen] = torch.randint(classes, (count,), generator=generator)
    return changed


def crop_and_flip(
    padded: Tensor,
    index: Tensor,
    top: Tensor,
    left: Tensor,
    flip: Tensor,
    size: tuple[int, int],
) -> Tensor:
    """Crop each selected image and flip some of them, with a single gather.

    Args:
        padded: Padded images, (count, rows, columns, channels).
        index: Indices of the images, (batch,).
        top: First row of each crop, (batch,).
        left: First column of each crop, (batch,).
        flip: Which crops to flip horizontally, (batch,) of bool.
        size: Rows and columns of a crop.

    Returns:
        The crops, (batch, rows, columns, channels).
    """
    height, width = size
    down, across = (torch.arange(length, device=padded.device) for length in (height, width))
    flipped = torch.where(flip[:, None], width - 1 - across, across)
    rows = (top[:, None] + down)[:, :, None]
    columns = (left[:, None] + flipped)[:, None, :]
    return padded[index[:, None, None], rows, columns]


class Normalizer:
    """Converts (batch, rows, columns, channels) bytes to normalized floats.

    Args:
        info: Mean and standard deviation of each channel.
        device: The device of the images.
    """

    def __init__(self, info: DatasetInfo, device: torch.device) -> None:
        std = torch.tensor(info.std, device=device)
        self.scale = 1 / (255 * std)
        self.shift = -torch.tensor(info.mean, device=device) / std

    def __call__(self, images: Tensor) -> Tensor:
        """Return (batch, channels, rows, columns) floats, channels last in memory."""
        return torch.addcmul(self.shift, images.float(), self.scale).permute(0, 3, 1, 2)


class ImageFeed(DataFeed):
    """Labelled images."""

    shape: tuple[int, int, int]
    """Channels, rows and columns of an image as passed to the model."""

    def __init__(self, info: DatasetInfo, device: torch.device) -> None:
        self.info, self.device = info, device
        self.loss, self.metric = cross_entropy, ERROR
        self.normalize = Normalizer(info, device)

    @property
    def task(self) -> Task:  # type: ignore[override]
        """What a named model must know of the data."""
        return Task(self.shape, self.info.classes, self.name)

    def example(self, count: int) -> Batch:
        """Return black images of the first class."""
        labels = torch.zeros(count, dtype=torch.int64, device=self.device)
        return torch.zeros(count, *self.shape, device=self.device), labels


class MemoryFeed(ImageFeed):
    """Batches of images that are stored on the training device as bytes.

    The random numbers of an epoch are drawn on the device when it begins. No step synchronizes with
    the device.

    Args:
        images: The data set, with label noise already applied.
        batch_size: Images per step; reduced to the number of images if there are fewer.
        device: The training device.
        seed: Seed of order and augmentation.
        augment: Apply the data set's random crops and flips.
    """

    def __init__(
        self, images: Images, batch_size: int, device: torch.device, seed: int, augment: bool
    ) -> None:
        super().__init__(images.info, device)
        self.verified = images.verified
        self.train_count, rows, columns, channels = images.train_images.shape
        self.test_count = len(images.test_labels)
        self.validation_count = 0
        self.shape = (channels, rows, columns)
        self.batch_size = min(batch_size, self.train_count)
        self.steps = self.train_count // self.batch_size
        self.generator = torch.Generator(device).manual_seed(derive_seed(seed, "data"))
        self.padding = self.info.padding if augment else 0
        self.flip = self.info.flip and augment
        border = (0, 0, *[self.padding] * 4)
        self.train_images = torch.nn.functional.pad(images.train_images.to(device), border)
        self.train_labels = images.train_labels.to(device)
        self.test_images = images.test_images.to(device)
        self.test_labels = images.test_labels.to(device)
        if images.validation_images is not None and images.validation_labels is not None:
            self.validation_images = images.validation_images.to(device)
            self.validation_labels = images.validation_labels.to(device)
            self.validation_count = len(self.validation_labels)

    def epoch(self) -> Iterator[Batch]:
        """Yield the training batches of the next epoch."""
        order = torch.randperm(self.train_count, generator=self.generator, device=self.device)
        top, left = self._randint(2 * self.padding + 1), self._randint(2 * self.padding + 1)
        flip = self._randint(2).bool() if self.flip else torch.zeros_like(top, dtype=torch.bool)
        for step in range(self.steps):
            part = slice(step * self.batch_size, (step + 1) * self.batch_size)
            index = order[part]
            yield self._images(index, top[part], left[part], flip[part]), self.train_labels[index]

    def _images(self, index: Tensor, top: Tensor, left: Tensor, flip: Tensor) -> Tensor:
        if not (self.padding or self.flip):
            return self.normalize(self.train_images[index])
        crops = crop_and_flip(self.train_images, index, top, left, flip, self.shape[1:])
        return self.normalize(crops)

    def _randint(self, high: int) -> Tensor:
        size = (self.train_count,)
        return torch.randint(high, size, generator=self.generator, device=self.device)

    def fixed(self, split: str, count: int, size: int) -> Iterator[Batch]:
        """Yield the first `count` images of a split without augmentation, in batches of `size`."""
        images, labels = getattr(self, f"{split}_images"), getattr(self, f"{split}_labels")
        for start in range(0, count, size):
            part = slice(start, min(start + size, count))
            yield self.normalize(images[part]), labels[part]

    def evaluation(self, split: str) -> Iterator[Batch]:
        """Yield a whole split without augmentation, in large batches."""
        size = _TEST_BATCH_CUDA if self.device.type == "cuda" else _TEST_BATCH_CPU
        return self.fixed(split, getattr(self, f"{split}_count"), size)


class TensorFeed(DataFeed):
    """Batches of samples that are stored on the training device.

    Args:
        splits: Inputs and targets of ``train``, ``test`` and possibly ``validation``.
        task: What a named model must know of the data.
        loss: Compares outputs and targets.
        metric: The default metric.
        batch_size: Samples per step; reduced to the number of samples if there are fewer.
        device: The training device.
        seed: Seed of the order.
        units: Mean and deviation that real targets were standardised by.
    """

    verified = "own data"

    def __init__(
        self,
        splits: Mapping[str, tuple[Tensor, Tensor]],
        task: Task,
        loss: Loss,
        metric: Metric,
        batch_size: int,
        device: torch.device,
        seed: int,
        units: tuple[float, float] | None = None,
    ) -> None:
        self.task, self.loss, self.metric, self.units = task, loss, metric, units
        self.device, self.name = device, task.data
        self.splits = {name: (x.to(device), y.to(device)) for name, (x, y) in splits.items()}
        self.train_count, self.validation_count, self.test_count = (
            len(self.splits[split][1]) if split in self.splits else 0 for split in SPLITS
        )
        self.batch_size = min(batch_size, self.train_count)
        self.steps = self.train_count // self.batch_size
        self.generator = torch.Generator(device).manual_seed(derive_seed(seed, "data"))

    def example(self, count: int) -> Batch:
        """Return the first training samples."""
        return next(self.fixed(TRAIN, count, count))

    def epoch(self) -> Iterator[Batch]:
        """Yield the training batches of the next epoch."""
        inputs, targets = self.splits[TRAIN]
        order = torch.randperm(self.train_count, generator=self.generator, device=self.device)
        for step in range(self.steps):
            index = order[step * self.batch_size : (step + 1) * self.batch_size]
            yield inputs[index], targets[index]

    def fixed(self, split: str, count: int, size: int) -> Iterator[Batch]:
        """Yield the first `count` samples of a split, in batches of `size`."""
        inputs, targets = (part[:count] for part in self.splits[split])
        for start in range(0, len(targets), size):
            yield inputs[start : start + size], targets[start : start + size]

    def evaluation(self, split: str) -> Iterator[Batch]:
        """Yield a whole split, in large batches."""
        return self.fixed(split, getattr(self, f"{split}_count"), _TEST_BATCH_CPU)
