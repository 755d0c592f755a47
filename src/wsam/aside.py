"""On a CPU the second pass may run on weights that lie elsewhere.

To copy w away, add d to it where it is and copy it back takes two passes over memory too many: w + d
can be made in another place, with the parameters pointed there for the second pass, while w stays
where it is, untouched. Only where nobody else has an eye on the memory of a weight, though: another
name of it (a view, an alias by `detach`, an array of numpy) would show w in the second pass.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from wsam.block import PLAIN, Aside, Block, is_dense, rooms


def step_aside(block: Block, direction: Sequence[Tensor], scale: Tensor) -> bool:
    """Make `w + scale * direction` in another place and point the parameters there.

    Returns:
        False, with nothing done, where a copy of w must be made.
    """
    weights = block.weights()
    if block.sharded or torch.compiler.is_compiling():
        return False
    if not all(_is_alone(w, d) for w, d in zip(weights, direction, strict=True)):
        return False
    elsewhere = rooms(block)
    for w, d, room in zip(weights, direction, elsewhere, strict=True):
        torch.addcmul(w, d, scale, out=room)
    block.saved = Aside(weights)  # first: whoever is interrupted puts back what is saved
    for w, room in zip(weights, elsewhere, strict=True):
        w.data = room
    increment_version(weights)
    return True


def _is_alone(weight: Tensor, direction: Tensor) -> bool:
    if not PLAIN.issuperset((type(weight), type(direction))) or weight.device.type != "cpu":
        return False
    if weight.dtype not in (torch.float32, torch.float64):
        return False
    if (direction.dtype, direction.shape) != (weight.dtype, weight.shape):
        return False
    return is_dense(weight) and _names(weight) == _names_of_one()


def _names(tensor: Tensor) -> int:
    """Return how many hold a tensor's memory, this question included; 0 where torch does not tell."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return 0 if count is None else count(tensor.untyped_storage()._cdata)


@functools.cache
def _names_of_one() -> int:
    return _names(torch.empty(1)) or -1
