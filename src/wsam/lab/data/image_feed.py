"""Labeled images as batches: crops, flips and normalization on the training device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from wsam.lab.data.datasets import DatasetInfo, Images, ImageSet
from wsam.lab.data.feed import Batch, DataFeed, add_label_noise, hold_out
from wsam.lab.metrics import ERROR, cross_entropy
from wsam.lab.models import Task
from wsam.lab.run import Run
from wsam.lab.settings import TEST, TRAIN


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
    """Labeled images.

    Args:
        run: As for `DataFeed`.
        device: The training device.
        counts: Number of images of each split.
        generator: As for `DataFeed`.
        info: Classes and channel statistics.
        shape: Channels, rows and columns of an image as passed to the model.
    """

    has_noise = True

    def __init__(
        self,
        run: Run,
        device: torch.device,
        counts: Mapping[str, int],
        generator: torch.Generator,
        info: DatasetInfo,
        shape: tuple[int, int, int],
    ) -> None:
        super().__init__(run, device, counts, generator)
        self.loss, self.metric = cross_entropy, ERROR
        self.task = Task(shape, info.classes, run.data)
        self.normalize = Normalizer(info, device)

    def example(self, count: int) -> Batch:
        """Return black images of the first class."""
        labels = torch.zeros(count, dtype=torch.int64, device=self.device)
        return torch.zeros(count, *self.task.shape, device=self.device), labels


class MemoryFeed(ImageFeed):
    """Batches of images that are stored on the training device as bytes.

    The random numbers of an epoch are drawn on the device when it begins. No step synchronizes with
    the device.

    Args:
        images: The data set.
        run: Has limits, validation split, label noise, batch size and seed, and whether to apply the
            data set's random crops and flips.
        device: The training device.
    """

    def __init__(self, images: Images, run: Run, device: torch.device) -> None:
        info, splits = images.info, _split_images(images, run)
        counts = {split: len(part.labels) for split, part in splits.items()}
        _, rows, columns, channels = images.train.images.shape
        shape = (channels, rows, columns)
        super().__init__(run, device, counts, torch.Generator(device), info, shape)
        self.verified = images.verified
        self.evaluation_batch = 2000 if device.type == "cuda" else 500
        self.padding = info.padding if run.augment else 0
        self.flip = info.flip and run.augment
        self.splits = {
            split: ImageSet(part.images.to(device), part.labels.to(device))
            for split, part in splits.items()
        }
        padded = pad(self.splits[TRAIN].images, (0, 0, *[self.padding] * 4))
        self.splits[TRAIN] = self.splits[TRAIN]._replace(images=padded)

    def epoch(self) -> Iterator[Batch]:
        """Yield the training batches of the next epoch."""
        images, labels = self.splits[TRAIN]
        order = torch.randperm(len(labels), generator=self.generator, device=self.device)
        top, left = self._randint(2 * self.padding + 1), self._randint(2 * self.padding + 1)
        flip = self._randint(2).bool() if self.flip else torch.zeros_like(top, dtype=torch.bool)
        _, rows, columns = self.task.shape
        for step in range(self.steps):
            part = slice(step * self.batch_size, (step + 1) * self.batch_size)
            index, crop = order[part], (top[part], left[part], flip[part])
            batch = crop_and_flip(images, index, *crop, (rows, columns))
            yield self.normalize(batch), labels[index]

    def _randint(self, high: int) -> Tensor:
        size = (self.counts[TRAIN],)
        return torch.randint(high, size, generator=self.generator, device=self.device)

    def fixed(self, split: str, count: int, size: int) -> Iterator[Batch]:
        """Yield the first `count` images of a split without augmentation, in batches of `size`."""
        images, labels = (torch.split(part[:count], size) for part in self.splits[split])
        yield from zip(map(self.normalize, images), labels, strict=True)


def _split_images(images: Images, run: Run) -> dict[str, ImageSet]:
    """Return the images of each split, with the run's limits and label noise."""
    pixels, labels = (part[: run.train_limit] for part in images.train)
    splits = {
        split: ImageSet(pixels[index], labels[index])
        for split, index in hold_out(run, len(labels)).items()
    }
    splits[TEST] = ImageSet(*(part[: run.test_limit] for part in images.test))
    labels = splits[TRAIN].labels
    noisy = add_label_noise(labels, images.info.classes, run.noise, run.noise_seed)
    splits[TRAIN] = splits[TRAIN]._replace(labels=noisy)
    return splits
