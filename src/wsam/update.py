"""The arithmetic of a two-pass step on lists of tensors: take g0, restore, combine, apply.

Nothing here waits for the device, and nothing here knows a method's name: what is kept, fed and
applied follows from the rule's weights alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from wsam.block import (
    BYTES,
    GRADIENT,
    LAYOUT,
    PLAIN,
    Aside,
    Block,
    add_scaled,
    align_gradients,
    copies,
    global_squares,
    local,
    on_device,
    places,
    widened,
)
from wsam.rule import Mix, Products, Rule, is_number
from wsam.schedule import Scalar

CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ has the same


@dataclass
class Beside:
    """`scale * tensors`, to be applied with the group's learning rate after the base has stepped."""

    block: Block
    tensors: list[Tensor]
    scale: Scalar
    spend: bool = True
    """Whether the tensors are scratch and may be overwritten."""


@dataclass
class Flight:
    """A step between its first pass and its update. Scratch: it never enters any state."""

    blocks: list[Block]
    """Parameters that had a gradient in the first pass."""
    moved: list[Block] = field(default_factory=list)
    """Those whose weights are at w + d now, with what to put back."""
    beside: list[Beside] = field(default_factory=list)
    ready: bool = False
    """Both passes are done; only the update is left."""
    plain: bool = False
    """The interval left this step to the base alone."""
    stepped: bool = False
    """The base has stepped already (lean)."""
    by_hand: bool = False
    """The passes are the user's: `p.grad` is in his hands between `descend` and `step`."""
    scale_known: bool = False
    """`ascend` was told the factor of a GradScaler."""
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    """What the base is to be fed, and how often it had been written to when it was made."""
    looking: bool = False
    """Nothing will be updated: the user only looks at w + d."""
    skip: bool = False
    """A gradient was not finite: nothing is to change."""
    separate: bool = False
    """g0 have been looked at: see `separate`."""
    random: tuple[Any, ...] | None = None
    """Generator states after the first pass."""
    memory: Any = None
    """What the interval remembered before this step, where it keeps count of gradient norms."""

    @property
    def made(self) -> bool:
        """Whether the update is made, and only counting is left."""
        return self.ready and self.stepped and not self.beside

    @property
    def keeps_second(self) -> bool:
        """Whether a step that is left to the base uses the second pass's gradients.

        Both passes ran at w then, and a GradScaler has looked at the second's alone.
        """
        return self.plain and self.scale_known and self.has_second

    @property
    def has_second(self) -> bool:
        """Whether the second pass has left a gradient."""
        return any(p.grad is not None for block in self.blocks for p in block.params)

    def refuse_one_pass(self) -> None:
        """Raise if the second pass has left no gradient at all, where there should have been one."""
        if self.skip or self.plain or not self.blocks:
            return
        if not self.has_second:
            raise RuntimeError(
                "no parameter has a gradient: call backward() in the second pass, too"
            )


def gather(layout: Sequence[Block]) -> list[Block]:
    """Return the blocks of parameters that have gradients, holding these as g0."""
    align_gradients(layout)
    found = []
    for block in layout:
        grads = list(map(GRADIENT, block.params))
        present = [g for g in grads if g is not None]
        part = block.subset([g is not None for g in grads])
        if part is None:
            continue
        if set(map(LAYOUT, present)) != {torch.strided}:
            raise TypeError(
                "sharpness-aware steps need dense gradients and a parameter has a sparse one: "
                "use sparse=False in nn.Embedding"
            )
        part.first = present
        found.append(part)
    return found


def separate(flight: Flight) -> None:
    """Let g0 be written to: see `apart`. Kernels only read it, and need not wait for this."""
    if flight.separate:
        return
    seen = set[int]()
    for block in flight.blocks:
        if not block.sharded and block.first is not None:
            block.first = apart(block.first, seen)
    flight.separate = True


def apart(gradients: list[Tensor], seen: set[int]) -> list[Tensor]:
    """Return gradients that can be written to one by one: copies of those that begin where others do.

    `loss.backward()` makes none such, but whoever sets `p.grad` himself may: of A + B
    `torch.autograd.grad` returns one tensor for both, and of a sum an expanded one.

    Args:
        gradients: of some parameters.
        seen: where gradients begin that were looked at before; these are added.
    """
    if torch.compiler.is_compiling() or not PLAIN.issuperset(map(type, gradients)):
        return gradients
    begins = places(gradients)
    distinct = len(set(begins)) == len(begins) and seen.isdisjoint(begins)
    if distinct and 0 not in chain.from_iterable(map(Tensor.stride, gradients)):
        seen.update(begins)
        return gradients  # as almost always
    result = []
    for g, begin in zip(gradients, begins, strict=True):
        result.append(g.clone() if begin in seen or 0 in g.stride() else g)
        seen.add(begin)
    return result


