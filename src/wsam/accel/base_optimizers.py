"""What the accelerators know about SGD, Adam and AdamW: their state, numbers and branches."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from wsam._core.param_blocks import sign_of
from wsam._core.param_groups import PREFIX, RHO, rule_values
from wsam._core.tensor_ops import PLAIN_TYPES, is_dense
from wsam.rule import Rule

BASES = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
COLUMNS = 16
"""Length of a group's row of numbers. Twelve are used, sixteen keep rows aligned."""
MIX_COLUMNS = (1, 2, 3, 4)
"""The columns of the four coefficients of a rule."""
BASE_NUMBERS = ("weight_decay", "momentum", "dampening", "betas", "eps")
"""Numbers of a base that kernels read on the device. OneCycleLR changes momentum and betas."""
HAS_G0, DECAY, MOMENTUM, NESTEROV, ADAM, DECOUPLED_DECAY = (1 << bit for bit in range(6))
"""Compile-time branches of a kernel."""


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


def is_base_only(group: dict[str, Any], rule: Rule) -> bool:
    """Whether a group's step is the base's own, which must then hold bit for bit."""
    values = rule_values(group, rule)
    if any(isinstance(value, Tensor) for value in values.values()) or rule.needs_products(values):
        return False  # the coefficients are on the device
    return rule.mix(values, None).is_base_only


def numbers_of(group: dict[str, Any], rule: Rule, boost: float) -> list[float]:
    """Return a group's row of numbers, in the order in which kernels read them.

    0: radius; 1, 2: coefficients (g0, difference) of base_grad; 3, 4: of decoupled; 5: learning rate;
    6: weight decay; 7, 8: momentum and dampening of SGD, betas of Adam; 9: Adam's epsilon; 10, 11: the
    logarithms of the betas.
    """
    values = rule_values(group, rule)
    row = [sign_of(group) * group[RHO] * boost]
    if rule.needs_products(values):  # the coefficients are computed on the device
        row += [0.0] * 4
    else:
        mix = rule.mix(values, None)
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
    states = [state or {} for state in map(base.state.get, params)]
    if "betas" in group and not all(_is_count_on(s.get("step"), device) for s in states):
        return None
    return [[state.get(name) for state in states] for name in _state_names(group)]


def _state_names(group: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the base's parameter-sized state."""
    if "betas" in group:
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if group["momentum"] else ()


def _is_count_on(value: Any, device: torch.device) -> bool:
    return isinstance(value, Tensor) and (value.dtype, value.device) == (torch.float32, device)


def can_step_fused(base: Optimizer, group: dict[str, Any]) -> bool:
    """Whether a group on a CPU can step by torch's fused code, and the user left that open."""
    if not _steps_as_written(base) or group["differentiable"] or torch.compiler.is_compiling():
        return False
    if any(group.get(name) is not None for name in ("fused", "foreach")):
        return False
    if any(isinstance(value, Tensor) for value in (group["lr"], *group.get("betas", ()))):
        return False
    trained = [p for p in group["params"] if p.grad is not None]
    return all(_has_uniform_layout(p, base.state.get(p) or {}, group) for p in trained)


def _has_uniform_layout(p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> bool:
    """Whether a weight, its gradient and its state exist with the same dtype, shape and strides.

    torch's fused code assumes that and does not check it.
    """
    if any(state.get(name) is None for name in _state_names(group)):
        return False
    if "betas" in group and not _is_count_on(state.get("step"), p.device):
        return False
    tensors = [p, p.grad, *(t for k, t in state.items() if k != "step" and t is not None)]
    if not PLAIN_TYPES.issuperset(map(type, tensors)) or not is_dense(p):
        return False
    if p.dtype not in (torch.float32, torch.float64):
        return False
    return len({(t.dtype, t.shape, t.stride()) for t in tensors}) == 1
