"""ESAM's data selection: the second pass uses the samples whose loss increased most."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from wsam._core.validation import number, warn


class SampleSelection:
    """Stores per-sample losses of the first pass, and selects samples in the second.

    With s_i = l_i(w + d) - l_i(w), the keep * B samples with the largest s_i are used: rounded down,
    and at least one.
    """

    def __init__(self, keep: float) -> None:
        self.keep = number("keep", keep, 0, 1, low_open=True, high_open=False)
        self._warned = False
        self._collected: list[tuple[Tensor, int]] | None = None  # while `choose` runs
        self.reset()

    def reset(self) -> None:
        """Forget the losses. Call before a first pass."""
        self._first: list[Tensor] = []
        self._corrections: list[Tensor] = []  # one for each call in the second pass
        self._batch_is_selected = False  # by `choose`
        self.share: float | None = None
        """The share of the batch in the next call; None if all calls have the same."""

    def mean(self, losses: Tensor, second_pass: bool) -> Tensor:
        """Return the mean over the samples that are used in this pass."""
        if losses.dim() == 0:
            raise ValueError("select takes a loss for each sample: use reduction='none'")
        losses = losses.flatten()
        is_used = losses.requires_grad or self._collected is not None
        if self.keep == 1.0 or self._batch_is_selected or not is_used:
            return losses.mean()
        if not second_pass:
            self._first.append(losses.detach())
            return losses.mean()
        increase = losses.detach() - self._first[len(self._corrections)]
        # Stable: where nothing was perturbed all increases are zero, and the choice is still defined.
        order = torch.argsort(increase, descending=True, stable=True)
        # The slack keeps 0.29 * 100 from becoming 28.
        order = order[: max(1, math.floor(self.keep * len(losses) + 1e-9))]
        if self._collected is not None:
            self._collected.append((order, len(losses)))
        mean = losses[order].mean()
        correction = losses.detach().mean() - mean.detach()
        self._corrections.append(correction if self.share is None else self.share * correction)
        return mean

    def choose(self, forward: Callable[[], object]) -> list[tuple[Tensor, int]]:
        """Run a forward pass at w + d without gradients.

        The next pass must run on the selected samples. It uses all of them.

        Returns:
            For each call of `mean` the indices of the selected losses, and the number of all.
        """
        self._collected, self._batch_is_selected = [], False
        try:
            with torch.no_grad():
                forward()
            self._batch_is_selected = bool(self._collected)
            return self._collected
        finally:
            self._collected = None

    def corrected(self, loss_increase: Tensor) -> Tensor:
        """Return the loss increase over all samples, given that of the selected ones."""
        if self.keep < 1.0 and not self._first and not self._warned:
            self._warned = True
            warn(
                "the closure provides no per-sample losses, so all samples are used: compute "
                "loss = optimizer.select(losses) with reduction='none'"
            )
        if not self._corrections:
            return loss_increase
        corrections = torch.stack(self._corrections)
        return loss_increase + (corrections.mean() if self.share is None else corrections.sum())
