"""What the integrations share: our optimizer inside a framework's, and the replay of a window.

A framework that accumulates gradients runs the micro-batches of a step one after the other and then
asks for an update. All of them belong to both passes: they are kept, and once the last one's first
pass is done, the weights move to w + d and all run again.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from wsam._core.validation import number
from wsam.optimizer import SharpnessAware

Pass = Callable[[], Tensor | None]


def unwrap(optimizer: Any) -> SharpnessAware | None:
    """Return the sharpness-aware optimizer inside a framework's wrappers, or None if there is none.

    Wrappers imitate the class of what they wrap, or do not forward its methods: call `begin`,
    `ascend`, `descend` and `sharpness` on what this returns.
    """
    while optimizer is not None:
        if isinstance(optimizer, SharpnessAware) and "base" in vars(optimizer):
            return optimizer
        optimizer = getattr(optimizer, "optimizer", None)
    return None


class Window:
    """The micro-batches of one step: each runs once at w and, when all have, once more at w + d.

    Args:
        optimizer: the sharpness-aware optimizer.
        unsynchronised: makes a context in which backward passes do not reduce gradients over ranks;
            used for all but the last micro-batch of the second pass, as it is in the first.
    """

    def __init__(
        self,
        optimizer: SharpnessAware,
        unsynchronised: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        if optimizer.local:
            raise ValueError(
                "local=True (m-sharpness) needs a first pass without synchronisation, which this "
                "framework does not make: use local=False, or a loop of your own"
            )
        self.replaying = False
        self._optimizer = optimizer
        self._unsynchronised = unsynchronised
        self._runs: list[tuple[Pass, tuple[Any, ...] | None]] = []
        self._losses: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, again: Pass) -> None:
        """Say that a micro-batch's first pass begins.

        Args:
            again: computes the loss at whatever the weights are then, calls backward, returns the loss.
        """
        optimizer = self._optimizer
        if not self._runs:
            optimizer.begin()
        # Between two micro-batches a data loader may have drawn random numbers, too.
        random = optimizer._rng.read() if optimizer.repeat_randomness else None
        self._runs.append((again, random))

    def note(self, loss: Tensor) -> None:
        """Take the loss of a micro-batch at w; with all of them the sharpness can be told."""
        self._losses.append(loss.detach())

    def first(self, run: Callable[[], Tensor]) -> Tensor:
        """Make a micro-batch's first pass; the second will be the same."""
        self.add(run)
        try:
            loss = run()
        except BaseException:
            self._runs, self._losses = [], []
            raise
        self.note(loss)
        return loss

    def finish(self, scaler: Any = None, *, losses_are_scaled: bool = False) -> None:
        """Move to w + d by the gradients that lie there, run all again, and return to w.

        Afterwards `p.grad` holds what the base is fed, and `optimizer.step()` makes the update.

        Args:
            scaler: the GradScaler whose scale is on the gradients, if there is one.
            losses_are_scaled: whether the noted losses have the scale on them, too.
        """
        runs, losses = self._runs, self._losses
        self._runs, self._losses = [], []
        scale = scaler.get_scale() if scaler is not None and scaler.is_enabled() else None
        optimizer = self._optimizer
        moved = optimizer.ascend(scale)
        second: list[Tensor | None] = []
        # A scaler must see gradients that it can check, even where the weights have not moved.
        if moved or scale is not None:
            try:
                second = self._replay(runs)
                if scale is not None:
                    scaler.unscale_(optimizer)
            except BaseException as error:
                optimizer._cancel(error)
                raise
        rise = torch.full((), torch.nan)
        if moved and len(losses) == len(second):
            first = torch.stack(losses).sum() / (scale if scale and losses_are_scaled else 1.0)
            rise = sum(loss for loss in second if loss is not None) - first
            rise = optimizer._selection.corrected(rise)
        if moved and second and all(loss is None for loss in second):
            optimizer._skip_step()  # the framework's way to leave out a batch
        optimizer.descend()
        optimizer._sharpness = rise

    def _replay(self, runs: list[tuple[Pass, tuple[Any, ...] | None]]) -> list[Tensor | None]:
        losses = []
        self.replaying = True
        try:
            for position, (again, random) in enumerate(runs, start=1):
                if random is not None:
                    self._optimizer._rng.write(random)
                last = position == len(runs)
                context = contextlib.nullcontext() if last else self._unsynchronised()
                with torch.enable_grad(), context:
                    losses.append(again())
        finally:
            self.replaying = False
        return [None if loss is None else loss.detach() for loss in losses]


def take_over_clipping(optimizer: SharpnessAware, max_norm: float, source: str) -> None:
    """Let the optimizer clip as the framework was told to: once, and both terms of the update alike.

    A framework clips what lies in `p.grad`: in each pass, which distorts g1 - g0, or what the base is
    fed and not the decoupled term beside it.
    """
    if optimizer.lean:
        raise ValueError(
            f"{source} needs both gradients before the update, and lean=True lets the base step "
            "between them: choose one of the two"
        )
    optimizer.max_norm = number(source, max_norm, low_open=True)
