"""Which base optimizers, parameter groups and options a sharpness-aware optimizer supports."""

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from wsam._core.framework_checks import FSDP1
from wsam._core.local_gradients import check_model
from wsam._core.preconditioners import require_preconditioner
from wsam._core.schedule_base import Interval
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
    name = type(base).__name__
    if isinstance(base, torch.optim.SparseAdam):
        raise TypeError("SparseAdam takes sparse gradients, sharpness-aware steps need dense ones")
    arguments = inspect.signature(base.step).parameters
    if "closure" in arguments and arguments["closure"].default is inspect.Parameter.empty:
        raise TypeError(f"{name}.step needs a closure of its own, so it cannot be a base")
    if "hessian" in arguments:
        raise TypeError(f"{name} needs second derivatives, which a base does not receive")
    for group in base.param_groups:
        check_group(group, base, rule)


def check_group(group: dict[str, Any], base: Optimizer, rule: "Rule") -> None:
    """Reject a parameter group that sharpness-aware steps do not support."""
    if "lr" not in group:
        raise TypeError(f"{type(base).__name__} has no 'lr' in its groups, which the update needs")
    if any(p.is_complex() for p in group["params"]):
        raise TypeError("complex parameters are not supported: view them as real pairs")
    if any(getattr(p, "_fsdp_flattened", False) for p in group["params"]):
        raise TypeError(f"{FSDP1}: torch.distributed.fsdp.fully_shard")
    if rule.preconditions:
        require_preconditioner(base).check(group)
    if group.get("differentiable") and not rule.base_uses_g1:
        raise ValueError(
            f"the base is differentiable, but the decoupled term of {type(rule).__name__} is not part "
            "of its graph: use CoupledWSAM"
        )


def check_options(opt: "SharpnessAware") -> None:
    """Reject options of a wrong kind, and options that exclude each other."""
    if opt.geometry.uses_denominators:
        require_preconditioner(opt.base)
    if opt.model is not None and not isinstance(opt.model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(opt.model).__name__}")
    if opt.nonfinite not in NONFINITE:
        raise ValueError(f"nonfinite must be one of {NONFINITE}, got {opt.nonfinite!r}")
    if opt.when is not None and not isinstance(opt.when, Interval):
        raise TypeError(
            f"when must be an interval such as wsam.schedule.Every(2), got {opt.when!r}"
        )
    if opt.local:
        check_model(opt.model)
    _check_combination(opt)


def _check_combination(opt: "SharpnessAware") -> None:
    """Reject options that exclude each other."""
    rule, several, name = opt.rule, opt.ascent_steps > 1, type(opt.geometry).__name__
    if opt.lean:
        _reject(
            "lean=True lets the base step between the passes, but",
            {
                "this method, unlike WSAM, passes the second gradient to the base": rule.base_uses_g1,
                "max_norm needs both gradients first": opt.max_norm is not None,
                f"nonfinite={opt.nonfinite!r} must be able to undo the step": (
                    opt.nonfinite != "propagate"
                ),
                "local=True averages the first gradient after the second pass": opt.local,
                "reuse needs both gradients first: leave out one of the two": rule.reuses,
                "a preconditioned step needs both gradients: pass precondition=False": (
                    rule.preconditions
                ),
            },
        )
    if not opt.geometry.needs_g0:
        reads_norm = opt.when is not None and opt.when.needs_norm
        _reject(
            f"{name} has one pass, at w + d, and does not support",
            {
                f"the rule {type(rule).__name__}, which needs the gradient at w": rule.keeps_g0,
                "keep, which compares the losses of two passes": opt.keep < 1,
                "local=True, which perturbs by the gradient at w": opt.local,
                "an interval that reads the gradient norm": reads_norm,
                "several ascent steps": several,
            },
        )
    if opt.geometry.memory:
        _reject(
            f"{name} averages one gradient a step and does not support",
            {
                "local=True, where gradients differ between ranks": opt.local,
                "several ascent steps": several,
            },
        )
    if several:
        _reject(
            f"ascent_steps={opt.ascent_steps} does not support",
            {
                "keep, which compares the losses of two passes": opt.keep < 1,
                "lean=True": opt.lean,
            },
        )


def _reject(reason: str, options: dict[str, bool]) -> None:
    """Raise if one of these options is used."""
    for option, is_used in options.items():
        if is_used:
            raise ValueError(f"{reason} {option}")


def warn_about_low_precision(groups: list[dict[str, Any]]) -> None:
    """Warn about weights whose rounding is coarser than most perturbations."""
    low = (torch.float16, torch.bfloat16)
    if any(p.dtype in low for group in groups for p in group["params"]):
        warn(
            "parameters are float16 or bfloat16: at small radii most of the perturbation is lost to "
            "rounding (at rho 0.05 only 1 to 23% of bfloat16 weights move); keep float32 weights and "
            "use torch.autocast"
        )
