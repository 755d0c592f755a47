"""Closures of frameworks that would be silently wrong in a two-pass step.

The check reads the closure's module name, so nothing is imported here.
"""

import functools
from typing import Any

_MIXIN = "let the module derive from wsam.integrations.lightning.SharpnessAwareMixin"
_LIGHTNING = ("lightning", "pytorch_lightning")


def check_closure(closure: Any) -> None:
    """Raise if a Lightning Trainer clips or accumulates gradients in this closure."""
    if not isinstance(closure, functools.partial) or not closure.args:
        return
    if str(getattr(closure.func, "__module__", "")).partition(".")[0] not in _LIGHTNING:
        return
    module = closure.args[0]
    trainer = getattr(module, "trainer", None)
    if trainer is None or not module.automatic_optimization:
        return
    if trainer.accumulate_grad_batches > 1:
        raise RuntimeError(
            "accumulate_grad_batches > 1: Lightning's closure runs the last batch only, so the "
            f"gradients of the others would be lost; {_MIXIN}"
        )
    hook = type(module).configure_gradient_clipping
    if trainer.gradient_clip_val or hook.__module__.partition(".")[0] not in _LIGHTNING:
        raise RuntimeError(
            "Lightning would clip in both passes, which distorts the difference of the gradients: "
            f"pass max_norm= to the optimizer, or {_MIXIN}"
        )
