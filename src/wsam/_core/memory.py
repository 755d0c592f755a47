"""Tensors that a method keeps between steps, one for each parameter.

They are entries of the optimizer's state, `optimizer.state[p]["sam_<name>"]`, so they are saved,
loaded, moved and sharded together with the base's own.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wsam._core.param_blocks import Block, local_shards
from wsam._core.param_groups import PREFIX


class Memory:
    """Reads the tensors of the last step, and writes new ones when a step is complete.

    Args:
        state: the base optimizer's state. Bases fill an entry that is empty, so a new tensor must not
            be added before the base has stepped.
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        self._written: list[tuple[Block, str, list[Tensor]]] = []

    def read(self, block: Block, name: str) -> list[Tensor] | None:
        """Return the local shards of a tensor for each parameter; None if one of them has none."""
        found = [
            self._state[p].get(PREFIX + name) if p in self._state else None for p in block.params
        ]
        return None if any(t is None for t in found) else local_shards(found)  # type: ignore[arg-type]

    def write(self, block: Block, name: str, tensors: list[Tensor]) -> None:
        """Store local shards at the end of the step."""
        self._written.append((block, name, tensors))

    def commit(self) -> None:
        """Copy what was written into the state. The storage stays, as a CUDA graph needs it."""
        for block, name, tensors in self._written:
            self.create(block.params, name)
            torch._foreach_copy_(self.read(block, name), tensors)  # type: ignore[arg-type]
        self._written = []

    def create(self, params: Sequence[Tensor], name: str) -> None:
        """Create zeros for parameters that have no such tensor."""
        for p in params:
            if PREFIX + name not in self._state[p]:
                self._state[p][PREFIX + name] = torch.zeros_like(p, requires_grad=False)
