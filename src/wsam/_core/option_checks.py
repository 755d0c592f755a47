"""Which base optimizers, parameter groups and options a sharpness-aware optimizer supports."""

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from wsam._core.framework_checks import FSDP1
from wsam._core.local_gradients import check_model
from wsam._core.preconditioners import require_preconditioner
from wsam._core.validation import warn

if TYPE_CHECKING:
    from wsam.optimizer import SharpnessAware
    from wsam.rule import Rule

NONFINITE = ("propagate", "skip", "raise")


def check_base(base: Any, rule: "Rule") -> None:
    """Reject what cannot be a base optimizer."""
    if not isinstance(base, Optimizer):
        raise TypeError(
            "base must be an instance of a torch.optim.Optimizer, such as "
            f"torch.optim.SGD(model.parameters(), lr=0.1); got {base!r}"
        )
    closure = inspect.signature(base.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise TypeError(
            f"base must take a step without a closure, but {type(base).__name__}.step() needs a "
            "closure: use a first-order base, such as torch.optim.SGD(model.parameters(), lr=0.1)"
        )
    for group in base.param_groups:
        check_group(group, base, rule)


def check_group(group: dict[str, Any], base: Optimizer, rule: "Rule") -> None:
    """Reject a parameter group that sharpness-aware steps do not support."""
    if any(p.is_complex() for p in group["params"]):
        raise TypeError("complex parameters are not supported: view them as real pairs")
    if any(getattr(p, "_fsdp_flattened", False) for p in group["params"]):
        raise TypeError(f"{FSDP1}: torch.distributed.fsdp.fully_shard")
    if rule.precondition:
        require_preconditioner(base).check(group)
    if group.get("differentiable") and not rule.base_uses_g1:
        raise ValueError(
            "differentiable=True would leave the decoupled term out of the graph: use CoupledWSAM"
        )


def check_options(opt: "SharpnessAware") -> None:
    """Reject options of a wrong kind, and options that exclude each other."""
    rule, geometry, several = opt.rule, opt.geometry, opt.ascent_steps > 1
    if geometry.uses_denominators:
        require_preconditioner(opt.base)
    if opt.nonfinite not in NONFINITE:
        raise ValueError(f"nonfinite must be one of {NONFINITE}, got {opt.nonfinite!r}")
    if opt.local:
        check_model(opt.model)
    must_undo = opt.max_norm is not None or opt.nonfinite != "propagate" or opt.local or several
    if opt.lean and (must_undo or rule.base_uses_g1 or rule.reuse or rule.precondition):
        raise ValueError(
            "lean=True lets the base step before the second gradient is known: only WSAM with "
            "precondition=False supports it, without max_norm, nonfinite, local, ascent_steps and reuse"
        )
    if several and opt.keep < 1:
        raise ValueError("ascent_steps > 1 does not support keep, which compares two passes")
    if geometry.memory and (opt.local or several):
        raise ValueError(
            f"{type(geometry).__name__} averages one gradient a step and supports neither local=True "
            "nor ascent_steps > 1"
        )
    reads_norm = opt.when is not None and opt.when.needs_norm
    needs_two = rule.keeps_g0 or opt.keep < 1 or opt.local or several or reads_norm
    if needs_two and not geometry.needs_g0:
        raise ValueError(
            f"{type(geometry).__name__} has one pass, at w + d, and supports no rule that needs the "
            "gradient at w, no interval that reads its norm, and neither keep, local nor ascent_steps"
        )


def warn_about_low_precision(groups: list[dict[str, Any]]) -> None:
    """Warn about weights whose rounding is coarser than most perturbations."""
    low = (torch.float16, torch.bfloat16)
    if any(p.dtype in low for group in groups for p in group["params"]):
        warn(
            "parameters are float16 or bfloat16: at small radii most of the perturbation is lost to "
            "rounding (at rho 0.05 only 1 to 23% of bfloat16 weights move); keep float32 weights and "
            "use torch.autocast"
        )
