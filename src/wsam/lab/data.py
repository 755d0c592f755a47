"""Data sets that fit into memory: CIFAR-10, CIFAR-100, Fashion-MNIST and scikit-learn's digits.

Images are (count, rows, columns, channels) bytes, as the device keeps them; see `batches`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from wsam.lab import formats
from wsam.lab.fetch import Progress, Remote, fetch, unpack
from wsam.lab.files import file_sha256, quiet

PUBLISHED = "published files"
REORDERED = "published images in another order"
UNVERIFIED = "sizes and labels only"
EMBEDDED = "embedded in scikit-learn"


@dataclass(frozen=True)
class Traits:
    """What a data set's images are like, and how they may be augmented."""

    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    padding: int = 0
    """Random crops out of images with this black border."""
    flip: bool = False
    """Random mirror images."""


@dataclass(frozen=True)
class Images:
    """A data set in memory."""

    traits: Traits
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    verified: str
    """How it was checked that these are the published images."""

    def limited(self, train: int | None, test: int | None) -> Images:
        """Return the first `train` and `test` images alone; None for all."""
        return replace(
            self,
            train_images=self.train_images[:train],
            train_labels=self.train_labels[:train],
            test_images=self.test_images[:test],
            test_labels=self.test_labels[:test],
        )

    def relabelled(self, train_labels: Tensor) -> Images:
        """Return the same images with other labels to train on."""
        return replace(self, train_labels=train_labels)


@dataclass(frozen=True)
class Source:
    """Where data is looked for and how its user hears of it."""

    folder: Path
    download: bool = True
    progress: Callable[[str], Progress] | None = None
    """Given a file's name, returns what is told of its download."""
    say: Callable[[str], None] = quiet

    def get(self, remote: Remote) -> Path:
        """Return a published file, downloaded into the folder if it may be."""
        if not self.download and not (self.folder / remote.name).exists():
            raise FileNotFoundError(
                f"{remote.name} is not in {self.folder}: put it there, or allow the download"
            )
        return fetch(remote, self.folder, self.progress(remote.name) if self.progress else None)


