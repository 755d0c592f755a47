"""Element-wise operations on lists of tensors that a step is made of.

All of them use `torch._foreach_*`, and none of them synchronizes with the device.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from wsam._core.mix import Scalar

PLAIN_TYPES = frozenset((Tensor, nn.Parameter))
"""Tensors of other classes may store their elements anywhere."""
CHUNK_BYTES = 1 << 26
"""Size limit of temporary copies; a single tensor may exceed it."""
_HALF = (torch.float16, torch.bfloat16)


def on_device(value: Scalar, device: torch.device) -> Scalar:
    """Return a scalar that can be combined with tensors on `device`."""
    if isinstance(value, Tensor) and value.device != device:
        return value.to(device)
    return value


def accumulation_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return float32 for half precision; None where the tensor's own dtype is wide enough."""
    return torch.float32 if tensor.dtype in _HALF else None


def widened(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return half-precision tensors as float32, and others unchanged."""
    return [t.float() if t.dtype in _HALF else t for t in tensors]


def copies(tensors: list[Tensor]) -> list[Tensor]:
    """Return bit-exact copies, by one kernel launch where possible."""
    if tensors and tensors[0].is_cuda and tensors[0].is_floating_point():
        # Multiplication by one is exact, and allocates all copies in a single call.
        return list(torch._foreach_mul(tensors, 1.0))
    fresh = [torch.empty_like(t) for t in tensors]
    torch._foreach_copy_(fresh, tensors)
    return fresh


def chunks(tensors: list[Tensor], limit: int) -> Iterator[slice]:
    """Yield slices of at most `limit` bytes, or of a single tensor."""
    start = size = 0
    for stop, tensor in enumerate(tensors):
        if stop > start and size + tensor.nbytes > limit:
            yield slice(start, stop)
            start, size = stop, 0
        size += tensor.nbytes
    if tensors:
        yield slice(start, len(tensors))


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a contiguous range of memory, in any order of dimensions."""
    if tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last):
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def are_dense(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors are dense."""
    return all(map(Tensor.is_contiguous, tensors)) or all(map(is_dense, tensors))


def add_scaled(into: list[Tensor], tensors: list[Tensor], scale: Scalar) -> None:
    """Compute `into += scale * tensors`."""
    if not isinstance(scale, Tensor):
        torch._foreach_add_(into, tensors, alpha=scale)
    elif into[0].is_cuda and _can_use_fused_sgd(into, tensors):
        # SGD's fused kernel, whose learning rate is a device tensor: w - (-scale) g in one pass.
        torch._fused_sgd_(
            into,
            tensors,
            [],  # of momentum
            weight_decay=0.0,
            momentum=0.0,
            lr=-scale.to(torch.float32),
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )
    elif into[0].device.type == "cpu" and not accumulation_dtype(into[0]):
        torch._foreach_addcmul_(into, tensors, [scale] * len(into))
    else:  # in float32: torch would round the scale to half precision first
        for part in chunks(tensors, CHUNK_BYTES):
            torch._foreach_add_(into[part], torch._foreach_mul(widened(tensors[part]), scale))


def _can_use_fused_sgd(into: list[Tensor], tensors: list[Tensor]) -> bool:
    if {t.dtype for t in (*into, *tensors)} != {torch.float32}:
        return False
    if [a.stride() for a in into] != [b.stride() for b in tensors]:
        return False
    return are_dense(into)