def detach_gradients(blocks: Sequence[Block], outlive: bool = True) -> None:
    """Take g0 away from the parameters, so that the next backward pass makes fresh gradients.

    Args:
        blocks: the parameters, with their g0.
        outlive: whether g0 must outlive that pass. One that is a view (of a bucket that
            DistributedDataParallel will write into again) is copied then; any other is simply kept.
    """
    for block in blocks:
        if outlive:
            block.first = own_gradients(block.first or [], block.sharded)
        for p in block.params:
            p.grad = None


def own_gradients(gradients: Sequence[Tensor], sharded: bool) -> list[Tensor]:
    """Return the gradients, copies of those that are views: whoever owns the whole may write there."""
    shards = local(gradients) if sharded else gradients
    if not torch.compiler.is_compiling():  # a compiler cannot trace `nbytes`
        wholes = map(torch.UntypedStorage.nbytes, map(Tensor.untyped_storage, shards))
        if list(wholes) == list(map(BYTES, shards)) and not any(map(Tensor._is_view, shards)):
            return list(gradients)  # as almost always
    views = [
        s._is_view() or s.untyped_storage().nbytes() > s.numel() * s.element_size() for s in shards
    ]
    return [g.clone() if view else g for g, view in zip(gradients, views, strict=True)]


def squares_of_first(blocks: Sequence[Block]) -> Tensor:
    """Return norm(g0)^2."""
    return global_squares(blocks, [block.shards(block.first or []) for block in blocks])


def unscale(blocks: Sequence[Block], grad_scale: Scalar) -> None:
    """Divide g0 by the factor a GradScaler has put on the loss."""
    for block in blocks:
        torch._foreach_div_(block.shards(block.first or []), grad_scale)


def pairs(blocks: Sequence[Block]) -> list[tuple[Tensor, Tensor]]:
    """Return each parameter with its g0."""
    return [pair for block in blocks for pair in zip(block.params, block.first or [], strict=True)]


def put_back(blocks: Sequence[Block]) -> None:
    """Give g0 back to the parameters: the base steps alone."""
    for p, g in pairs(blocks):
        p.grad = g


def restore(moved: Sequence[Block]) -> None:
    """Put the saved weights back, bit for bit. The one place that does.

    Last first: of weights that share memory the first to move was saved at w.
    """
    for block in reversed(moved):
        if isinstance(block.saved, Aside):
            block.saved.put_back(block.weights())
        elif block.saved:
            torch._foreach_copy_(block.weights(), list(block.saved))
        block.saved = []


def second_gradients(block: Block, keeps_first: bool, seen: set[int]) -> list[Tensor]:
    """Return g1 of the block's parameters; for `seen` see `apart`.

    Where the second pass left none, the parameter gets no sharpness term: g1 counts as g0 if g0 is
    still there, else the parameter leaves the block and the base sees no gradient.
    """
    grads = [p.grad for p in block.params]
    present = [g for g in grads if g is not None]
    if not block.sharded:
        present = apart(present, seen)
    if len(present) == len(grads):
        return present
    if keeps_first:
        assert block.first is not None
        found = iter(present)
        pairs = zip(grads, block.first, strict=True)
        return [f.clone() if g is None else next(found) for g, f in pairs]
    left = [i for i, g in enumerate(grads) if g is not None]
    block.params = [block.params[i] for i in left]
    block.numbers = [block.numbers[i] for i in left]
    return present


def refuse_overwritten(blocks: Sequence[Block], seen: set[int]) -> None:
    """Raise if the second pass has left its gradients, which were `seen`, where g0 are kept."""
    for block in blocks if seen else ():
        first = block.first or []
        if block.sharded or not PLAIN.issuperset(map(type, first)):
            continue
        if seen.intersection(places(first)) - {0}:  # empty tensors lie nowhere
            raise RuntimeError(
                "the second pass wrote its gradients into the tensors that hold the first's: give "
                "p.grad new tensors in each pass"
            )


def latecomers(layout: Sequence[Block], blocks: Sequence[Block]) -> list[Block]:
    """Return blocks of parameters whose gradient appeared in the second pass only; their g0 is 0."""
    if sum(len(block.params) for block in blocks) == sum(len(block.params) for block in layout):
        return []  # all had one in the first pass, as almost always
    known = {number for block in blocks for number in block.numbers}
    late = []
    for block in layout:
        keep = [
            p.grad is not None and n not in known
            for p, n in zip(block.params, block.numbers, strict=True)
        ]
        part = block.subset(keep) if any(keep) else None
        if part is not None:
            part.first = [torch.zeros_like(p.grad) for p in part.params if p.grad is not None]
            late.append(part)
    return late


