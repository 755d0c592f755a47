"""Every test starts from the same random state, and all run on one thread: tensors are tiny."""

import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
ONEDNN = torch.backends.mkldnn.enabled
settings.register_profile(
    "house",
    deadline=None,
    max_examples=25,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],  # a busy machine is no fault of the test
)
settings.load_profile("house")


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Data that a module draws while it is imported must be the same in every run, too."""
    if isinstance(collector, pytest.Module):
        _seed()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long by itself takes minutes where other programs share the machine."""
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(900))


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> None:
    """What a whole module shares must not depend on the test that came before it."""
    if fixturedef.scope != "function":
        _seed()


@pytest.fixture(autouse=True)
def _fresh_start() -> None:
    _seed()
    # Where a CPU lacks bfloat16, torch gives oneDNN up in this process at the first such product.
    torch.backends.mkldnn.enabled = ONEDNN
    compiler = sys.modules.get("torch._dynamo.utils")
    if compiler is not None:  # what an earlier test has compiled is no business of this one
        compiler.counters.clear()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless browser for the tests of a page, which say by `needs_browser` that they want one."""
    from browsing import running

    with running() as found:
        yield found
