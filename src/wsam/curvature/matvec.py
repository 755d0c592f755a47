"""Products of one batch's curvature matrix with vectors, in reverse or in forward mode.

Each function adds `size * A v` to `out` for every row v of `vectors`, where A is the curvature of
the mean loss of one batch, and returns that loss. Both modes agree up to rounding. Which one is
faster depends on the model and the device; `MatvecRunner` measures it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from wsam.curvature.objective import Objective

DiffMode = Literal["reverse", "forward"]
Differentiation = Literal["auto", "reverse", "forward"]
Kind = Literal["hessian", "gauss_newton", "empirical_fisher"]


@dataclass(frozen=True)
class BatchMatvec:
    """One batch, the vectors to multiply (rows) and the sums the products are added to (rows)."""

    objective: Objective
    batch: Any
    size: float
    vectors: Tensor
    out: Tensor

    def tangents(self, row: int) -> list[Tensor]:
        """Return a vector as tensors with the shapes and devices of the parameters."""
        pieces = self.objective.split(self.vectors[row])
        return [
            piece.to(p.device)
            for piece, p in zip(pieces.values(), self.objective.parameters.values(), strict=True)
        ]

    def add(self, row: int, parts: list[Tensor] | tuple[Tensor, ...]) -> None:
        """Add one product, weighted by the number of samples."""
        targets = self.objective.split(self.out[row]).values()
        for target, part in zip(targets, parts, strict=True):
            target.add_(part.to(target.device), alpha=self.size)


# Hessian ----------------------------------------------------------------------------------------


def _hessian_reverse(task: BatchMatvec) -> Tensor:
    """`H v = d/dw <dL/dw, v>`: one graph of the gradient serves all vectors."""
    named = task.objective.leaves()
    leaves = list(named.values())
    loss, _ = task.objective.evaluate(named, task.batch, task.size)
    gradients = torch.autograd.grad(
        task.objective.differentiable(loss), leaves, create_graph=True, materialize_grads=True
    )
    # The gradient of a linear term is constant and adds nothing to H.
    curved = [index for index, gradient in enumerate(gradients) if gradient.requires_grad]
    for row in range(len(task.vectors)) if curved else ():
        tangents = task.tangents(row)
        parts = torch.autograd.grad(
            [gradients[index] for index in curved],
            leaves,
            [tangents[index] for index in curved],
            retain_graph=row + 1 < len(task.vectors),
            materialize_grads=True,
        )
        task.add(row, parts)
    return loss.detach()


def _hessian_forward(task: BatchMatvec) -> Tensor:
    """`H v = d/dt grad L(w + t v)` at t = 0: the gradient is computed on dual numbers."""
    for row in range(len(task.vectors)):
        with forward_ad.dual_level():
            duals = _dual_leaves(task, row)
            loss, _ = task.objective.evaluate(duals, task.batch, task.size)
            gradients = torch.autograd.grad(
                task.objective.differentiable(loss), list(duals.values()), materialize_grads=True
            )
            task.add(row, [_tangent(gradient) for gradient in gradients])
            value: Tensor = forward_ad.unpack_dual(loss).primal.detach()  # type: ignore[no-untyped-call]
    return value


# Gauss-Newton and empirical Fisher --------------------------------------------------------------


OutputProduct = Callable[[BatchMatvec, Tensor, Tensor], Tensor]


def _through_output(mode: DiffMode, output_product: OutputProduct, task: BatchMatvec) -> Tensor:
    """`J' B J v`, where `output_product` multiplies by B, z is the model's output and J = dz/dw.

    B is d²l/dz² for Gauss-Newton, and the mean of `s_i s_i'`, s_i = dl_i/dz_i, for the empirical
    Fisher.
    """
    leaves = task.objective.leaves()
    loss, output = task.objective.evaluate(leaves, task.batch, task.size)
    if not isinstance(output, Tensor):
        raise TypeError(
            "Gauss-Newton and Fisher need a model whose output is one tensor, got "
            f"{type(output).__name__}: wrap the model so that it returns the tensor alone"
        )
    jvp = _jvp_forward(task) if mode == "forward" else _jvp_reverse(task, leaves, output)
    for row in range(len(task.vectors)):
        cotangent = output_product(task, output, jvp(row))
        parts = torch.autograd.grad(
            output, list(leaves.values()), cotangent, retain_graph=True, materialize_grads=True
        )
        task.add(row, parts)
    return loss.detach()


def _jvp_forward(task: BatchMatvec) -> Callable[[int], Tensor]:
    """Return a function for `J v` as the tangent of the output on dual numbers, without a graph."""

    def jvp(row: int) -> Tensor:
        with forward_ad.dual_level(), torch.no_grad():
            duals = _dual_leaves(task, row)
            return _tangent(task.objective.evaluate(duals, task.batch, task.size)[1])

    return jvp


def _jvp_reverse(
    task: BatchMatvec, leaves: dict[str, Tensor], output: Tensor
) -> Callable[[int], Tensor]:
    """Return a function for `J v` as the derivative of the linear map `u -> <J' u, v>`."""
    dummy = torch.zeros_like(output, requires_grad=True)
    vjp = torch.autograd.grad(
        output, list(leaves.values()), dummy, create_graph=True, materialize_grads=True
    )
    linear = [index for index, part in enumerate(vjp) if part.requires_grad]

    def jvp(row: int) -> Tensor:
        tangents = task.tangents(row)
        (product,) = torch.autograd.grad(
            [vjp[index] for index in linear],
            dummy,
            [tangents[index] for index in linear],
            retain_graph=True,
        )
        return product

    return jvp


def _output_hessian_product(task: BatchMatvec, output: Tensor, vector: Tensor) -> Tensor:
    """Return the Hessian of the batch's mean loss with respect to the output, times a vector."""
    gradient, leaf = _output_gradient(task, output, create_graph=True)
    if not gradient.requires_grad:
        return torch.zeros_like(leaf)
    (product,) = torch.autograd.grad(gradient, leaf, vector, materialize_grads=True)
    return product


