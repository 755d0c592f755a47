"""Every test starts from the same random state and on one thread."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("house", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("house")


@pytest.fixture(autouse=True)
def _fixed_randomness() -> Iterator[None]:
    torch.manual_seed(0)
    yield
