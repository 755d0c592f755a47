"""Image folders whose images all have the same size: decoded once and kept in memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from wsam.lab.data.datasets import UNVERIFIED, DatasetInfo, Images, ImageSet
from wsam.lab.data.feed import fixed_order
from wsam.lab.data.image_folder import (
    MEAN,
    STD,
    class_names,
    image_pixels,
    list_images,
    open_image,
    val_folder,
)

_MAX_BYTES = 4 << 30


def load_folder(root: Path, name: str) -> Images:
    """Return all images of a folder at their own size.

    Random crops are taken from a border of an eighth of the size, as is usual for small images.

    Args:
        root: The folder that contains ``train`` and ``val`` or ``test``.
        name: Name of the data, for messages.

    Raises:
        ValueError: The images differ in size, or do not fit into memory.
    """
    classes = class_names(root)
    train_paths, train_labels = list_images(root / "train", classes)
    test_paths, test_labels = list_images(val_folder(root), classes)
    width, height = _common_size([*train_paths, *test_paths], name)
    info = DatasetInfo(len(classes), MEAN, STD, padding=min(width, height) // 8, flip=True)

    def shuffled(paths: list[Path], labels: Tensor) -> ImageSet:
        order = fixed_order(len(paths))  # files are sorted by class, and limits keep the first ones
        return ImageSet(_read(paths, (height, width))[order], labels[order])

    train, test = shuffled(train_paths, train_labels), shuffled(test_paths, test_labels)
    return Images(info, train, test, UNVERIFIED)


def _common_size(paths: list[Path], name: str) -> tuple[int, int]:
    """Return width and height of all images; only the files' headers are read."""
    size = (0, 0)
    for path in paths:
        with open_image(path) as image:
            found: tuple[int, int] = image.size
        if path is paths[0]:
            size = found
        if found != size:
            raise ValueError(
                f"the images of {name} differ in size: {paths[0]} is {size[0]} x {size[1]}, {path} "
                f"is {found[0]} x {found[1]}; give --image-size"
            )
    if (needed := 3 * size[0] * size[1] * len(paths)) > _MAX_BYTES:
        raise ValueError(
            f"the images of {name} need {needed / 1e9:.1f} GB of memory at their own size; give "
            "--image-size, and they are decoded during training instead"
        )
    return size


def _read(paths: list[Path], size: tuple[int, int]) -> Tensor:
    pixels = torch.empty(len(paths), *size, 3, dtype=torch.uint8)

    def read(index: int) -> None:
        with open_image(paths[index]) as opened:
            pixels[index] = image_pixels(opened.convert("RGB"))

    with ThreadPoolExecutor() as pool:
        for _ in pool.map(read, range(len(paths))):
            pass
    return pixels
