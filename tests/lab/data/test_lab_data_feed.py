"""Splits, batches of tensors and label noise."""

import pytest
import torch

from wsam.lab.data.feed import TensorFeed, add_label_noise, fixed_order, split_rows
from wsam.lab.metrics import MSE, squared_error
from wsam.lab.models import Task
from wsam.lab.run import Run


def tensor_feed(seed=0):
    """50 samples whose target is ten times the input, in batches of 16."""
    numbers = torch.arange(50)
    splits = {"train": (numbers, 10 * numbers), "test": (numbers[:7], 10 * numbers[:7])}
    run, task = Run(batch_size=16, seed=seed), Task((1,), 1)
    return TensorFeed(splits, task, squared_error, MSE, run, torch.device("cpu"))


def epoch(feed):
    batches = list(feed.epoch())
    assert [len(inputs) for inputs, _ in batches] == [16, 16, 16]
    assert all(torch.equal(10 * inputs, targets) for inputs, targets in batches)
    order = torch.cat([inputs for inputs, _ in batches]).tolist()
    assert len(set(order)) == 48
    return order


def test_the_order_of_tensors_is_that_of_the_run_s_generator():
    one, again, other = tensor_feed(), tensor_feed(), tensor_feed(seed=1)
    first = epoch(one)
    torch.manual_seed(5)  # the global generator is not used
    assert epoch(again) == first
    assert epoch(other) != first
    other.generator.set_state(one.generator.get_state())
    second = epoch(one)
    assert epoch(other) == second != first


def test_fixed_batches_are_the_first_samples_in_order():
    feed = tensor_feed()
    assert [x.tolist() for x, _ in feed.fixed("train", 5, 3)] == [[0, 1, 2], [3, 4]]
    assert [x.tolist() for x, _ in feed.evaluation("test")] == [list(range(7))]


def test_rows_of_the_splits():
    run = Run()
    parts = {split: rows.tolist() for split, rows in split_rows(run, 50, None).items()}
    assert len(parts["test"]) == 10
    assert parts["train"] + parts["test"] == fixed_order(50).tolist()
    given = split_rows(run, 50, 7)
    assert given["train"].tolist() == list(range(43))
    assert given["test"].tolist() == list(range(43, 50))
    limited = split_rows(run.replace(train_limit=20, test_limit=3), 50, 7)
    assert limited["train"].tolist() == list(range(20))
    assert limited["test"].tolist() == [43, 44, 45]
    held_out = [
        split_rows(run.replace(validation=0.2, validation_seed=seed), 50, None) for seed in (0, 1)
    ]
    for found in held_out:
        kept = [*found["train"].tolist(), *found["validation"].tolist()]
        assert sorted(kept) == sorted(parts["train"])
        assert len(found["validation"]) == 8
    assert not torch.equal(held_out[0]["validation"], held_out[1]["validation"])


@pytest.mark.parametrize("fraction", [0.2, 0.4, 0.8])
def test_label_noise_is_uniform_over_all_classes(fraction):
    labels = torch.arange(50_000) % 10
    changed = add_label_noise(labels, 10, fraction, seed=0)
    # One in ten redrawn labels equals the old one.
    wrong = (changed != labels).double().mean().item()
    assert wrong == pytest.approx(fraction * 0.9, abs=0.01)
    drawn = changed[changed != labels]
    counts = torch.bincount(drawn, minlength=10).double() / len(drawn)
    assert counts.min() > 0.09
    assert counts.max() < 0.11
    # Independent of the old label: all pairs of old and new are about equally frequent.
    pairs = torch.bincount(labels * 10 + changed, minlength=100).view(10, 10).double() / 5000
    away = pairs[~torch.eye(10, dtype=torch.bool)]
    assert (away - fraction / 10).abs().max() < 0.02


def test_label_noise_has_its_own_seed_and_copies_the_labels():
    labels = torch.arange(1000) % 10
    assert torch.equal(add_label_noise(labels, 10, 0.0, 0), labels)
    assert torch.equal(add_label_noise(labels, 10, 0.5, 1), add_label_noise(labels, 10, 0.5, 1))
    assert not torch.equal(add_label_noise(labels, 10, 0.5, 1), add_label_noise(labels, 10, 0.5, 2))
    assert torch.equal(labels, torch.arange(1000) % 10)
