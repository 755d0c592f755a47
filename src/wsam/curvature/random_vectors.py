"""Random vectors, drawn on the CPU: equal for equal generators on every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wsam.curvature.operator import SymmetricOperator


def normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw Gaussian numbers, whatever PyTorch's default device and precision are."""
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")


def normal_rows(operator: SymmetricOperator, rows: int, generator: torch.Generator) -> Tensor:
    """Draw Gaussian vectors that an operator can multiply, one per row."""
    return normal((rows, operator.shape[0]), generator).to(operator.device, operator.dtype)


def sign_columns(operator: SymmetricOperator, columns: int, generator: torch.Generator) -> Tensor:
    """Draw vectors of random signs that an operator can multiply, one per column."""
    shape = (operator.shape[0], columns)
    bits = torch.randint(0, 2, shape, generator=generator, dtype=torch.int8, device="cpu")
    return (2 * bits - 1).to(operator.device, operator.dtype)
