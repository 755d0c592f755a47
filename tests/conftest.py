"""Fixtures and settings of all tests: fixed seeds, one thread, a hypothesis profile, a browser."""

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
    "wsam",
    deadline=None,
    max_examples=25,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],  # the machine may be busy
)
settings.load_profile("wsam")


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Seed before a module is imported, which may draw random data."""
    if isinstance(collector, pytest.Module):
        _seed()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give slow tests a longer timeout, as the machine may be busy."""
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(900))


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> None:
    """Seed before a shared fixture, so that it does not depend on earlier tests."""
    if fixturedef.scope != "function":
        _seed()


@pytest.fixture(autouse=True)
def _restored_import_path() -> Iterator[None]:
    """Remove the folders of imported user code: processes that other tests start inherit the path."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture(autouse=True)
def _fresh_start() -> None:
    _seed()
    # On a CPU without bfloat16, torch disables oneDNN at the first bfloat16 product.
    torch.backends.mkldnn.enabled = ONEDNN
    compiler = sys.modules.get("torch._dynamo.utils")
    if compiler is not None:  # counts of earlier tests
        compiler.counters.clear()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless browser, for tests marked with `needs_browser`."""
    from browsing import running

    with running() as found:
        yield found
