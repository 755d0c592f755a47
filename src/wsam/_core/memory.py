"""Tensors that a method keeps between steps, one for each parameter.

They are entries of the optimizer's state, `optimizer.state[p]["sam_<name>"]`, so they are saved,
loaded, moved and sharded together with the base's own.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wsam._core.param_blocks import Block, local_shards, squared_norm
from wsam._core.param_groups import PREFIX

State = dict[str, Any]
"""The base's state of one parameter. Tensors are this rank's shards."""


def states_of(base: Optimizer, block: Block) -> list[State]:
    """Return the base's state of each parameter of a block, with local shards."""
    states: list[State] = [base.state.get(p) or {} for p in block.params]
    if not block.sharded:
        return states
    return [
        {name: local_shards([t])[0] if isinstance(t, Tensor) else t for name, t in state.items()}
        for state in states
    ]


class Memory:
    """Reads the tensors of the last step, and writes new ones when a step is complete.

    Bases fill a state that is empty, so a new tensor must not be added before the base has stepped.

    torch.distributed.checkpoint needs a place for each tensor, also in states that are saved or loaded
    before the first perturbed step. `reserve` creates it: zeros, which do not count as a value.

    Args:
        base: the base optimizer.
        reserved: parameters and names of the tensors that are reserved. The optimizer keeps this set.
    """

    def __init__(self, base: Optimizer, reserved: set[tuple[Tensor, str]]) -> None:
        self._base, self._reserved = base, reserved
        self._written: dict[str, dict[Tensor, Tensor]] = {}

    def has(self, name: str) -> bool:
        """Whether any parameter has such a tensor."""
        return any(
            PREFIX + name in state and (p, name) not in self._reserved
            for p, state in self._base.state.items()
        )

    def read_each(self, block: Block, name: str) -> list[Tensor | None]:
        """Return the local shard of a tensor for each parameter, None where there is none.

        An earlier micro-batch of the same step may have written it already.
        """
        written = self._written.get(name, {})
        pairs = zip(block.params, self.stored(block, name), strict=True)
        stored = [(p, None if (p, name) in self._reserved else tensor) for p, tensor in pairs]
        return [written.get(p, tensor) for p, tensor in stored]

    def stored(self, block: Block, name: str) -> list[Tensor | None]:
        """Return the local shard in the state of each parameter, reserved or not."""
        return [state.get(PREFIX + name) for state in states_of(self._base, block)]

    def momentum(self, block: Block) -> list[Tensor | None]:
        """Return the local shard of the base's momentum for each parameter, None where there is none.

        That is "momentum_buffer" in the state of SGD, and "exp_avg" in that of Adam and its relatives.
        """
        states = states_of(self._base, block)
        return [state.get("momentum_buffer", state.get("exp_avg")) for state in states]

    def write(self, block: Block, name: str, tensors: list[Tensor]) -> None:
        """Store local shards at the end of the step."""
        self._written.setdefault(name, {}).update(zip(block.params, tensors, strict=True))

    def commit(self) -> None:
        """Copy what was written into the state. The storage stays, as a CUDA graph needs it.

        A parameter without a gradient for the base is left out until the base has created its state.
        """
        state = self._base.state
        for name, tensors in self._written.items():
            params = [p for p in tensors if p.grad is not None or state.get(p)]
            self._create(params, name)
            if params:
                stored = local_shards([state[p][PREFIX + name] for p in params])
                torch._foreach_copy_(stored, [tensors[p] for p in params])
            self.mark_written(params, name)
        self._written = {}

    def mark_written(self, params: Sequence[Tensor], name: str) -> None:
        """Mark the stored tensors of these parameters as values: they are no longer only reserved."""
        self._reserved.difference_update((p, name) for p in params)

    def reserve(self, params: Sequence[Tensor], names: Sequence[str]) -> None:
        """Reserve the tensors that these parameters do not have yet."""
        for name in names:
            self._reserved.update((p, name) for p in self._create(params, name))

    def find_reserved(self, blocks: Sequence[Block], names: Sequence[str]) -> None:
        """Find the tensors that are reserved in a loaded state: all of one name are zero."""
        for name in names:
            stored = [[t for t in self.stored(b, name) if t is not None] for b in blocks]
            if float(squared_norm(blocks, stored)) == 0.0:
                self._reserved.update((p, name) for block in blocks for p in block.params)

    def _create(self, params: Sequence[Tensor], name: str) -> list[Tensor]:
        """Create zeros for the parameters that have no such tensor, and return these parameters."""
        missing = [p for p in params if PREFIX + name not in self._base.state[p]]
        for p in missing:
            self._base.state[p][PREFIX + name] = torch.zeros_like(p, requires_grad=False)
        return missing
