"""Images in folders: listing, crops, reproducible epochs."""

import random
import shutil

import pytest
import torch
from command import wsam_command
from recorded import recorded
from training import curve

from wsam.lab.data.datasets import DataSource
from wsam.lab.data.image_feed import MemoryFeed
from wsam.lab.data.image_folder import (
    FolderFeed,
    center_crop,
    find_root,
    image_pixels,
    random_crop,
)
from wsam.lab.environment import available_cores
from wsam.lab.execution import ExecutionConfig
from wsam.lab.loaded_model import FixedBatches
from wsam.lab.problem import make_data_feed
from wsam.lab.run import Run
from wsam.lab.train import train
from wsam.report.commands import commands
from wsam.report.results import Result

Image = pytest.importorskip("PIL.Image")
CPU = torch.device("cpu")


@pytest.fixture
def root(tmp_path):
    """Three classes, each with its own color."""
    rng = random.Random(0)
    for part, count in (("train", 6), ("val", 2)):
        for label, name in enumerate(("ant", "bee", "cat")):
            folder = tmp_path / "pets" / part / name
            folder.mkdir(parents=True)
            (folder / "notes.txt").write_text("not an image")
            for n in range(count):
                color = [40] * 3
                color[label] = 200 + rng.randint(0, 50)
                size = (rng.randint(40, 60), rng.randint(40, 60))
                Image.new("RGB", size, tuple(color)).save(folder / f"{n}.png")
    return tmp_path / "pets"


def feed(root, workers=0, **settings):
    run = Run(data=f"folder:{root}", image_size=32, batch_size=4, **settings)
    return FolderFeed(root, run, CPU, workers)


def test_classes_are_numbered_by_name(root):
    images = feed(root)
    assert images.task.outputs == 3
    assert (images.counts["train"], images.counts["test"], images.steps) == (18, 6, 4)
    batches = list(images.epoch())
    assert len(batches) == 4
    for x, y in batches:
        assert x.shape == (4, 3, 32, 32)
        # The strongest channel identifies the class.
        assert torch.equal(x.mean((2, 3)).argmax(1), y)
    x, y = next(images.evaluation("test"))
    assert y.tolist() == [0, 0, 1, 1, 2, 2]


def test_the_generator_state_repeats_an_epoch(root):
    images = feed(root)
    saved = images.generator.get_state()
    first, second = list(images.epoch()), list(images.epoch())
    assert not all(torch.equal(a[1], b[1]) for a, b in zip(first, second, strict=True))
    images.generator.set_state(saved)
    again = list(images.epoch())
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))


def test_batches_do_not_depend_on_the_number_of_workers(root):
    one, several = list(feed(root).epoch()), list(feed(root, workers=2).epoch())
    assert all(torch.equal(a[0], b[0]) for a, b in zip(one, several, strict=True))


def test_fixed_batches_use_pinned_memory_on_cuda(root, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "wsam.lab.data.feed.DataLoader", lambda *_, **kwargs: calls.append(kwargs) or []
    )
    images = feed(root)
    batches = FixedBatches(images, "test", samples=5, batch_size=2)
    images.device = torch.device("cuda")  # the replaced loader yields no batches
    assert list(batches) == []
    (kwargs,) = calls
    assert kwargs["pin_memory"]
    assert [len(samples) for samples in kwargs["batch_sampler"]] == [2, 2, 1]


def test_limits_keep_all_classes_and_noise_changes_labels(root):
    limited = feed(root, train_limit=9, test_limit=3)
    assert limited.counts == {"train": 9, "test": 3}
    assert len(set(limited.splits["train"].labels.tolist())) == 3
    clean, noisy = feed(root).splits["train"], feed(root, noise=1.0, noise_seed=1).splits["train"]
    assert not torch.equal(clean.labels, noisy.labels)


def test_center_crop():
    image = Image.new("RGB", (100, 60), (0, 0, 0))
    image.paste((255, 255, 255), (40, 20, 60, 40))
    crop = center_crop(image, 28)
    assert crop.size == (28, 28)
    assert crop.getpixel((14, 14)) == (255, 255, 255)
    assert crop.getpixel((1, 1)) == (0, 0, 0)


@pytest.mark.parametrize("size", [(500, 3), (3, 500), (64, 64), (1, 1)])
def test_random_crop_accepts_any_shape(size):
    image = Image.new("RGB", size, (9, 9, 9))
    for seed in range(20):
        assert random_crop(image, 16, random.Random(seed)).size == (16, 16)


def gradient(width, height):
    """Return an image whose red rises from left to right, and its green from top to bottom."""
    red = torch.linspace(0, 255, width).expand(height, -1)
    green = torch.linspace(0, 255, height).expand(width, -1).T
    pixels = torch.stack((red, green, torch.zeros(height, width)), 2)
    return Image.fromarray(pixels.to(torch.uint8).numpy())


def test_random_crops_are_windows_or_their_mirror_images():
    image, areas, flips = gradient(80, 60), [], set()
    for seed in range(60):
        pixels = image_pixels(random_crop(image, 16, random.Random(seed))).float() * 16 / 15 / 255
        across, down = pixels[8, -1, 0] - pixels[8, 0, 0], pixels[-1, 8, 1] - pixels[0, 8, 1]
        assert down > 0
        assert 0.7 < (80 * across.abs()) / (60 * down) < 1.4
        flips.add(bool(across < 0))
        areas.append(float(across.abs() * down))
    assert flips == {False, True}
    assert 0.06 < min(areas) < 0.2
    assert 0.7 < max(areas) < 1.1


