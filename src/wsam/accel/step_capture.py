"""`capture=` of `wsam.train_step`: replay a step from a CUDA graph, or find what prevents it."""

import contextlib
import logging
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wsam.accel.cuda_graph import CONSTANTS, RECORDINGS, GraphedStep, MakeStep, flatten_batch
from wsam.accel.graph_inputs import sharpness_aware
from wsam.accel.host_work import find_host_work

_logger = logging.getLogger(__name__)


class StepCapture:
    """Replays training steps, or makes them eagerly if something prevents a CUDA graph.

    Args:
        opt: a sharpness-aware or a plain optimizer, on a CUDA device.
        make_step: makes an eager step, which is recorded.
        has_scaler: whether the step uses a GradScaler.
        required: raise an error about what prevents the graph, instead of logging it once.

    Raises:
        ValueError: The step cannot be captured, and that is required.
    """

    def __init__(
        self, opt: Optimizer, make_step: MakeStep, *, has_scaler: bool, required: bool
    ) -> None:
        self._opt, self._make_step, self._has_scaler = opt, make_step, has_scaler
        self._required = required
        self._is_eager = False
        self._host_work: list[str] = []
        self.graph = self._make_graph() if required else None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        """Make one step on a batch."""
        leaves, structure = flatten_batch(args, kwargs)
        if not (self._required or self._is_eager):
            self._prepare(leaves)
        if self.graph is None:
            return self._make_step(*args, **kwargs)
        result = self.graph.run(leaves, structure)
        if self._host_work:
            self._give_up(self._host_work[0])
        elif not self._required and len(self.graph) == RECORDINGS:
            self._give_up(f"batches have {RECORDINGS} different shapes or settings")
        return result

    def find_host_work(self) -> AbstractContextManager[Any]:
        """Look for work on the host before the step is recorded, while it is still eager."""
        if self.graph is None or not self.graph.is_last_eager_call:
            return contextlib.nullcontext()
        return find_host_work(self._host_work)

    def _make_graph(self) -> GraphedStep:
        if self._has_scaler:
            raise ValueError("a GradScaler reads its scale on the host: use bfloat16 without one")
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            raise ValueError("torch.distributed is initialized: collectives cannot be captured")
        return GraphedStep(self._opt, self._make_step)

    def _prepare(self, leaves: list[Any]) -> None:
        """Make a graph if there is none, unless something prevents the step from being captured."""
        sharp = sharpness_aware(self._opt)
        others = [x for x in leaves if not isinstance(x, CONSTANTS)]
        if not all(isinstance(x, Tensor) and x.is_cuda and not x.requires_grad for x in others):
            self._give_up(
                "the batch must consist of numbers, strings and CUDA tensors that need no gradient"
            )
        elif self.graph is None and (sharp is None or sharp.model is None):
            self._give_up(
                "the model is unknown, so that train() and eval() would not be noticed: pass model= to "
                "the sharpness-aware optimizer, or capture=True"
            )
        elif self.graph is None:
            try:
                self.graph = self._make_graph()
            except ValueError as error:
                self._give_up(str(error))

    def _give_up(self, reason: str) -> None:
        """Make eager steps from now on, or raise an error."""
        if self._required:
            raise ValueError(f"the step cannot be captured: {reason}; use capture=False")
        _logger.warning("train_step makes eager steps: %s", reason)
        self._is_eager, self.graph = True, None