def _sample_outer_products(task: BatchMatvec, output: Tensor, vector: Tensor) -> Tensor:
    """Return `s_i <s_i, v_i> / n`, s_i = dl_i/dz_i.

    The gradient of the mean loss has rows s_i / n, hence the factor n at the end.
    """
    if output.ndim == 0 or len(output) != task.size:
        raise ValueError(
            f"the empirical Fisher needs one output per sample: {task.size:g} samples gave an "
            f"output of shape {tuple(output.shape)}"
        )
    gradient, _ = _output_gradient(task, output, create_graph=False)
    rows = gradient.reshape(len(output), -1)
    inner = (rows * vector.reshape(len(output), -1)).sum(1, keepdim=True)
    return (rows * inner).reshape(output.shape) * task.size


def _output_gradient(
    task: BatchMatvec, output: Tensor, *, create_graph: bool
) -> tuple[Tensor, Tensor]:
    leaf = output.detach().requires_grad_()
    loss = task.objective.criterion(leaf, task.batch, task.size)
    (gradient,) = torch.autograd.grad(loss, leaf, create_graph=create_graph)
    return gradient, leaf


# Dual numbers -----------------------------------------------------------------------------------


def _dual_leaves(task: BatchMatvec, row: int) -> dict[str, Tensor]:
    leaves = task.objective.leaves()
    return {
        name: forward_ad.make_dual(leaf, tangent)  # type: ignore[no-untyped-call]
        for (name, leaf), tangent in zip(leaves.items(), task.tangents(row), strict=True)
    }


def _tangent(dual: Tensor) -> Tensor:
    tangent: Tensor | None = forward_ad.unpack_dual(dual).tangent  # type: ignore[no-untyped-call]
    return torch.zeros_like(dual) if tangent is None else tangent


# Choice of the mode -----------------------------------------------------------------------------


MATVECS: dict[tuple[Kind, DiffMode], Callable[[BatchMatvec], Tensor]] = {
    ("hessian", "reverse"): _hessian_reverse,
    ("hessian", "forward"): _hessian_forward,
    ("gauss_newton", "reverse"): partial(_through_output, "reverse", _output_hessian_product),
    ("gauss_newton", "forward"): partial(_through_output, "forward", _output_hessian_product),
    ("empirical_fisher", "reverse"): partial(_through_output, "reverse", _sample_outer_products),
    ("empirical_fisher", "forward"): partial(_through_output, "forward", _sample_outer_products),
}


class MatvecRunner:
    """Multiply in one differentiation mode or, with "auto", in the faster one.

    "auto" alternates between the modes on the first four batches, whose products are used like any
    other, and keeps the mode whose second trial took less time per sample. It falls back to reverse
    mode for operations without a forward derivative. The choice depends on timings, so two runs may
    differ by rounding; choose a mode for bitwise reproducibility.
    """

    def __init__(self, kind: Kind, differentiation: Differentiation) -> None:
        if differentiation not in ("auto", "reverse", "forward"):
            raise ValueError(
                f"differentiation must be 'auto', 'reverse' or 'forward', got {differentiation!r}"
            )
        self.kind = kind
        self.mode: DiffMode | None = None if differentiation == "auto" else differentiation
        self._seconds: list[float] = []

    def run(self, task: BatchMatvec) -> Tensor:
        """Add the products of one batch to `task.out` and return the batch's mean loss."""
        if self.mode is not None:
            return MATVECS[self.kind, self.mode](task)
        mode: DiffMode = ("reverse", "forward")[len(self._seconds) % 2]
        # A separate sum: a trial that raises may already have added some of its products.
        trial = replace(task, out=torch.zeros_like(task.out))
        _synchronize(task.out)
        start = time.perf_counter()
        try:
            loss = MATVECS[self.kind, mode](trial)
        except RuntimeError:
            # An operation without a forward derivative, or another error, which reverse mode raises.
            self.mode = "reverse"
            return MATVECS[self.kind, self.mode](task)
        _synchronize(task.out)
        self._seconds.append((time.perf_counter() - start) / (task.size * len(task.vectors)))
        task.out.add_(trial.out)
        if len(self._seconds) == 4:
            reverse, forward = self._seconds[2:]
            self.mode = "forward" if forward < reverse else "reverse"
        return loss


def _synchronize(tensor: Tensor) -> None:
    """Wait for the GPU, so that a timing includes the kernels launched before it."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
