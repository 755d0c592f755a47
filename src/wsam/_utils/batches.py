"""Utilities for batches: tensors, or tuples, lists and mappings of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["check_reiterable", "count_samples", "move_batch", "split_batch"]


def check_reiterable(batches: Iterable[Any]) -> None:
    """Raise unless `batches` can be iterated more than once.

    Raises:
        TypeError: If it is a tensor, not iterable, or an iterator. Every matrix-vector product
            iterates over all batches again.
    """
    if isinstance(batches, Tensor) or not isinstance(batches, Iterable):
        raise TypeError(
            f"batches must be a list or a loader of batches, got {type(batches).__name__}"
        )
    if isinstance(batches, Iterator):
        raise TypeError(
            "batches must be iterable more than once, got a generator or an iterator, which can be "
            "read only once: pass a list or a DataLoader"
        )


def count_samples(batch: Any) -> int:
    """Return the number of samples of a batch: the length of its first tensor.

    Raises:
        ValueError: If the batch has no tensor.

    Example:
        >>> count_samples((torch.zeros(8, 3), torch.zeros(8)))
        8
    """
    for tensor in _tensors(batch):
        return len(tensor) if tensor.ndim else 1
    raise ValueError(
        "the batch contains no tensor, so its number of samples is unknown: pass `size`, a function "
        "that returns it"
    )


def move_batch(batch: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Move all tensors of a batch to a device; cast floating-point ones to `dtype` if given.

    An object with a method `to` is moved by it and not cast.
    """
    if isinstance(batch, Tensor):
        cast = dtype if batch.is_floating_point() else None
        return batch.to(device=device, dtype=cast, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: move_batch(value, device, dtype) for key, value in batch.items()}
    if hasattr(batch, "to"):  # such as a PackedSequence or a graph
        return batch.to(device)
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return tuple(move_batch(value, device, dtype) for value in batch)
    return batch


def split_batch(batch: Any, size: int) -> Iterator[Any]:
    """Split a batch into batches of `size` samples; the last one may be smaller."""
    total = count_samples(batch)
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
