"""Curvature as a linear operator: Hessian, Gauss-Newton and empirical Fisher, times a vector."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from wsam.curvature.objective import LossFunction, Objective, ObjectiveOptions, Reading
from wsam.curvature.products import Chooser, Differentiation, Kind, Work

__all__ = [
    "Info",
    "Operator",
    "SymmetricOperator",
    "empirical_fisher",
    "gauss_newton",
    "hessian",
]


class SymmetricOperator(Protocol):
    """What the eigenvalue, trace and density functions ask of their operator.

    A symmetric `torch.Tensor` is one; so is every `Operator`.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns, equal."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the vectors."""

    @property
    def device(self) -> torch.device:
        """Where the vectors live."""

    def __matmul__(self, vectors: Tensor, /) -> Tensor:
        """Multiply a vector, or a matrix column by column."""


TITLES = {
    "hessian": "Hessian",
    "gauss_newton": "Gauss-Newton matrix",
    "empirical_fisher": "empirical Fisher matrix",
}
"""What people call an operator, by its kind."""


@dataclass(frozen=True)
class Info:
    """What a curvature was computed from; every field is a plain number or word.

    Attributes:
        kind: "hessian", "gauss_newton" or "empirical_fisher".
        mode: "eval" or "train", the mode the model was evaluated in.
        samples: how many samples one product reads.
        batches: in how many batches.
        parameters: the number of weights, the operator's size.
        dtype: precision of weights, products and vectors.
        tf32: whether the GPU may round products of float32 to 10 bits of mantissa (TF32).
        device: where it was computed.
        loss: the mean loss at the weights of the last product; before the first one, at those the
            operator was built with.
        differentiation: "reverse", "forward", or "auto" while both are on trial.
    """

    kind: str
    mode: str
    samples: float
    batches: int
    parameters: int
    dtype: str
    tf32: bool
    device: str
    loss: float
    differentiation: str

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary fit for JSON."""
        return asdict(self)


class Operator:
    """A curvature matrix of a model's loss, known by its products with vectors.

    `A @ v` reads every batch once and adds up batch by batch, so memory does not grow with the
    number of batches. The model's weights are read anew at each product and never written.

    Attributes:
        objective: the loss it is the curvature of.
        products: how many vectors have been multiplied so far.
    """

    def __init__(
        self, objective: Objective, kind: Kind, differentiation: Differentiation = "auto"
    ) -> None:
        self.objective = objective
        self.products = 0
        self._chooser = Chooser(kind, differentiation)

    @property
    def shape(self) -> tuple[int, int]:
        """Number of weights, twice."""
        return (self.objective.numel, self.objective.numel)

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the products."""
        return self.objective.dtype

    @property
    def device(self) -> torch.device:
        """Where the products are made."""
        return self.objective.device

    @property
    def info(self) -> Info:
        """What the curvature is computed from."""
        return Info(
            kind=self._chooser.kind,
            differentiation=self._chooser.name,
            **self.objective.describe(),
        )

    @property
    def semidefinite(self) -> bool:
        """Whether the curvature cannot be negative, whatever the rounding of its products says.

        So of an empirical Fisher, and of a Gauss-Newton matrix of a loss known to be convex:
        PyTorch's cross-entropies and squared error, without weights of their own.
        """
        kind = self._chooser.kind
        convex = kind == "gauss_newton" and _is_known_convex(self.objective.loss_fn)
        return kind == "empirical_fisher" or convex

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """Multiply a flat vector, or every column of a matrix."""
        given = torch.as_tensor(vectors)
        if given.ndim not in (1, 2) or given.shape[0] != self.objective.numel:
            raise ValueError(
                f"this operator multiplies vectors of {self.objective.numel} numbers, or matrices "
                f"of such columns, not a tensor of shape {tuple(given.shape)}"
            )
        rows = given.detach().to(self.device, self.dtype).reshape(len(given), -1).T.contiguous()
        total, losses, count = torch.zeros_like(rows), [], 0.0
        with self.objective.ready():
            for batch, size in self.objective.stream():
                loss = self._chooser.run(Work(self.objective, batch, size, rows, total))
                losses.append(loss * size)
                count += size
        if not count:
            raise ValueError("there are no batches any more: can the data be read only once?")
        mean = float(torch.stack(losses).double().sum()) / count
        self.objective.confirm(Reading(mean, count, len(losses)))
        self.products += len(rows)
        product = total.div_(count).T.reshape(given.shape)
        if not torch.isfinite(product).all() and torch.isfinite(rows).all():
            raise ValueError("a product with the curvature is not finite at these weights")
        return product

    def dense(self) -> Tensor:
        """Return the whole matrix: for small models only, one product a weight."""
        identity = torch.eye(self.objective.numel, dtype=self.dtype, device=self.device)
        return torch.cat([self @ block for block in torch.split(identity, 64, dim=1)], dim=1)

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Return a flat vector as tensors named and shaped like the parameters."""
        return self.objective.split(vector)

    def to_scipy(self) -> Any:
        """Return a `scipy.sparse.linalg.LinearOperator`, for scipy's solvers."""
        from scipy.sparse.linalg import LinearOperator

        def product(array: Any) -> Any:
            return (self @ torch.as_tensor(array)).cpu().numpy()

        dtype = str(self.dtype).removeprefix("torch.")
        return LinearOperator(self.shape, matvec=product, matmat=product, dtype=dtype)

    def __repr__(self) -> str:
        info = self.info
        return (
            f"<{info.kind} of {info.parameters} weights, {info.samples:g} samples in "
            f"{info.batches} batches, {info.mode} mode, {info.dtype} on {info.device}>"
        )


