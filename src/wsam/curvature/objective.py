"""The mean loss of a model over batches as a function of its weights.

All measurements of this package evaluate the model through an `Objective`. It iterates over the
batches, sets the model's mode, evaluates at other weights without changing the model's own, and
raises if two evaluations of the same loss differ.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from wsam._utils.batches import check_reiterable, count_samples, move_batch
from wsam.curvature.parameters import (
    ParameterFilter,
    select_dtype,
    select_parameters,
    unwrap_model,
)

LossFunction = Callable[..., Tensor]
Mode = Literal["eval", "train"]

_PREFIX = "model."


class ObjectiveOptions(TypedDict, total=False):
    """Keyword arguments of `Objective`, which other functions pass on as `**options`."""

    mode: Mode
    params: ParameterFilter | None
    dtype: torch.dtype | None
    reduction: Literal["mean", "sum"]
    size: Callable[[Any], float] | None
    check: bool


class LossSummary(NamedTuple):
    """Mean loss of one pass over the data, with the number of samples and batches."""

    loss: float
    samples: float
    batches: int


class _ModelAndLoss(nn.Module):
    """Model and loss in one module, so that a loss that reads the weights uses the swapped ones."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction, reduction: str) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.reduction = reduction

    def forward(self, batch: Any, size: float, then: Callable[[Tensor, Any], Any]) -> Any:
        """Call `then` with mean loss and output, while the swapped weights are in place."""
        if isinstance(batch, Mapping):
            output = self.model(**batch)
        elif isinstance(batch, Sequence):
            output = self.model(batch[0])
        else:
            output = self.model(batch)
        return then(self.criterion(output, batch, size), output)

    def criterion(self, output: Any, batch: Any, size: float) -> Tensor:
        """Return the mean loss of a batch as a function of the model's output."""
        if isinstance(batch, Mapping):
            loss = self.loss_fn(output, batch)
        elif isinstance(batch, Sequence):
            loss = self.loss_fn(output, *batch[1:])
        else:
            try:
                loss = self.loss_fn(output)
            except TypeError as error:
                raise TypeError(
                    "batches must be a list of (input, target) pairs: [(x, y)]. It contains a "
                    f"{type(batch).__name__}, for which loss_fn(model(batch)) raised: {error}"
                ) from error
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            given = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn must return one number for a batch, it returned {given}")
        return loss / size if self.reduction == "sum" else loss


