"""Batch norms told to keep no statistics during the second pass: it has less to do, and nothing moves.

The switch is `track_running_stats`, without which torch's batch norms compute the same. Whoever throws
it may not rely on being obeyed: scripted, exported and compiled code may know nothing of it.
"""

import sys
from collections.abc import Sequence
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

    def throw(self, layers: Sequence[nn.Module]) -> bool:
        """Switch the statistics of layers off, if all have a switch; return whether it was done.

        Compiled code would have to be compiled once more for layers that are switched off.
        """
        own_names = list(map(vars, layers))
        if compilations() or not _have_switches(layers, own_names):
            return False
        self._off = own_names
        for own in self._off:
            own[SWITCH] = False
        return True

    def back(self) -> None:
        """Switch them on again; may be called twice."""
        for own in self._off:
            own[SWITCH] = True
        self._off = []  # last: whoever is interrupted before comes here again


def _have_switches(layers: Sequence[nn.Module], own_names: Sequence[dict[str, Any]]) -> bool:
    """Whether layers are batch norms as torch makes them, whose statistics are on."""
    if not set(KINDS).issuperset(map(type, layers)):
        return False
    return all(own[SWITCH] and "forward" not in own for own in own_names)
