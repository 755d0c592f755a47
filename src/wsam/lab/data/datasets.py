"""Data sets that fit into memory: CIFAR-10, CIFAR-100, Fashion-MNIST and scikit-learn's digits.

Images are (count, rows, columns, channels) bytes; `image_feed` normalizes them on the device. The
binary files are checked (sizes, headers, labels, SHA-256) and never execute code.
"""

from __future__ import annotations

import gzip
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wsam.lab.data.download import Progress, RemoteFile, download, extract_archive
from wsam.lab.data.feed import fixed_order
from wsam.lab.files import file_sha256

# Values of `Images.verified`, which are part of the record format.
PUBLISHED = "published files"
REORDERED = "published images in another order"
UNVERIFIED = "sizes and labels only"
EMBEDDED = "embedded in scikit-learn"

Bytes = npt.NDArray[np.uint8]
_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE
_IMAGES_MAGIC, _LABELS_MAGIC = 2051, 2049


@dataclass(frozen=True)
class DatasetInfo:
    """Classes, channel statistics and augmentation of a data set."""

    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    padding: int = 0
    """Width of the black border that random crops are taken from."""
    flip: bool = False
    """Random horizontal flips."""


class ImageSet(NamedTuple):
    """Images and their labels."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Images:
    """A data set in memory."""

    info: DatasetInfo
    train: ImageSet
    test: ImageSet
    verified: str
    """How the files were compared with the published ones."""


@dataclass(frozen=True)
class DataSource:
    """Where data is stored and whether it may be downloaded."""

    folder: Path
    download: bool = True
    progress: Callable[[str], Progress] | None = None
    """Given a file name, returns a callback for the progress of its download."""

    def get(self, remote: RemoteFile) -> Path:
        """Return the path of a published file; download it if necessary and allowed."""
        if not self.download and not (self.folder / remote.name).exists():
            raise FileNotFoundError(
                f"{remote.name} is not in {self.folder}: copy it there, or allow the download"
            )
        return download(remote, self.folder, self.progress(remote.name) if self.progress else None)


def default_folder() -> Path:
    """Return the default data folder: ``$WSAM_DATA``, else ``wsam`` in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("WSAM_DATA") or Path(cache) / "wsam")


def load(name: str, source: DataSource) -> Images:
    """Load a data set.

    Args:
        name: ``digits``, ``cifar10``, ``cifar100`` or ``fashion``.
        source: Where the files are and whether they may be downloaded.

    Raises:
        OSError: A file is missing and cannot be downloaded.
        ValueError: A file is damaged.
    """
    return LOADERS[name](source)


def load_digits(source: DataSource) -> Images:  # noqa: ARG001  the signature of all loaders
    """Load scikit-learn's 1,797 digits of 8 x 8 pixels, 1,200 of them for training."""
    from sklearn.datasets import load_digits as sklearn_digits

    digits = sklearn_digits()
    images = torch.from_numpy(np.rint(digits.images * (255 / 16)).astype(np.uint8)).unsqueeze(-1)
    labels = torch.from_numpy(digits.target.astype(np.int64))
    # The digits are ordered by writer; a fixed shuffle mixes the writers.
    order = fixed_order(len(labels))
    train, test = (ImageSet(images[part], labels[part]) for part in (order[:1200], order[1200:]))
    return Images(_DIGITS, train, test, EMBEDDED)


