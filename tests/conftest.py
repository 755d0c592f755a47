"""Every test starts from the same random state, and all run on one thread: tensors are tiny."""

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("house", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("house")


@pytest.fixture(autouse=True)
def _fixed_randomness() -> None:
    torch.manual_seed(0)
