"""Without slow tests, do not import the frameworks whose tests are all slow: that takes seconds."""

from pathlib import Path

import pytest

SLOW_MODULES = (
    *("test_accelerate.py", "test_fabric.py", "test_lightning.py", "test_lightning_errors.py"),
    "test_transformers.py",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore a module of slow tests if the marker expression deselects them."""
    deselected = "not slow" in config.getoption("markexpr")
    return True if deselected and collection_path.name in SLOW_MODULES else None