def test_crops_are_random_in_each_epoch_and_for_each_image(root):
    for path in root.rglob("*.png"):
        gradient(48, 40).save(path)
    images = feed(root)
    (center,) = torch.cat([x for x, _ in images.evaluation("test")]).unique(dim=0)
    start = images.generator.get_state()
    epochs = [torch.cat([x for x, _ in images.epoch()]) for _ in range(2)]
    assert len(torch.cat(epochs).unique(dim=0)) == 32
    torch.manual_seed(1)  # the global generator is not used
    images.generator.set_state(start)
    assert torch.equal(torch.cat([x for x, _ in images.epoch()]), epochs[0])
    plain = torch.cat([x for x, _ in feed(root, augment=False).epoch()])
    assert torch.equal(plain, center.expand_as(plain))


def test_defaults_of_imagenet(root):
    images = FolderFeed(root, Run(data="imagenet"), CPU)
    assert images.task.shape == (3, 224, 224)
    assert images.workers == available_cores()


def test_other_files_and_missing_classes(root):
    (root / "train" / "notes.txt").write_text("not a class")
    assert feed(root).task.outputs == 3
    shutil.rmtree(root / "val" / "bee")
    with pytest.raises(FileNotFoundError, match=r"bee contains no images"):
        feed(root)


def test_a_damaged_image_is_refused(root):
    path = root / "train" / "bee" / "3.png"
    path.write_bytes(path.read_bytes()[:30])
    with pytest.raises(ValueError, match=r"bee/3\.png is damaged"):
        list(feed(root).epoch())


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_of_too_many_pixels_is_refused(root, monkeypatch, workers):
    """With Pillow's own exception as the message, without its traceback."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match=r"png is damaged or not an image: Image size") as raised:
        list(feed(root, workers=workers).epoch())
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith(str(root))


def test_missing_folders(root, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"imagenet must contain the folders train/CLASS"):
        find_root(tmp_path / "nowhere", "imagenet")
    for path in (root / "val" / "cat").iterdir():
        path.unlink()
    with pytest.raises(FileNotFoundError, match="cat contains no images"):
        feed(root)
    with pytest.raises(FileNotFoundError, match=r"val/CLASS \(or test/CLASS\) with images .*\.png"):
        find_root(tmp_path / "data", "nosuch")


@pytest.mark.slow
def test_a_run_on_an_image_folder(root, tmp_path):
    run = Run(data="folder:pets", image_size=32, model="mlp", method="sam", epochs=1, batch_size=6)
    execution = ExecutionConfig(device="cpu", source=DataSource(root.parent), workers=0)
    record = train(run, tmp_path / "out", execution)
    assert record["data"] == {
        "train": 18,
        "test": 6,
        "steps": 3,
        "verified": "sizes and labels only",
        "folder": str(root.parent),
    }
    # The command in a report finds the data.
    train_command = commands(Result(run, record))[0]
    assert f"--data-dir {root.parent} " in train_command
    wsam_command(*train_command.split()[1:-1], tmp_path / "again")
    (again,) = recorded(tmp_path / "again")
    assert curve(again) == curve(record)


def small_images(folder, size=(12, 8), part="test"):
    """Images of one size; the first pixel identifies an image."""
    for split, count in (("train", 8), (part, 3)):
        for label, name in enumerate(("dark", "light")):
            (folder / split / name).mkdir(parents=True)
            for n in range(count):
                image = Image.new("RGB", size, (200 * label,) * 3)
                image.putpixel((0, 0), (n, 0, 0))
                image.save(folder / split / name / f"{n}.png")
    return folder


@pytest.mark.parametrize("absolute", [True, False])
def test_images_of_one_size_are_kept_in_memory_at_that_size(tmp_path, monkeypatch, absolute):
    folder = small_images(tmp_path / "data" / "mine")
    monkeypatch.chdir(tmp_path)
    path = folder if absolute else "data/mine"
    run = Run(data=f"folder:{path}", model="cnn", epochs=5, batch_size=4, validation=4)
    execution = ExecutionConfig(device="cpu", source=DataSource(tmp_path / "nowhere"))
    images = make_data_feed(run, execution)
    assert isinstance(images, MemoryFeed)
    assert images.task.shape == (3, 8, 12)
    assert images.counts == {"train": 12, "validation": 4, "test": 6}
    assert next(images.epoch())[0].shape == (4, 3, 8, 12)
    x, y = next(images.evaluation("test"))
    assert torch.equal(x[:, 0, -1, -1] > 0, y.bool())
    assert train(run, tmp_path / "out", execution)["final"]["test_error"] == 0


def test_images_of_different_sizes_need_a_size(root, tmp_path):
    run = Run(data=f"folder:{root}", model="mlp", epochs=1, batch_size=6)
    with pytest.raises(
        ValueError, match=r"differ in size: .*png is \d+ x \d+, .*give --image-size"
    ):
        train(run, tmp_path / "out", ExecutionConfig(device="cpu"))
    sized = make_data_feed(run.replace(image_size=16), ExecutionConfig("cpu", workers=0))
    assert sized.task.shape == (3, 16, 16)
    with pytest.raises(ValueError, match="image_size applies to data folder:"):
        Run(image_size=16)


def test_the_path_comes_before_the_data_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cached = small_images(tmp_path / "cache" / "mine")
    assert find_root(tmp_path / "cache", "mine") == cached
    small_images(tmp_path / "mine", part="val")
    assert find_root(tmp_path / "cache", "mine").resolve() == tmp_path / "mine"