def hessian(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    *,
    differentiation: Differentiation = "auto",
    **options: Unpack[ObjectiveOptions],
) -> Operator:
    """Hessian of the mean loss, `H = d2L/dw2`.

    Args:
        model: any module.
        loss_fn: mean loss of a batch: `loss_fn(model(x), y)` for a batch `(x, y)`.
        batches: a list or a loader; read once a product.
        differentiation: "reverse" over reverse, "forward" over reverse, or "auto", the faster.
        **options: mode, params, dtype, reduction, size, check: see `Objective`.

    Example:
        >>> model = nn.Linear(3, 1).double()
        >>> x, y = torch.ones(4, 3).double(), torch.zeros(4, 1).double()
        >>> H = hessian(model, nn.functional.mse_loss, [(x, y)])
        >>> (H @ torch.ones(4).double()).tolist()
        [8.0, 8.0, 8.0, 8.0]

    Reference: Pearlmutter, Fast exact multiplication by the Hessian, Neural Computation 1994.
    """
    return Operator(Objective(model, loss_fn, batches, **options), "hessian", differentiation)


def gauss_newton(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    *,
    differentiation: Differentiation = "auto",
    **options: Unpack[ObjectiveOptions],
) -> Operator:
    """Generalised Gauss-Newton matrix, `G = mean_i J_i' (d2l_i/dz_i2) J_i`, z the output.

    Never negative where the loss is convex in the output. For cross-entropy it is the Fisher
    information, for `mse_loss` 2/outputs times that of unit noise. Terms of the loss that bypass
    the output are left out.

    Args:
        model: any module whose output is one tensor.
        loss_fn: mean loss of a batch.
        batches: a list or a loader; read once a product.
        differentiation: how `J v` is formed: "reverse", "forward" or "auto", the faster.
        **options: as for `hessian`.

    Example:
        >>> model = nn.Linear(3, 1)
        >>> data = [(torch.ones(4, 3), torch.zeros(4, 1))]
        >>> gauss_newton(model, nn.functional.mse_loss, data).shape
        (4, 4)

    Reference: Schraudolph, Fast curvature matrix-vector products, Neural Computation 2002.
    """
    return Operator(Objective(model, loss_fn, batches, **options), "gauss_newton", differentiation)


def empirical_fisher(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    *,
    differentiation: Differentiation = "auto",
    **options: Unpack[ObjectiveOptions],
) -> Operator:
    """Empirical Fisher matrix, `F = mean_i g_i g_i'`, g_i the gradient of sample i's own loss.

    The batch loss must be a plain mean (or sum) of the samples' losses and no sample may reach
    another's output, so BatchNorm has to be in eval mode. No per-sample gradient is stored.

    Args:
        model: any module whose output is one tensor with one row a sample.
        loss_fn: mean loss of a batch.
        batches: a list or a loader; read once a product.
        differentiation: how `J v` is formed: "reverse", "forward" or "auto", the faster.
        **options: as for `hessian`.

    Example:
        >>> model = nn.Linear(3, 1)
        >>> data = [(torch.ones(4, 3), torch.zeros(4, 1))]
        >>> empirical_fisher(model, nn.functional.mse_loss, data).info.kind
        'empirical_fisher'

    Reference: Kunstner et al., Limitations of the empirical Fisher approximation, NeurIPS 2019.
    """
    objective = Objective(model, loss_fn, batches, **options)
    if objective.mode == "train" and _has_batch_statistics(objective.model):
        raise ValueError("BatchNorm in training mode mixes samples: the Fisher needs mode='eval'")
    return Operator(objective, "empirical_fisher", differentiation)


def _has_batch_statistics(model: nn.Module) -> bool:
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


def _is_known_convex(loss_fn: LossFunction) -> bool:
    """Whether a loss is one of PyTorch's that are convex in the model's output."""
    if isinstance(loss_fn, nn.Module):
        plain = all(buffer is None for buffer in loss_fn._buffers.values())
        return plain and type(loss_fn) in (nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss)
    return loss_fn in (
        functional.cross_entropy,
        functional.mse_loss,
        functional.binary_cross_entropy_with_logits,
    )
