"""Batch norms told to keep no statistics during the second pass: it has less to do.

The switch is `track_running_stats`, without which torch's batch norms compute the same. It saves time
and nothing else: scripted, exported and compiled code knows nothing of it, and others than the layers
write into their statistics, so these are copied and put back all the same.
"""

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
SWITCH = "track_running_stats"


def compilations() -> int:
    """How many graphs have been compiled since somebody last set the compiler's counters back."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return int(compiler.counters["stats"]["unique_graphs"]) if compiler is not None else 0


class Switches:
    """The switches that are off now; none between steps."""

    def __init__(self) -> None:
        self._off: list[dict[str, Any]] = []

    def throw(self, layers: Iterable[nn.Module]) -> None:
        """Switch the statistics of those layers off that have a switch.

        Not where code was compiled: it would have to be compiled once more for layers that are off.
        """
        if not compilations():
            own_names = [vars(layer) for layer in layers if type(layer) in KINDS]
            self._off = [own for own in own_names if own[SWITCH] and "forward" not in own]
            for own in self._off:
                own[SWITCH] = False

    def back(self) -> None:
        """Switch them on again; may be called twice."""
        for own in self._off:
            own[SWITCH] = True
        self._off = []  # last: whoever is interrupted before comes here again
