"""Every test starts from the same random state, and all run on one thread: tensors are tiny."""

import sys

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("house", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("house")


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Data that a module draws while it is imported must be the same in every run, too."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _fresh_start() -> None:
    torch.manual_seed(0)
    compiler = sys.modules.get("torch._dynamo.utils")
    if compiler is not None:  # what an earlier test has compiled is no business of this one
        compiler.counters.clear()
