"""ESAM's data selection: the second pass learns from the samples whose loss grew most."""

import math

import torch
from torch import Tensor

from wsam.checks import number, warn


class Selection:
    """Remembers per-sample losses of the first pass and picks among those of the second.

    s_i = l_i(w + d) - l_i(w); the keep * B samples of largest s_i stay: exactly that many (rounded
    down), at least one.
    """

    def __init__(self, keep: float) -> None:
        self.keep = number("keep", keep, 0, 1, low_open=True, high_open=False)
        self._first: list[Tensor] = []
        self._corrections: list[Tensor] = []
        self._calls = 0
        self._warned = False

    def reset(self) -> None:
        """Forget the samples; call before a first pass."""
        self._first, self._corrections, self._calls = [], [], 0

    def mean(self, losses: Tensor, second: bool) -> Tensor:
        """Return the mean over the samples that count in the first or the second pass."""
        if losses.dim() == 0:
            raise ValueError("select takes a loss for each sample: use reduction='none'")
        losses = losses.flatten()
        if self.keep == 1.0 or not losses.requires_grad:
            return losses.mean()
        if not second:
            self._first.append(losses.detach())
            return losses.mean()
        if self._calls >= len(self._first) or len(self._first[self._calls]) != len(losses):
            raise RuntimeError(
                "select saw other samples in the second pass than in the first: both passes must "
                "use the same batch; in a loop by hand call begin() before the first pass"
            )
        growth = losses.detach() - self._first[self._calls]
        self._calls += 1
        # Stable: where nothing was perturbed all growths are zero, and the choice is still defined.
        order = torch.argsort(growth, descending=True, stable=True)
        mean = losses[order[: self.size(len(losses))]].mean()
        self._corrections.append(losses.detach().mean() - mean.detach())
        return mean

    def size(self, samples: int) -> int:
        """Return how many of `samples` are kept."""
        # The slack keeps 0.29 * 100 from becoming 28.
        return max(1, math.floor(self.keep * samples + 1e-9))

    def corrected(self, rise: Tensor) -> Tensor:
        """Return the rise of the loss over all samples, not only over those kept in the second pass."""
        if self.keep < 1.0 and not self._first and not self._warned:
            self._warned = True
            warn(
                f"only a share of {self.keep:g} of the samples is to be kept in the second pass, but "
                "the closure gives no per-sample losses, so all are kept: let it compute "
                "loss = optimizer.select(losses) with reduction='none'"
            )
        return rise + torch.stack(self._corrections).mean() if self._corrections else rise