def default_folder() -> Path:
    """Return where data is kept unless the user says otherwise (``WSAM_DATA`` or a cache)."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("WSAM_DATA") or Path(cache) / "wsam")


def load(name: str, source: Source) -> Images:
    """Load a data set that fits into memory.

    Args:
        name: ``digits``, ``cifar10``, ``cifar100`` or ``fashion``.
        source: Where to look and whether to download.

    Raises:
        OSError: A file is missing and cannot be downloaded.
        ValueError: A file is damaged; the message says which and what to do.
    """
    return LOADERS[name](source)


def load_digits(source: Source) -> Images:  # noqa: ARG001  every loader takes a source
    """Load the 1,797 digits of 8 x 8 pixels that scikit-learn carries: 1,200 to train on."""
    from sklearn.datasets import load_digits as embedded

    digits = embedded()
    images = torch.from_numpy(np.rint(digits.images * (255 / 16)).astype(np.uint8)).unsqueeze(-1)
    labels = torch.from_numpy(digits.target.astype(np.int64))
    # The digits come writer by writer: a fixed shuffle gives both parts all of them.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1200], order[1200:]
    return Images(_DIGITS, images[train], labels[train], images[test], labels[test], EMBEDDED)


@dataclass(frozen=True)
class Cifar:
    """One of the two CIFAR sets as its authors publish it."""

    traits: Traits
    archive: Remote
    folder: str
    label_bytes: int
    train: dict[str, str]
    test: dict[str, str]
    """Files and their SHA-256."""
    contents: tuple[str, str] | None
    """`formats.content_digest` of the training and test files, in any order; None: not known."""
    counts: tuple[int, int] = (50_000, 10_000)
    """Images to train on and to test on."""

    @property
    def record(self) -> int:
        """Bytes of one image with its label."""
        return self.label_bytes + 3072

    def __call__(self, source: Source) -> Images:
        """Find, read and check the files."""
        folder = self._find(source)
        train_images, train_labels = self._read(folder, self.train, self.counts[0])
        test_images, test_labels = self._read(folder, self.test, self.counts[1])
        verified = self._verify(folder, source)
        return Images(self.traits, train_images, train_labels, test_images, test_labels, verified)

    def _find(self, source: Source) -> Path:
        """Return the folder with the binary files; unpack or download them if need be."""
        names = (*self.train, *self.test)
        for folder in (source.folder / self.folder, source.folder):
            found = [name for name in names if (folder / name).exists()]
            if len(found) == len(names):
                return folder
            if found:
                missing = next(name for name in names if name not in found)
                raise FileNotFoundError(
                    f"{folder / missing} is missing though {found[0]} is there: put it there, "
                    f"or remove the others to unpack all of them anew"
                )
        unpack(source.get(self.archive), source.folder)
        return source.folder / self.folder

    def _verify(self, folder: Path, source: Source) -> str:
        expected = self.train | self.test
        wrong = [name for name, sha in expected.items() if file_sha256(folder / name) != sha]
        if not wrong:
            return PUBLISHED
        if self.contents is None:
            source.say(f"{folder}: not the published files; only sizes and labels are checked")
            return UNVERIFIED
        for files, digest in zip((self.train, self.test), self.contents, strict=True):
            paths = [folder / name for name in files]
            if formats.content_digest(paths, self.record) != digest:
                which = [str(folder / name) for name in files if name in wrong]
                problem = "the images and labels are not the published ones, in any order"
                raise ValueError(formats.damaged(Path(", ".join(which)), problem))
        return REORDERED

    def _read(self, folder: Path, files: dict[str, str], count: int) -> tuple[Tensor, Tensor]:
        each = count // len(files)
        parts = [
            formats.read_cifar(folder / name, self.label_bytes, self.traits.classes, each)
            for name in files
        ]
        images = np.concatenate([part[0] for part in parts])
        labels = np.concatenate([part[1] for part in parts])
        return torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64))


def load_fashion(source: Source) -> Images:
    """Load Fashion-MNIST from its IDX files, gzipped as published or unpacked."""
    folders = (source.folder / "fashion-mnist", source.folder)
    arrays, unpacked = [], False
    for remote, count in zip(_FASHION_FILES, (60_000, 60_000, 10_000, 10_000), strict=True):
        plain = [folder / remote.name.removesuffix(".gz") for folder in folders]
        there = next((path for path in plain if path.exists()), None)
        unpacked = unpacked or there is not None
        path = there or _fashion_file(remote, source, folders)
        if "images" in remote.name:
            arrays.append(formats.read_idx_images(path, count))
        else:
            arrays.append(formats.read_idx_labels(path, _FASHION.classes, count))
    images, labels, test_images, test_labels = (torch.from_numpy(array.copy()) for array in arrays)
    verified = UNVERIFIED if unpacked else PUBLISHED
    return Images(_FASHION, images, labels.long(), test_images, test_labels.long(), verified)


def _fashion_file(remote: Remote, source: Source, folders: tuple[Path, Path]) -> Path:
    there = next((folder for folder in folders if (folder / remote.name).exists()), folders[0])
    return replace(source, folder=there).get(remote)


_DIGITS = Traits(10, (0.3053,), (0.3759,))
_FASHION = Traits(10, (0.2860,), (0.3530,), padding=2, flip=True)
_FASHION_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_FASHION_FILES = (
    Remote(
        f"{_FASHION_URL}/train-images-idx3-ubyte.gz",
        26_421_880,
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    ),
    Remote(
        f"{_FASHION_URL}/train-labels-idx1-ubyte.gz",
        29_515,
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    ),
    Remote(
        f"{_FASHION_URL}/t10k-images-idx3-ubyte.gz",
        4_422_102,
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    ),
    Remote(
        f"{_FASHION_URL}/t10k-labels-idx1-ubyte.gz",
        5_148,
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
)

_CIFAR10 = Cifar(
    Traits(10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), padding=4, flip=True),
    Remote(
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
    Traits(100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), padding=4, flip=True),
    Remote(
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        168_513_733,
        "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    ),
    folder="cifar-100-binary",
    label_bytes=2,
    train={"train.bin": "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"},
    test={"test.bin": "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"},
    contents=None,
)
LOADERS: dict[str, Callable[[Source], Images]] = {
    "digits": load_digits,
    "cifar10": _CIFAR10,
    "cifar100": _CIFAR100,
    "fashion": load_fashion,
}
