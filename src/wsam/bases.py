"""Base optimizers that can be made faster: SGD, Adam and AdamW, whose step the fused kernels know.

What a kernel needs of them: the lists of their state, numbers that may change from step to step, and
which of its branches are theirs. On a CPU torch has fused code for them itself.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from wsam.block import PLAIN, direction_of, is_ordinary
from wsam.rule import Rule
from wsam.schedule import Scalar
from wsam.state import PREFIX

BASES = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
COLUMNS = 16
"""Of the numbers of a group; twelve are used, sixteen keep a row aligned."""
MIX = (1, 2, 3, 4)
"""Where of these the weights of both gradients are."""
OF_BASE = ("weight_decay", "momentum", "dampening", "betas", "eps")
"""Numbers of a base that kernels read beside the learning rate: OneCycleLR moves momentum and betas."""
KEPT, DECAY, MOMENTUM, NESTEROV, ADAM, DECOUPLED = (1 << bit for bit in range(6))
"""Branches of a kernel: g0 is there; the base decays weights, has momentum, looks ahead with it, is
Adam, decays as AdamW does."""


def can_finish(base: Optimizer) -> bool:
    """Whether the base's step is one the kernels know, and nobody else has a hand in it."""
    if type(base) not in BASES or _is_hooked_or_patched(base):
        return False
    groups = base.param_groups
    plain = all(isinstance(beta, float | int) for g in groups for beta in g.get("betas", ()))
    return plain and not any(g.get("amsgrad") or g.get("maximize") for g in groups)


def _is_hooked_or_patched(base: Optimizer) -> bool:
    """Whether others have a hand in the base's step: what was looked at before need not hold in it."""
    hooks = (base._optimizer_step_pre_hooks, base._optimizer_step_post_hooks)
    everywhere = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    return any(hooks) or any(everywhere) or _is_patched(base)


def _is_patched(base: Optimizer) -> bool:
    """Whether `base.step` was replaced; a scheduler made over the base only notes that it is called."""
    own: Any = base.__dict__.get("step")
    inside = getattr(own, "__wrapped__", None) if hasattr(own, "_wrapped_by_lr_sched") else None
    return own is not None and inside is not type(base).step


def may_use_kernels(base: Optimizer, rule: Rule) -> bool:
    """Whether an eager step may go by kernels: nobody has chosen another way for the base.

    Nor may a number be a tensor, whose value the host does not know.
    """
    if type(base) not in BASES or _is_patched(base):
        return False
    names = ("lr", *OF_BASE, *(PREFIX + name for name in ("rho", *rule.hyper())))
    groups = base.param_groups
    tensors = any(isinstance(group.get(name), Tensor) for group in groups for name in names)
    return not tensors and all(map(_is_open, groups))


def _is_open(group: dict[str, Any]) -> bool:
    """Whether it was left open how the group is stepped, or it is to be fused.

    Adam's counts must lie on the device, as they do if it is fused or capturable.
    """
    if group.get("fused") is not None:
        return bool(group["fused"])
    chosen = group.get("foreach") is not None or group.get("differentiable")
    return not chosen and bool("betas" not in group or group.get("capturable"))


def hyper_of(group: dict[str, Any], rule: Rule) -> dict[str, Scalar]:
    """Return the rule's hyperparameters in a group."""
    return {name: group[PREFIX + name] for name in rule.hyper()}


def numbers_of(group: dict[str, Any], rule: Rule, boost: float) -> list[float]:
    """Return what may change from step to step, in the order the kernels read it.

    0: the radius; 1 and 2: what is fed, 3 and 4: what is beside (loss, sharp); 5: the learning rate;
    6: weight decay; 7 and 8: momentum and dampening of SGD, the betas of Adam; 9: its epsilon; 10 and
    11: the logarithms of the betas.
    """
    hyper = hyper_of(group, rule)
    row = [direction_of(group) * group[PREFIX + "rho"] * boost]
    if rule.needs_products(hyper):  # the mix is made on the device, in each step
        row += [0.0] * 4
    else:
        mix = rule.mix(hyper, None)
        row += [float(value) for value in (*mix.fed, *mix.beside)]
    row += [float(group["lr"]), group.get("weight_decay", 0.0)]
    if "betas" in group:
        betas = group["betas"]
        row += [*betas, group["eps"], *(math.log(beta) if beta else -math.inf for beta in betas)]
    elif "momentum" in group:
        row += [group["momentum"], group.get("dampening", 0.0)]
    return row + [0.0] * (COLUMNS - len(row))


def branches_of(base: Optimizer, group: dict[str, Any]) -> int:
    """Return which branches of a kernel are the base's."""
    adam = not isinstance(base, torch.optim.SGD)
    decoupled = isinstance(base, torch.optim.AdamW) or group.get("decoupled_weight_decay")
    return (
        DECAY * bool(group["weight_decay"])
        | MOMENTUM * bool(not adam and group["momentum"])
        | NESTEROV * bool(group.get("nesterov"))
        | ADAM * adam
        | DECOUPLED * bool(adam and decoupled)
    )


def history_of(
    base: Optimizer, group: dict[str, Any], params: Sequence[Tensor], device: torch.device
) -> list[list[Any]] | None:
    """Return the base's state as lists; None where its counts are not where a kernel reads them."""
    states = [state or {} for state in map(base.state.get, params)]
    counts = "betas" in group
    if counts and not all(_is_count(state.get("step"), device) for state in states):
        return None
    return [[state.get(name) for state in states] for name in _names_of_state(group)]


def _names_of_state(group: dict[str, Any]) -> tuple[str, ...]:
    """Return what the base keeps of each weight, but for Adam's counts."""
    if "betas" in group:
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if group["momentum"] else ()


def _is_count(step: Any, device: torch.device) -> bool:
    return isinstance(step, Tensor) and (step.dtype, step.device) == (torch.float32, device)


@contextlib.contextmanager
def stepping_fast(base: Optimizer, groups: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Let the base step some of its groups by torch's fused code on a CPU, where that was left open.

    It does the same in fewer passes over memory: the usual loop makes a temporary tensor of each
    gradient, whose fresh pages alone cost as much as the step.
    """
    groups = [group for group in groups if _can_be_fused(base, group)]
    try:
        for group in groups:
            group["fused"] = True
        yield
    finally:
        for group in groups:
            group["fused"] = None


def _can_be_fused(base: Optimizer, group: dict[str, Any]) -> bool:
    if type(base) not in BASES or torch.compiler.is_compiling() or _is_hooked_or_patched(base):
        return False
    chosen = any(group.get(name) is not None for name in ("fused", "foreach"))
    numbers = (group["lr"], *group.get("betas", ()))
    if chosen or group["differentiable"] or any(isinstance(x, Tensor) for x in numbers):
        return False
    trained = [p for p in group["params"] if p.grad is not None]
    return all(_lies_alike(p, base.state.get(p) or {}, group) for p in trained)


def _lies_alike(p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> bool:
    """Whether torch's fused code may walk over a weight, its gradient and its state side by side.

    It does not look how they are laid out, nor how large they are, nor can it begin with some states
    there and some not.
    """
    if any(state.get(name) is None for name in _names_of_state(group)):
        return False
    if "betas" in group and not _is_count(state.get("step"), p.device):
        return False
    others = [p.grad, *(t for name, t in state.items() if name != "step" and t is not None)]
    if not PLAIN.issuperset(map(type, others)) or not is_ordinary(p):
        return False
    wanted = (p.dtype, p.shape, p.stride())
    return all((t.dtype, t.shape, t.stride()) == wanted for t in others)
