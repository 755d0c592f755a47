"""The mathematics of a step: perturb, restore, combine, clip, apply.

    d  = rho * S g0 / (sqrt(<g0, S g0>) + eps)          `perturb`, S from the geometry
    g1 = grad l(w + d)                                  the second pass
    base_grad = a g0 + b (g1 - g0)                      `combine`, coefficients from the rule
    decoupled = c g0 + e (g1 - g0)
    w <- w - base(base_grad) - lr * decoupled           the base's own step, then `apply`

For WSAM base_grad = g0 and decoupled = k (g1 - g0) with k = gamma / (1 - gamma). The coefficients
(a, b) and (c, e) are the `Part`s of a `Mix`. Nothing here synchronizes with the device or depends on a
method's name. `SharpnessAware` calls these functions in this order; an accelerator may replace
`perturb`, or all that follows the second pass, with the same result.
"""

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wsam._core.mix import NOTHING, Mix, Part, Products, Scalar, is_exactly
from wsam._core.param_blocks import (
    EPSILON,
    Block,
    CopiedWeights,
    DecoupledTerm,
    local_shards,
    squared_norm,
    squared_norm_of_g0,
    subsets,
)
from wsam._core.param_groups import RHO, rule_values
from wsam._core.preconditioners import add_squares, apply_preconditioned, denominators_before
from wsam._core.step_state import Action, StepState
from wsam._core.tensor_ops import accumulation_dtype, add_scaled, copies, on_device, widened

if TYPE_CHECKING:
    from wsam.rule import Rule

CLIP_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""

KEPT = "kept"
"""The name of the vector that a rule reuses."""

Lists = Sequence[list[Tensor]]
"""For each block, a tensor for each of its parameters."""
Roots = Sequence[list[Tensor] | None]
"""For each block sqrt(S), None where S = 1."""
Direction = tuple[list[Tensor], Tensor]
"""S g0, and the factor that turns it into d."""


# The first gradient ---------------------------------------------------------------------------------


def unscale(blocks: Sequence[Block], grad_scale: Scalar) -> None:
    """Divide g0 by the scale of a GradScaler."""
    for block in blocks:
        torch._foreach_div_(block.shards(block.g0), grad_scale)


def own_g0(blocks: Sequence[Block]) -> None:
    """Make g0 survive the second backward pass."""
    for block in blocks:
        block.g0 = owned(block.g0, block.sharded)


def owned(gradients: list[Tensor], sharded: bool) -> list[Tensor]:
    """Return the gradients, with copies of those that are views.

    DistributedDataParallel with `gradient_as_bucket_view=True` reuses their storage.
    """
    shards = local_shards(gradients) if sharded else gradients
    return [g.clone() if s._is_view() else g for g, s in zip(gradients, shards, strict=True)]


def clear_gradients(blocks: Sequence[Block]) -> None:
    """Set `p.grad` to None, so that the next backward pass creates new tensors."""
    for block in blocks:
        for p in block.params:
            p.grad = None


def gradients_of(blocks: Sequence[Block]) -> list[tuple[Tensor, Tensor]]:
    """Return each parameter with its g0."""
    return [pair for block in blocks for pair in zip(block.params, block.g0, strict=True)]


# w -> w + d -----------------------------------------------------------------------------------------


def perturb(state: StepState) -> None:
    """Move the weights to w + d, and save w in `block.saved`.

        d = rho * S g0 / (sqrt(<g0, S g0>) + eps)

    Overwrites g0 where the rule does not need it any more.
    """
    blocks = state.moved = masked(state)
    for block, direction in zip(blocks, directions(state, blocks), strict=True):
        save_and_move(block, direction)


def ascend_further(state: StepState, blocks: Sequence[Block]) -> None:
    """Move the weights on from w + d, by the perturbation that `g0` of these blocks gives there."""
    for block, direction in zip(blocks, directions(state, blocks), strict=True):
        add_scaled(block.weights(), *direction)


def masked(state: StepState) -> list[Block]:
    """Return the blocks of the parameters that are perturbed."""
    if state.mask is None:
        return list(state.blocks)
    mask = state.mask
    return subsets(state.blocks, lambda _, i: mask[i])


