"""Label noise."""

import pytest
import torch

from wsam.lab.data.feed import add_label_noise


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