@dataclass(frozen=True)
class Cifar:
    """CIFAR-10 or CIFAR-100 as published; calling it loads the data set."""

    info: DatasetInfo
    archive: RemoteFile
    folder: str
    label_bytes: int
    train: dict[str, str]
    test: dict[str, str]
    """Files and their SHA-256."""
    contents: tuple[str, str]
    """`content_digest` of the training and the test files."""
    counts: tuple[int, int] = (50_000, 10_000)
    """Number of training and test images."""

    @property
    def record_bytes(self) -> int:
        """Bytes of one image with its label."""
        return self.label_bytes + _PIXELS

    def __call__(self, source: DataSource) -> Images:
        """Find, read and verify the files."""
        folder = self._find(source)
        train = self._read(folder, self.train, self.counts[0])
        test = self._read(folder, self.test, self.counts[1])
        return Images(self.info, train, test, self._verify(folder))

    def _find(self, source: DataSource) -> Path:
        """Return the folder of the binary files; download and extract them if necessary."""
        names = (*self.train, *self.test)
        for folder in (source.folder / self.folder, source.folder):
            if all((folder / name).exists() for name in names):
                return folder
        extract_archive(source.get(self.archive), source.folder)
        return source.folder / self.folder

    def _verify(self, folder: Path) -> str:
        """Return how the files compare with the published ones; images in another order are allowed."""
        expected = self.train | self.test
        wrong = [name for name, sha in expected.items() if file_sha256(folder / name) != sha]
        if not wrong:
            return PUBLISHED
        for files, digest in zip((self.train, self.test), self.contents, strict=True):
            paths = [folder / name for name in files]
            if content_digest(paths, self.record_bytes) != digest:
                which = [str(folder / name) for name in files if name in wrong]
                problem = "the images and labels are not the published ones, in any order"
                raise ValueError(_damaged(Path(", ".join(which)), problem))
        return REORDERED

    def _read(self, folder: Path, files: dict[str, str], count: int) -> ImageSet:
        each = count // len(files)
        parts = [
            read_cifar(folder / name, self.label_bytes, self.info.classes, each) for name in files
        ]
        images = np.concatenate([part[0] for part in parts])
        labels = np.concatenate([part[1] for part in parts])
        return ImageSet(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)))


def load_fashion(source: DataSource) -> Images:
    """Load Fashion-MNIST from its IDX files, gzipped as published or uncompressed."""
    folders = (source.folder / "fashion-mnist", source.folder)
    arrays, uncompressed = [], False
    for remote, count in zip(_FASHION_FILES, (60_000, 60_000, 10_000, 10_000), strict=True):
        candidates = [folder / remote.name.removesuffix(".gz") for folder in folders]
        existing = next((path for path in candidates if path.exists()), None)
        uncompressed = uncompressed or existing is not None
        path = existing or _fashion_file(remote, source, folders)
        if "images" in remote.name:
            arrays.append(read_idx_images(path, count))
        else:
            arrays.append(read_idx_labels(path, _FASHION.classes, count))
    images, labels, test_images, test_labels = (torch.from_numpy(array.copy()) for array in arrays)
    train, test = ImageSet(images, labels.long()), ImageSet(test_images, test_labels.long())
    return Images(_FASHION, train, test, UNVERIFIED if uncompressed else PUBLISHED)


def _fashion_file(remote: RemoteFile, source: DataSource, folders: tuple[Path, Path]) -> Path:
    folder = next((folder for folder in folders if (folder / remote.name).exists()), folders[0])
    return replace(source, folder=folder).get(remote)


# Readers of the published file formats ----------------------------------------------------------


def read_cifar(path: Path, label_bytes: int, classes: int, count: int) -> tuple[Bytes, Bytes]:
    """Read a binary file of CIFAR-10 (one label byte) or CIFAR-100 (coarse label, fine label).

    Args:
        path: The file.
        label_bytes: Label bytes before each image; the last one is used.
        classes: Labels must be less than this.
        count: Number of images the file must contain.

    Returns:
        The images as (count, 32, 32, 3), and the labels.

    Raises:
        ValueError: The size is wrong, or a label is out of range.
    """
    record_bytes = label_bytes + _PIXELS
    raw = np.fromfile(path, np.uint8)
    if raw.size != count * record_bytes:
        raise ValueError(_damaged(path, f"{raw.size} bytes, expected {count * record_bytes}"))
    rows = raw.reshape(count, record_bytes)
    labels = rows[:, label_bytes - 1].copy()
    _check_labels(path, labels, classes)
    planes = rows[:, label_bytes:].reshape(count, 3, _SIDE, _SIDE)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels


def content_digest(paths: Sequence[Path], record_bytes: int) -> str:
    """Return a SHA-256 of the records of some files that does not depend on their order.

    It is taken over the sorted digests of the records: copies of a data set exist in several orders.
    """
    digests: list[bytes] = []
    for path in paths:
        data = path.read_bytes()
        starts = range(0, len(data), record_bytes)
        digests += [hashlib.sha256(data[start : start + record_bytes]).digest() for start in starts]
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()