class Objective:
    """Mean loss over batches.

    Equation, with n_b samples in batch b::

        L(w) = sum_b n_b L_b(w) / sum_b n_b

    A batch `(x, y, ...)` is evaluated as `loss_fn(model(x), y, ...)`, a mapping as
    `loss_fn(model(**batch), batch)`, anything else as `loss_fn(model(batch))`.

    Args:
        model: Any module. Wrappers of torch.compile and data parallelism are removed.
        loss_fn: Returns the mean loss of one batch, or the sum (see `reduction`).
        batches: A list or a loader. Every evaluation iterates over it, so a generator is refused.
        mode: "eval" (BatchNorm uses its running statistics, dropout is off) or "train" (BatchNorm
            uses the statistics of each batch; the running ones do not change).
        params: Names of the parameters to differentiate, or a function that selects them by name.
            Default: those that require a gradient.
        dtype: Precision to compute in, float32 or float64: model, loss module and batches are
            cast. Default: that of the parameters.
        reduction: Reduction of `loss_fn` over a batch, "mean" or "sum".
        size: Returns the number of samples of a batch. Default: the length of its first tensor.
        check: Evaluate one batch twice, and compare a second pass over the data with the first.

    Raises:
        TypeError: If `batches` can be read only once.
        ValueError: If an argument is invalid, there are no batches or no parameters, the loss is
            not finite, or (with `check`) two evaluations differ.
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
            raise ValueError(f"mode must be 'eval' or 'train', got {mode!r}")
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
        check_reiterable(batches)
        self.model = unwrap_model(model)
        self.loss_fn = loss_fn
        self.batches = batches
        self.mode: Mode = mode
        self.reduction = reduction
        self.size_of: Callable[[Any], float] = size or count_samples
        self._model_and_loss = _ModelAndLoss(self.model, loss_fn, reduction)
        self.parameters = select_parameters(self.model, params)
        self.dtype = select_dtype(self.parameters, dtype)
        self.device = next(iter(self.parameters.values())).device
        self._cast = dtype is not None
        self.numel = sum(p.numel() for p in self.parameters.values())
        with self.ready(), torch.no_grad():
            first = self._summarize(self.leaves(), twice=check)
        self.loss, self.batch_count = first.loss, first.batches
        self.samples: float = int(first.samples) if first.samples.is_integer() else first.samples
        self._confirmed = not check
        self._loss_versions = self._parameter_versions()

    # Weights as one flat vector -----------------------------------------------------------------

    def weights(self) -> Tensor:
        """Return the model's current weights as one flat vector."""
        return self.flatten([p.detach() for p in self.parameters.values()])

    def flatten(self, tensors: Iterable[Tensor]) -> Tensor:
        """Concatenate tensors, in the order of the parameters, to one flat vector."""
        return torch.cat([t.reshape(-1).to(self.device, self.dtype) for t in tensors])

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of a flat vector, named and shaped like the parameters."""
        pieces = torch.split(flat, [p.numel() for p in self.parameters.values()])
        return {
            name: piece.view(p.shape)
            for (name, p), piece in zip(self.parameters.items(), pieces, strict=True)
        }

    def leaves(self, flat: Tensor | None = None) -> dict[str, Tensor]:
        """Return new leaf tensors that require a gradient, at `flat` or at the model's weights."""
        # A clone is a normal tensor even if the vector was computed in inference mode.
        source = self.parameters if flat is None else self.split(flat.clone())
        return {
            name: source[name].detach().to(p.device, self.dtype).requires_grad_()
            for name, p in self.parameters.items()
        }

    # Evaluation ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Set the model's mode and the global switches for evaluation; restore them on exit."""
        before = [(module, module.training) for module in self.model.modules()]
        # Fused attention has no second derivative; autocast would lower the precision.
        fastpath = torch.backends.mha.get_fastpath_enabled()
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
            torch.backends.mha.set_fastpath_enabled(fastpath)
            for module, training in before:
                module.training = training

    def stream(self, batches: Iterable[Any] | None = None) -> Iterator[tuple[Any, float]]:
        """Yield each batch on the model's device with its number of samples."""
        dtype = self.dtype if self._cast else None
        empty = True
        for batch in self.batches if batches is None else batches:
            empty = False
            yield move_batch(batch, self.device, dtype), float(self.size_of(batch))
        if empty:
            raise ValueError(
                "batches must contain at least one batch in every pass: the data is empty, or can be "
                "read only once: pass a list or a DataLoader"
            )

    def evaluate(self, leaves: Mapping[str, Tensor], batch: Any, size: float) -> tuple[Tensor, Any]:
        """Return the mean loss of one batch and the model's output.

        Args:
            leaves: Parameters, and optionally buffers, by name. Others are the model's own.
            batch: As `stream` yields it.
            size: Number of samples of the batch.
        """
        loss, output = self._call(leaves, batch, size, lambda loss, output: (loss, output))
        return loss, output

    def _call(
        self,
        leaves: Mapping[str, Tensor],
        batch: Any,
        size: float,
        then: Callable[[Tensor, Any], Any],
    ) -> Any:
        """Return `then(loss, output)`, called while the model has the given weights."""
        tensors = self._swapped_tensors(leaves)
        return torch.func.functional_call(self._model_and_loss, tensors, (batch, size, then))

    def criterion(self, output: Tensor, batch: Any, size: float) -> Tensor:
        """Return the mean loss of one batch as a function of the model's output."""
        return self._model_and_loss.criterion(output, batch, size)

    def mean_loss(self, flat: Tensor | None = None) -> float:
        """Return the loss over all batches, at `flat` or at the model's weights."""
        with self.ready(), torch.no_grad():
            return self._summarize(self.leaves(flat), finite=False).loss

    def gradient(
        self, flat: Tensor | None = None, batches: Iterable[Any] | None = None
    ) -> tuple[LossSummary, Tensor]:
        """Return the mean loss of all batches (or those given) and its flat gradient."""
        loss_sum, samples, count = 0.0, 0.0, 0
        with self.ready():
            total = torch.zeros(self.numel, device=self.device, dtype=self.dtype)
            leaves = self.leaves(flat)

            # Activation checkpointing computes the forward pass again inside of the backward pass,
            # which must therefore use the given weights, too.
            def differentiate(loss: Tensor, _output: Any) -> tuple[float, Tensor]:
                gradients = torch.autograd.grad(
                    self.differentiable(loss), list(leaves.values()), materialize_grads=True
                )
                return loss.item(), self.flatten(gradients)

            for batch, size in self.stream(batches):
                loss, gradient = self._call(leaves, batch, size, differentiate)
                total.add_(gradient, alpha=size)
                loss_sum += loss * size
                samples, count = samples + size, count + 1
        return LossSummary(loss_sum / samples, samples, count), total / samples

    def differentiable(self, loss: Tensor) -> Tensor:
        """Return the loss; raise if it does not depend on the selected parameters."""
        if not loss.requires_grad:
            raise ValueError("the loss does not depend on any of the chosen parameters")
        return loss

    def describe(self) -> dict[str, Any]:
        """Return the data, mode and precision of the loss as numbers and strings."""
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
        return self.device.type == "cuda" and self.dtype == torch.float32 and _is_tf32_allowed()

    def _swapped_tensors(self, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all tensors of model and loss: those given, and the others as constants."""
        tensors = {_PREFIX + name: tensor for name, tensor in leaves.items()}
        for name, parameter in self._model_and_loss.named_parameters():
            if name not in tensors:
                tensors[name] = self._to_dtype(parameter.detach())
        for name, buffer in self._model_and_loss.named_buffers():
            # BatchNorm writes into its statistics, also into given ones.
            tensors[name] = self._to_dtype(tensors.get(name, buffer)).clone()
        return tensors

    def _to_dtype(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if self._cast and tensor.is_floating_point() else tensor

    # Consistency checks -------------------------------------------------------------------------

    def confirm(self, reading: LossSummary) -> None:
        """Compare a second pass over the data with the first.

        Callers that evaluate all batches at the model's weights anyway pass their result, so that
        the check needs no pass of its own. It runs once. If the model's weights changed since the
        first pass, `loss` is updated instead.

        Args:
            reading: Result of the second pass.

        Raises:
            ValueError: If the number of samples or batches, or the mean loss, differs.
        """
        versions = self._parameter_versions()
        if versions != self._loss_versions:
            self.loss, self._loss_versions = reading.loss, versions
        if self._confirmed:
            return
        self._confirmed = True
        # Sizes may be sums of weights, which shuffling rounds differently.
        same_samples = math.isclose(reading.samples, self.samples, rel_tol=1e-6)
        if not same_samples or reading.batches != self.batch_count:
            raise ValueError(
                f"the batches changed between two passes: {self.samples:g} samples in "
                f"{self.batch_count} batches, then {reading.samples:g} in {reading.batches}"
            )
        # Shuffling changes the order of summation and, in train mode, the batch statistics.
        rtol = 1e-3 if self._uses_tf32() or self.mode == "train" else 1e-4
        hint = (
            "over all batches: if the data is augmented at random, or shuffled and used with drop_last "
            "or mode='train', pass list(loader)"
        )
        self._check_equal(self.loss, reading.loss, rtol, hint)

    def read_again(self) -> None:
        """Make a second pass over the data for `confirm`, unless it has already run."""
        if not self._confirmed:
            with self.ready(), torch.no_grad():
                self.confirm(self._summarize(self.leaves()))

    def _parameter_versions(self) -> list[int]:
        return [p._version for p in self.parameters.values()]

    def _summarize(
        self, leaves: Mapping[str, Tensor], *, twice: bool = False, finite: bool = True
    ) -> LossSummary:
        """Return the mean loss of all batches.

        Args:
            leaves: Parameters by name.
            twice: Evaluate the first batch again and compare.
            finite: Raise an error if a loss is not finite.
        """
        total, samples, count = 0.0, 0.0, 0
        for batch, size in self.stream():
            loss = self.evaluate(leaves, batch, size)[0].item()
            if finite and not math.isfinite(loss):
                raise ValueError(f"the loss of batch {count} is {loss}: curvature needs it finite")
            if twice and count == 0:
                again = self.evaluate(leaves, batch, size)[0].item()
                hint = "of one batch: is dropout active? Use mode='eval'"
                self._check_equal(loss, again, 1e-6, hint)
            total, samples, count = total + loss * size, samples + size, count + 1
        return LossSummary(total / samples, samples, count)

    def _check_equal(self, first: float, second: float, rtol: float, hint: str) -> None:
        if self.dtype == torch.float64:
            rtol *= 1e-6
        # A loss may be zero because its terms cancel, up to their rounding.
        atol = max(1e-12, torch.finfo(self.dtype).eps)
        if not math.isclose(first, second, rel_tol=rtol, abs_tol=atol):
            raise ValueError(f"the loss changed from {first:.9g} to {second:.9g} {hint}")


def _is_tf32_allowed() -> bool:
    """Return whether convolutions or matrix products may use TF32."""
    try:
        return torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:  # set by `fp32_precision`, which `allow_tf32` cannot express
        backends = (getattr(torch.backends.cudnn, "conv", None), torch.backends.cuda.matmul)
        return any(getattr(b, "fp32_precision", "tf32") == "tf32" for b in backends)