def save_and_move(block: Block, direction: Direction) -> None:
    """Copy the weights into `block.saved`, and add d to them."""
    block.saved = CopiedWeights(copies(block.weights()))
    add_scaled(block.weights(), *direction)


def directions(state: StepState, blocks: Sequence[Block]) -> list[Direction]:
    """Return S g0 for each block, and the scale that turns it into d."""
    whitened, roots = whiten(state, blocks)
    scales = scales_of(state, blocks, whitened)
    return unwhiten(whitened, roots, scales)


def whiten(state: StepState, blocks: Sequence[Block]) -> tuple[Lists, Roots]:
    """Return z = sqrt(S) v for each block, and sqrt(S); v is g0 or the geometry's own vector."""
    whitened, roots = [], []
    for block in blocks:
        g0 = block.shards(block.g0)
        if state.geometry.uses_denominators:
            block.denominators = denominators_before(state.base, block)
        root = state.geometry.sqrt_metric(block, g0)
        vector = state.geometry.vector(block, g0, state.memory)
        block.denominators = None
        if root is None:
            z = vector
        elif state.g0_is_scratch and not accumulation_dtype(g0[0]):
            torch._foreach_mul_(g0, root)
            z = g0
        else:
            z = list(torch._foreach_mul(widened(vector), root))
        whitened.append(z)
        roots.append(root)
    return whitened, roots


def unwhiten(whitened: Lists, roots: Roots, scales: Sequence[Tensor]) -> list[Direction]:
    """Turn z = sqrt(S) g0 into S g0, in place."""
    for z, root in zip(whitened, roots, strict=True):
        if root is not None:
            torch._foreach_mul_(z, root)
    return list(zip(whitened, scales, strict=True))


def scales_of(state: StepState, blocks: Sequence[Block], whitened: Lists) -> list[Tensor]:
    """Return rho / (norm(z) + eps) for each block, with one norm over all of them."""
    norm = squared_norm(blocks, whitened).sqrt()
    # An infinite norm would make d zero for most weights and hide the overflow from the second pass.
    # Adding 0 * norm makes d NaN instead.
    zero_or_nan = 0.0 * (norm if state.mask is None else squared_norm_of_g0(state.blocks))
    radii = [block.sign * block.group[RHO] * state.boost for block in blocks]
    scales = [radius / (norm + EPSILON) + zero_or_nan for radius in radii]
    return [scale.to(block.device) for scale, block in zip(scales, blocks, strict=True)]


# w + d -> w -----------------------------------------------------------------------------------------


def restore(state: StepState) -> None:
    """Write the saved weights back, bit for bit."""
    for block in reversed(state.moved):  # where weights share storage, the first copy is of w
        if block.saved is not None:
            block.saved.restore(block.weights())
        block.saved = None
    state.moved = []


# The two gradients ----------------------------------------------------------------------------------


def combine(state: StepState, all_blocks: Sequence[Block]) -> None:
    """Set `p.grad` to what the base receives, and `state.decoupled` to what is applied directly."""
    rule = state.rule
    late = blocks_without_g0(all_blocks, state.blocks)
    units = units_of(rule, [*state.blocks, *late])
    for blocks in units:
        _combine_unit(state, blocks)
    if state.max_norm is not None:
        clip(list(chain.from_iterable(units)), state.decoupled, state.max_norm)
    if not (rule.base_uses_g1 or rule.precondition):
        clear_gradients(late)  # the base receives g0, which these parameters do not have


def _combine_unit(state: StepState, blocks: Sequence[Block]) -> None:
    """Combine the gradients of blocks whose inner products are computed together."""
    rule = state.rule
    g1s = [second_gradients(block, rule.keeps_g0) for block in blocks]
    values = [rule_values(block.group, rule) for block in blocks]
    mixes = [None if rule.needs_products(value) else rule.mix(value, None) for value in values]
    takes_g1 = [m is not None and m.base_grad.is_g1 and m.decoupled.is_zero for m in mixes]
    products = None
    if None in mixes or rule.kept_needs_products:
        products = _subtract_with_products(blocks, g1s, takes_g1)
    for i, (block, g1, value) in enumerate(zip(blocks, g1s, values, strict=True)):
        mix = mixes[i] or rule.mix(value, products)
        g0, difference = block.shards(block.g0), block.shards(g1)
        if takes_g1[i] and rule.reuse:
            difference = list(torch._foreach_sub(difference, g0))
        elif not takes_g1[i] and products is None:
            torch._foreach_sub_(difference, g0)
        if rule.reuse:
            is_one_element = rule.per_tensor and block.params[0].numel() == 1
            kept = rule.kept(value, products)
            if is_one_element and rule.keeps_orthogonal_part:
                kept = NOTHING  # it would be rounding errors only
            _keep(state, block, kept, g0, difference)
        if not takes_g1[i]:
            state.decoupled += _decoupled_terms(block, mix, g0, difference)
            _mix_into_g0(mix, g0, difference)
        for p, g in zip(block.params, g1 if takes_g1[i] else block.g0, strict=True):
            p.grad = g
        block.g0 = []