def read_idx_images(path: Path, count: int) -> Bytes:
    """Read an IDX file of images, plain or gzipped, as (count, rows, columns, 1).

    Raises:
        ValueError: Not an IDX file of `count` images.
    """
    data = _read_bytes(path)
    header = np.frombuffer(data[:16], ">u4").tolist() if len(data) >= 16 else []
    if header[:2] != [_IMAGES_MAGIC, count]:
        raise ValueError(_damaged(path, f"not an IDX file of {count} images"))
    rows, columns = header[2:]
    if (expected := 16 + count * rows * columns) != len(data):
        raise ValueError(_damaged(path, f"{len(data)} bytes, expected {expected}"))
    return np.frombuffer(data, np.uint8, offset=16).reshape(count, rows, columns, 1)


def read_idx_labels(path: Path, classes: int, count: int) -> Bytes:
    """Read an IDX file of labels, plain or gzipped.

    Raises:
        ValueError: Not an IDX file of `count` labels, or a label is out of range.
    """
    data = _read_bytes(path)
    header = np.frombuffer(data[:8], ">u4").tolist() if len(data) >= 8 else []
    if header != [_LABELS_MAGIC, count] or len(data) != 8 + count:
        raise ValueError(_damaged(path, f"not an IDX file of {count} labels"))
    labels = np.frombuffer(data, np.uint8, offset=8)
    _check_labels(path, labels, classes)
    return labels


def _check_labels(path: Path, labels: npt.NDArray[Any], classes: int) -> None:
    wrong = np.flatnonzero(labels >= classes)
    if wrong.size:
        index = int(wrong[0])
        problem = f"label {int(labels[index])} of image {index} is not less than {classes}"
        raise ValueError(_damaged(path, problem))


def _damaged(path: Path, problem: str) -> str:
    return f"{path} is damaged: {problem}; remove it and run again, or replace it by a good copy"


def _read_bytes(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        return gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise ValueError(_damaged(path, str(error))) from error


# Published files --------------------------------------------------------------------------------

_DIGITS = DatasetInfo(10, (0.3053,), (0.3759,))
_FASHION = DatasetInfo(10, (0.2860,), (0.3530,), padding=2, flip=True)
_FASHION_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_FASHION_FILES = (
    RemoteFile(
        f"{_FASHION_URL}/train-images-idx3-ubyte.gz",
        26_421_880,
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    ),
    RemoteFile(
        f"{_FASHION_URL}/train-labels-idx1-ubyte.gz",
        29_515,
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    ),
    RemoteFile(
        f"{_FASHION_URL}/t10k-images-idx3-ubyte.gz",
        4_422_102,
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    ),
    RemoteFile(
        f"{_FASHION_URL}/t10k-labels-idx1-ubyte.gz",
        5_148,
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
)

_CIFAR10 = Cifar(
    DatasetInfo(10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), padding=4, flip=True),
    RemoteFile(
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        170_052_171,
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    ),
    folder="cifar-10-batches-bin",
    label_bytes=1,
    train={
        "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    },
    test={"test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"},
    contents=(
        "55a61f79a40ece2ceda9fb5f9f7078f6ea2fc4952489cef56682bcf92cfcc260",
        "325704b01eb92e1e2a6215ae6a916bb7db7de054af0c496be1c7be2e0fcfbf5f",
    ),
)
_CIFAR100 = Cifar(
    DatasetInfo(100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), padding=4, flip=True),
    RemoteFile(
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        168_513_733,
        "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    ),
    folder="cifar-100-binary",
    label_bytes=2,
    train={"train.bin": "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"},
    test={"test.bin": "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"},
    # Of a shuffled copy whose pixels have the channel means and deviations above.
    contents=(
        "7077d87fc363f92dbf1245f13ba80561d7b33a96c79ad57168d49dc172aaa92b",
        "96adb3db8da7632dbb350559a17b9f585fab5b17675de5fc8f6761384196b294",
    ),
)
LOADERS: dict[str, Callable[[DataSource], Images]] = {
    "digits": load_digits,
    "cifar10": _CIFAR10,
    "cifar100": _CIFAR100,
    "fashion": load_fashion,
}
