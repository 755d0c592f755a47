"""What an iteration tells whoever follows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Progress", "Report"]


class Progress(NamedTuple):
    """How far an iteration has come: products made, the most it may make, the error so far."""

    products: int
    limit: int
    error: float


Report = Callable[[Progress], None]
