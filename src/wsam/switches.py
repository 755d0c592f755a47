"""Batch norms told to keep no statistics during the second pass, so that none need be put back."""

import operator
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
SWITCH, COUNT = "track_running_stats", "num_batches_tracked"
TRIALS = 3


def compilations() -> int:
    """How many graphs have been compiled so far."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return int(compiler.counters["stats"]["unique_graphs"]) if compiler is not None else 0


class Switches:
    """The switches of batch norms: `track_running_stats`, without which a pass computes the same.

    To throw them is cheaper than to copy statistics and put them back, and the pass itself has less to
    do. They serve where all layers have one and look at it, which CUDA graphs and compiled code do not.
    So it is tried before it is relied upon, the statistics being copied all the same: every layer has
    to run, and none may change. Later each layer must have counted the batch of the first pass, or the
    step goes by copies.

    Args:
        layers: all that are to be held still.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.serve = False
        has = bool(layers) and all(map(_has_switch, layers))
        self._trials = TRIALS if has else 0
        self._own = [vars(layer) for layer in layers if has]  # and not the layers, which may go
        self._counts: list[Any] = [own["_buffers"][COUNT] for own in self._own]
        self._ran: set[int] = set()
        self._end: Any = None
        self.look()

    def look(self) -> None:
        """Look how many batches were counted; call when a step ends."""
        self._looked = [count._version for count in self._counts]

    def throw(self, layers: Sequence[nn.Module]) -> bool:
        """Switch statistics off, if that may serve; return whether none need be copied."""
        if not (self.serve or self._trials) or compilations():
            return False
        now = [count._version for count in self._counts]
        # Another optimizer in the same loop may have thrown them, and throws them back when it likes.
        if not all(own[SWITCH] for own in self._own) or not all(
            map(operator.gt, now, self._looked)
        ):
            return False
        hooks = []
        if not self.serve:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                return False  # whoever tries has to wait for the device
            self._trials -= 1
            ran = self._ran = set()
            hooks = [each.register_forward_hook(lambda m, *_: ran.add(id(m))) for each in layers]
        # Also if the optimizer is given up in the middle of a step.
        self._end = weakref.finalize(self, _back, self._own, hooks)
        for own in self._own:
            own[SWITCH] = False
        return self.serve

    def back(self, unchanged: Callable[[], bool]) -> None:
        """Switch statistics on again; may be called twice.

        Args:
            unchanged: says whether they are as they were. It is asked where that was tried only.
        """
        if self._end is None:
            return
        self._end()
        self._end = None
        if not self.serve:
            self.serve = len(self._ran) == len(self._own) and unchanged()


def _has_switch(layer: nn.Module) -> bool:
    """Whether a layer is a batch norm as torch makes it, and counts its batches."""
    if type(layer) not in KINDS or "forward" in vars(layer):
        return False
    count = layer._buffers.get(COUNT)
    return type(count) is Tensor and not count.is_inference() and bool(vars(layer)[SWITCH])


def _back(layers: Sequence[dict[str, Any]], hooks: Sequence[Any]) -> None:
    for own in layers:
        own[SWITCH] = True
    for hook in hooks:
        hook.remove()
