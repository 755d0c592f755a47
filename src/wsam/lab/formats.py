"""Readers of the data sets' own binary formats; none of them runs code.

Every reader checks what it reads: sizes, headers, and that labels are labels.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE
_IMAGES_MAGIC, _LABELS_MAGIC = 2051, 2049


def read_cifar(path: Path, label_bytes: int, classes: int, count: int) -> tuple[Bytes, Bytes]:
    """Read a binary file of CIFAR-10 (one label byte) or CIFAR-100 (coarse label, fine label).

    Args:
        path: The file.
        label_bytes: Label bytes before each image; the last is the label.
        classes: Labels must be below this.
        count: How many images the file must hold.

    Returns:
        The images as (count, 32, 32, 3) and the labels.

    Raises:
        ValueError: A wrong size, or labels out of range.
    """
    record = label_bytes + _PIXELS
    raw = np.fromfile(path, np.uint8)
    if raw.size != count * record:
        raise ValueError(damaged(path, f"{raw.size} bytes instead of {count * record}"))
    rows = raw.reshape(count, record)
    labels = rows[:, label_bytes - 1].copy()
    check_labels(path, labels, classes)
    planes = rows[:, label_bytes:].reshape(count, 3, _SIDE, _SIDE)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels


def content_digest(paths: Sequence[Path], record: int) -> str:
    """Return one SHA-256 for the records of some files, whatever their order.

    Copies of a data set come in several orders; the images and labels are the same ones exactly
    if this digest, taken over the sorted digests of all records, is the same.
    """
    digests: list[bytes] = []
    for path in paths:
        data = path.read_bytes()
        starts = range(0, len(data), record)
        digests += [hashlib.sha256(data[start : start + record]).digest() for start in starts]
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()


def read_idx_images(path: Path, count: int) -> Bytes:
    """Read an IDX file of images, plain or gzipped, as (count, rows, columns, 1).

    Raises:
        ValueError: Not such a file, or not of `count` images.
    """
    data = _contents(path)
    header = np.frombuffer(data[:16], ">u4").tolist() if len(data) >= 16 else []
    if header[:2] != [_IMAGES_MAGIC, count]:
        raise ValueError(damaged(path, f"not an IDX file of {count} images"))
    rows, columns = header[2:]
    if len(data) != 16 + count * rows * columns:
        raise ValueError(damaged(path, f"{len(data)} bytes do not hold {count} images"))
    return np.frombuffer(data, np.uint8, offset=16).reshape(count, rows, columns, 1)


def read_idx_labels(path: Path, classes: int, count: int) -> Bytes:
    """Read an IDX file of labels, plain or gzipped.

    Raises:
        ValueError: Not such a file, not of `count` labels, or labels out of range.
    """
    data = _contents(path)
    header = np.frombuffer(data[:8], ">u4").tolist() if len(data) >= 8 else []
    if header != [_LABELS_MAGIC, count] or len(data) != 8 + count:
        raise ValueError(damaged(path, f"not an IDX file of {count} labels"))
    labels = np.frombuffer(data, np.uint8, offset=8)
    check_labels(path, labels, classes)
    return labels


def check_labels(path: Path, labels: npt.NDArray[Any], classes: int) -> None:
    """Check that all labels are below `classes`.

    Raises:
        ValueError: Some is not; the message says which and where.
    """
    wrong = np.flatnonzero(labels >= classes)
    if wrong.size:
        where = int(wrong[0])
        problem = f"label {int(labels[where])} of image {where} is not below {classes}"
        raise ValueError(damaged(path, problem))


def damaged(path: Path, problem: str) -> str:
    """Word a message about a damaged file, with what to do."""
    return f"{path} is damaged: {problem}; remove it and run again, or put a good copy there"


def _contents(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        return gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise ValueError(damaged(path, str(error))) from error
