"""Replacements of functions whose second derivatives PyTorch computes wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Return `g v / norm(v)`. PyTorch's second derivative treats the norm as a constant."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **options: Any
) -> Tensor:
    """Look up rows; that of `padding_idx` is a constant.

    In PyTorch it is one in reverse mode only. A forward derivative would give products with a matrix
    that is not symmetric.
    """
    rows = functional.embedding(input, weight, padding_idx, *args, **options)
    if padding_idx is None:
        return rows
    padding = input == padding_idx % len(weight)
    return torch.where(padding[..., None], rows.detach(), rows)


_REPLACEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch._weight_norm: _weight_norm,
    functional.embedding: _embedding,
}


class ExactDerivatives(TorchFunctionMode):
    """Use the replacements while a product with a curvature matrix is computed."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of PyTorch, or its replacement."""
        return _REPLACEMENTS.get(func, func)(*args, **(kwargs or {}))
