"""Products of the curvature of one batch with vectors, in reverse or in forward mode.

Each function adds `size * A v` to `total` for every row v of `columns`, A the curvature of the
mean loss of one batch, and returns that loss. Both modes give the same numbers to rounding; which
is faster depends on model and device (`Chooser` measures it).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from wsam.curvature.objective import Objective

__all__ = ["PRODUCTS", "Chooser", "Differentiation", "Kind", "Work"]

Differentiation = Literal["auto", "reverse", "forward"]
Kind = Literal["hessian", "gauss_newton", "empirical_fisher"]
Way = Literal["reverse", "forward"]


@dataclass(frozen=True)
class Work:
    """One batch, the vectors to multiply (one a row) and where the products are added up."""

    objective: Objective
    batch: Any
    size: float
    columns: Tensor
    total: Tensor

    def tangents(self, row: int) -> list[Tensor]:
        """Return a vector cut into tensors that lie beside the parameters."""
        pieces = self.objective.split(self.columns[row])
        return [
            piece.to(p.device)
            for piece, p in zip(pieces.values(), self.objective.parameters.values(), strict=True)
        ]

    def add(self, row: int, parts: list[Tensor] | tuple[Tensor, ...]) -> None:
        """Add one product, weighted by the number of samples."""
        targets = self.objective.split(self.total[row]).values()
        for target, part in zip(targets, parts, strict=True):
            target.add_(part.to(target.device), alpha=self.size)


def _hessian_reverse(work: Work) -> Tensor:
    """`H v = d/dw <dL/dw, v>`: the gradient's graph is built once and serves all vectors."""
    leaves = list((named := work.objective.leaves()).values())
    loss, _ = work.objective.evaluate(named, work.batch, work.size)
    gradients = torch.autograd.grad(
        work.objective.differentiable(loss), leaves, create_graph=True, materialize_grads=True
    )
    # A gradient that does not depend on the weights (a linear term) adds nothing.
    curved = [index for index, gradient in enumerate(gradients) if gradient.requires_grad]
    for row in range(len(work.columns)) if curved else ():
        tangents = work.tangents(row)
        parts = torch.autograd.grad(
            [gradients[index] for index in curved],
            leaves,
            [tangents[index] for index in curved],
            retain_graph=row + 1 < len(work.columns),
            materialize_grads=True,
        )
        work.add(row, parts)
    return loss.detach()


def _hessian_forward(work: Work) -> Tensor:
    """`H v = d/dt grad L(w + t v)`: the gradient is computed on dual numbers."""
    for row in range(len(work.columns)):
        with forward_ad.dual_level():
            duals = _duals(work, row)
            loss, _ = work.objective.evaluate(duals, work.batch, work.size)
            gradients = torch.autograd.grad(
                work.objective.differentiable(loss), list(duals.values()), materialize_grads=True
            )
            work.add(row, [_tangent(gradient) for gradient in gradients])
            value = _primal(loss).detach()
    return value


def _gauss_newton(work: Work, way: Way) -> Tensor:
    """`G v = J' (d2l/dz2) J v`, z the model's output."""
    return _through_output(work, way, _loss_hessian)


def _empirical_fisher(work: Work, way: Way) -> Tensor:
    """`F v = mean_i g_i <g_i, v>`, g_i = J_i' dl_i/dz_i the gradient of sample i."""
    return _through_output(work, way, _sample_outer_products)


OutputCurvature = Callable[[Work, Tensor, Tensor], Tensor]


def _through_output(work: Work, way: Way, curvature: OutputCurvature) -> Tensor:
    """`J' B J v` with B the curvature in the space of the model's outputs."""
    leaves = work.objective.leaves()
    loss, output = work.objective.evaluate(leaves, work.batch, work.size)
    _check_output(output)
    push = _push_forward(work) if way == "forward" else _push_reverse(work, leaves, output)
    for row in range(len(work.columns)):
        cotangent = curvature(work, output, push(row))
        parts = torch.autograd.grad(
            output, list(leaves.values()), cotangent, retain_graph=True, materialize_grads=True
        )
        work.add(row, parts)
    return loss.detach()


def _push_forward(work: Work) -> Callable[[int], Tensor]:
    """`J v` as the tangent of the output on dual numbers; no graph is kept."""

    def push(row: int) -> Tensor:
        with forward_ad.dual_level(), torch.no_grad():
            return _tangent(work.objective.evaluate(_duals(work, row), work.batch, work.size)[1])

    return push


def _push_reverse(work: Work, leaves: dict[str, Tensor], output: Tensor) -> Callable[[int], Tensor]:
    """`J v` as the derivative of the linear map `u -> J' u`, contracted with v."""
    dummy = torch.zeros_like(output, requires_grad=True)
    pulled = torch.autograd.grad(
        output, list(leaves.values()), dummy, create_graph=True, materialize_grads=True
    )
    linear = [index for index, part in enumerate(pulled) if part.requires_grad]

    def push(row: int) -> Tensor:
        tangents = work.tangents(row)
        (pushed,) = torch.autograd.grad(
            [pulled[index] for index in linear],
            dummy,
            [tangents[index] for index in linear],
            retain_graph=True,
        )
        return pushed

    return push


