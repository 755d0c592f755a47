"""Frameworks that would run a two-pass step wrongly, recognized by module names.

Nothing of them is imported here.
"""

import functools
import sys
from typing import Any

_LIGHTNING = ("lightning", "pytorch_lightning")
DEEPSPEED = (
    "DeepSpeed is not supported: its engine calls the optimizer itself, on flat partitions of the "
    "weights; shard the model with FSDP2 instead"
)
FSDP1 = (
    "FSDP1 is not supported: its parameters are flat shards, so the norm of the gradient is unknown; "
    "use FSDP2"
)
_HINTS = {
    "deepspeed.runtime.engine": DEEPSPEED,
    "transformers.trainer": (
        "This framework runs one pass: use wsam.integrations.transformers.SharpnessAwareTrainer "
        "instead of Trainer, or list its SharpnessAwareMixin before your Trainer"
    ),
    "accelerate.optimizer": (
        "This framework runs one pass: use wsam.integrations.accelerate.TwoPasses, whose backward() "
        "replaces accelerator.backward()"
    ),
}
"""What to do, by the framework's module that calls `optimizer.step()`. The first that is found counts:
these frameworks call each other."""


def check_closure(closure: Any) -> None:
    """Raise if a closure of Lightning is empty, or its Trainer would change the gradients.

    It is empty if `step` was called without a closure in manual optimization. The Trainer may clip
    gradients, or accumulate them over batches.
    """
    if not isinstance(closure, functools.partial) or not closure.args:
        return
    if str(getattr(closure.func, "__module__", "")).partition(".")[0] not in _LIGHTNING:
        return
    if getattr(closure.args[-1], "__name__", "") == "do_nothing_closure":
        raise RuntimeError(
            "step() runs both passes itself: pass a closure: self.optimizers().step(closure), "
            "where closure computes the loss, calls self.manual_backward(loss) and returns the loss"
        )
    module = closure.args[0]
    trainer = getattr(module, "trainer", None)
    if trainer is None or not module.automatic_optimization:
        return
    hook = type(module).configure_gradient_clipping
    clips = trainer.gradient_clip_val or hook.__module__.partition(".")[0] not in _LIGHTNING
    if clips or trainer.accumulate_grad_batches > 1:
        raise RuntimeError(
            "Lightning's closure would clip in each pass, and run the last of several accumulated "
            "batches only: let the module derive from wsam.integrations.lightning.SharpnessAwareMixin"
        )


def integration_hint() -> str:
    """Return a sentence about the framework that calls, "" if there is none."""
    modules, frame = set(), sys._getframe().f_back
    while frame is not None:
        modules.add(frame.f_globals.get("__name__"))
        frame = frame.f_back
    found = [hint for name, hint in _HINTS.items() if name in modules]
    return f". {found[0]}" if found else ""
