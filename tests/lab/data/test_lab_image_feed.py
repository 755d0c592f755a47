"""Batches of images: crops, epochs, augmentation, normalization."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wsam.lab.data.datasets import DatasetInfo, Images, ImageSet
from wsam.lab.data.feed import derive_seed
from wsam.lab.data.image_feed import MemoryFeed, Normalizer, crop_and_flip
from wsam.lab.run import Run

CPU = torch.device("cpu")


def images(count=50, size=8, channels=3, padding=2, flip=True, test=7):
    generator = torch.Generator().manual_seed(1)
    info = DatasetInfo(5, (0.4,) * channels, (0.2,) * channels, padding, flip)

    def pixels(n):
        shape = (n, size, size, channels)
        return torch.randint(256, shape, generator=generator, dtype=torch.uint8)

    train, test = (ImageSet(pixels(n), torch.arange(n) % 5) for n in (count, test))
    return Images(info, train, test, "random")


def memory_feed(source, batch_size=16, **settings):
    return MemoryFeed(source, Run(batch_size=batch_size, **settings), CPU)


@given(st.integers(1, 9), st.integers(4, 9), st.integers(0, 4), st.integers(0, 10**6))
def test_crops_equal_a_loop_over_the_images(batch, size, padding, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(below, *shape):
        return torch.randint(below, shape, generator=generator)

    padded = draw(256, 6, size + 2 * padding, size + 2 * padding, 3).to(torch.uint8)
    index, flip = draw(6, batch), draw(2, batch).bool()
    top, left = draw(2 * padding + 1, batch), draw(2 * padding + 1, batch)
    expected = []
    for n in range(batch):
        window = padded[index[n], top[n] : top[n] + size, left[n] : left[n] + size]
        expected.append(window.flip(1) if flip[n] else window)
    crops = crop_and_flip(padded, index, top, left, flip, (size, size))
    assert torch.equal(crops, torch.stack(expected))


def test_normalizer():
    info = DatasetInfo(2, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    pixels = torch.randint(256, (4, 5, 5, 3), dtype=torch.uint8)
    normalized = Normalizer(info, CPU)(pixels)
    mean, std = torch.tensor(info.mean), torch.tensor(info.std)
    expected = ((pixels / 255 - mean) / std).permute(0, 3, 1, 2)
    torch.testing.assert_close(normalized, expected)
    assert normalized.is_contiguous(memory_format=torch.channels_last)


def test_an_epoch_contains_each_image_at_most_once_in_full_batches():
    # Without augmentation the first pixel identifies the image.
    source = images(padding=0, flip=False)
    source.train.images[:, 0, 0, 0] = torch.arange(50, dtype=torch.uint8)
    feed = memory_feed(source)
    assert feed.steps == 3
    orders = []
    for _ in range(2):
        seen = []
        for x, y in feed.epoch():
            assert x.shape == (16, 3, 8, 8)
            numbers = (x[:, 0, 0, 0] * 0.2 + 0.4).mul(255).round().long()
            assert torch.equal(y, numbers % 5)
            seen += numbers.tolist()
        assert len(set(seen)) == len(seen) == 48
        orders.append(seen)
    assert orders[0] != orders[1]


@pytest.mark.parametrize(
    ("padding", "flip", "augment"),
    [(2, True, True), (2, False, True), (0, True, True), (2, True, False)],
)
def test_random_crops_and_flips(padding, flip, augment):
    """A sample is a window of its own image, padded with black, and all windows occur."""
    source = images(padding=padding, flip=flip)
    source.train.labels[:] = torch.arange(50)  # identify the images
    feed = memory_feed(source, 50, augment=augment)
    padded = torch.zeros(50, 8 + 2 * padding, 8 + 2 * padding, 3, dtype=torch.uint8)
    padded[:, padding : padding + 8, padding : padding + 8] = source.train.images
    offsets = range(2 * padding + 1) if augment else [padding]
    windows, seen = {}, set()
    for top, left in itertools.product(offsets, offsets):
        crops = padded[:, top : top + 8, left : left + 8]
        for flipped in [False, True] if flip and augment else [False]:
            for number, crop in enumerate(crops.flip(2) if flipped else crops):
                windows[number, crop.numpy().tobytes()] = (top, left, flipped)
    for x, y in itertools.chain.from_iterable(feed.epoch() for _ in range(12)):
        pixels = (x * 0.2 + 0.4).mul(255).round().to(torch.uint8).permute(0, 2, 3, 1)
        for number, image in zip(y.tolist(), pixels.contiguous(), strict=True):
            seen.add(windows[number, image.numpy().tobytes()])
    assert seen == set(windows.values())


def test_fixed_batches_are_the_first_images_without_augmentation():
    source = images()
    feed = memory_feed(source, augment=False)
    batches = list(feed.fixed("train", 5, 3))
    assert [len(x) for x, _ in batches] == [3, 2]
    assert torch.equal(batches[0][0], feed.normalize(source.train.images[:3]))
    assert batches[1][1].tolist() == source.train.labels[3:5].tolist()


def test_the_generator_state_resumes_a_feed():
    one = memory_feed(images(), seed=3)
    list(one.epoch())
    saved = one.generator.get_state()
    expected = list(one.epoch())
    other = memory_feed(images(), seed=99)
    other.generator.set_state(saved)
    torch.manual_seed(5)  # the global generator is not used
    for (x, y), (expected_x, expected_y) in zip(other.epoch(), expected, strict=True):
        assert torch.equal(x, expected_x)
        assert torch.equal(y, expected_y)


def test_batches_depend_on_the_seed_only():
    def first(seed):
        return next(memory_feed(images(), seed=seed).epoch())[0]

    assert torch.equal(first(0), first(0))
    assert not torch.equal(first(0), first(1))
    assert derive_seed(0, "data") != derive_seed(0, "label noise")


def test_the_test_set_is_complete_and_in_order():
    source = images(test=1203)
    feed = memory_feed(source)
    labels = torch.cat([y for _, y in feed.evaluation("test")])
    assert torch.equal(labels, source.test.labels)
    assert sum(len(x) for x, _ in feed.evaluation("test")) == feed.counts["test"] == 1203


def test_the_batch_size_is_at_most_the_number_of_images():
    feed = memory_feed(images(), 1000)
    assert (feed.steps, feed.batch_size) == (1, 50)
