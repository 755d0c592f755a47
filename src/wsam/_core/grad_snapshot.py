"""Detects that gradients were changed between `descend` and `step`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from wsam._core.param_blocks import is_sharded, local_shards


class GradSnapshot:
    """Version counters of gradients, and norms of the local shards of DTensors.

    In-place foreach operations, such as those of clipping, leave the counters of DTensors unchanged.

    Args:
        grads: the gradients.
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
        before, now = self._norms, self._shard_norms()
        return bool(((before == now) | (before.isnan() & now.isnan())).all())

    def _shard_norms(self) -> Tensor:
        if not self._sharded:
            return torch.empty(0)
        return torch.stack([n.float() for n in torch._foreach_norm(local_shards(self._sharded))])
