"""Preconditioned sharpness: the decoupled term, divided by the denominator of an adaptive base.

Adam and its relatives divide their step by a denominator, made of an average v of squared gradients. A
decoupled term s = k h that is not divided, too, has almost no effect. The preconditioned step is

    w <- w - lr (m(g0) + s) / denominator(v),        v over g0^2 + s^2

where m is the base's first moment. With v over g0^2 alone, s / sqrt(v) is unbounded; with v over
(g0 + s)^2, v vanishes where both terms cancel. With the sum of squares both terms are bounded.

The base makes its own step. It computes v <- a v + b g0^2, so adding (b/a) s^2 to v before that step
leaves a v + b (g0^2 + s^2) after it, and the base uses this v itself. Then lr s / denominator(v) is
subtracted from the weights.
"""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wsam._core.memory import State, states_of
from wsam._core.mix import Scalar, is_exactly
from wsam._core.param_blocks import Block, DecoupledTerm
from wsam._core.tensor_ops import CHUNK_BYTES, add_scaled, chunks, on_device, widened


class Preconditioner:
    """What preconditioned WSAM reads of a base optimizer: its squares and its denominator.

    This class describes Adam: the state has "exp_avg_sq" and "step", groups have "betas" and "eps".
    Derive from it for other bases, and pass an instance to `wsam.register_preconditioner`.
    """

    square: str = "exp_avg_sq"
    """The name of the average or sum of squared gradients in the base's state."""

    def create_state(self, base: Optimizer, group: dict[str, Any]) -> None:
        """Create the state of the group's parameters with gradients, as the base's first step would.

        Override it for a base without torch's `_init_group`.
        """
        create: Any = base._init_group  # type: ignore[attr-defined]  # of torch's optimizers
        _, *names = inspect.signature(create).parameters
        # The other parameters are lists that it fills; in torch 2.6, AdamW also takes amsgrad.
        create(group, *(group[name] if name == "amsgrad" else [] for name in names))

    def decay(self, group: dict[str, Any]) -> Scalar:
        """Return a of the base's v <- a v + (1 - a) g^2, in (0, 1)."""
        beta: Scalar = group["betas"][1]
        return beta

    def square_weight(self, group: dict[str, Any]) -> Scalar:
        """Return b/a of the base's v <- a v + b g^2."""
        decay = self.decay(group)
        return (1 - decay) / decay

    def denominators(self, group: dict[str, Any], states: Sequence[State]) -> list[Tensor]:
        """Return what the base divides its learning rate by: new tensors, in at least float32.

        Args:
            group: the parameter group.
            states: the base's state of some parameters of the group. Do not read values of its
                tensors on the host, unless they are on a CPU.
        """
        largest = "max_" + self.square
        v = torch._foreach_sqrt(tensors(states, largest if group.get("amsgrad") else self.square))
        corrections = bias_corrections(self.decay(group), counts(states))
        torch._foreach_div_(v, per_tensor(corrections.sqrt()))
        torch._foreach_add_(v, group["eps"])
        return list(v)

    def check(self, group: dict[str, Any]) -> None:
        """Raise if the group has a value with which v cannot be extended."""
        if is_exactly(self.decay(group), 0.0):
            raise ValueError("preconditioning needs squared gradients with a decay above 0")


def tensors(states: Sequence[State], name: str) -> list[Tensor]:
    """Return a tensor of each state, in at least float32. It may be the state's own."""
    return widened([state[name] for state in states])


def counts(states: Sequence[State]) -> Tensor:
    """Return the step counts of all states in one tensor, on the device where the base keeps them."""
    steps = torch.stack([state["step"] for state in states])
    return steps.double() if steps.device.type == "cpu" else steps


def bias_corrections(decay: Scalar, steps: Tensor) -> Tensor:
    """Return 1 - decay^steps, accurate in float32, too."""
    log = decay.log() if isinstance(decay, Tensor) else math.log(decay)
    return -torch.expm1(steps * log)


def per_tensor(values: Tensor) -> Any:
    """Return the elements, one for each parameter: numbers from a CPU, 0-d tensors from a device."""
    if values.device.type == "cpu" and not torch.compiler.is_compiling():
        return values.tolist()
    return list(values.unbind())


class _RAdam(Preconditioner):
    """RAdam divides by (sqrt(v) + eps) / (sqrt(1 - beta2^t) r_t).

    In its first steps, where it does not divide its average of gradients, the term is not divided.
    """

    def denominators(self, group: dict[str, Any], states: Sequence[State]) -> list[Tensor]:
        decay, steps = self.decay(group), counts(states)
        correction = bias_corrections(decay, steps)
        longest = 2 / (1 - decay) - 1
        length = longest - 2 * steps * (1 - correction) / correction
        divides = length > 5
        safe = length.clamp(min=5)
        rectified = (safe - 4) * (safe - 2) * longest / ((longest - 4) * (longest - 2) * safe)
        factor = torch.where(divides, (correction * rectified).rsqrt(), 0.0)
        v = list(torch._foreach_sqrt(tensors(states, self.square)))
        torch._foreach_add_(v, group["eps"])
        torch._foreach_mul_(v, per_tensor(factor))
        torch._foreach_add_(v, per_tensor((~divides).to(factor.dtype)))
        return v


