"""What a loss function does on the host is found before a CUDA graph is recorded."""

import random
import warnings

import numpy as np
import pytest
import torch

from wsam.accel.host_work import find_host_work


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda: torch.rand(1), "torch"),
        (random.random, "random"),
        (lambda: np.random.beta(1.0, 1.0), "numpy"),
    ],
)
def test_random_numbers_on_the_host(draw, name):
    found: list[str] = []
    with find_host_work(found):
        draw()
    (sentence,) = found
    assert f"random numbers from {name}" in sentence


def test_nothing_to_find():
    found: list[str] = []
    with find_host_work(found):
        torch.ones(3).sum()
    assert found == []


def test_synchronizations_are_found_and_other_warnings_are_kept():
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with find_host_work(found):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)  # as torch does
            warnings.warn("another", stacklevel=1)
    assert str(caught[0].message) == "another"
    assert len(found) == len(caught) == 1
    assert "synchronizes" in found[0]
    assert "test_host_work.py, line" in found[0]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_item_synchronizes():
    x, found = torch.ones(3, device="cuda"), []
    mode = torch.cuda.get_sync_debug_mode()
    with find_host_work(found):
        x.sum()
    assert found == []
    with find_host_work(found):
        x.sum().item()
    assert "test_host_work.py, line" in found[0]
    assert torch.cuda.get_sync_debug_mode() == mode
