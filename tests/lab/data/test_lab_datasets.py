"""Data sets: the published file formats, and damaged files."""

import gzip
import tarfile
from hashlib import sha256

import numpy as np
import pytest
import torch

from wsam.lab.data import datasets
from wsam.lab.data.datasets import Cifar, DataSource
from wsam.lab.data.download import RemoteFile

RNG = np.random.default_rng(0)
TRAIN, TEST = ("data_batch_1.bin", "data_batch_2.bin"), "test_batch.bin"


def records(count, label_bytes, classes):
    rows = RNG.integers(0, 256, (count, label_bytes + 3072), dtype=np.uint8)
    rows[:, :label_bytes] %= classes
    return rows


@pytest.fixture
def rows():
    return {name: records(20, 1, 10) for name in (*TRAIN, TEST)}


@pytest.fixture
def folder(tmp_path, rows):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name, array in rows.items():
        (folder / name).write_bytes(array.tobytes())
    return folder


@pytest.fixture
def cifar(folder, tmp_path):
    """A small data set in CIFAR-10's format."""
    names = sorted(path.name for path in folder.iterdir())
    train, test = names[:2], names[2:]
    hashes = {name: sha256((folder / name).read_bytes()).hexdigest() for name in names}
    contents = tuple(
        datasets.content_digest([folder / name for name in part], 3073) for part in (train, test)
    )
    path = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(folder, folder.name)
    return Cifar(
        datasets.DatasetInfo(10, (0.5,) * 3, (0.25,) * 3, padding=4, flip=True),
        RemoteFile(
            f"http://127.0.0.1:9/{path.name}",
            path.stat().st_size,
            sha256(path.read_bytes()).hexdigest(),
        ),
        folder=folder.name,
        label_bytes=1,
        train={name: hashes[name] for name in train},
        test={name: hashes[name] for name in test},
        contents=contents,
        counts=(40, 20),
    )


def remove(folder):
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def test_images_and_labels_are_read_correctly(cifar, folder, rows, tmp_path):
    images = cifar(DataSource(tmp_path))
    assert images.verified == datasets.PUBLISHED
    assert images.train.images.shape == (40, 32, 32, 3)
    assert images.train.images.dtype == torch.uint8
    row = rows["data_batch_2.bin"][3]
    image = images.train.images[23]
    assert images.train.labels[23] == row[0]
    # Red, green and blue planes, row by row: the pixel at row 5, column 7.
    assert image[5, 7].tolist() == [row[1 + plane * 1024 + 5 * 32 + 7] for plane in range(3)]
    assert torch.equal(images.test.labels, torch.from_numpy(rows[TEST][:, 0]).long())


def test_the_archive_is_extracted_if_files_are_missing(cifar, folder, tmp_path):
    (folder / "data_batch_1.bin").unlink()
    assert len(cifar(DataSource(tmp_path, download=False)).train.labels) == 40
    remove(folder)
    assert len(cifar(DataSource(tmp_path, download=False)).train.labels) == 40


def test_files_in_the_data_folder_itself(cifar, folder):
    (folder.parent / "cifar-10-binary.tar.gz").unlink()
    assert cifar(DataSource(folder, download=False)).verified == datasets.PUBLISHED


def test_another_order_of_the_same_images_is_recognized(cifar, folder, rows, tmp_path):
    both = np.concatenate([rows["data_batch_1.bin"], rows["data_batch_2.bin"]])
    shuffled = both[RNG.permutation(40)]
    (folder / "data_batch_1.bin").write_bytes(shuffled[:20].tobytes())
    (folder / "data_batch_2.bin").write_bytes(shuffled[20:].tobytes())
    assert cifar(DataSource(tmp_path)).verified == datasets.REORDERED


def test_a_flipped_bit_is_detected(cifar, folder, tmp_path):
    path = folder / "data_batch_2.bin"
    contents = bytearray(path.read_bytes())
    contents[5000] ^= 4
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=r"data_batch_2\.bin is damaged: .* remove it") as raised:
        cifar(DataSource(tmp_path))
    assert "data_batch_1" not in str(raised.value)


def test_a_truncated_file_is_detected(cifar, folder, tmp_path):
    path = folder / TEST
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        ValueError, match=r"test_batch\.bin is damaged: 61459 bytes, expected 61460"
    ):
        cifar(DataSource(tmp_path))


def test_labels_out_of_range_are_detected(cifar, folder, tmp_path):
    path = folder / TEST
    contents = bytearray(path.read_bytes())
    contents[3073 * 4] = 10
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=r"label 10 of image 4 is not less than 10"):
        cifar(DataSource(tmp_path))


def test_missing_data_without_download(tmp_path):
    for name, file in (("cifar10", "cifar-10-binary"), ("cifar100", "cifar-100-binary")):
        with pytest.raises(
            FileNotFoundError, match=rf"{file}\.tar\.gz is not in .*: copy it there"
        ):
            datasets.load(name, DataSource(tmp_path, download=False))
    with pytest.raises(FileNotFoundError, match=r"train-images-idx3-ubyte\.gz is not in"):
        datasets.load("fashion", DataSource(tmp_path, download=False))


