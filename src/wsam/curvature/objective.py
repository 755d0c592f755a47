"""The mean loss of a model over batches, as a function of its weights.

Everything in this package reads a model through one `Objective`: it streams the batches, keeps the
model in one mode, evaluates at other weights without touching the model's own, and refuses what
would make two evaluations differ.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from wsam.curvature.batch import batch_size, move, require_repeatable
from wsam.curvature.choice import (
    ParameterFilter,
    allows_tf32,
    chosen_parameters,
    chosen_precision,
    unwrapped,
)

__all__ = ["LossFunction", "Mode", "Objective", "ObjectiveOptions", "Reading"]

LossFunction = Callable[..., Tensor]
Mode = Literal["eval", "train"]

_PREFIX = "model."


class ObjectiveOptions(TypedDict, total=False):
    """The keyword arguments of `Objective`, shared by everything that builds one."""

    mode: Mode
    params: ParameterFilter | None
    dtype: torch.dtype | None
    reduction: Literal["mean", "sum"]
    size: Callable[[Any], float] | None
    check: bool


class Reading(NamedTuple):
    """What a pass over batches found: their mean loss, and how many there were."""

    loss: float
    samples: float
    batches: int


class _ModelAndLoss(nn.Module):
    """Model and loss in one module, so that swapped weights are seen by a loss that reads them."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, batch: Any) -> tuple[Tensor, Any]:
        if isinstance(batch, Mapping):
            output = self.model(**batch)
        elif isinstance(batch, Sequence):
            output = self.model(batch[0])
        else:
            output = self.model(batch)
        return self.criterion(output, batch), output

    def criterion(self, output: Any, batch: Any) -> Tensor:
        if isinstance(batch, Mapping):
            loss = self.loss_fn(output, batch)
        elif isinstance(batch, Sequence):
            loss = self.loss_fn(output, *batch[1:])
        else:
            loss = self.loss_fn(output)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            given = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn must return one number for a batch, it returned {given}")
        return loss.reshape(())


