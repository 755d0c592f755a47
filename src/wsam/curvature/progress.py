"""Progress reports of iterative estimates."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Progress(NamedTuple):
    """State of an iteration: products so far, the most it may compute, and the current error."""

    products: int
    limit: int
    error: float


ProgressCallback = Callable[[Progress], None]
