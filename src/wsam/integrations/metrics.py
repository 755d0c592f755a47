"""Keeps the metrics of torchmetrics out of the second pass."""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor


@contextlib.contextmanager
def metrics_unchanged(objects: Iterable[Any]) -> Iterator[None]:
    """Let the metrics among `objects` work on copies of their states, and restore the states.

    They still compute the values of a batch, from which a loss may be computed.
    """
    torchmetrics = sys.modules.get("torchmetrics")  # without it there are no metrics
    kind: Any = torchmetrics.Metric if torchmetrics is not None else ()
    saved = [(vars(found), dict(vars(found))) for found in objects if isinstance(found, kind)]
    for attributes, before in saved:
        for name, value in before.items():
            if isinstance(value, Tensor):
                attributes[name] = value.detach().clone()
            elif isinstance(value, list):
                attributes[name] = list(value)  # states that grow, one tensor for each batch
    try:
        yield
    finally:
        for attributes, before in saved:
            attributes.clear()
            attributes.update(before)
