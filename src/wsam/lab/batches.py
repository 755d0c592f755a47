"""Batches made where the model trains: shuffling, crops, mirror images and normalisation.

A feed hands out one epoch after the other. Every step of an epoch has the same number of images,
so that a captured step fits all of them: the few that are left over after the last full batch (80
of CIFAR's 50,000 at batch 128) are other ones in every epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from wsam.lab.data import Images, Traits

Batch = tuple[Tensor, Tensor]
_TEST_BATCH = {"cuda": 2000}
_TEST_BATCH_ELSEWHERE = 500


class Feed(Protocol):
    """What training needs of data, be it in memory or in files."""

    traits: Traits
    shape: tuple[int, int, int]
    """Channels, rows, columns of an image as the model sees it."""
    batch_size: int
    steps: int
    """Steps of an epoch."""
    train_count: int
    test_count: int
    verified: str
    generator: torch.Generator
    """All randomness of order and augmentation; its state is all a resumed run needs."""

    def epoch(self) -> Iterator[Batch]:
        """Yield the training batches of one more epoch."""
        ...

    def test(self) -> Iterator[Batch]:
        """Yield the test set in large batches."""
        ...


def stream(seed: int, name: str) -> int:
    """Return a seed for one use of randomness, unrelated to those of its other uses."""
    digest = hashlib.sha256(f"{name}:{seed}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def noisy(labels: Tensor, classes: int, fraction: float, seed: int) -> Tensor:
    """Return labels with symmetric noise.

    A share of the labels, chosen at random, is drawn anew, uniformly over all classes: the old
    label included, so a fraction f leaves about ``1 - f + f/classes`` of them right.

    Args:
        labels: The labels, on the CPU.
        classes: How many classes there are.
        fraction: The share that is drawn anew.
        seed: Of the choice and the drawing.

    Reference:
        Arazo et al., Unsupervised label noise modeling and loss correction, ICML 2019.
    """
    count = round(fraction * len(labels))
    generator = torch.Generator().manual_seed(stream(seed, "label noise"))
    chosen = torch.randperm(len(labels), generator=generator)[:count]
    changed = labels.clone()
    changed[chosen] = torch.randint(classes, (count,), generator=generator)
    return changed


def crop(
    padded: Tensor, index: Tensor, top: Tensor, left: Tensor, flip: Tensor, size: int
) -> Tensor:
    """Cut one window out of each chosen image, some of them mirrored, by a single gather.

    Args:
        padded: Images with their border, (count, rows, columns, channels).
        index: Which images, (batch,).
        top: First row of each window, (batch,).
        left: First column of each window, (batch,).
        flip: Which windows are mirrored left to right, (batch,) of bool.
        size: Rows and columns of a window.

    Returns:
        (batch, size, size, channels).
    """
    along = torch.arange(size, device=padded.device)
    across = torch.where(flip[:, None], size - 1 - along, along)
    rows = (top[:, None] + along)[:, :, None]
    columns = (left[:, None] + across)[:, None, :]
    return padded[index[:, None, None], rows, columns]


class Normaliser:
    """Turns (batch, rows, columns, channels) bytes into what a model takes, channels last in memory.

    Args:
        traits: Mean and deviation of the channels.
        device: Where images are.
    """

    def __init__(self, traits: Traits, device: torch.device) -> None:
        std = torch.tensor(traits.std, device=device)
        self.scale = 1 / (255 * std)
        self.shift = -torch.tensor(traits.mean, device=device) / std

    def __call__(self, images: Tensor) -> Tensor:
        """Return (batch, channels, rows, columns) floats of mean 0 and deviation 1."""
        return torch.addcmul(self.shift, images.float(), self.scale).permute(0, 3, 1, 2)


class MemoryFeed:
    """Feeds images that live on the training device as bytes.

    All random numbers of an epoch are drawn at its start, on the device; nothing in an epoch waits
    for the device.

    Args:
        images: The data set, with label noise already applied.
        batch_size: Images per step; at most as many as there are.
        device: Where the model trains.
        seed: Of order and augmentation.
        augment: Use the data set's crops and mirror images.
    """

    def __init__(
        self, images: Images, batch_size: int, device: torch.device, seed: int, augment: bool
    ) -> None:
        self.traits = images.traits
        self.verified = images.verified
        self.train_count, rows, columns, channels = images.train_images.shape
        self.test_count = len(images.test_labels)
        self.shape = (channels, rows, columns)
        self.batch_size = min(batch_size, self.train_count)
        self.steps = self.train_count // self.batch_size
        self.generator = torch.Generator(device).manual_seed(stream(seed, "data"))
        self.device = device
        self.padding = self.traits.padding if augment else 0
        self.flip = self.traits.flip and augment
        border = (0, 0, *[self.padding] * 4)
        self.train_images = torch.nn.functional.pad(images.train_images.to(device), border)
        self.train_labels = images.train_labels.to(device)
        self.test_images = images.test_images.to(device)
        self.test_labels = images.test_labels.to(device)
        self.normalise = Normaliser(self.traits, device)

    def epoch(self) -> Iterator[Batch]:
        """Yield the training batches of one more epoch."""
        order = torch.randperm(self.train_count, generator=self.generator, device=self.device)
        top, left = self._draw(2 * self.padding + 1), self._draw(2 * self.padding + 1)
        flip = self._draw(2).bool() if self.flip else torch.zeros_like(top, dtype=torch.bool)
        for step in range(self.steps):
            part = slice(step * self.batch_size, (step + 1) * self.batch_size)
            index = order[part]
            yield self._images(index, top[part], left[part], flip[part]), self.train_labels[index]

    def _images(self, index: Tensor, top: Tensor, left: Tensor, flip: Tensor) -> Tensor:
        if not (self.padding or self.flip):
            return self.normalise(self.train_images[index])
        return self.normalise(crop(self.train_images, index, top, left, flip, self.shape[1]))

    def _draw(self, below: int) -> Tensor:
        size = (self.train_count,)
        return torch.randint(below, size, generator=self.generator, device=self.device)

    def test(self) -> Iterator[Batch]:
        """Yield the test set in large batches."""
        size = _TEST_BATCH.get(self.device.type, _TEST_BATCH_ELSEWHERE)
        for at in range(0, self.test_count, size):
            part = slice(at, at + size)
            yield self.normalise(self.test_images[part]), self.test_labels[part]