def second_gradients(block: Block, keeps_g0: bool) -> list[Tensor]:
    """Return g1 of the block's parameters.

    A parameter without a second gradient gets no sharpness term: g1 counts as g0 where the rule needs
    g0; otherwise the parameter leaves the block.
    """
    grads = [p.grad for p in block.params]
    present = [g for g in grads if g is not None]
    if len(present) == len(grads):
        return present
    if keeps_g0:
        return [g0.clone() if g is None else g for g, g0 in zip(grads, block.g0, strict=True)]
    block.params = [p for p in block.params if p.grad is not None]
    return present


def blocks_without_g0(all_blocks: Sequence[Block], blocks: Sequence[Block]) -> list[Block]:
    """Return blocks of the parameters whose gradient appeared in the second pass; their g0 is 0."""
    if sum(len(block.params) for block in blocks) == sum(len(block.params) for block in all_blocks):
        return []
    known = {index for block in blocks for index in block.indices}
    late = subsets(all_blocks, lambda p, i: p.grad is not None and i not in known)
    for block in late:
        block.g0 = [torch.zeros_like(p.grad) for p in block.params if p.grad is not None]
    return late


def units_of(rule: "Rule", blocks: Sequence[Block]) -> list[list[Block]]:
    """Return the parts of the model that have inner products of their own: all blocks, or tensors."""
    if not rule.per_tensor:
        return [list(blocks)]
    return [[block.part([i])] for block in blocks for i in range(len(block.params))]


def _subtract_with_products(
    blocks: Sequence[Block], g1s: Lists, keep_g1: Sequence[bool]
) -> Products:
    """Replace g1 by g1 - g0, except where it is kept; return the inner products of all blocks."""
    g0s = [block.shards(block.g0) for block in blocks]
    differences = [block.shards(g1) for block, g1 in zip(blocks, g1s, strict=True)]
    g0_g0, g1_g1 = squared_norm(blocks, g0s), squared_norm(blocks, differences)
    for i, (g1, g0) in enumerate(zip(differences, g0s, strict=True)):
        if keep_g1[i]:
            differences[i] = list(torch._foreach_sub(g1, g0))
        else:
            torch._foreach_sub_(g1, g0)
    return Products.of_squares(g0_g0, g1_g1, squared_norm(blocks, differences))


def _decoupled_terms(
    block: Block, mix: Mix, g0: list[Tensor], difference: list[Tensor]
) -> list[DecoupledTerm]:
    part = mix.decoupled
    if part.is_zero:
        return []
    if is_exactly(part.g0, 0.0):
        return [DecoupledTerm(block, difference, part.difference)]
    tensors = list(torch._foreach_mul(g0, on_device(part.g0, block.device)))
    add_scaled(tensors, difference, on_device(part.difference, block.device))
    return [DecoupledTerm(block, tensors, 1.0)]


def _mix_into_g0(mix: Mix, g0: list[Tensor], difference: list[Tensor]) -> None:
    """Turn g0 into the base's gradient, in place. A zero coefficient is a branch: 0 * inf is NaN."""
    of_g0, of_difference = (on_device(value, g0[0].device) for value in mix.base_grad)
    if not is_exactly(of_g0, 1.0):
        torch._foreach_mul_(g0, of_g0)
    if not is_exactly(of_difference, 0.0):
        add_scaled(g0, difference, of_difference)


# The steps between two-pass steps -------------------------------------------------------------------


