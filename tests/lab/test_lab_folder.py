"""Images in folders: what is listed, what is cut out, and that an epoch can be repeated."""

import random

import pytest
import torch

from wsam.lab.data import Source
from wsam.lab.folder import FolderFeed, anywhere, find_root, middle
from wsam.lab.means import Means
from wsam.lab.run import Run
from wsam.lab.subject import FixedBatches
from wsam.lab.train import train

Image = pytest.importorskip("PIL.Image")
CPU = torch.device("cpu")


@pytest.fixture
def root(tmp_path):
    """Three classes, each of a colour of its own."""
    rng = random.Random(0)
    for part, count in (("train", 6), ("val", 2)):
        for label, name in enumerate(("ant", "bee", "cat")):
            folder = tmp_path / "pets" / part / name
            folder.mkdir(parents=True)
            (folder / "notes.txt").write_text("not an image")
            for n in range(count):
                colour = [40] * 3
                colour[label] = 200 + rng.randint(0, 50)
                size = (rng.randint(40, 60), rng.randint(40, 60))
                Image.new("RGB", size, tuple(colour)).save(folder / f"{n}.png")
    return tmp_path / "pets"


def feed(root, **changes):
    settings = {
        "batch_size": 4,
        "device": CPU,
        "seed": 0,
        "augment": True,
        "size": 32,
        "workers": 0,
    }
    return FolderFeed(root, **(settings | changes))


def test_classes_are_numbered_by_name(root):
    made = feed(root)
    assert made.traits.classes == 3
    assert (made.train_count, made.test_count, made.steps) == (18, 6, 4)
    batches = list(made.epoch())
    assert len(batches) == 4
    for x, y in batches:
        assert x.shape == (4, 3, 32, 32)
        # The strongest channel tells the class: normalisation shifts all of them about alike.
        assert torch.equal(x.mean((2, 3)).argmax(1), y)
    x, y = next(made.test())
    assert y.tolist() == [0, 0, 1, 1, 2, 2]


def test_epochs_differ_and_the_generator_repeats_them(root):
    made = feed(root)
    saved = made.generator.get_state()
    first, second = list(made.epoch()), list(made.epoch())
    assert not all(torch.equal(a[1], b[1]) for a, b in zip(first, second, strict=True))
    made.generator.set_state(saved)
    again = list(made.epoch())
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))


def test_workers_change_nothing_but_the_time(root):
    alone, helped = list(feed(root).epoch()), list(feed(root, workers=2).epoch())
    assert all(torch.equal(a[0], b[0]) for a, b in zip(alone, helped, strict=True))


def test_measurements_read_images_as_training_does(root, monkeypatch):
    """Through pinned memory where there is a GPU: the loader is the feed's own."""
    found = []
    monkeypatch.setattr("wsam.lab.folder.DataLoader", lambda *_, **how: found.append(how) or [])
    images = feed(root)
    batches = FixedBatches(images, "test", samples=5, batch_size=2)
    images.device = torch.device("cuda")  # no batch is made, so none is needed
    assert list(batches) == []
    (how,) = found
    assert how["pin_memory"]
    assert [len(tickets) for tickets in how["batch_sampler"]] == [2, 2, 1]


def test_limits_keep_all_classes_and_noise_changes_labels(root):
    assert feed(root, limits=(9, 3)).train_count == 9
    assert len(set(feed(root, limits=(9, 3)).train_set.labels.tolist())) == 3
    clean, noisy = feed(root).train_set.labels, feed(root, noise=(1.0, 1)).train_set.labels
    assert not torch.equal(clean, noisy)


def test_middle_is_the_middle():
    image = Image.new("RGB", (100, 60), (0, 0, 0))
    image.paste((255, 255, 255), (40, 20, 60, 40))
    square = middle(image, 28)
    assert square.size == (28, 28)
    assert square.getpixel((14, 14)) == (255, 255, 255)
    assert square.getpixel((1, 1)) == (0, 0, 0)


@pytest.mark.parametrize("size", [(500, 3), (3, 500), (64, 64), (1, 1)])
def test_anywhere_takes_any_shape(size):
    image = Image.new("RGB", size, (9, 9, 9))
    for seed in range(20):
        assert anywhere(image, 16, random.Random(seed)).size == (16, 16)


def test_a_damaged_image_is_named(root):
    path = root / "train" / "bee" / "3.png"
    path.write_bytes(path.read_bytes()[:30])
    with pytest.raises(ValueError, match=r"bee/3\.png is damaged"):
        list(feed(root).epoch())


def test_missing_folders_say_what_is_looked_for(root, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"imagenet must hold train/CLASS"):
        find_root(tmp_path / "nowhere", "imagenet")
    for path in (root / "val" / "cat").iterdir():
        path.unlink()
    with pytest.raises(FileNotFoundError, match="cat holds no images"):
        feed(root)


def test_a_run_on_a_folder(root, tmp_path):
    run = Run(data="folder:pets", model="cnn", method="sam", epochs=1, batch_size=6)
    means = Means(device="cpu", source=Source(root.parent), workers=0)
    record = train(run, tmp_path / "out", means)
    assert record["data"] == {
        "train": 18,
        "test": 6,
        "steps": 3,
        "verified": "sizes and labels only",
    }
