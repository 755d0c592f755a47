"""Shared parts of the integrations: unwrapping, the second pass, clipping.

A framework that accumulates gradients runs the micro-batches of a step one after the other and then
calls the optimizer. `MicrobatchReplay` records them. When the first pass of the last one is done, it
moves the weights to w + d and runs all of them again.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from wsam._core.step_state import Action
from wsam._core.validation import number
from wsam.optimizer import SharpnessAware

RunMicrobatch = Callable[[], Tensor | None]
"""Computes the loss of a micro-batch, calls backward and returns the loss; None to leave it out."""


def unwrap(optimizer: Any) -> SharpnessAware | None:
    """Return the sharpness-aware optimizer inside a framework's wrappers, None if there is none.

    Wrappers do not forward all methods. Call `begin`, `ascend`, `descend` and `select`, and read
    `sharpness`, on the returned optimizer.
    """
    while optimizer is not None:
        # A wrapper may derive from the class of what it wraps, but only the optimizer has a base.
        if isinstance(optimizer, SharpnessAware) and "base" in vars(optimizer):
            return optimizer
        optimizer = getattr(optimizer, "optimizer", None)
    return None


class MicrobatchReplay:
    """Records the micro-batches of a step in the first pass, and runs them again at w + d.

    Args:
        optimizer: the sharpness-aware optimizer.
        no_sync: returns a context in which backward passes do not reduce gradients over ranks. The
            second pass uses it for all micro-batches but the last, as frameworks do in the first.
    """

    def __init__(
        self,
        optimizer: SharpnessAware,
        no_sync: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        if optimizer.local:
            raise ValueError(
                "local=True (m-sharpness) is not supported by this integration, because the framework "
                "synchronizes the first pass: use local=False, or write the training loop yourself"
            )
        self.in_second_pass = False
        self._optimizer = optimizer
        self._no_sync = no_sync
        self._microbatches: list[tuple[RunMicrobatch, tuple[Any, ...] | None]] = []
        self._first_losses: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._microbatches)

    def add(self, run: RunMicrobatch) -> None:
        """Record a micro-batch. Call before its first pass.

        Args:
            run: runs the micro-batch again, with the current weights.
        """
        optimizer = self._optimizer
        if not self._microbatches:
            optimizer.begin()
        # One state for each micro-batch: a data loader may draw random numbers between them.
        rng_state = optimizer._rng.read() if optimizer.repeat_randomness else None
        self._microbatches.append((run, rng_state))

    def record_loss(self, loss: Tensor) -> None:
        """Record the loss of a micro-batch at w, from which the sharpness is computed."""
        self._first_losses.append(loss.detach())

    def run_first_pass(self, run: Callable[[], Tensor]) -> Tensor:
        """Record a micro-batch, run its first pass and return its loss."""
        self.add(run)
        try:
            loss = run()
        except BaseException:
            self._clear()
            raise
        self.record_loss(loss)
        return loss

    def run_second_pass(self, scaler: Any = None, *, losses_are_scaled: bool = False) -> None:
        """Move to w + d, run all micro-batches again, and return to w.

        Afterwards `p.grad` holds the gradient for the base, and `optimizer.step()` makes the update.

        Args:
            scaler: the GradScaler that has scaled the gradients, if there is one.
            losses_are_scaled: whether the recorded losses are multiplied by its scale, too.
        """
        microbatches, first_losses = self._microbatches, self._first_losses
        self._clear()
        optimizer = self._optimizer
        scaler = scaler if scaler is not None and scaler.is_enabled() else None
        scale = scaler.get_scale() if scaler is not None and losses_are_scaled else 1.0
        try:
            with torch.no_grad():
                moved, losses = optimizer._run_next_passes(
                    lambda: self._replay(microbatches), scaler
                )
        except BaseException as error:
            optimizer._cancel(error)
            raise
        second_losses: list[Tensor | None] = losses or []
        if moved and second_losses and all(loss is None for loss in second_losses):
            optimizer._step_state.action = Action.SKIP
        sharpness = torch.full((), torch.nan)
        if moved and len(first_losses) == len(second_losses):
            first = torch.stack(first_losses).sum() / scale
            increase = sum(loss for loss in second_losses if loss is not None) - first
            sharpness = optimizer._selection.corrected(increase)
        optimizer.descend()
        optimizer._sharpness = sharpness

    def _clear(self) -> None:
        self._microbatches, self._first_losses = [], []

    def _replay(
        self, microbatches: list[tuple[RunMicrobatch, tuple[Any, ...] | None]]
    ) -> list[Tensor | None]:
        losses = []
        self.in_second_pass = True
        try:
            for i, (run, rng_state) in enumerate(microbatches, start=1):
                if rng_state is not None:
                    self._optimizer._rng.write(rng_state)
                is_last = i == len(microbatches)
                context = contextlib.nullcontext() if is_last else self._no_sync()
                with torch.enable_grad(), context:
                    losses.append(run())
        finally:
            self.in_second_pass = False
        return [None if loss is None else loss.detach() for loss in losses]


def clip_in_optimizer(optimizer: SharpnessAware, max_norm: float, option: str) -> None:
    """Set `max_norm` of the optimizer to the value of a framework's clipping option.

    The framework itself would clip `p.grad`. In each pass that distorts g1 - g0; after both passes it
    scales the base's gradient but not the decoupled term.

    Args:
        optimizer: the sharpness-aware optimizer.
        max_norm: the value of the option.
        option: its name, for error messages.
    """
    if optimizer.lean:
        raise ValueError(
            f"{option} needs both gradients before the update, but lean=True lets the base step "
            f"between the passes: set lean=False, or remove {option}"
        )
    optimizer.max_norm = number(option, max_norm, low_open=True)
