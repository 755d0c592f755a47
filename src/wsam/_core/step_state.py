"""The state of one step, from the end of its first pass to its update.

    IDLE --ascend--> PERTURBED --descend--> READY --step--> IDLE
    IDLE or READY --perturbed()--> READ_ONLY --> back

`abandon` and every error return to IDLE. A step that ends is replaced by a new state, and `perturbed()`
uses a state of its own. All errors about a call in the wrong phase are raised here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from wsam._core.framework_checks import integration_hint
from wsam._core.grad_scaler import OverflowReport
from wsam._core.memory import Memory
from wsam._core.param_blocks import Block, DecoupledTerm, is_sharded, local_shards

if TYPE_CHECKING:
    from wsam.geometry import Geometry
    from wsam.rule import Rule

_INSTEAD_OF_STEP = (
    ": use step = wsam.train_step(optimizer, loss_fn), which makes the whole step; after step(*batch) "
    "no optimizer.step() is needed. Or call optimizer.step(closure), where closure computes the loss, "
    "calls backward() and returns the loss; or, by hand, ascend() and descend() before step(). Do not "
    "call step() inside a closure"
)


class Phase(Enum):
    """Where a step is."""

    IDLE = auto()
    """Between steps."""
    PERTURBED = auto()
    """After the first pass. The weights are at w + d, or at w if the step is not perturbed."""
    READY = auto()
    """After the second pass. Only the update remains."""
    READ_ONLY = auto()
    """Inside `perturbed()`: the weights are at w + d and must not be updated."""


_TRANSITIONS = {
    (Phase.IDLE, Phase.PERTURBED),
    (Phase.IDLE, Phase.READ_ONLY),
    (Phase.PERTURBED, Phase.READY),
}
"""Allowed transitions, as (from, to). A new state is IDLE."""


class Action(Enum):
    """What a step does."""

    SHARPNESS_AWARE = auto()
    """Two passes and an update from both gradients."""
    REUSE = auto()
    """One pass, and an update from g0 and the vector that the last two-pass step kept."""
    BASE_ONLY = auto()
    """The interval or a radius of 0 leaves the step to the base optimizer."""
    SKIP = auto()
    """A gradient is not finite: nothing changes."""


@dataclass
class StepState:
    """A step. Never saved: between steps a new one replaces it."""

    base: Optimizer
    rule: "Rule"
    geometry: "Geometry"
    memory: Memory
    """What the method keeps between steps."""
    phase: Phase = Phase.IDLE
    action: Action = Action.SHARPNESS_AWARE
    blocks: list[Block] = field(default_factory=list)
    """Parameters that have a first gradient."""
    moved: list[Block] = field(default_factory=list)
    """Parameters that are at w + d now, with the weights to restore."""
    mask: list[bool] | None = None
    """Which of all parameters are perturbed; None for all."""
    decoupled: list[DecoupledTerm] = field(default_factory=list)
    max_norm: float | None = None
    lean: bool = False
    """The base steps between the passes."""
    base_stepped: bool = False
    """The base has already stepped, so the step cannot be undone."""
    manual: bool = False
    """The passes are run by the user's loop instead of a closure."""
    ascent_steps: int = 1
    """How many ascent steps lead from w to w + d."""
    passes: int = 0
    """How many passes this step has had: those before the last `ascend`."""
    unscaled: bool = False
    """`ascend` received the scale of a GradScaler."""
    overflow_report: OverflowReport | None = None
    """Reports an overflow of the first pass to that scaler."""
    prepared_grads: dict[Tensor, tuple[int, float]] = field(default_factory=dict)
    """The gradients prepared for the base, if a decoupled term goes with them; see `_fingerprints`."""
    rng_after_first_pass: tuple[Any, ...] | None = None
    """The generators as the first pass left them, while the second pass repeats its draws."""
    interval_memory: Any = None
    """What the interval `when` kept before this step, in case the step is not made."""

    @property
    def is_done(self) -> bool:
        """Whether the update is complete and only counting remains."""
        return self.phase is Phase.READY and self.base_stepped and not self.decoupled

    @property
    def is_one_pass(self) -> bool:
        """Whether the update uses one gradient: at w, or at w + d if that needs no gradient at w."""
        if self.action is Action.SHARPNESS_AWARE:
            return not self.geometry.needs_g0
        return self.action is not Action.SKIP

    @property
    def is_ascending(self) -> bool:
        """Whether another ascent step follows the running pass."""
        return self.phase is Phase.PERTURBED and 0 < self.passes < self.ascent_steps

    @property
    def boost(self) -> float:
        """The factor of the radius in one ascent step."""
        return self.geometry.boost / self.ascent_steps

    @property
    def g0_is_scratch(self) -> bool:
        """Whether the perturbation may overwrite g0."""
        kept = self.rule.keeps_g0 or self.lean or self.phase is Phase.READ_ONLY
        return self.geometry.follows_g0 and not kept

    def enter(self, phase: Phase) -> None:
        """Go to another phase."""
        assert (self.phase, phase) in _TRANSITIONS, f"no transition {self.phase} -> {phase}"
        self.phase = phase

    def step_base(self) -> None:
        """Step the base optimizer."""
        try:
            self.base.step()
        except Exception as error:
            error.add_note(
                f"raised by the base, {type(self.base).__name__}.step(), which is called without a "
                "closure and with gradients that have no graph"
            )
            raise

    def require_weights(self, operation: str) -> None:
        """Raise unless the weights are at w, as `operation` needs them."""
        remedy = "call descend() first, or abandon()" if self.manual else "not inside a closure"
        if self.phase is Phase.READ_ONLY:
            remedy = "not inside perturbed()"
        if self.phase in (Phase.PERTURBED, Phase.READ_ONLY):
            raise RuntimeError(f"cannot {operation} while the weights are at w + d: {remedy}")

    def reject_update(self, given: Any = None) -> NoReturn:
        """Raise because `step` received no closure, or something else, without passes by hand."""
        call = "without" if given is None else f"with a {type(given).__name__} instead of"
        raise RuntimeError(
            f"step() was called {call} a closure{integration_hint() or _INSTEAD_OF_STEP}"
        )

    def require_unscaled(self, closure: Any, grad_scale: Any, found_inf: Any) -> None:
        """Raise unless a GradScaler calls `step` after both passes, with all gradients unscaled.

        `ascend` unscales those of the first pass, the scaler those of the second: `found_inf` is a
        tensor if there were any.
        """
        is_unscaled = self.unscaled and grad_scale is None and isinstance(found_inf, Tensor)
        if closure is not None or not is_unscaled:
            raise RuntimeError(
                "with a GradScaler use wsam.train_step(optimizer, loss_fn, scaler=scaler). Or run two "
                "passes at every step by hand: scale the loss and call ascend(scaler.get_scale()); "
                "scale the second loss, also if ascend() returned False; then "
                "scaler.unscale_(optimizer), descend() and scaler.step(optimizer)"
                + integration_hint()
            )

    def require_descend(self) -> None:
        """Raise unless `descend` may be called now."""
        if self.phase is not Phase.PERTURBED:
            raise RuntimeError("descend() without ascend()")
        if self.action is Action.SHARPNESS_AWARE and self.is_ascending:
            raise RuntimeError(
                f"ascent_steps={self.ascent_steps}, but ascend() was called {self.passes} times: run "
                "the passes with `for _ in range(ascent_steps): ascend(), backward()`"
            )

    def require_abandonable(self, in_closure: bool) -> None:
        """Raise if `abandon` is called inside `perturbed()` or a closure."""
        if in_closure or self.phase is Phase.READ_ONLY:
            raise RuntimeError("abandon() inside a closure or perturbed(): raise an error instead")

    def require_no_pending_update(self) -> None:
        """Raise if `descend` has prepared an update that `step()` must finish."""
        if self.phase is Phase.READY and self.manual:
            raise RuntimeError(
                "descend() has prepared a step: finish it with step() without a closure (a framework "
                "may have passed one), or drop it with abandon()"
            )

    def require_g0(self, remedy: str) -> None:
        """Raise if no parameter has a first gradient."""
        if not self.blocks:
            raise RuntimeError(f"no parameter has a gradient: {remedy}")

    def require_gradients(self, all_blocks: Sequence[Block]) -> None:
        """Raise if the last pass left no gradient at all."""
        if self.is_one_pass:
            found = any(block.g0 for block in self.blocks)
        else:
            found = any(p.grad is not None for block in all_blocks for p in block.params)
        if not found and self.action is not Action.SKIP:
            where = " in the second pass, too" if self.passes else ""
            raise RuntimeError(f"no parameter has a gradient: call backward(){where}")

    def remember_gradients(self, all_blocks: list[Block]) -> None:
        """Remember the gradients that were prepared, if a decoupled term goes with them."""
        if self.decoupled and not self.base_stepped:
            self.prepared_grads = _fingerprints(all_blocks)

    def require_unchanged_gradients(self, all_blocks: list[Block]) -> None:
        """Raise if `p.grad` was modified between `descend` and `step`: that scales half the update."""
        before = self.prepared_grads
        if before and not before.items() <= _fingerprints(all_blocks).items():
            raise RuntimeError(
                "p.grad was changed between descend() and step(), but the decoupled term was not: "
                "clip with max_norm of the optimizer, which scales both alike"
            )


def _fingerprints(blocks: list[Block]) -> dict[Tensor, tuple[int, float]]:
    """Return the version counter of each gradient, and the norm of the local shard of a DTensor.

    In-place foreach operations, such as those of clipping, leave the counters of DTensors unchanged.
    """
    grads = [p.grad for block in blocks for p in block.params if p.grad is not None]
    shards = {g: local_shards([g])[0] for g in grads if is_sharded(g)}
    norms = {g: float(shard.norm().nan_to_num(-1.0)) for g, shard in shards.items()}
    return {g: (g._version, norms.get(g, 0.0)) for g in grads}