def test_cifar100_uses_the_fine_label(tmp_path):
    rows = records(10, 2, 100)
    (tmp_path / "train.bin").write_bytes(rows.tobytes())
    images, labels = datasets.read_cifar(tmp_path / "train.bin", 2, 100, 10)
    assert np.array_equal(labels, rows[:, 1])
    assert images[0, 0, 0].tolist() == rows[0, [2, 1026, 2050]].tolist()


def test_published_files_of_cifar():
    ten, hundred = datasets.LOADERS["cifar10"], datasets.LOADERS["cifar100"]
    assert (ten.info.classes, hundred.info.classes) == (10, 100)
    assert ten.archive.sha256.startswith("c4a38c50a1bc5f3a")
    assert hundred.archive.sha256.startswith("58a81ae192c23a4b")
    assert ten.archive.url == "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    assert len(ten.train) == 5
    assert ten.counts == hundred.counts == (50_000, 10_000)


def idx(magic, *shape):
    header = np.array([magic, *shape], ">u4").tobytes()
    return header + bytes(int(np.prod(shape)))


def test_idx_files_plain_and_gzipped(tmp_path):
    path = tmp_path / "images"
    pixels = RNG.integers(0, 256, (3, 4, 5), dtype=np.uint8)
    path.write_bytes(idx(2051, 3, 4, 5)[:16] + pixels.tobytes())
    assert np.array_equal(datasets.read_idx_images(path, 3)[..., 0], pixels)
    zipped = tmp_path / "labels.gz"
    zipped.write_bytes(gzip.compress(idx(2049, 3)[:8] + bytes([9, 0, 4])))
    assert datasets.read_idx_labels(zipped, 10, 3).tolist() == [9, 0, 4]
    with pytest.raises(ValueError, match="label 9 of image 0 is not less than 9"):
        datasets.read_idx_labels(zipped, 9, 3)


@pytest.mark.parametrize(
    "contents", [b"", b"short", idx(2049, 3), idx(2051, 4, 4, 5), idx(2051, 3, 4, 5)[:-1]]
)
def test_damaged_idx_images(tmp_path, contents):
    path = tmp_path / "images"
    path.write_bytes(contents)
    with pytest.raises(ValueError, match="images is damaged"):
        datasets.read_idx_images(path, 3)


@pytest.mark.parametrize("contents", [b"", idx(2051, 3), idx(2049, 2), idx(2049, 3)[:-1]])
def test_damaged_idx_labels(tmp_path, contents):
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(contents))
    with pytest.raises(ValueError, match=r"labels\.gz is damaged"):
        datasets.read_idx_labels(path, 10, 3)
    path.write_bytes(gzip.compress(contents)[:-3])
    with pytest.raises(ValueError, match=r"labels\.gz is damaged"):
        datasets.read_idx_labels(path, 10, 3)


def test_digits_need_no_download():
    digits = datasets.load("digits", DataSource(datasets.default_folder(), download=False))
    assert digits.train.images.shape == (1200, 8, 8, 1)
    assert len(digits.test.labels) == 597
    assert digits.train.images.max() == 255
    assert sorted(digits.train.labels.unique().tolist()) == list(range(10))
    everything = torch.cat([digits.train.images, digits.test.images]).double() / 255
    assert abs(everything.mean() - digits.info.mean[0]) < 1e-3
    assert abs(everything.std() - digits.info.std[0]) < 1e-3


@pytest.mark.parametrize("zipped", [False, True])
def test_fashion(tmp_path, monkeypatch, zipped):
    """Images of one pixel, which is their number."""
    folder, remote = tmp_path / ("" if zipped else "fashion-mnist"), []
    folder.mkdir(exist_ok=True)
    for file, count in zip(datasets._FASHION_FILES, (60_000, 60_000, 10_000, 10_000), strict=True):
        numbers = np.arange(count) % 10
        images = "images" in file.name
        head = idx(2051, count, 1, 1)[:16] if images else idx(2049, count)[:8]
        data = head + (numbers + 20 * images).astype(np.uint8).tobytes()
        if zipped:
            data = gzip.compress(data)
        (folder / file.name.removesuffix("" if zipped else ".gz")).write_bytes(data)
        remote.append(RemoteFile(file.url, len(data), sha256(data).hexdigest()))
    monkeypatch.setattr(datasets, "_FASHION_FILES", tuple(remote))
    found = datasets.load("fashion", DataSource(tmp_path, download=False))
    assert found.verified == (datasets.PUBLISHED if zipped else datasets.UNVERIFIED)
    for part, count in ((found.train, 60_000), (found.test, 10_000)):
        assert torch.equal(part.labels, torch.arange(count) % 10)
        assert torch.equal(part.images.flatten(), (part.labels + 20).to(torch.uint8))


def test_default_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("WSAM_DATA", raising=False)
    assert datasets.default_folder() == tmp_path / "wsam"
    monkeypatch.setenv("WSAM_DATA", str(tmp_path / "here"))
    assert datasets.default_folder() == tmp_path / "here"
