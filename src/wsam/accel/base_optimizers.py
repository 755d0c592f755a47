"""What the kernels need of SGD, Adam and AdamW: their state, numbers and branches."""

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from wsam._core.mix import Mix, Scalar, is_exactly
from wsam._core.param_blocks import sign_of
from wsam._core.param_groups import PREFIX, RHO, rule_values
from wsam._core.tensor_ops import PLAIN_TYPES, are_dense
from wsam.rule import Rule

BASES = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
COLUMNS = 16
"""Length of a group's row of numbers. Twelve are used, sixteen keep rows aligned."""
MIX_COLUMNS = (1, 2, 3, 4)
"""The columns of the four coefficients of a rule."""
BASE_NUMBERS = ("weight_decay", "momentum", "dampening", "betas", "eps")
"""Numbers of a base that kernels read on the device. OneCycleLR changes momentum and betas."""
HAS_G0, DECAY, MOMENTUM, NESTEROV, ADAM, DECOUPLED_DECAY, PRECONDITION, KEEP, REUSE = (
    1 << bit for bit in range(9)
)
"""Compile-time branches of a kernel."""
_KIND = attrgetter("dtype", "device")


def has_kernel(base: Optimizer) -> bool:
    """Whether the kernels implement the base's step, and no hook or patch changes it."""
    if not _steps_as_written(base):
        return False
    groups = base.param_groups
    plain = all(isinstance(beta, float | int) for g in groups for beta in g.get("betas", ()))
    return plain and not any(g.get("amsgrad") or g.get("maximize") for g in groups)


def _steps_as_written(base: Optimizer) -> bool:
    """Whether the base is one of `BASES`, and no hook or patch changes its step."""
    own = base._optimizer_step_pre_hooks or base._optimizer_step_post_hooks
    hooked = own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks
    return type(base) in BASES and not hooked and not _is_patched(base)


def _is_patched(base: Optimizer) -> bool:
    """Whether `base.step` was replaced by anything but a learning-rate scheduler's counter."""
    own: Any = base.__dict__.get("step")
    inner = getattr(own, "__wrapped__", None) if hasattr(own, "_wrapped_by_lr_sched") else None
    return own is not None and inner is not type(base).step


def may_use_kernels(base: Optimizer, rule: Rule) -> bool:
    """Whether an eager step may use kernels.

    Not if the user chose `foreach` or `fused=False` for the base, or if a hyperparameter is a tensor.
    """
    if type(base) not in BASES or _is_patched(base):
        return False
    names = ("lr", *BASE_NUMBERS, RHO, *(PREFIX + name for name in rule.hyper()))
    groups = base.param_groups
    tensors = any(isinstance(group.get(name), Tensor) for group in groups for name in names)
    return not tensors and all(map(_may_be_fused, groups))


def _may_be_fused(group: dict[str, Any]) -> bool:
    """Whether the group is fused, or the user left that open.

    The step counts of Adam must be on the device, as they are if it is fused or capturable.
    """
    if group.get("fused") is not None:
        return bool(group["fused"])
    chosen = group.get("foreach") is not None or group.get("differentiable")
    return not chosen and bool("betas" not in group or group.get("capturable"))


class _NormNeededError(Exception):
    """A rule has requested a norm."""


def _no_norm() -> Tensor:
    raise _NormNeededError


def mix_on_host(values: dict[str, Scalar], rule: Rule, reuses: bool) -> Mix | None:
    """Return the rule's coefficients; None if they depend on inner products or norms.

    Args:
        values: of the rule's hyperparameters.
        rule: the optimizer's rule.
        reuses: whether the step has one pass and a kept vector.
    """
    if not reuses:
        return None if rule.needs_products(values) else rule.mix(values, None)
    try:
        return rule.mix_kept(values, _no_norm, _no_norm)
    except _NormNeededError:
        return None


def reuse_needs_norms(rule: Rule) -> bool:
    """Whether steps that reuse a kept vector need norms, for some values of the hyperparameters.

    A recorded step is replayed with other values, so their current ones must not decide.
    """
    unknown: dict[str, Scalar] = dict.fromkeys(rule.hyper(), torch.tensor(0.5))
    return mix_on_host(unknown, rule, reuses=True) is None


