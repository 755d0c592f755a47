"""Curvature matrices as linear operators: Hessian, Gauss-Newton and empirical Fisher."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from wsam.curvature.matvec import BatchMatvec, Differentiation, Kind, MatvecRunner
from wsam.curvature.objective import LossFunction, LossSummary, Objective, ObjectiveOptions
from wsam.curvature.second_derivatives import ExactDerivatives


class SymmetricOperator(Protocol):
    """Interface that eigenvalue, trace and density functions need.

    Every `Operator` and every symmetric `torch.Tensor` has it.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of rows and columns, which are equal."""

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the vectors."""

    @property
    def device(self) -> torch.device:
        """Device of the vectors."""

    def __matmul__(self, vectors: Tensor, /) -> Tensor:
        """Multiply a vector, or every column of a matrix."""


TITLES = {
    "hessian": "Hessian",
    "gauss_newton": "Gauss-Newton matrix",
    "empirical_fisher": "empirical Fisher matrix",
}
"""Names of the operators in titles and tables, by `Info.kind`."""


@dataclass(frozen=True)
class Info:
    """Data, mode and precision of a curvature operator.

    Attributes:
        kind: "hessian", "gauss_newton" or "empirical_fisher".
        mode: Mode of the model, "eval" or "train".
        samples: Number of samples that one product reads.
        batches: Number of batches.
        parameters: Number of weights, the size of the operator.
        dtype: Precision of weights, products and vectors.
        tf32: Whether the GPU may round the inputs of float32 products to TF32 (10 mantissa bits).
        device: Device of the first parameter.
        loss: Mean loss at the weights of the last product; before the first product, at the weights
            the operator was built with.
        differentiation: "reverse", "forward", or "auto" while both are timed.
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
        """Return the fields as a dictionary for JSON."""
        return asdict(self)


class Operator:
    """Curvature matrix A of a model's loss, available through products `A @ v`.

    A product iterates over all batches and adds up their contributions, so memory does not grow
    with the number of batches. Each product uses the model's current weights and does not change
    them.

    Args:
        objective: The loss.
        kind: "hessian", "gauss_newton" or "empirical_fisher".
        differentiation: "reverse", "forward", or "auto" for the faster one.

    Attributes:
        objective: The loss.
        products: Number of vectors multiplied so far.
    """

    def __init__(
        self, objective: Objective, kind: Kind, differentiation: Differentiation = "auto"
    ) -> None:
        self.objective = objective
        self.products = 0
        self._runner = MatvecRunner(kind, differentiation)

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
        """Device of the products."""
        return self.objective.device

    @property
    def info(self) -> Info:
        """Data, mode and precision of the operator."""
        return Info(
            kind=self._runner.kind,
            differentiation=self._runner.mode or "auto",
            **self.objective.describe(),
        )

    @property
    def semidefinite(self) -> bool:
        """Whether the matrix is known to be positive semidefinite, up to rounding.

        True for the empirical Fisher, and for the Gauss-Newton matrix of PyTorch's cross-entropies
        and squared error without class weights, which are convex in the output.
        """
        if self._runner.kind == "gauss_newton":
            return _is_known_convex(self.objective.loss_fn)
        return self._runner.kind == "empirical_fisher"

    def __matmul__(self, vectors: Tensor) -> Tensor:
        """Multiply a flat vector, or every column of a matrix."""
        given = torch.as_tensor(vectors, device=self.device)
        if given.dim() not in (1, 2) or len(given) != self.shape[1]:
            raise ValueError(
                f"a product needs a vector of {self.shape[1]} numbers, one for each weight, or a "
                f"matrix of such columns; got the shape {tuple(given.shape)}"
            )
        losses, count = [], 0.0
        with self.objective.ready(), ExactDerivatives():
            # A clone is a normal tensor even if the vectors were computed in inference mode.
            columns = given.detach().to(self.dtype).clone()
            rows = columns.reshape(len(given), -1).T.contiguous()
            total = torch.zeros_like(rows)
            for batch, size in self.objective.stream():
                loss = self._runner.run(BatchMatvec(self.objective, batch, size, rows, total))
                losses.append(loss * size)
                count += size
        mean = float(torch.stack(losses).double().sum()) / count
        self.objective.confirm(LossSummary(mean, count, len(losses)))
        self.products += len(rows)
        product = total.div_(count).T.reshape(given.shape)
        if not torch.isfinite(product).all() and torch.isfinite(rows).all():
            raise ValueError("a product with the curvature is not finite at these weights")
        return product

    def dense(self) -> Tensor:
        """Return the whole matrix, by one product per weight: for small models only."""
        identity = torch.eye(self.objective.numel, dtype=self.dtype, device=self.device)
        return torch.cat([self @ block for block in torch.split(identity, 64, dim=1)], dim=1)

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Return a flat vector as tensors named and shaped like the parameters."""
        return self.objective.split(vector)

    def to_scipy(self) -> Any:
        """Return a `scipy.sparse.linalg.LinearOperator`, for scipy's solvers."""
        from scipy.sparse.linalg import LinearOperator

        def product(array: Any) -> Any:
            return (self @ array).cpu().numpy()

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
    """Return the Hessian of the mean loss as a linear operator.

    Equation, with n_b samples in batch b::

        L(w) = sum_b n_b L_b(w) / sum_b n_b,        H = d²L / dw²

    Args:
        model: Any module.
        loss_fn: Mean loss of a batch: `loss_fn(model(x), y)` for a batch `(x, y)`.
        batches: A list or a loader; every product iterates over it once.
        differentiation: "reverse" over reverse, "forward" over reverse, or "auto" for the faster.
        **options: mode, params, dtype, reduction, size and check of `Objective`.

    Returns:
        An operator: `H @ v` is a Hessian-vector product.

    Example:
        >>> model = nn.Linear(3, 1).double()
        >>> x, y = torch.ones(4, 3).double(), torch.zeros(4, 1).double()
        >>> H = hessian(model, nn.functional.mse_loss, [(x, y)])
        >>> (H @ torch.ones(4).double()).tolist()
        [8.0, 8.0, 8.0, 8.0]

    References:
        Pearlmutter, Fast exact multiplication by the Hessian, Neural Computation 1994.
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
    """Return the generalized Gauss-Newton matrix as a linear operator.

    Equation, with z_i the model's output for sample i and J_i = dz_i / dw::

        G = mean_i  J_i' (d²l_i / dz_i²) J_i

    It is positive semidefinite if the loss is convex in the output. For cross-entropy it equals the
    Fisher information; for `mse_loss` it is 2/outputs times that of Gaussian noise of variance one.
    Terms of the loss that do not depend on the output, such as weight decay, are left out.

    Args:
        model: A module whose output is one tensor.
        loss_fn: Mean loss of a batch.
        batches: A list or a loader; every product iterates over it once.
        differentiation: Mode for `J v`: "reverse", "forward", or "auto" for the faster.
        **options: mode, params, dtype, reduction, size and check of `Objective`.

    Returns:
        An operator: `G @ v` is a product with the Gauss-Newton matrix.

    Example:
        >>> model = nn.Linear(3, 1)
        >>> data = [(torch.ones(4, 3), torch.zeros(4, 1))]
        >>> gauss_newton(model, nn.functional.mse_loss, data).shape
        (4, 4)

    References:
        Schraudolph, Fast curvature matrix-vector products, Neural Computation 2002.
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
    """Return the empirical Fisher matrix as a linear operator.

    Equation, with g_i the gradient of the loss of sample i::

        F = mean_i  g_i g_i'

    The batch loss must be a mean (or sum) of the losses of its samples, and no sample may influence
    another's output, so BatchNorm must be in eval mode. Per-sample gradients are not stored.

    Args:
        model: A module whose output is one tensor with one row per sample.
        loss_fn: Mean loss of a batch.
        batches: A list or a loader; every product iterates over it once.
        differentiation: Mode for `J v`: "reverse", "forward", or "auto" for the faster.
        **options: mode, params, dtype, reduction, size and check of `Objective`.

    Returns:
        An operator: `F @ v` is a product with the empirical Fisher matrix.

    Raises:
        ValueError: If the model has BatchNorm that uses the statistics of a batch: in mode "train",
            or without running statistics.

    Example:
        >>> model = nn.Linear(3, 1)
        >>> data = [(torch.ones(4, 3), torch.zeros(4, 1))]
        >>> empirical_fisher(model, nn.functional.mse_loss, data).info.kind
        'empirical_fisher'

    References:
        Kunstner et al., Limitations of the empirical Fisher approximation, NeurIPS 2019.
    """
    objective = Objective(model, loss_fn, batches, **options)
    norms = [m for m in objective.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if any(objective.mode == "train" or norm.running_mean is None for norm in norms):
        raise ValueError(
            "BatchNorm with the statistics of a batch mixes samples: the empirical Fisher needs "
            "mode='eval' and track_running_stats=True"
        )
    return Operator(objective, "empirical_fisher", differentiation)


def _is_known_convex(loss_fn: LossFunction) -> bool:
    """Return whether a loss is one of PyTorch's that are convex in the model's output."""
    if isinstance(loss_fn, nn.Module):
        unweighted = all(buffer is None for buffer in loss_fn._buffers.values())
        convex = (nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss)
        return unweighted and type(loss_fn) in convex
    return loss_fn in (
        functional.cross_entropy,
        functional.mse_loss,
        functional.binary_cross_entropy_with_logits,
    )
