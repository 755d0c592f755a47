"""Images in folders named by class, such as ImageNet: too large for memory, decoded during training.

Layout: images in ``ROOT/train/CLASS`` and ``ROOT/val/CLASS`` (or ``test``). Classes are numbered
in the order of their names, as pretrained ImageNet weights expect. Pillow decodes the files.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from wsam.lab.data.datasets import UNVERIFIED, DatasetInfo
from wsam.lab.data.feed import (
    Batch,
    add_label_noise,
    batch_loader,
    derive_seed,
    fixed_order,
    hold_out,
)
from wsam.lab.data.image_feed import ImageFeed
from wsam.lab.environment import available_cores
from wsam.lab.run import Run
from wsam.lab.settings import TEST, TRAIN

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp"})
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IMAGENET_SIZE = 224
Sample = tuple[int, int | None]
"""The index of an image and the seed of its augmentation; None for the center crop."""


def find_root(folder: Path, name: str) -> Path:
    """Return the folder that contains ``train``, and ``val`` or ``test``.

    Args:
        folder: The data folder.
        name: A path, absolute or relative to the current folder; else one within the data folder.

    Raises:
        FileNotFoundError: Neither the path, ``folder/name`` nor `folder` contains them.
    """
    for root in (Path(name), folder / name, folder):
        if (root / "train").is_dir() and val_folder(root).is_dir():
            return root
    paths = dict.fromkeys((str(Path(name).absolute()), str(folder / name)))
    raise FileNotFoundError(
        f"no images for {name}: {' or '.join(paths)} must contain the folders train/CLASS and "
        f"val/CLASS (or test/CLASS) with images ({', '.join(sorted(SUFFIXES))})"
    )


def val_folder(root: Path) -> Path:
    """Return the folder of the test images: ``val``, else ``test``."""
    return root / "val" if (root / "val").is_dir() else root / "test"


def class_names(root: Path) -> list[str]:
    """Return the names of the classes, sorted."""
    return sorted(path.name for path in (root / "train").iterdir() if path.is_dir())


class ImageError(ValueError):
    """An image cannot be decoded."""


@contextmanager
def open_image(path: Path) -> Iterator[Any]:
    """Open an image file; an error while it is open names the file.

    Raises:
        ImageError: The file is damaged or not an image.
    """
    from PIL import Image

    try:
        with Image.open(path) as opened:
            yield opened
    # A broken PNG raises SyntaxError; an image of too many pixels, DecompressionBombError.
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ImageError(f"{path} is damaged or not an image: {error}") from error


def image_pixels(image: Any) -> Tensor:
    """Return the bytes of an RGB image as (rows, columns, 3)."""
    data = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return data.view(image.height, image.width, 3)


def list_images(folder: Path, classes: list[str]) -> tuple[list[Path], Tensor]:
    """Return the sorted paths of all images of the given classes, and their labels.

    Raises:
        FileNotFoundError: A class has no folder or no image.
    """
    paths, labels = [], []
    for label, name in enumerate(classes):
        entries = (folder / name).iterdir() if (folder / name).is_dir() else iter(())
        found = sorted(path for path in entries if path.suffix.lower() in SUFFIXES)
        if not found:
            raise FileNotFoundError(f"{folder / name} contains no images")
        paths += found
        labels += [label] * len(found)
    return paths, torch.tensor(labels)


class ImageFiles(Dataset[Batch]):
    """Decodes image files and crops them to squares.

    Args:
        paths: The files.
        labels: Their labels.
        size: Rows and columns of a crop.
    """

    def __init__(self, paths: list[Path], labels: Tensor, size: int) -> None:
        self.paths, self.labels, self.size = paths, labels, size

    def __len__(self) -> int:
        return len(self.paths)

    def subset(self, index: Tensor) -> ImageFiles:
        """Return the files with the given indices, in their order."""
        return ImageFiles([self.paths[n] for n in index.tolist()], self.labels[index], self.size)

    def __getitem__(self, sample: Sample) -> Batch:
        """Return (rows, columns, channels) bytes and the label."""
        index, seed = sample
        with open_image(self.paths[index]) as opened:
            image = opened.convert("RGB")
        if seed is None:
            crop = center_crop(image, self.size)
        else:
            # One generator per image: workers may decode them in any order.
            crop = random_crop(image, self.size, random.Random(derive_seed(seed, str(index))))
        return image_pixels(crop), self.labels[index]


def _list_split(folder: Path, classes: list[str], limit: int | None, size: int) -> ImageFiles:
    images = ImageFiles(*list_images(folder, classes), size)
    if limit is None:
        return images
    # The list is sorted by class; a fixed shuffle keeps all classes in a small subset.
    return images.subset(fixed_order(len(images))[:limit])


def center_crop(image: Any, size: int) -> Any:
    """Resize the shorter side to 8/7 of `size` and return the center square."""
    from PIL import Image

    scale = round(size * 8 / 7) / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))


def random_crop(image: Any, size: int, rng: random.Random) -> Any:
    """Return a random resized crop: 8 to 100% of the area, ratio 3:4 to 4:3, flipped or not."""
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


class FolderFeed(ImageFeed):
    """Batches of image files that worker processes decode during training.

    Args:
        root: The folder that contains ``train``, and ``val`` or ``test``.
        run: Has image size, limits, validation split, label noise, batch size and seed, and whether
            to train on random crops and flips instead of center crops.
        device: The training device.
        workers: Processes that decode; None: one per core.
    """

    verified = UNVERIFIED
    evaluation_batch = 256

    def __init__(
        self, root: Path, run: Run, device: torch.device, workers: int | None = None
    ) -> None:
        classes, size = class_names(root), run.image_size or IMAGENET_SIZE
        images = _list_split(root / "train", classes, run.train_limit, size)
        parts = hold_out(run, len(images))
        self.splits = {split: images.subset(index) for split, index in parts.items()}
        self.splits[TEST] = _list_split(val_folder(root), classes, run.test_limit, size)
        train = self.splits[TRAIN]
        train.labels = add_label_noise(train.labels, len(classes), run.noise, run.noise_seed)
        counts = {split: len(images) for split, images in self.splits.items()}
        info = DatasetInfo(len(classes), MEAN, STD)
        super().__init__(run, device, counts, torch.Generator(), info, (3, size, size))
        self.augment = run.augment
        self.workers = available_cores() if workers is None else workers

    def epoch(self) -> Iterator[Batch]:
        """Yield the training batches of the next epoch."""
        order = torch.randperm(self.counts[TRAIN], generator=self.generator).tolist()
        seed = int(torch.randint(2**62, (), generator=self.generator)) if self.augment else None
        used = order[: self.steps * self.batch_size]
        return self._batches(TRAIN, [(index, seed) for index in used], self.batch_size)

    def fixed(self, split: str, count: int, size: int) -> Iterator[Batch]:
        """Yield `count` center crops of a split in batches of `size`.

        The files are sorted by class, so their order is shuffled with a fixed seed.
        """
        order = fixed_order(self.counts[split])[:count].tolist()
        return self._batches(split, [(index, None) for index in order], size)

    def evaluation(self, split: str) -> Iterator[Batch]:
        """Yield the center crops of a whole split, in large batches."""
        samples: list[Sample] = [(index, None) for index in range(self.counts[split])]
        return self._batches(split, samples, self.evaluation_batch)

    def _batches(self, split: str, samples: list[Sample], size: int) -> Iterator[Batch]:
        """Yield batches of the given samples, in their order, on the device."""
        images = self.splits[split]
        try:
            for pixels, labels in batch_loader(images, samples, size, self.workers, self.device):
                yield (
                    self.normalize(pixels.to(self.device, non_blocking=True)),
                    labels.to(self.device, non_blocking=True),
                )
        except ImageError as error:  # of a worker process, whose message includes a traceback
            message = str(error).strip().splitlines()[-1]
            raise ValueError(message.split("ImageError: ")[-1]) from error