class Objective:
    """Mean loss over batches: `L(w) = sum_b n_b L_b(w) / sum_b n_b`, n_b samples in batch b.

    A batch `(x, y, ...)` gives `loss_fn(model(x), y, ...)`, a mapping gives
    `loss_fn(model(**batch), batch)`, anything else `loss_fn(model(batch))`.

    Args:
        model: any module; a compiled or data-parallel wrapper is looked through.
        loss_fn: returns the mean loss of one batch (or the sum: say so with `reduction`).
        batches: read again for every evaluation, so a list or a loader, not a generator.
        mode: "eval" (BatchNorm uses its running statistics, dropout is off) or "train" (BatchNorm
            uses each batch's own statistics; the running ones stay as they are).
        params: names, or a test of a name, of the parameters to differentiate; default: those that
            require a gradient.
        dtype: compute in this precision; default: the parameters' own.
        reduction: what `loss_fn` does over a batch, "mean" or "sum".
        size: how many samples a batch counts for; default: the length of its first tensor.
        check: compare two evaluations of one batch, and later two readings of all batches, and
            refuse a loss that changes between them.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        batches: Iterable[Any],
        *,
        mode: Mode = "eval",
        params: ParameterFilter | None = None,
        dtype: torch.dtype | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        size: Callable[[Any], float] | None = None,
        check: bool = True,
    ) -> None:
        if mode not in ("eval", "train"):
            raise ValueError(f"mode must be 'eval' or 'train', not {mode!r}")
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be 'mean' or 'sum', not {reduction!r}")
        require_repeatable(batches)
        self.model = unwrapped(model)
        self.loss_fn = loss_fn
        self.batches = batches
        self.mode: Mode = mode
        self.reduction = reduction
        self.size_of: Callable[[Any], float] = size or batch_size
        self._joined = _ModelAndLoss(self.model, loss_fn)
        self.parameters = chosen_parameters(self.model, params)
        self.dtype = chosen_precision(self.parameters, dtype)
        self.device = next(iter(self.parameters.values())).device
        self._cast = any(p.dtype != self.dtype for p in self.parameters.values())
        self.numel = sum(p.numel() for p in self.parameters.values())
        self.loss, samples, self.batch_count = self._survey(check)
        self.samples: float = int(samples) if samples.is_integer() else samples
        self._confirmed = not check
        self._loss_versions = self._versions()

    # Weights as one flat vector, and back -------------------------------------------------------

    def weights(self) -> Tensor:
        """Return the model's present weights as one flat vector."""
        return self.flatten([p.detach() for p in self.parameters.values()])

    def flatten(self, tensors: Iterable[Tensor]) -> Tensor:
        """Join tensors, in the order of the parameters, to one flat vector."""
        return torch.cat([t.reshape(-1).to(self.device, self.dtype) for t in tensors])

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Cut a flat vector into views shaped and named like the parameters."""
        if flat.shape != (self.numel,):
            raise ValueError(f"expected a vector of {self.numel} numbers, got {tuple(flat.shape)}")
        pieces = torch.split(flat, [p.numel() for p in self.parameters.values()])
        return {
            name: piece.view(p.shape)
            for (name, p), piece in zip(self.parameters.items(), pieces, strict=True)
        }

    def leaves(self, flat: Tensor | None = None) -> dict[str, Tensor]:
        """Return fresh tensors to differentiate by, at `flat` or at the model's own weights."""
        source = self.parameters if flat is None else self.split(flat)
        return {
            name: source[name].detach().to(p.device, self.dtype).requires_grad_()
            for name, p in self.parameters.items()
        }

    # Evaluation ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Put the model in the chosen mode for a while; every module gets its own mode back."""
        before = [(module, module.training) for module in self.model.modules()]
        # Fused attention has no second derivative; autocast would hide a lower precision.
        fused = torch.backends.mha.get_fastpath_enabled()
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            self.model.train(self.mode == "train")
            with (
                torch.inference_mode(False),
                torch.enable_grad(),
                torch.autocast(self.device.type, enabled=False),
                sdpa_kernel(SDPBackend.MATH),
            ):
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
            for module, training in before:
                module.training = training

    def stream(self, batches: Iterable[Any] | None = None) -> Iterator[tuple[Any, float]]:
        """Yield every batch on the model's device, with the number of samples it counts for."""
        cast = self.dtype if self._cast else None
        for batch in self.batches if batches is None else batches:
            size = float(self.size_of(batch))
            if not size > 0 or math.isinf(size):
                raise ValueError(f"a batch must count for at least one sample, got {size}")
            yield move(batch, self.device, cast), size

    def evaluate(self, leaves: Mapping[str, Tensor], batch: Any, size: float) -> tuple[Tensor, Any]:
        """Return the mean loss of one batch and the model's output, at the tensors `leaves`.

        These may name buffers beside parameters; what they do not name stays the model's own.
        """
        tensors = self._others(leaves)
        tensors.update({_PREFIX + name: tensor for name, tensor in leaves.items()})
        loss, output = torch.func.functional_call(self._joined, tensors, (batch,))
        return self._mean(loss, size), output

    def criterion(self, output: Tensor, batch: Any, size: float) -> Tensor:
        """Return the mean loss of one batch as a function of the model's output alone."""
        return self._mean(self._joined.criterion(output, batch), size)

    def mean_loss(self, flat: Tensor | None = None) -> float:
        """Return the loss over all batches, at `flat` or at the model's own weights."""
        with self.ready(), torch.no_grad():
            return self._total(self.leaves(flat)).loss

    def gradient(
        self, flat: Tensor | None = None, batches: Iterable[Any] | None = None
    ) -> tuple[Reading, Tensor]:
        """Return a reading of all batches (or those given) and the flat gradient of its loss."""
        total = torch.zeros(self.numel, device=self.device, dtype=self.dtype)
        loss_sum, samples, count = 0.0, 0.0, 0
        with self.ready():
            leaves = self.leaves(flat)
            for batch, size in self.stream(batches):
                loss, _ = self.evaluate(leaves, batch, size)
                parts = torch.autograd.grad(
                    self.differentiable(loss), list(leaves.values()), materialize_grads=True
                )
                total.add_(self.flatten(parts), alpha=size)
                loss_sum += loss.item() * size
                samples, count = samples + size, count + 1
        return Reading(loss_sum / samples, samples, count), total / samples

    def differentiable(self, loss: Tensor) -> Tensor:
        """Return the loss, or say that it does not depend on the parameters."""
        if not loss.requires_grad:
            raise ValueError("the loss does not depend on any of the chosen parameters")
        return loss

    def describe(self) -> dict[str, Any]:
        """Return what the loss is computed from: plain numbers and words."""
        return {
            "mode": self.mode,
            "samples": self.samples,
            "batches": self.batch_count,
            "parameters": self.numel,
            "dtype": str(self.dtype).removeprefix("torch."),
            "tf32": self._uses_tf32(),
            "device": str(self.device),
            "loss": self.loss,
        }

    def _uses_tf32(self) -> bool:
        return self.device.type == "cuda" and self.dtype == torch.float32 and allows_tf32()

    def _mean(self, loss: Tensor, size: float) -> Tensor:
        return loss / size if self.reduction == "sum" else loss

    def _others(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Everything the model holds beside what is given, where it must be replaced."""
        others: dict[str, Tensor] = {}
        if self._cast:
            for name, parameter in self.model.named_parameters():
                if name not in given:
                    others[_PREFIX + name] = self._as_computed(parameter.detach())
        if self._cast or self.mode == "train":
            # Copies: BatchNorm writes its running statistics into what it is given.
            for name, buffer in self.model.named_buffers():
                others[_PREFIX + name] = self._as_computed(buffer).clone()
        return others

    def _as_computed(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    # What is refused ----------------------------------------------------------------------------

    def _survey(self, check: bool) -> Reading:
        """Count samples and batches and check that the loss is finite."""
        with self.ready(), torch.no_grad():
            reading = self._total(self.leaves(), twice=check)
        if not reading.batches:
            raise ValueError("there are no batches: the data is empty")
        return reading

    def confirm(self, reading: Reading) -> None:
        """Compare a second reading of all batches with the first; refuse data that changes.

        Whoever reads all batches at the model's own weights calls it, so that the check costs no
        reading of its own. Where the model has been trained since, there is nothing to compare, and
        `loss` becomes that of the new weights.
        """
        versions = self._versions()
        if versions != self._loss_versions:
            self.loss, self._loss_versions = reading.loss, versions
            self._confirmed = True
        if self._confirmed:
            return
        self._confirmed = True
        if (reading.samples, reading.batches) != (self.samples, self.batch_count):
            raise ValueError(
                f"the batches changed between two readings: {self.samples:g} samples in "
                f"{self.batch_count} batches, then {reading.samples:g} in {reading.batches}"
            )
        # Shuffled batches are rounded in another order; with their own statistics they also differ.
        rtol = 1e-3 if self._uses_tf32() or self.mode == "train" else 1e-4
        where = "over all batches: is the data augmented at random?"
        self._same(self.loss, reading.loss, rtol, where)

    def read_again(self) -> None:
        """Read all batches for `confirm` alone, if that is still wanted."""
        if not self._confirmed:
            with self.ready(), torch.no_grad():
                self.confirm(self._total(self.leaves()))

    def _versions(self) -> list[int]:
        return [p._version for p in self.parameters.values()]

    def _total(self, leaves: Mapping[str, Tensor], twice: bool = False) -> Reading:
        total, samples, count = 0.0, 0.0, 0
        for batch, size in self.stream():
            loss = self.evaluate(leaves, batch, size)[0].item()
            if not math.isfinite(loss):
                raise ValueError(f"the loss of batch {count} is {loss}: curvature needs it finite")
            if twice and count == 0:
                again = self.evaluate(leaves, batch, size)[0].item()
                self._same(loss, again, 1e-6, "of one batch: is dropout active? mode='eval' helps")
            total, samples, count = total + loss * size, samples + size, count + 1
        return Reading(total / samples if samples else math.nan, samples, count)

    def _same(self, first: float, second: float, rtol: float, where: str) -> None:
        if self.dtype == torch.float64:
            rtol *= 1e-6
        if not math.isclose(first, second, rel_tol=rtol, abs_tol=1e-12):
            raise ValueError(f"the loss changed from {first:.9g} to {second:.9g} {where}")