def combine(
    layout: Sequence[Block],
    blocks: list[Block],
    rule: Rule,
    hyper: Callable[[dict[str, Any]], dict[str, Scalar]],
    max_norm: float | None,
) -> list[Beside]:
    """Put what the base is fed into `p.grad`, and return what is to be applied beside it."""
    late = latecomers(layout, blocks)
    blocks = [*blocks, *late]
    seen = set[int]()
    seconds = [second_gradients(block, rule.keeps_first, seen) for block in blocks]
    refuse_overwritten(blocks, seen)
    settings = [hyper(block.group) for block in blocks]
    products = None
    needy = [rule.needs_products(setting) for setting in settings]
    if any(needy):
        products = differences(blocks, seconds, needy)
    beside = []
    fed = []
    for block, second, setting, subtracted in zip(blocks, seconds, settings, needy, strict=True):
        mix = rule.mix(setting, products if subtracted else None)
        if mix.fed.is_second and mix.beside.is_zero and not subtracted:
            gradients = second
        else:
            assert block.first is not None
            first, change = block.shards(block.first), block.shards(second)
            if not subtracted:
                torch._foreach_sub_(change, first)
            beside += _beside(block, mix, first, change)
            _feed(mix, first, change, spend=mix.beside.is_zero)
            gradients = block.first
        for p, g in zip(block.params, gradients, strict=True):
            p.grad = g
        fed.append(block.shards(gradients))
        block.first = None
    if max_norm is not None:
        clip(blocks, fed, beside, max_norm)
    if not rule.feeds_second:
        # The base has no business with them: it was to be fed g0, which is not there.
        for block in late:
            for p in block.params:
                p.grad = None
    return beside


def differences(
    blocks: Sequence[Block], seconds: Sequence[list[Tensor]], needy: Sequence[bool]
) -> Products:
    """Turn g1 of needy blocks into g1 - g0 in place; return the inner products without a temporary."""
    firsts = [block.shards(block.first or []) for block in blocks]
    changes = [block.shards(second) for block, second in zip(blocks, seconds, strict=True)]
    first, second = global_squares(blocks, firsts), global_squares(blocks, changes)
    for i, (g1, g0) in enumerate(zip(changes, firsts, strict=True)):
        if needy[i]:
            torch._foreach_sub_(g1, g0)
        else:  # what the group is fed is g1 as it stands
            changes[i] = list(torch._foreach_sub(g1, g0))
    return Products.of_squares(first, second, apart=global_squares(blocks, changes))


def _beside(block: Block, mix: Mix, first: list[Tensor], change: list[Tensor]) -> list[Beside]:
    if mix.beside.is_zero:
        return []
    if is_number(mix.beside.loss, 0.0):
        return [Beside(block, change, mix.beside.sharp)]
    tensors = list(torch._foreach_mul(first, on_device(mix.beside.loss, block.device)))
    add_scaled(tensors, change, on_device(mix.beside.sharp, block.device), spend=False)
    return [Beside(block, tensors, 1.0)]


def _feed(mix: Mix, first: list[Tensor], change: list[Tensor], spend: bool) -> None:
    """Turn g0 into what the base is fed, in place. A zero weight is a branch: 0 * inf is NaN."""
    if not first:
        return
    device = first[0].device
    if not is_number(mix.fed.loss, 1.0):
        torch._foreach_mul_(first, on_device(mix.fed.loss, device))
    if not is_number(mix.fed.sharp, 0.0):
        add_scaled(first, change, on_device(mix.fed.sharp, device), spend=spend)


def clip(
    blocks: Sequence[Block], fed: list[list[Tensor]], beside: list[Beside], max_norm: float
) -> None:
    """Scale fed and beside alike by min(1, max_norm / |fed + beside|)."""
    terms = {id(term.block): term for term in beside}
    whole = []
    for block, tensors in zip(blocks, fed, strict=True):
        term = terms.get(id(block))
        if term is None or not tensors:
            whole.append(tensors)
            continue
        both = copies(widened(tensors))
        add_scaled(both, term.tensors, on_device(term.scale, block.device), spend=False)
        whole.append(both)
    norm = global_squares(blocks, whole).sqrt()
    factor = (max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0)
    for block, tensors in zip(blocks, fed, strict=True):
        torch._foreach_mul_(tensors, on_device(factor, block.device))
    for term in beside:
        term.scale = on_device(factor, term.block.device) * term.scale


def apply(beside: Sequence[Beside]) -> None:
    """`w -= lr * scale * tensors`, with the learning rate of each block's group."""
    for term in beside:
        device = term.block.device
        step = -term.block.direction * on_device(term.block.group["lr"], device)
        scale = step * on_device(term.scale, device)
        add_scaled(term.block.weights(), term.tensors, scale, spend=term.spend)
