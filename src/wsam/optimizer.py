"""`SharpnessAware`: a `torch.optim.Optimizer` around an instance of a base optimizer.

A method is a geometry (which perturbation d), a rule (what becomes of the gradients at w and w + d)
and a base optimizer. This file runs the two passes and keeps the model consistent between them. The
arithmetic is in `wsam._core.step`.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wsam._core import lean, local_gradients, losses, option_checks, step
from wsam._core.framework_checks import check_closure
from wsam._core.grad_accumulator import GradAccumulator
from wsam._core.grad_scaler import OverflowReport, reject_grad_scaler
from wsam._core.memory import Memory
from wsam._core.mix import Scalar, is_exactly
from wsam._core.norm_stats import NormStats
from wsam._core.param_blocks import (
    Block,
    align_gradients,
    build_blocks,
    collect_gradients,
    find_sharded_modules,
    squared_norm_of_g0,
    subsets,
)
from wsam._core.param_groups import PREFIX, RHO, STEP, GroupValues, own_values
from wsam._core.pytree import map_tensors
from wsam._core.rng import RngState
from wsam._core.sample_selection import SampleSelection
from wsam._core.schedule_base import Interval, Schedule
from wsam._core.state_dict import ENTRY, load, sharpness_entry
from wsam._core.step_state import Action, Phase, StepState
from wsam._core.validation import CheckedArguments, count, number, warn
from wsam.geometry import Euclidean, Geometry
from wsam.rule import Rule

try:
    from wsam.accel.backend import select_backend
except ModuleNotFoundError:  # acceleration is optional
    select_backend = None  # type: ignore[assignment]

Closure = Callable[[], Any]
_KIND = attrgetter("dtype", "device")
_BASE_STEPPED = (
    "lean=True: the base had already stepped, so the step could not be undone; the weights are at "
    "w + u + lr k g0, where u is the base's update"
)
_ERRORS_OF_A_USED_GRAPH = (
    "backward through the graph a second time",
    "modified by an inplace operation",
)
_FORWARD_OUTSIDE = (
    "a closure runs twice, at w and at w + d, so it must contain the forward pass: move the call of "
    "the model and the computation of the loss into it, before backward(). With wsam.train_step, "
    "loss_fn must not call backward()"
)


def _shared_with_base(name: str) -> Any:
    """Return a property that reads and sets an attribute of the base optimizer."""
    return property(attrgetter(f"base.{name}"), lambda self, value: setattr(self.base, name, value))


def group_value(name: str) -> Any:
    """Return a property for a hyperparameter that the parameter groups hold.

    Reading returns the value of the first group. Setting changes all groups.
    """

    def get(self: "SharpnessAware") -> Any:
        return self.param_groups[0][PREFIX + name]

    def put(self: "SharpnessAware", value: float | Schedule) -> None:
        self._values.set(name, value)

    return property(get, put, doc=f"The value of {name} in the first parameter group.")


def geometry_value(name: str) -> Any:
    """Return a read-only property for an argument of the geometry."""
    return property(lambda self: getattr(self.geometry, name), doc=f"`geometry.{name}`.")


class SharpnessAware(CheckedArguments, Optimizer):
    """Train with a base optimizer and two gradients a step, at w and at w + d.

        d  = rho * S g0 / (sqrt(<g0, S g0>) + eps)              S from the geometry
        g1 = grad l(w + d)
        w <- w - base(base_grad) - lr * decoupled               both from the rule

    Args:
        base: an instance of any `torch.optim.Optimizer` that takes dense gradients and no closure.
        rule: what becomes of the two gradients; see `wsam.rule`.
        rho: the radius, a number or a `Schedule`. Groups may set their own as "sam_rho".
        geometry: the shape of the neighborhood; a ball if None.
        model: the trained module. With it, running statistics are protected without module hooks,
            which is faster and needed for compiled models; `local` needs it, too. Pass every module
            the closure calls, even ones this optimizer does not train:
            `nn.ModuleList([generator, discriminator])`.
        lean: let the base step between the passes, which saves WSAM a buffer.
        max_norm: clip by the norm of base_grad + decoupled; scales both alike.
        nonfinite: what to do about NaN or inf in a gradient: "propagate" as torch does, "skip" the step
            and count it in `skipped`, or "raise". "skip" and "raise" synchronize with the device at
            every step, and restore the running statistics from before the step, which a loop by hand
            saves by calling `begin`.
        repeat_randomness: draw the same dropout masks in both passes. This rewinds torch's default
            generators, so other threads that draw from them meanwhile need generators of their own.
        keep: the share of samples that `select` uses in the second pass.
        when: an `Interval` of steps that are sharpness-aware. The others have one pass: only the base
            updates the weights, or the method reuses what it kept (LookSAM, WSAM with `reuse`).
        local: under DistributedDataParallel, perturb by each rank's own gradient (m-sharpness).
        ascent_steps: number of steps to w + d, of length rho / ascent_steps, each along the gradient
            at the point reached so far; a step costs ascent_steps + 1 passes. A loop by hand calls
            `ascend` before each pass but the first. `perturbed` always makes one step of length rho.

    Example:
        >>> from wsam.rule import Weighted
        >>> model = nn.Linear(2, 1)
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = SharpnessAware(base, rule=Weighted(gamma=0.9), rho=0.05)
        >>> def closure():
        ...     loss = model(torch.ones(4, 2)).square().mean()
        ...     loss.backward()
        ...     return loss
        >>> loss = opt.step(closure)
    """

    param_groups = _shared_with_base("param_groups")
    state = _shared_with_base("state")
    defaults = _shared_with_base("defaults")
    rho = group_value("rho")

    # torch.amp.GradScaler then sets `grad_scale` and `found_inf` and calls `step` in any case, which
    # lets us reject gradients that were not unscaled.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        base: Optimizer,
        *,
        rule: Rule,
        rho: float | Schedule = 0.05,
        geometry: Geometry | None = None,
        model: nn.Module | None = None,
        lean: bool = False,
        max_norm: float | None = None,
        nonfinite: str = "propagate",
        repeat_randomness: bool = True,
        keep: float = 1.0,
        when: Interval | None = None,
        local: bool = False,
        ascent_steps: int = 1,
    ) -> None:
        if isinstance(base, SharpnessAware):
            name = type(base).__name__
            raise TypeError(f"base is already sharpness-aware ({name}): wrap a plain optimizer")
        option_checks.check_base(base, rule)
        if geometry is not None and not isinstance(geometry, Geometry):
            raise TypeError(
                f"geometry must be an instance, such as wsam.Adaptive(), got {geometry!r}"
            )
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        self.base = base
        self.rule = rule
        self.geometry = geometry if geometry is not None else Euclidean()
        self.model = model
        self.lean = lean
        self.max_norm = None if max_norm is None else number("max_norm", max_norm, low_open=True)
        self.nonfinite = nonfinite
        self.repeat_randomness = repeat_randomness
        self.when = when
        self.local = local
        self.ascent_steps = count("ascent_steps", ascent_steps, 1)
        self.skipped = 0
        self._base_writes_grads: bool | None = None  # unknown before the first lean step
        self._reserved: set[tuple[Tensor, str]] = set()
        self._selection = SampleSelection(keep)
        option_checks.check_options(self)
        super().__setstate__({})  # torch's constructor would give us groups and state of our own
        self._reset_scratch()
        self._refresh_blocks()  # checks names
        defaults = {"rho": rho, **{name: getattr(rule, name) for name in rule.hyper()}}
        self._values = GroupValues(base, rule, defaults)
        for p in (p for group in self.param_groups for p in group["params"]):
            for name in own_values(self.state.get(p) or {}):  # of an earlier wrapper of this base
                del self.state[p][name]
        self._reserve_memory()
        option_checks.warn_about_low_precision(self.param_groups)

    def _reset_scratch(self) -> None:
        """Create the attributes that are not copied or pickled."""
        saved = {*self.__dict__}
        self._known_blocks: tuple[Any, list[Block]] | None = None
        self._fixed_mask: list[bool] | None = None
        self._sharded_modules: list[Any] = []
        self._norm_stats = NormStats(self.model)
        # From before the first pass, for steps that are skipped.
        self._norm_stats_before = NormStats(self.model, pause_spectral_norms=False)
        self._rng = RngState()
        self._rng_before_first_pass: tuple[Any, ...] | None = None
        self._backend: Any = None
        self._sharpness: Tensor | None = None
        self._scale_is_checked = False  # whether the first closure was found to scale no loss
        self._in_closure = False
        self._step_state = self._new_step()
        self._scratch = {*self.__dict__, "_scratch"} - saved

    def _new_step(self, memory: Memory | None = None) -> StepState:
        """Return a new state; `memory` is that of an earlier micro-batch of the same step."""
        memory = memory or Memory(self.base, self._reserved)
        parts = (self.base, self.rule, self.geometry, memory)
        return StepState(*parts, max_norm=self.max_norm, lean=self.lean)

    # Attributes ---------------------------------------------------------------------------------

    @property
    def when(self) -> Interval | None:
        """The steps that are sharpness-aware; None for all."""
        return self._when

    @when.setter
    def when(self, when: Interval | None) -> None:
        if when is not None and not isinstance(when, Interval):
            raise TypeError(f"when must be an interval, as wsam.schedule.Every(2), got {when!r}")
        self._when = when

    @property
    def keep(self) -> float:
        """The share of samples that `select` uses in the second pass."""
        return self._selection.keep

    @property
    def sharpness(self) -> Tensor | None:
        """L(w + d) - L(w) of the last step, as a tensor on the device; NaN if it was not measured.

        None after a step by hand, whose losses are unknown. Where `select` uses a share of the samples,
        the closure's loss is assumed to contain the mean that `select` returned.
        """
        return self._sharpness

    @property
    def second_pass(self) -> bool:
        """Whether the second pass is running, so that a closure can leave out metrics and logs."""
        return self._step_state.phase is Phase.PERTURBED and self._step_state.passes > 0

    @property
    def _in_last_pass(self) -> bool:
        """Whether the running pass is the last one: no further ascent step follows it."""
        state = self._step_state
        ascends = state.action is Action.SHARPNESS_AWARE and state.is_ascending
        return state.phase is Phase.PERTURBED and not ascends

    def select(self, losses: Tensor) -> Tensor:
        """Return the mean of per-sample losses over the samples that are used in this pass.

        In the first pass these are all samples; in the second the share `keep` whose loss increased
        most (ESAM).
        """
        if self._step_state.phase is Phase.READY:
            self._drop_unfinished()  # a new first pass has begun
        state = self._step_state
        if state.phase is Phase.READ_ONLY or state.action is not Action.SHARPNESS_AWARE:
            return losses.mean()
        return self._selection.mean(losses, second_pass=self.second_pass)

    def __repr__(self) -> str:
        self._values.sync()
        group, schedules = self.param_groups[0], self._values.schedules[0]
        values = {name: schedules.get(name, group[PREFIX + name]) for name in self._values.defaults}
        shown = {k: repr(v) if isinstance(v, Schedule) else f"{v:g}" for k, v in values.items()}
        for name, argument in inspect.signature(SharpnessAware).parameters.items():
            default = Euclidean() if name == "geometry" else argument.default
            if name not in ("base", "rule", "rho", "model") and getattr(self, name) != default:
                shown[name] = repr(getattr(self, name))
        for name in self.rule.options:
            if getattr(self.rule, name) != getattr(type(self.rule), name, None):
                shown[name] = repr(getattr(self.rule, name))
        arguments = ", ".join(f"{name}={value}" for name, value in shown.items())
        return f"{type(self).__name__}({arguments}, base={self.base!r})"

    # The whole step -----------------------------------------------------------------------------

    @torch.no_grad()
    def step(
        self,
        closure: Closure | Sequence[Closure] | None = None,
        *,
        weights: Sequence[float] | None = None,
    ) -> Any:
        """Make one step and return L(w).

        Args:
            closure: computes the loss, calls backward and returns the loss, a tuple that begins with
                it, or a dict with the key "loss". It runs twice, and gradients are cleared before each
                run. A list of closures, one for each micro-batch, computes a perturbation for each and
                sums their gradients. None finishes a step whose `ascend` and `descend` were called by
                hand.
            weights: for a list of closures, the factor of the gradients, the loss and the sharpness of
                each; default 1. Fisher SAM's perturbation depends on the scale of the loss: pass
                weights there instead of dividing the losses by their number.
        """
        if hasattr(self, "found_inf"):
            self._step_for_grad_scaler(closure)
            return None
        if closure is None:
            self._update()
            return None
        closures: Any = closure if isinstance(closure, list | tuple) else [closure]
        self._step_state.require_no_pending_update()
        self._step_state.require_weights("begin a step")
        try:
            self._save_statistics()
            self._in_closure = True
            loss, self._sharpness = self._run_passes(closures, weights)
            self._combine()
            self._norm_stats_before.discard()  # its hook must not outlive an interrupted update
        except BaseException as error:
            self._cancel(error)
            raise
        finally:
            self._in_closure = False
        self._update()
        return loss

    def _run_passes(
        self, closures: Sequence[Closure], weights: Sequence[float] | None
    ) -> tuple[Any, Tensor]:
        """Run all passes of each closure; return L(w) and the sharpness.

        Gradients, losses and sharpness of several closures are multiplied by the weights and summed.
        """
        if not closures:
            raise ValueError("the list of closures is empty: pass one for each micro-batch")
        for closure in closures:
            if not callable(closure):
                self._step_state.reject_update(closure)
            check_closure(closure)
        if weights is None:
            weights = [1.0] * len(closures)
        elif len(weights) != len(closures):
            raise ValueError(
                f"weights need a number for each of {len(closures)} closures, got {weights!r}"
            )
        if len(closures) == 1 and weights[0] == 1.0:
            return self._run_closure(closures[0])
        if self.lean or (self.when is not None and self.when.needs_norm):
            raise ValueError(
                "lean=True, or an interval that reads the gradient norm, needs a single closure"
            )
        gradients, first, sharpness = GradAccumulator(), [], []
        for closure, weight in zip(closures, weights, strict=True):
            value, increase = self._run_closure(closure)
            first.append(value)
            sharpness.append(weight * increase)
            self._restore()
            self._take_gradient_after_ascend()
            gradients.add(self._step_state, self._all_blocks(), weight)
            self._step_state = self._new_step(self._step_state.memory)
        gradients.fill(self._step_state, self._all_blocks())
        self._step_state.enter(Phase.PERTURBED)
        return losses.total(first, weights), sum(sharpness[1:], sharpness[0])

    def _run_closure(self, closure: Closure, scaler: Any = None) -> tuple[Any, Tensor]:
        """Run all passes of a closure; return its first result and the sharpness.

        Without passes at both w and w + d, the sharpness is 0 if d = 0, otherwise NaN.
        """
        self.begin()
        needs_g0 = self.geometry.needs_g0
        first = self._run(closure) if needs_g0 else None
        moved, last = self._run_next_passes(lambda: self._run(closure), scaler)
        if needs_g0 and moved:
            return first, self._selection.corrected(losses.loss_increase(last, first))
        value = 0.0 if self._radius_is_zero() else torch.nan
        sharpness = torch.full((), value, device=self._all_blocks()[0].device)
        return first if needs_g0 else last, sharpness

    def _run_next_passes(self, run: Closure, scaler: Any = None) -> tuple[bool, Any]:
        """Ascend and run the passes after the first.

        A GradScaler checks and unscales the gradients of the last pass; if it is certain that the
        weights do not move, those at w, and there is no other pass.

        Returns:
            Whether the weights have moved, and the result of the last pass, None if there was none.
        """
        scale, is_checked = None, False
        if scaler is not None:
            at_w = self.geometry.needs_g0 and not self.local
            is_checked = at_w and not self._may_perturb_next_step()
            scale = 1.0 if is_checked else scaler.get_scale()
            if is_checked:
                scaler.unscale_(self)  # before `_ascend`, which clears the gradients
        moved, last = self._ascend(scale), None
        while moved and not self._in_last_pass:
            run()
            moved = self._ascend(scale)
        if moved or not self._step_state.passes or (scaler is not None and not is_checked):
            last = run()
            if scaler is not None:
                scaler.unscale_(self)
        return moved, last

    def _run(self, closure: Closure) -> Any:
        """Run a pass. With `local`, gradients are reduced over ranks in the last one only."""
        is_local = self.local and not self._in_last_pass
        context = self.model.no_sync() if is_local else contextlib.nullcontext()  # type: ignore[union-attr, operator]
        with torch.enable_grad(), context:
            if self._scale_is_checked or torch.compiler.is_compiling():
                return map_tensors(Tensor.detach, closure())
            with reject_grad_scaler():
                result = map_tensors(Tensor.detach, closure())
            self._scale_is_checked = True
            return result

    def _step_for_grad_scaler(self, closure: Any) -> None:
        """Handle a call by `GradScaler.step`, which has set `grad_scale` and `found_inf`."""
        grad_scale, found_inf = self.__dict__["grad_scale"], self.__dict__["found_inf"]
        report = self._step_state.overflow_report
        try:
            self._step_state.require_unscaled(closure, grad_scale, found_inf)
            if bool(found_inf if report is None else report.found_overflow(found_inf)):
                self._norm_stats_before.release()  # the batch may have made them NaN
                self._drop_unfinished()
            else:
                self._update()
        except BaseException:
            for name in ("grad_scale", "found_inf"):  # the scaler removes them only after a return
                self.__dict__.pop(name, None)
            raise

    # The step by hand ---------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a first pass: clear gradients, and save generators so that dropout masks repeat.

        A loop by hand that does not call it must clear gradients itself.
        """
        self._reject_framework_wrapper()
        self._step_state.require_weights("begin a step")
        self._drop_unfinished()
        if not self._in_closure:
            self._save_statistics()
        step.clear_gradients(self._refresh_blocks())
        self._selection.reset()
        self._rng_before_first_pass = self._rng.read() if self.repeat_randomness else None

    @torch.no_grad()
    def ascend(self, grad_scale: float | Tensor | None = None) -> bool:
        """Take `p.grad` as g0 and move the weights to w + d, or one of several steps towards it.

        Args:
            grad_scale: the scale of a GradScaler, `scaler.get_scale()`.

        Returns:
            Whether the weights have moved. If not (see `when`), the second pass may be omitted, unless
            a GradScaler must check its gradients.
        """
        self._reject_framework_wrapper()
        if not self._step_state.is_ascending:
            self._step_state.require_weights("ascend")
        self._sharpness = None
        try:
            return self._ascend(grad_scale)
        except BaseException as error:
            self._cancel(error)
            raise

    @torch.no_grad()
    def descend(self) -> None:
        """Take `p.grad` as g1, restore w, and set `p.grad` to the gradient that the base receives."""
        self._step_state.require_descend()
        try:
            self._restore()
            self._combine()
            self._step_state.remember_gradients(self._all_blocks())
        except BaseException as error:
            self._cancel(error)
            raise

    @torch.no_grad()
    def abandon(self) -> None:
        """Cancel a step begun by hand: the weights return to w, bit for bit.

        Use it in an `except` around the passes. Running statistics and generators stay as the first
        pass left them. Without a step it does nothing. With `lean=True` the base has already stepped,
        which cannot be undone: a warning is issued. After `scaler.unscale_` also call
        `scaler.update()`.
        """
        self._step_state.require_abandonable(self._in_closure)
        self._cancel(sys.exc_info()[1])

    def first_step(self, zero_grad: bool = False) -> None:
        """Call `ascend`, under the name that other SAM code uses. Always clears gradients."""
        self.ascend()

    def second_step(self, zero_grad: bool = False) -> None:
        """Call `descend` and `step`, under the name that other SAM code uses."""
        self.descend()
        self.step()
        if zero_grad:
            self.zero_grad()

    @contextlib.contextmanager
    def perturbed(self) -> Iterator[None]:
        """Hold the weights at w + d, given by the gradients in `p.grad`, to evaluate the model."""
        self._reject_framework_wrapper()
        pending = self._step_state
        pending.require_weights("perturb again")
        self._values.refresh()
        state = self._new_step()
        state.blocks = collect_gradients(self._refresh_blocks())
        state.require_g0("call backward() before perturbed()")
        step.own_g0(state.blocks)  # a backward pass must not overwrite them
        gradients = step.gradients_of(state.blocks)
        state.mask = self._mask()
        state.enter(Phase.READ_ONLY)
        self._step_state = state
        try:
            with torch.no_grad():
                step.clear_gradients(state.blocks)
                step.perturb(state)
            self._discard_copies_of_weights()
            self._norm_stats.hold()
            yield
        finally:
            with torch.no_grad():
                self._restore()
            self._step_state = pending  # a prepared update is still pending
            step.clear_gradients(self._all_blocks())
            for p, g in gradients:
                p.grad = g

    def _reject_framework_wrapper(self) -> None:
        """Raise for a wrapper of Fabric, which derives from this class but has no state of its own."""
        if "base" not in self.__dict__:
            name = type(self).__name__
            raise TypeError(f"{name} is a framework's wrapper: call this on its .optimizer")

    def _save_statistics(self) -> None:
        """Copy running statistics, where a step may have to be undone because of its batch."""
        if self.nonfinite != "propagate":
            self._norm_stats_before.hold()

    # The phases ---------------------------------------------------------------------------------

    def _ascend(self, grad_scale: Scalar | None = None) -> bool:
        """Take g0 and move to w + d; return whether the weights have moved."""
        if self.local:
            local_gradients.check_pass(self.model)
        if self._step_state.is_ascending:
            return self._ascend_further(grad_scale)
        self._drop_unfinished()
        if grad_scale is not None and self.lean:
            raise ValueError("lean=True cannot undo a step that a GradScaler skips")
        self._values.refresh()
        self._step_state = state = self._new_step(self._step_state.memory)
        state.manual, state.ascent_steps = not self._in_closure, self.ascent_steps
        state.blocks = collect_gradients(self._refresh_blocks())
        if self.geometry.needs_g0:
            state.require_g0(
                "the loss must depend on the base's parameters, and the first pass must call backward()"
            )
        state.passes = 1 if state.blocks else 0
        if grad_scale is not None:
            state.unscaled = True
            step.unscale(state.blocks, grad_scale)
        state.action = self._choose_action(state)
        state.enter(Phase.PERTURBED)
        if state.unscaled and state.action is Action.SHARPNESS_AWARE:
            state.overflow_report = OverflowReport(state.blocks)
        moved = self._perturb(state)
        # A loop by hand may run its second pass although nothing moved.
        if (moved or state.manual) and state.passes:
            self._protect_model(state)
        return moved

    def _ascend_further(self, grad_scale: Scalar | None) -> bool:
        """Make the next of several ascent steps; return whether the weights have moved."""
        state = self._step_state
        state.require_gradients(self._all_blocks())
        if state.action is Action.SHARPNESS_AWARE:
            blocks = collect_gradients(state.moved)
            if grad_scale is not None:
                step.unscale(blocks, grad_scale)
            if state.overflow_report is not None:
                state.overflow_report.include(blocks)
            if self._has_overflow(blocks, state.unscaled):
                state.action = Action.SKIP
            else:
                step.ascend_further(state, blocks)
        step.clear_gradients(self._all_blocks())
        self._discard_copies_of_weights()
        if self._rng_before_first_pass is not None:
            self._rng.write(self._rng_before_first_pass)
        state.passes += 1
        return state.action is Action.SHARPNESS_AWARE

    def _choose_action(self, state: StepState) -> Action:
        """Return what the step does, given its first gradient, the radii and the interval."""
        if self._has_overflow(state.blocks, state.unscaled):
            return Action.SKIP
        if self._radius_is_zero():
            return Action.BASE_ONLY
        perturb = True
        if self.when is not None:
            state.interval_memory = self.when.remember()
            perturb = self.when.chosen(
                self.param_groups[0][STEP], lambda: float(self._squared_norm(state.blocks).sqrt())
            )
        if perturb and not self.geometry.needs_g0:
            blocks = subsets(self._all_blocks(), lambda p, _: p.requires_grad)
            if not self.geometry.is_ready(blocks, state.memory):
                return Action.BASE_ONLY
            step.clear_gradients(state.blocks)  # of a first pass, which was not needed
            state.blocks = blocks
        if perturb:
            return Action.SHARPNESS_AWARE
        # The kept vector may be of other parameters, so that all micro-batches do the same.
        reuse = self.rule.reuse and state.memory.has(step.KEPT)
        return Action.REUSE if reuse else Action.BASE_ONLY

    def _perturb(self, state: StepState) -> bool:
        """Move the weights to w + d if the step is sharpness-aware; clear the gradients."""
        if state.action is not Action.SHARPNESS_AWARE:
            if state.action is not Action.SKIP:
                step.own_g0(state.blocks)
            step.clear_gradients(state.blocks)
            return False
        if self.rule.keeps_g0 and not state.lean:
            step.own_g0(state.blocks)
        state.mask = self._mask()
        if self._backend is not None and self._backend.perturb(state):
            pass
        elif state.lean:
            self._base_writes_grads = lean.begin(state, guard_g0=self._base_writes_grads is None)
            self.lean = not self._base_writes_grads
        else:
            step.perturb(state)
        step.clear_gradients(state.blocks)
        if not self.rule.keeps_g0:
            for block in (*state.blocks, *state.moved):
                block.g0 = []
        self._discard_copies_of_weights()
        return True

    def _protect_model(self, state: StepState) -> None:
        """Protect running statistics, and let the second pass draw the numbers of the first."""
        self._norm_stats.hold()
        before = self._rng_before_first_pass
        # In a loop by hand, another optimizer may have rewound the generators already.
        if before is not None and not (state.manual and self._rng.is_at(before)):
            state.rng_after_first_pass = self._rng.read()
            self._rng.write(before)

    def _restore(self) -> None:
        """Return weights, running statistics and generators to where the first pass left them."""
        state = self._step_state
        step.restore(state)
        self._norm_stats.release()
        if state.overflow_report is not None:
            state.overflow_report.remove()
        if state.rng_after_first_pass is not None:
            self._rng.write(state.rng_after_first_pass)
            state.rng_after_first_pass = None
        self._discard_copies_of_weights()

    def _discard_copies_of_weights(self) -> None:
        """Discard what was computed from the weights before they moved, and would be used again.

        An enclosing autocast keeps casts. FSDP2 keeps gathered weights after a pass without backward.
        """
        torch.clear_autocast_cache()
        for module in self._sharded_modules:
            module.reshard()

    def _take_gradient_after_ascend(self) -> bool:
        """In a step that uses one gradient, take that of the pass after `ascend`, if it had one.

        A gradient at w that is known already is replaced only if a GradScaler has checked the new one.
        """
        state = self._step_state
        at_w = state.action is not Action.SHARPNESS_AWARE
        if not state.is_one_pass or (at_w and state.passes and not state.unscaled):
            return False
        found = collect_gradients(self._all_blocks())
        if found:
            state.blocks = found
            if self._has_overflow(found, state.unscaled):
                state.action = Action.SKIP
        return bool(found)

    def _combine(self) -> None:
        """Make the base's gradient and the decoupled term from g0 and g1."""
        state, all_blocks = self._step_state, self._all_blocks()
        if self._finish_with_backend(state):
            return
        self._restore()
        align_gradients(all_blocks)
        one_pass, uses_g0 = state.is_one_pass, self.rule.keeps_g0
        if one_pass:
            uses_g0 = not self._take_gradient_after_ascend()
            step.clear_gradients(all_blocks)  # also of a second pass that was not needed
        elif self.nonfinite != "propagate" and self._has_overflow(collect_gradients(all_blocks)):
            state.action = Action.SKIP
        state.require_gradients(all_blocks)
        if self.local and uses_g0 and state.action is not Action.SKIP:
            state.blocks = local_gradients.average_g0(all_blocks, state.blocks, self.model)
        if state.action is Action.SKIP:
            self._norm_stats_before.release()  # the batch may have made them NaN
            self.zero_grad()
        elif one_pass:
            step.combine_one_pass(state)
        elif state.base_stepped:
            lean.finish(state, all_blocks)
        else:
            step.combine(state, all_blocks)
        state.enter(Phase.READY)

    def _finish_with_backend(self, state: StepState) -> bool:
        """Let the backend restore, combine and update in one go, where nothing else is needed."""
        if self._backend is None or state.manual or state.action in (Action.BASE_ONLY, Action.SKIP):
            return False
        if self.local or self.max_norm is not None or self.nonfinite != "propagate":
            return False
        if step.blocks_without_g0(self._all_blocks(), state.blocks):
            return False
        if not self._backend.finish(state):
            return False
        state.moved, state.base_stepped = [], True
        state.enter(Phase.READY)
        self._restore()
        return True

    def _update(self) -> None:
        """Step the base, and apply the decoupled term."""
        state = self._step_state
        if state.phase is Phase.IDLE:
            self._initialize_base()
            return
        if state.phase is Phase.PERTURBED and state.action is not Action.SHARPNESS_AWARE:
            self._combine()
        state.require_weights("step")
        state.require_unchanged_gradients(self._all_blocks())
        self.base.__dict__["_opt_called"] = True  # so that a scheduler of the base does not warn
        if state.action is Action.SKIP:
            self._restore_interval(state)
            self._end_step()
            self.skipped += 1
            return
        self._end_step()
        if state.action is Action.BASE_ONLY:
            state.step_base()
        elif state.base_stepped:
            step.apply(state.decoupled)
        elif self._backend is None or not self._backend.finish(state):
            step.update(state)
        state.memory.commit()
        self._reserve_memory(stepped=True)
        self._values.count_update()

    def _initialize_base(self) -> None:
        """Step the base with zero gradients, as torch.distributed.checkpoint does to create state."""
        groups = self.param_groups
        grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        rates_are_zero = all(float(group["lr"]) == 0.0 for group in groups)
        if not rates_are_zero or any(bool(torch.count_nonzero(g)) for g in grads):
            self._step_state.reject_update()
        self.base.step()
        self._reserve_memory(stepped=True)

    def _end_step(self) -> None:
        """Discard all that was kept for the current step."""
        self._step_state = self._new_step()
        self._rng_before_first_pass = None
        self._norm_stats_before.discard()
        self._selection.reset()

    def _drop_unfinished(self) -> None:
        """Discard a step that was prepared and not finished, because a GradScaler skipped it."""
        if self._step_state.phase is not Phase.IDLE:
            self.skipped += not self._step_state.is_done
            self._cancel()

    def _restore_interval(self, state: StepState) -> None:
        """Let the interval forget a step that is not made."""
        if self.when is not None and state.interval_memory is not None:
            self.when.recall(state.interval_memory)

    def _cancel(self, error: BaseException | None = None) -> None:
        """Undo what a step has done to weights, statistics and generators."""
        state = self._step_state
        if any(text in str(error) for text in _ERRORS_OF_A_USED_GRAPH):
            error.add_note(_FORWARD_OUTSIDE)  # type: ignore[union-attr]
        if state.phase is not Phase.IDLE:
            with torch.no_grad():
                self._restore()
        if state.is_done:  # nothing to undo; only the counting was interrupted
            self._values.count_update()
        else:
            self._restore_interval(state)
            if state.base_stepped and error is not None:
                error.add_note(_BASE_STEPPED)
            elif state.base_stepped:
                warn(_BASE_STEPPED)
        self._end_step()

    # What the phases need -----------------------------------------------------------------------

    def _all_blocks(self) -> list[Block]:
        """Return all parameters in blocks, as they were when the step began."""
        return self._refresh_blocks() if self._known_blocks is None else self._known_blocks[1]

    def _refresh_blocks(self) -> list[Block]:
        """Return all parameters in blocks; sort them again if groups, parameters or devices changed."""
        groups = self.param_groups
        key = [(id(g), [*map(id, g["params"])], [*map(_KIND, g["params"])]) for g in groups]
        if self._known_blocks is None or self._known_blocks[0] != key:
            named = self.model.named_parameters() if self.model is not None else ()
            blocks = build_blocks(groups, {p: name for name, p in named})
            self.geometry.check_names(blocks)
            self._fixed_mask = self._find_fixed_mask(blocks)
            self._sharded_modules = find_sharded_modules(self.model)
            self._rng = RngState(block.device for block in blocks)
            self._backend = None if select_backend is None else select_backend(blocks)
            self._known_blocks = (key, blocks)  # last, so that all is repeated after a Ctrl-C
        return self._known_blocks[1]

    def _mask(self) -> list[bool] | None:
        """Return which of all parameters this step perturbs; None for all."""
        tensors = sum(len(group["params"]) for group in self.param_groups)
        mask = self.geometry.mask(self.param_groups[0][STEP], tensors)
        return self._fixed_mask if mask is None else mask

    def _find_fixed_mask(self, blocks: Sequence[Block]) -> list[bool] | None:
        """Return which of all parameters the geometry perturbs at all steps; None for all."""
        found: dict[int, bool] = {}
        for block in blocks:
            chosen = self.geometry.selected(block)
            if chosen is None:
                return None
            found.update(zip(block.indices, chosen, strict=True))
        return [found[i] for i in range(len(found))]

    def _radius_is_zero(self) -> bool:
        return all(is_exactly(group[RHO], 0.0) for group in self.param_groups)

    @property
    def _memory_names(self) -> tuple[str, ...]:
        """Names of the tensors that the method keeps between steps."""
        return (*self.geometry.memory, *([step.KEPT] if self.rule.reuse else []))

    def _reserve_memory(self, stepped: bool = False) -> None:
        """Reserve what the method keeps between steps, for the parameters that the base has updated.

        These have a state, or after its step a gradient: some bases have no state.
        """
        if not self._memory_names:
            return
        params = [p for group in self.param_groups for p in group["params"]]
        updated = [p for p in params if self.state.get(p) or (stepped and p.grad is not None)]
        self._step_state.memory.reserve(updated, self._memory_names)

    def _may_perturb_next_step(self) -> bool:
        """Whether the next step, which may have begun, is perturbed; True if g0 decides that."""
        self._values.refresh()
        if self._radius_is_zero():
            return False
        if self.when is None or self.when.needs_norm:
            return True
        memory = self.when.remember()
        chosen = self.when.chosen(self.param_groups[0][STEP], lambda: 0.0)
        self.when.recall(memory)
        return chosen

    def _squared_norm(self, blocks: list[Block]) -> Tensor:
        """Return norm(g0)^2; averaged over ranks where it may differ, so that all ranks agree."""
        square = squared_norm_of_g0(blocks)
        if self.local:
            square = square.to(self._all_blocks()[0].device)
            local_gradients.average(square, self.model)
        return square

    def _has_overflow(self, blocks: list[Block], unscaled: bool = False) -> bool:
        """Whether the step is skipped because a gradient is NaN or infinite.

        If it was `unscaled`, an overflow must reach the GradScaler, which skips the step itself.
        """
        if self.nonfinite == "propagate" or (unscaled and self.nonfinite == "skip"):
            return False
        if bool(torch.isfinite(self._squared_norm(blocks))):
            return False
        if self.nonfinite == "raise":
            self._norm_stats.release()  # first: it restores the statistics after the first pass
            self._norm_stats_before.release()
            raise FloatingPointError("a gradient is NaN or infinite; no weight was changed")
        return True

    # Groups and state ---------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. It may set its own rho and gamma."""
        self._step_state.require_weights("add a parameter group")
        self.base.add_param_group(param_group)
        try:
            option_checks.check_group(self.param_groups[-1], self.base, self.rule)
            self._values.sync()
            self._refresh_blocks()
        except Exception:
            self.base.param_groups.pop()
            self._values.sync()
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resume needs, as tensors and plain values. The base can load it, too."""
        self._step_state.require_weights("save a state")
        self._values.sync()
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state = dict(self.base.state_dict())
        entry = sharpness_entry(self, state)
        for hook in self._optimizer_state_dict_post_hooks.values():
            state = hook(self, state) or state
        return {**state, ENTRY: entry}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer or of a plain base; an error leaves everything unchanged."""
        self._step_state.require_weights("load a state")
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        self._values.sync()
        load(self, state_dict)
        self._step_state = self._new_step()
        self._known_blocks = None  # holds parameters, which Accelerate replaces by shards
        if self._memory_names and ENTRY not in state_dict:  # of torch.distributed.checkpoint
            self._step_state.memory.find_reserved(self._all_blocks(), self._memory_names)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        self._step_state.require_weights("copy the optimizer")
        hooks = [key for key in self.__dict__ if key.startswith("_optimizer_")]
        left_out = {*self._scratch, *hooks, "step"}  # which learning-rate schedulers patch
        return {key: value for key, value in self.__dict__.items() if key not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        super().__setstate__({})
        self._reset_scratch()