def _loss_hessian(work: Work, output: Tensor, vector: Tensor) -> Tensor:
    """Return the Hessian of the batch's mean loss by the output, times a vector."""
    (gradient, leaf) = _output_gradient(work, output, create_graph=True)
    if not gradient.requires_grad:
        return torch.zeros_like(leaf)
    (product,) = torch.autograd.grad(gradient, leaf, vector, materialize_grads=True)
    return product


def _sample_outer_products(work: Work, output: Tensor, vector: Tensor) -> Tensor:
    """Return `s_i <s_i, v_i> / n`: with a mean loss, s_i = dl_i/dz_i is n times its share."""
    if output.ndim == 0 or len(output) != work.size:
        raise ValueError(
            f"the empirical Fisher needs one output a sample: {work.size:g} samples gave an "
            f"output of shape {tuple(output.shape)}"
        )
    (gradient, _) = _output_gradient(work, output, create_graph=False)
    flat = gradient.reshape(len(output), -1)
    inner = (flat * vector.reshape(len(output), -1)).sum(1, keepdim=True)
    return (flat * inner).reshape(output.shape) * work.size


def _output_gradient(work: Work, output: Tensor, *, create_graph: bool) -> tuple[Tensor, Tensor]:
    leaf = output.detach().requires_grad_()
    loss = work.objective.criterion(leaf, work.batch, work.size)
    if not loss.requires_grad:
        raise ValueError("the loss does not depend on the model's output")
    (gradient,) = torch.autograd.grad(loss, leaf, create_graph=create_graph)
    return gradient, leaf


def _check_output(output: Any) -> None:
    if not isinstance(output, Tensor):
        raise TypeError(
            "Gauss-Newton and Fisher need a model whose output is one tensor, not "
            f"{type(output).__name__}: wrap the model so that it returns the tensor alone"
        )
    if not output.requires_grad:
        raise ValueError("the model's output does not depend on any of the chosen parameters")


def _duals(work: Work, row: int) -> dict[str, Tensor]:
    leaves = work.objective.leaves()
    return {
        name: forward_ad.make_dual(leaf, tangent)  # type: ignore[no-untyped-call]
        for (name, leaf), tangent in zip(leaves.items(), work.tangents(row), strict=True)
    }


def _tangent(dual: Tensor) -> Tensor:
    tangent: Tensor | None = forward_ad.unpack_dual(dual).tangent  # type: ignore[no-untyped-call]
    return torch.zeros_like(dual) if tangent is None else tangent


def _primal(dual: Tensor) -> Tensor:
    primal: Tensor = forward_ad.unpack_dual(dual).primal  # type: ignore[no-untyped-call]
    return primal


PRODUCTS: dict[tuple[Kind, Way], Callable[[Work], Tensor]] = {
    ("hessian", "reverse"): _hessian_reverse,
    ("hessian", "forward"): _hessian_forward,
    ("gauss_newton", "reverse"): lambda work: _gauss_newton(work, "reverse"),
    ("gauss_newton", "forward"): lambda work: _gauss_newton(work, "forward"),
    ("empirical_fisher", "reverse"): lambda work: _empirical_fisher(work, "reverse"),
    ("empirical_fisher", "forward"): lambda work: _empirical_fisher(work, "forward"),
}


class Chooser:
    """Run one way of differentiation or, with "auto", the one that proves faster.

    "auto" takes turns on the first four batches, whose products count like any other, and keeps
    the way whose second turn took less time a sample. Timings decide, so two runs may round
    differently; name a way where every bit must repeat.
    """

    def __init__(self, kind: Kind, differentiation: Differentiation) -> None:
        if differentiation not in ("auto", "reverse", "forward"):
            raise ValueError(
                f"differentiation must be 'auto', 'reverse' or 'forward', not {differentiation!r}"
            )
        self.kind = kind
        self.way: Way | None = None if differentiation == "auto" else differentiation
        self._seconds: list[float] = []

    @property
    def name(self) -> str:
        """The way in use, or "auto" while both are still on trial."""
        return self.way or "auto"

    def run(self, work: Work) -> Tensor:
        """Add the products of one batch to the total and return the batch's mean loss."""
        if self.way is not None:
            return PRODUCTS[self.kind, self.way](work)
        way: Way = ("reverse", "forward")[len(self._seconds) % 2]
        # Into a sum of its own: a way that fails half-way must leave nothing behind.
        trial = replace(work, total=torch.zeros_like(work.total))
        _wait(work.total)
        start = time.perf_counter()
        try:
            loss = PRODUCTS[self.kind, way](trial)
        except (NotImplementedError, RuntimeError):
            # An operation without a forward derivative: the reverse way raises what is truly wrong.
            if way == "reverse":
                raise
            self.way = "reverse"
            return PRODUCTS[self.kind, self.way](work)
        _wait(work.total)
        self._seconds.append((time.perf_counter() - start) / (work.size * len(work.columns)))
        work.total.add_(trial.total)
        if len(self._seconds) == 4:
            reverse, forward = self._seconds[2:]
            self.way = "forward" if forward < reverse else "reverse"
        return loss


def _wait(tensor: Tensor) -> None:
    """Let the GPU finish: it works on after a call has returned."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