class _Adagrad(Preconditioner):
    """Adagrad sums squares, and divides by (sqrt(v) + eps)(1 + (t - 1) lr_decay)."""

    square = "sum"

    def decay(self, group: dict[str, Any]) -> Scalar:
        return 1.0  # a sum forgets nothing

    def square_weight(self, group: dict[str, Any]) -> Scalar:
        return 1.0

    def denominators(self, group: dict[str, Any], states: Sequence[State]) -> list[Tensor]:
        v = list(torch._foreach_sqrt(tensors(states, self.square)))
        torch._foreach_add_(v, group["eps"])
        if not is_exactly(group["lr_decay"], 0.0):
            decays = (counts(states) - 1).clamp(min=0)  # none before the first step either
            torch._foreach_mul_(v, per_tensor(1 + decays * group["lr_decay"]))
        return v


class _RMSprop(Preconditioner):
    """RMSprop divides by sqrt(v) + eps; if centered, by sqrt(v - m^2) + eps with its average m."""

    square = "square_avg"

    def decay(self, group: dict[str, Any]) -> Scalar:
        alpha: Scalar = group["alpha"]
        return alpha

    def denominators(self, group: dict[str, Any], states: Sequence[State]) -> list[Tensor]:
        v = tensors(states, self.square)
        if group["centered"]:
            mean = tensors(states, "grad_avg")
            v = list(torch._foreach_addcmul(v, mean, mean, value=-1.0))
        denominators = list(torch._foreach_sqrt(v))
        torch._foreach_add_(denominators, group["eps"])
        return denominators


class _Adadelta(Preconditioner):
    """Adadelta divides by sqrt(v + eps) / sqrt(u + eps), with its average u of squared updates.

    u is taken after the base's step.
    """

    square = "square_avg"

    def decay(self, group: dict[str, Any]) -> Scalar:
        rho: Scalar = group["rho"]
        return rho

    def denominators(self, group: dict[str, Any], states: Sequence[State]) -> list[Tensor]:
        names = (self.square, "acc_delta")
        v, u = (torch._foreach_add(tensors(states, name), group["eps"]) for name in names)
        torch._foreach_div_(v, u)
        torch._foreach_sqrt_(v)
        return list(v)


_KNOWN: dict[type[Optimizer], Preconditioner] = {
    torch.optim.Adam: Preconditioner(),
    torch.optim.AdamW: Preconditioner(),
    torch.optim.NAdam: Preconditioner(),
    torch.optim.RAdam: _RAdam(),
    torch.optim.Adagrad: _Adagrad(),
    torch.optim.RMSprop: _RMSprop(),
    torch.optim.Adadelta: _Adadelta(),
}


def register_preconditioner(kind: type[Optimizer], preconditioner: Preconditioner) -> None:
    """Let `WSAM` precondition its sharpness term over a class of base optimizers.

    Args:
        kind: the class. Classes derived from it are included.
        preconditioner: describes the class's squares and denominator.

    Example:
        >>> class MyAdam(torch.optim.Adam):
        ...     pass
        >>> register_preconditioner(MyAdam, Preconditioner())
    """
    _KNOWN[kind] = preconditioner


def find_preconditioner(base: Optimizer) -> Preconditioner | None:
    """Return what is registered for the base's class or the nearest class it derives from."""
    return next((_KNOWN[kind] for kind in type(base).__mro__ if kind in _KNOWN), None)


def require_preconditioner(base: Optimizer) -> Preconditioner:
    """Return the base's preconditioner, or raise an error that lists the bases that have one."""
    found = find_preconditioner(base)
    if found is None:
        known = ", ".join(kind.__name__ for kind in _KNOWN)
        raise ValueError(
            "preconditioning needs the denominator of the base, and none is known of "
            f"{type(base).__name__}: use one of {known}, or wsam.register_preconditioner"
        )
    return found


def add_squares(base: Optimizer, decoupled: Sequence[DecoupledTerm]) -> None:
    """Add the squares of the decoupled terms to the base's v, before the base's step."""
    preconditioner = require_preconditioner(base)
    for term in decoupled:
        block = term.block
        states = states_of(base, block)
        if not all(states):
            preconditioner.create_state(base, block.group)
            states = states_of(base, block)
        v = [state[preconditioner.square] for state in states]
        scale = on_device(term.scale, block.device)
        scale = scale * on_device(preconditioner.square_weight(block.group), block.device) ** 0.5
        for part in chunks(v, CHUNK_BYTES):
            scaled = torch._foreach_mul(widened(term.tensors[part]), scale)
            torch._foreach_addcmul_(v[part], scaled, scaled)


def denominators_before(base: Optimizer, block: Block) -> list[Tensor]:
    """Return the base's denominators before its step; 1 where it has not yet seen a gradient."""
    preconditioner = require_preconditioner(base)
    states = states_of(base, block)
    known = [state for state in states if preconditioner.square in state]
    if known:
        found = preconditioner.denominators(block.group, known)
        seen = list(torch._foreach_sign(tensors(known, preconditioner.square)))  # 0 or 1
        torch._foreach_mul_(found, seen)
        torch._foreach_sub_(seen, 1.0)
        torch._foreach_sub_(found, seen)
    ready = iter(found if known else [])
    pairs = zip(states, widened(block.weights()), strict=True)
    return [next(ready) if preconditioner.square in s else torch.ones_like(w) for s, w in pairs]


def apply_preconditioned(base: Optimizer, decoupled: Sequence[DecoupledTerm]) -> None:
    """Compute `w -= lr * scale * tensors / denominators`, after the base's step."""
    preconditioner = require_preconditioner(base)
    for term in decoupled:
        block, states = term.block, states_of(base, term.block)
        weights, factor = block.weights(), term.factor()
        for part in chunks(weights, CHUNK_BYTES):
            divided = preconditioner.denominators(block.group, states[part])
            torch._foreach_reciprocal_(divided)
            torch._foreach_mul_(divided, widened(term.tensors[part]))
            add_scaled(weights[part], divided, factor)
