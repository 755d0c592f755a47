"""Where w is kept, or w + d is made, while a step is in flight.

On a CPU the second pass may run on weights that lie elsewhere. To copy w away, add d to it where it
is and copy it back takes two passes over memory too many: w + d can be made in another place, with
the parameters pointed there for the second pass, while w stays where it is, untouched. Only where
nobody else has an eye on the memory of a weight, though: another name of it (a view, an alias by
`detach`, an array of numpy) would show w in the second pass.
"""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from wsam.block import PLAIN, Aside, Block, copies, is_ordinary


def save_weights(block: Block) -> None:
    """Keep copies of the block's weights in `block.saved`.

    On a CPU fresh pages cost more than the copies, so there the memory serves step after step. A CUDA
    allocator keeps its memory anyway and lends it to others between steps.
    """
    weights = block.weights()
    if weights[0].device.type != "cpu":
        block.saved = copies(weights)
        return
    saved = spare_memory(block)
    torch._foreach_copy_(saved, weights)
    block.saved = saved  # last: an interrupt must not restore from a copy that is half filled


def step_aside(block: Block, direction: Sequence[Tensor], scale: Tensor) -> bool:
    """Make `w + scale * direction` in another place and point the parameters there.

    Returns:
        False, with nothing done, where a copy of w must be made.
    """
    weights = block.weights()
    if block.sharded or torch.compiler.is_compiling() or len(set(map(id, weights))) < len(weights):
        return False
    if not all(_can_move(w, d) for w, d in zip(weights, direction, strict=True)):
        return False
    elsewhere = spare_memory(block)
    for w, d, room in zip(weights, direction, elsewhere, strict=True):
        torch.addcmul(w, d, scale, out=room)
    # First: an interrupt in the loop must find where w belongs.
    block.saved = Aside(weights, elsewhere)
    for w, room in zip(weights, elsewhere, strict=True):
        w.data = room
    increment_version(weights)
    return True


def spare_memory(block: Block) -> list[Tensor]:
    """Return memory laid out as the block's weights, the same at each step if nobody has taken it."""
    found = []
    for number, w in zip(block.numbers, block.weights(), strict=True):
        room = block.spare.get(number)
        if room is None or not _fits(room, w):
            with torch.inference_mode(False):
                room = block.spare[number] = torch.empty_like(w)
        found.append(room)
    return found


def _fits(room: Tensor, w: Tensor) -> bool:
    alike = (room.shape, room.dtype, room.stride()) == (w.shape, w.dtype, w.stride())
    if torch.compiler.is_compiling() or not alike:
        return alike
    if room.data_ptr() == w.data_ptr() and w.numel():
        return False  # somebody has made a weight of what lay there
    return ALONE is None or holders(room) == ALONE


def _can_move(weight: Tensor, direction: Tensor) -> bool:
    if not is_ordinary(weight) or type(direction) not in PLAIN:
        return False
    if (direction.dtype, direction.shape) != (weight.dtype, weight.shape):
        return False
    return ALONE is not None and holders(weight) == ALONE


def holders(tensor: Tensor) -> tuple[int, int, bool] | None:
    """Return how many hold a tensor's memory, by torch's and Python's counts, and whether others may.

    Memory that torch has not got itself, such as numpy's, and memory that processes share may have
    names that nobody counts. None where torch does not tell.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return None
    storage = tensor.untyped_storage()
    uncounted = not storage.resizable() or storage.is_shared()
    return count(storage._cdata), sys.getrefcount(storage), uncounted


def _holders_of_lone_memory() -> tuple[int, int, bool] | None:
    """Return what `holders` says of memory that has one; None if a second would go unnoticed."""
    lone = torch.empty(1)
    one, alias = holders(lone), lone.detach()
    return one if one != holders(alias) else None


ALONE = _holders_of_lone_memory()
