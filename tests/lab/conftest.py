"""Fixtures of the tests of the lab."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def restored_import_path() -> Iterator[None]:
    """Remove the folders of the user's code, which importing it adds."""
    before = list(sys.path)
    yield
    sys.path[:] = before