def _keep(
    state: StepState, block: Block, part: Part, g0: list[Tensor], difference: list[Tensor]
) -> None:
    """Keep the vector that a rule reuses, averaged with the one before."""
    of_g0, of_difference = (on_device(value, block.device) for value in part)
    if is_exactly(of_difference, 1.0) and is_exactly(of_g0, 0.0):
        vector = difference  # which nothing overwrites before the memory has copied it
    else:
        vector = list(torch._foreach_mul(difference, of_difference))
        if not is_exactly(of_g0, 0.0):
            add_scaled(vector, g0, of_g0)
    average = state.rule.reuse.average if state.rule.reuse else 0.0
    if average:
        pairs = zip(vector, state.memory.read_each(block, KEPT), strict=True)
        # The first vector is the first average. 0-d ones may have the dtype of the coefficients.
        before = [v if h is None else h.to(v.dtype) for v, h in pairs]
        vector = list(torch._foreach_lerp(vector, before, average))
    state.memory.write(block, KEPT, vector)


def combine_one_pass(state: StepState) -> None:
    """Give the base the step's only gradient, g0; in a step that reuses, add the kept vector."""
    blocks = state.blocks
    if state.action is Action.REUSE:
        units = units_of(state.rule, blocks)
        blocks = list(chain.from_iterable(units))
        for unit in units:
            _add_kept(state, unit)
    for p, g in gradients_of(blocks):
        p.grad = g
    if state.max_norm is not None:
        clip(blocks, state.decoupled, state.max_norm)


def _add_kept(state: StepState, blocks: Sequence[Block]) -> None:
    """Combine g0 with the kept vector, in blocks whose norms are computed together."""
    rule = state.rule
    values = [rule_values(block.group, rule) for block in blocks]
    g0s = [block.shards(block.g0) for block in blocks]
    kept = [_kept_or_zeros(state, block) for block in blocks]
    g0_norm = cache(lambda: squared_norm(blocks, g0s).sqrt())  # once, and only if it is needed
    kept_norm = cache(lambda: squared_norm(blocks, kept).sqrt())
    mixes = [rule.mix_kept(value, g0_norm, kept_norm) for value in values]
    for block, g0, vector, mix in zip(blocks, g0s, kept, mixes, strict=True):
        state.decoupled += _decoupled_terms(block, mix, g0, vector)
        _mix_into_g0(mix, g0, vector)


def _kept_or_zeros(state: StepState, block: Block) -> list[Tensor]:
    """Return the kept vector, 0 for parameters without a gradient in the step that kept it."""
    pairs = zip(state.memory.read_each(block, KEPT), block.weights(), strict=True)
    return [torch.zeros_like(w) if h is None else h for h, w in pairs]


# Clipping -------------------------------------------------------------------------------------------


def clip(blocks: Sequence[Block], decoupled: list[DecoupledTerm], max_norm: float) -> None:
    """Scale `p.grad` and the decoupled term by min(1, max_norm / norm(base_grad + decoupled))."""
    terms = {id(term.block): term for term in decoupled}
    blocks = [block for block in blocks if block.params]  # others have no gradient at w + d
    base_grads = [
        block.shards([p.grad for p in block.params if p.grad is not None]) for block in blocks
    ]
    sums = list(base_grads)
    for i, block in enumerate(blocks):
        term = terms.get(id(block))
        if term is not None:
            sums[i] = copies(widened(base_grads[i]))
            add_scaled(sums[i], term.tensors, on_device(term.scale, block.device))
    norm = squared_norm(blocks, sums).sqrt()
    factor = (max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0)
    for block, tensors in zip(blocks, base_grads, strict=True):
        torch._foreach_mul_(tensors, on_device(factor, block.device))
    for term in decoupled:
        term.scale = on_device(factor, term.block.device) * term.scale


# The update -----------------------------------------------------------------------------------------


def update(state: StepState) -> None:
    """Step the base and apply the decoupled term, through the base's denominator if the rule asks."""
    if not state.rule.precondition:
        state.step_base()
        apply(state.decoupled)
        return
    add_squares(state.base, state.decoupled)
    state.step_base()
    apply_preconditioned(state.base, state.decoupled)


def apply(decoupled: Sequence[DecoupledTerm]) -> None:
    """Compute `w -= lr * scale * tensors`, with the learning rate of each block's group."""
    for term in decoupled:
        add_scaled(term.block.weights(), term.tensors, term.factor())