def is_base_only(group: dict[str, Any], rule: Rule, reuses: bool) -> bool:
    """Whether a group's step is the base's own, which must then hold bit for bit."""
    values = rule_values(group, rule)
    if any(isinstance(value, Tensor) for value in values.values()):
        return False  # the coefficients are on the device
    mix = mix_on_host(values, rule, reuses)
    return mix is not None and mix.is_base_only


def keeps_difference(group: dict[str, Any], rule: Rule) -> bool:
    """Whether two-pass steps keep g1 - g0 as it is."""
    if (rule.reuse and rule.reuse.average) or rule.kept_needs_products:
        return False
    part = rule.kept(rule_values(group, rule), None)
    return is_exactly(part.g0, 0.0) and is_exactly(part.difference, 1.0)


def numbers_of(group: dict[str, Any], mix: Mix | None, boost: float) -> list[float]:
    """Return a group's row of numbers, in the order in which kernels read them.

    0: radius; 1, 2: coefficients (g0, difference) of base_grad; 3, 4: of decoupled; 5: learning rate;
    6: weight decay; 7, 8: momentum and dampening of SGD, betas of Adam; 9: Adam's epsilon; 10, 11: the
    logarithms of the betas.
    """
    row = [sign_of(group) * group[RHO] * boost]
    if mix is None:  # the coefficients are computed on the device
        row += [0.0] * 4
    else:
        row += [float(value) for value in (*mix.base_grad, *mix.decoupled)]
    row += [float(group["lr"]), group.get("weight_decay", 0.0)]
    if "betas" in group:
        betas = group["betas"]
        row += [*betas, group["eps"], *(math.log(beta) if beta else -math.inf for beta in betas)]
    elif "momentum" in group:
        row += [group["momentum"], group.get("dampening", 0.0)]
    return row + [0.0] * (COLUMNS - len(row))


def branches_of(base: Optimizer, group: dict[str, Any]) -> int:
    """Return the branches of a kernel that the base uses."""
    adam = not isinstance(base, torch.optim.SGD)
    decoupled = isinstance(base, torch.optim.AdamW) or group.get("decoupled_weight_decay")
    return (
        DECAY * bool(group["weight_decay"])
        | MOMENTUM * bool(not adam and group["momentum"])
        | NESTEROV * bool(group.get("nesterov"))
        | ADAM * adam
        | DECOUPLED_DECAY * bool(adam and decoupled)
    )


def state_lists(
    base: Optimizer, group: dict[str, Any], params: Sequence[Tensor], device: torch.device
) -> list[list[Any]] | None:
    """Return the base's state as lists of tensors; None if Adam's step counts are not on the device."""
    names = ("momentum_buffer",) if group.get("momentum") else ()
    states = [state or {} for state in map(base.state.get, params)]
    if "betas" in group:
        names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group.get("amsgrad") else ()))
        counts = [state.get("step") for state in states]
        if {*map(type, counts)} != {Tensor} or {*map(_KIND, counts)} != {(torch.float32, device)}:
            return None
    return [[state.get(name) for state in states] for name in names]


def can_step_fused(base: Optimizer, group: dict[str, Any]) -> bool:
    """Whether a group on a CPU can step by torch's fused code, and the user left that open."""
    if not _steps_as_written(base) or group["differentiable"] or torch.compiler.is_compiling():
        return False
    if any(group.get(name) is not None for name in ("fused", "foreach")):
        return False
    if any(isinstance(value, Tensor) for value in (group["lr"], *group.get("betas", ()))):
        return False
    trained = [p for p in group["params"] if p.grad is not None]
    states = state_lists(base, group, trained, torch.device("cpu"))
    return states is not None and _have_one_layout([trained, [p.grad for p in trained], *states])


def _have_one_layout(lists: Sequence[Sequence[Any]]) -> bool:
    """Whether weights, gradients and state exist with the same dtypes, shapes and strides.

    torch's fused code assumes that and does not check it.
    """
    if not all(PLAIN_TYPES.issuperset(map(type, tensors)) for tensors in lists):
        return False
    layouts = [[(t.dtype, t.shape, t.stride()) for t in tensors] for tensors in lists]
    wide = {dtype for dtype, _, _ in layouts[0]} <= {torch.float32, torch.float64}
    return wide and all(layout == layouts[0] for layout in layouts) and are_dense(lists[0])
