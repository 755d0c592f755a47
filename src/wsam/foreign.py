"""What comes from elsewhere: closures, arguments of other SAM code, other optimizers in a loop.

What they would do silently wrong is refused, what Python would refuse is explained. A closure tells
by its module whose it is, so nothing is imported here, and nothing is looked at in closures of one's
own.
"""

import functools
import threading
import weakref
from collections.abc import Callable
from inspect import signature
from typing import Any

MIXIN = "let the module derive from wsam.integrations.lightning.SharpnessAwareMixin"
LIGHTNING = ("lightning", "pytorch_lightning")


def check_closure(closure: Any) -> None:
    """Raise if the closure comes from a framework that is told to clip or accumulate in it."""
    function = closure.func if isinstance(closure, functools.partial) else closure
    package = str(getattr(function, "__module__", "")).partition(".")[0]
    check = CHECKS.get(package)
    if check is not None:
        check(closure)


HINTS = {
    "adaptive": "ASAM is the adaptive one",
    "base_optimizer": "give its instance, as base",
    "geometry": "it is SAM in a geometry of its own: give geometry= to SAM instead",
    "keep": "the share of samples is gamma here",
}
"""Arguments of other SAM code, and of other members."""


def explain_arguments(kind: Any, family: type) -> None:
    """Let a member say what to write where Python would only say that arguments are wrong.

    Args:
        kind: the member, whose constructor takes a base, and others by name.
        family: whose arguments it passes on.
    """
    build, name = kind.__init__, kind.__name__
    hidden = {"base", "options", "rule", *kind.fixes}
    known = dict.fromkeys([*signature(kind).parameters, *signature(family).parameters])
    allowed = [k for k in known if k not in hidden]

    @functools.wraps(build)
    def explained(self: Any, *given: Any, **named: Any) -> None:
        if type(self) is not kind:  # a subclass's arguments are its own
            build(self, *given, **named)
            return
        if len(given) > 1 or not (given or "base" in named):
            raise TypeError(
                f"{name} takes an optimizer's instance, and the rest by name: "
                f"{name}(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05)"
            )
        strange = [k for k in named if k not in {*allowed, "base"}]
        if strange:
            unknown = min(strange, key=lambda k: k not in HINTS)
            hint = HINTS.get(unknown, "the base has arguments of its own")
            raise TypeError(
                f"{name} has no argument {unknown!r} ({hint}); it has {', '.join(allowed)}"
            )
        build(self, *given, **named)

    kind.__init__ = explained


def _lightning(closure: Any) -> None:
    module = closure.args[0] if isinstance(closure, functools.partial) and closure.args else None
    trainer = getattr(module, "trainer", None)
    if trainer is None or not module.automatic_optimization:  # type: ignore[union-attr]
        return
    if trainer.accumulate_grad_batches > 1:
        raise RuntimeError(
            "accumulate_grad_batches > 1: Lightning's closure holds the last batch alone, the "
            f"gradients of the others would be lost; {MIXIN}"
        )
    hook = type(module).configure_gradient_clipping  # type: ignore[union-attr]
    if trainer.gradient_clip_val or hook.__module__.partition(".")[0] not in LIGHTNING:
        raise RuntimeError(
            "Lightning would clip in both passes, which distorts the difference of the gradients; "
            f"give the optimizer max_norm=, or {MIXIN}"
        )


def _skorch(closure: Any) -> None:
    cells = dict(zip(closure.__code__.co_freevars, closure.__closure__ or (), strict=True))
    net = cells["self"].cell_contents if "self" in cells else None
    for _, callback in getattr(net, "callbacks_", ()):
        if getattr(callback, "gradient_clip_value", None) is not None:
            raise RuntimeError(
                "skorch's GradientNormClipping clips in both passes, which distorts the difference "
                "of the gradients: give the optimizer max_norm= instead"
            )


CHECKS: dict[str, Callable[[Any], None]] = {
    **dict.fromkeys(LIGHTNING, _lightning),
    "skorch": _skorch,
}


class _Loop(threading.local):
    """The optimizers whose phases this thread calls by hand."""

    def __init__(self) -> None:
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()


_LOOP = _Loop()


def refuse_shared(optimizer: Any) -> None:
    """Refuse weights that another optimizer in the same loop by hand holds at its w + d.

    It has taken their gradients for its g0. Ours would find none, and take all of g1 for new.
    """
    others = [o for o in _LOOP.optimizers if o is not optimizer and o._flight is not None]
    own = {id(p) for block in optimizer._layout() for p in block.params} if others else set()
    for other in others:
        flight = other._flight
        moved = {id(p) for block in flight.moved for p in block.params if not flight.looking}
        if own & moved and (optimizer.rule.keeps_first or other.rule.keeps_first):
            raise RuntimeError(
                "another sharpness-aware optimizer in this loop has moved a parameter of this one: "
                "give each parameter to one of them, or step them by closures, one after the other; "
                "where its step was interrupted, call its abandon()"
            )
    _LOOP.optimizers.add(optimizer)
