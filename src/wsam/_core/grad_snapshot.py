"""Detects that gradients were changed between `descend` and `step`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from wsam._core.param_blocks import is_sharded, local_shards


class GradSnapshot:
    """Version counters of gradients, and norms of the local shards of DTensors.

    In-place foreach operations, such as those of clipping, leave the counters of DTensors unchanged.
    """

    def __init__(self, grads: Sequence[Tensor]) -> None:
        self._versions = [(g, g._version) for g in grads]
        self._sharded = [g for g in grads if is_sharded(g)]
        self._norms = self._shard_norms()

    def matches(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether `grads` still contain these gradients, with the same values."""
        present = {id(g) for g in grads}
        if any(g._version != version or id(g) not in present for g, version in self._versions):
            return False
        pairs = zip(self._norms, self._shard_norms(), strict=True)
        return all(torch.allclose(x, y, rtol=0, atol=0, equal_nan=True) for x, y in pairs)

    def _shard_norms(self) -> list[Tensor]:
        return list(torch._foreach_norm(local_shards(self._sharded))) if self._sharded else []
