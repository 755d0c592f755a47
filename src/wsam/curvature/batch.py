"""Batches of any shape: how many samples, onto which device, cut into smaller ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["batch_size", "move", "require_repeatable", "split_batch"]


def require_repeatable(batches: Iterable[Any]) -> None:
    """Refuse what can be read only once: every product reads the batches again."""
    if isinstance(batches, Tensor) or not isinstance(batches, Iterable):
        raise TypeError(
            f"batches must be a list or a loader of batches, not {type(batches).__name__}"
        )
    if isinstance(batches, Iterator):
        raise TypeError(
            "batches can be read only once (a generator or an iterator): pass a list or a loader"
        )


def batch_size(batch: Any) -> int:
    """Return the length of the first tensor of a batch.

    >>> batch_size((torch.zeros(8, 3), torch.zeros(8)))
    8
    """
    for tensor in _tensors(batch):
        return len(tensor) if tensor.ndim else 1
    raise ValueError("a batch holds no tensor: give `size`, the number of samples of a batch")


def move(batch: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Put every tensor of a batch on a device and, where `dtype` is given, cast its real ones."""
    if isinstance(batch, Tensor):
        cast = dtype if batch.is_floating_point() else None
        return batch.to(device=device, dtype=cast, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: move(value, device, dtype) for key, value in batch.items()}
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return tuple(move(value, device, dtype) for value in batch)
    return batch


def split_batch(batch: Any, size: int) -> Iterator[Any]:
    """Cut a batch into batches of `size` samples; the last one may be smaller."""
    total = batch_size(batch)
    for start in range(0, total, size):
        yield _slice(batch, start, start + size, total)


def _slice(batch: Any, start: int, stop: int, total: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[start:stop] if batch.ndim and len(batch) == total else batch
    if isinstance(batch, Mapping):
        return {key: _slice(value, start, stop, total) for key, value in batch.items()}
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return tuple(_slice(value, start, stop, total) for value in batch)
    return batch


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        for value in batch:
            yield from _tensors(value)
