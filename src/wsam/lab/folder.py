"""Images in folders named by class, as ImageNet comes: too many for memory, read as they are used.

``ROOT/train/CLASS/*.jpeg`` and ``ROOT/val/CLASS/*.jpeg``; classes are numbered in the order of
their names, which for ImageNet is the order pretrained weights expect. Pillow decodes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from wsam.lab.batches import Batch, Normaliser, noisy, stream
from wsam.lab.data import UNVERIFIED, Traits
from wsam.lab.environment import cores

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp"})
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_TEST_BATCH = 256
Ticket = tuple[int, int | None]
"""An image's number, and a seed for its augmentation or None."""


def find_root(folder: Path, name: str) -> Path:
    """Return the folder that holds ``train`` and ``val``.

    Raises:
        FileNotFoundError: There is none; the message says what is looked for.
    """
    for root in (folder / name, folder):
        if (root / "train").is_dir() and (root / "val").is_dir():
            return root
    raise FileNotFoundError(
        f"no images for {name}: {folder / name} must hold train/CLASS/*.jpeg and val/CLASS/*.jpeg"
    )


def list_images(folder: Path, classes: list[str]) -> tuple[list[Path], Tensor]:
    """Return all images of some classes, sorted, and their labels.

    Raises:
        FileNotFoundError: A class has no folder or no image.
    """
    paths, labels = [], []
    for label, name in enumerate(classes):
        inside = (folder / name).iterdir() if (folder / name).is_dir() else iter(())
        found = sorted(path for path in inside if path.suffix.lower() in SUFFIXES)
        if not found:
            raise FileNotFoundError(f"{folder / name} holds no images")
        paths += found
        labels += [label] * len(found)
    return paths, torch.tensor(labels)


class Decoded(Dataset[Batch]):
    """Decodes an image and cuts a square out of it: at random, or the middle.

    Args:
        paths: The images.
        labels: Their labels.
        size: Rows and columns of the square.
    """

    def __init__(self, paths: list[Path], labels: Tensor, size: int) -> None:
        self.paths, self.labels, self.size = paths, labels, size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, ticket: Ticket) -> Batch:
        """Return (rows, columns, channels) bytes and the label."""
        from PIL import Image, UnidentifiedImageError

        number, seed = ticket
        path = self.paths[number]
        try:
            with Image.open(path) as opened:
                image = opened.convert("RGB")
        except (UnidentifiedImageError, OSError) as error:
            raise ValueError(f"{path} is damaged or no image: {error}") from error
        if seed is None:
            square = middle(image, self.size)
        else:
            # A generator of its own for each image: workers may take them in any order.
            square = anywhere(image, self.size, random.Random(stream(seed, str(number))))
        pixels = torch.frombuffer(bytearray(square.tobytes()), dtype=torch.uint8)
        return pixels.view(self.size, self.size, 3), self.labels[number]


def middle(image: Any, size: int) -> Any:
    """Return the middle square of an image whose shorter side is brought to 8/7 of `size`."""
    from PIL import Image

    scale = round(size * 8 / 7) / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))


def anywhere(image: Any, size: int, rng: random.Random) -> Any:
    """Return a random part, 8% to all of the area and 3:4 to 4:3 in shape, mirrored or not."""
    from PIL import Image

    width, height = image.size
    box = (0, 0, width, height)
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1.0)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = rng.randint(0, width - w), rng.randint(0, height - h)
            box = (left, top, left + w, top + h)
            break
    image = image.resize((size, size), Image.Resampling.BICUBIC, box=box)
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else image


class FolderFeed:
    """Feeds images that are decoded by worker processes while the model trains.

    Args:
        root: The folder that holds ``train`` and ``val``.
        batch_size: Images per step.
        device: Where the model trains.
        seed: Of order and augmentation.
        augment: Random crops and mirror images; else the middle.
        noise: Fraction of labels drawn anew, and the seed of that.
        limits: At most this many images to train on and to test on.
        size: Rows and columns the model sees.
        workers: Processes that decode; None for one per core.
    """

    verified = UNVERIFIED

    def __init__(
        self,
        root: Path,
        batch_size: int,
        device: torch.device,
        seed: int,
        augment: bool,
        noise: tuple[float, int] = (0.0, 0),
        limits: tuple[int | None, int | None] = (None, None),
        size: int = 224,
        workers: int | None = None,
    ) -> None:
        classes = sorted(path.name for path in (root / "train").iterdir() if path.is_dir())
        self.traits = Traits(len(classes), _MEAN, _STD)
        self.train_set = self._part(root / "train", classes, limits[0], size)
        self.train_set.labels = noisy(self.train_set.labels, len(classes), *noise)
        self.test_set = self._part(root / "val", classes, limits[1], size)
        self.shape = (3, size, size)
        self.train_count, self.test_count = len(self.train_set), len(self.test_set)
        self.batch_size = min(batch_size, self.train_count)
        self.steps = self.train_count // self.batch_size
        self.generator = torch.Generator().manual_seed(stream(seed, "data"))
        self.augment, self.device = augment, device
        self.workers = cores() if workers is None else workers
        self.normalise = Normaliser(self.traits, device)

    @staticmethod
    def _part(folder: Path, classes: list[str], limit: int | None, size: int) -> Decoded:
        paths, labels = list_images(folder, classes)
        if limit is not None:
            # The list goes class by class: a fixed shuffle keeps all classes in a small part.
            generator = torch.Generator().manual_seed(0)
            few = torch.randperm(len(paths), generator=generator)[:limit]
            paths, labels = [paths[number] for number in few.tolist()], labels[few]
        return Decoded(paths, labels, size)

    def epoch(self) -> Iterator[Batch]:
        """Yield the training batches of one more epoch."""
        order = torch.randperm(self.train_count, generator=self.generator).tolist()
        seed = int(torch.randint(2**62, (), generator=self.generator)) if self.augment else None
        used = order[: self.steps * self.batch_size]
        return self.batches(self.train_set, [(number, seed) for number in used], self.batch_size)

    def test(self) -> Iterator[Batch]:
        """Yield the test set in large batches."""
        tickets: list[Ticket] = [(number, None) for number in range(self.test_count)]
        return self.batches(self.test_set, tickets, _TEST_BATCH)

    def batches(self, images: Decoded, tickets: list[Ticket], size: int) -> Iterator[Batch]:
        """Yield images in the order of their tickets, on the device."""
        loader = DataLoader(
            images,
            batch_sampler=[tickets[at : at + size] for at in range(0, len(tickets), size)],
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            # Workers seed themselves from this; the global generator must not be drawn from.
            generator=torch.Generator(),
        )
        for pixels, labels in loader:
            yield (
                self.normalise(pixels.to(self.device, non_blocking=True)),
                labels.to(self.device, non_blocking=True),
            )
