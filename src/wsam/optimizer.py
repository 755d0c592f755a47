"""`SharpnessAware`: a `torch.optim.Optimizer` around a base optimizer's instance.

A method is a geometry (which perturbation d), a rule (what becomes of the gradients at w and at
w + d) and a base optimizer. What one calls is here; what happens between the passes is in
`wsam.engine`.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wsam import update
from wsam.block import refuse_flat_shards
from wsam.checks import flag, number
from wsam.engine import Engine
from wsam.foreign import check_closure, refuse_shared
from wsam.geometry import Euclidean, Geometry
from wsam.micro import Sums, detached, rise, total
from wsam.perturb import perturb
from wsam.rule import Rule
from wsam.schedule import Interval, Schedule
from wsam.select import Selection
from wsam.update import Flight
from wsam.wrapper import check_base, warn_of_low_precision

Closure = Callable[[], Any]
POLICIES = ("propagate", "skip", "raise")


class SharpnessAware(Engine):
    """Train `base` with sharpness in mind.

        d  = rho * S g0 / (sqrt(<g0, S g0>) + eps)              S of the geometry
        g1 = grad l(w + d)
        w <- w - base(fed) - lr * beside                        fed, beside of the rule

    Args:
        base: an instance of any `torch.optim.Optimizer` that takes dense gradients and no closure.
        rule: what becomes of the two gradients; see `wsam.rule`.
        rho: the radius, a number or a `Schedule`. Groups may set their own under "sam_rho".
        geometry: the neighbourhood's shape; a ball if None.
        model: the trained module. Optional: with it running statistics are protected without module
            hooks, which is faster and the way for compiled models; `local` needs it, too. It must hold
            all that closures run in training mode, `nn.ModuleList([generator, discriminator])` say:
            the statistics of others are not held still.
        lean: let the base step between the passes, which saves WSAM a buffer (see `wsam.lean`).
        max_norm: clip by the norm of the combined gradient; scales fed and beside alike.
        nonfinite: what to do about a NaN or inf in either gradient: "propagate" (as torch does),
            "skip" the step and count it, or "raise"; the last two wait for the device each step.
        repeat_randomness: draw the same dropout masks in both passes.
        keep: the share of samples that `select` keeps in the second pass.
        when: an `Interval` of steps that are sharpness-aware; on others the base steps alone.
        local: under DistributedDataParallel, perturb by each rank's own gradient (m-sharpness).

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

    fixes: ClassVar[tuple[str, ...]] = ()
    """Arguments from above that a member gives by itself, and does not take."""

    # Asks torch.amp.GradScaler to hand over what it found instead of calling `step` blindly, so that
    # scaled gradients can be refused: see `_heed_scaler`.
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
    ) -> None:
        check_base(base, rule)
        refuse_flat_shards(base.param_groups)
        self.rule = rule
        self.geometry = geometry if geometry is not None else Euclidean()
        self.model = model
        self.lean = lean
        self.max_norm = max_norm
        self.nonfinite = nonfinite
        self.repeat_randomness = repeat_randomness
        self.when = when
        self.local = local
        self.skipped = 0
        self._selection = Selection(keep)
        self._check_options()
        super().__init__(base, {"rho": rho, **{name: getattr(rule, name) for name in rule.hyper()}})
        warn_of_low_precision(self.param_groups)

    def _check_options(self) -> None:
        for name in ("lean", "local", "repeat_randomness"):
            flag(name, getattr(self, name))
        if self.max_norm is not None:
            self.__dict__["max_norm"] = number("max_norm", self.max_norm, low_open=True)
        if not isinstance(self.geometry, Geometry):
            raise TypeError(f"geometry must be a geometry of wsam, got {self.geometry!r}")
        if self.model is not None and not isinstance(self.model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(self.model).__name__}")
        if self.nonfinite not in POLICIES:
            raise ValueError(f"nonfinite must be one of {POLICIES}, got {self.nonfinite!r}")
        if self.when is not None and not isinstance(self.when, Interval):
            raise TypeError(
                f"when must be an interval such as wsam.schedule.Every(5), got {self.when!r}"
            )
        self._check_local()
        if not self.lean:
            return
        undo = self.nonfinite != "propagate"
        reasons = {
            "this method, unlike WSAM, feeds it the second gradient": self.rule.feeds_second,
            "max_norm needs both gradients first": self.max_norm is not None,
            f"nonfinite={self.nonfinite!r} must be able to undo the step": undo,
            "local=True averages the first gradient after the second pass": self.local,
        }
        for reason in (reason for reason, holds in reasons.items() if holds):
            raise ValueError(f"lean=True lets the base step between the passes, but {reason}")

    def _check_local(self) -> None:
        ddp: Any = self.model
        if not self.local:
            return
        if not hasattr(ddp, "require_backward_grad_sync"):
            raise ValueError("local=True needs model=, wrapped in DistributedDataParallel")
        # Under no_sync torch remembers which parameters were used for a reduction that is not made.
        for option in ("find_unused_parameters", "static_graph"):
            if getattr(ddp, option):
                raise ValueError(
                    f"local=True leaves out the first reduction, which DistributedDataParallel with "
                    f"{option}=True does not allow: set {option}=False, or local=False"
                )

    def _options(self) -> dict[str, Any]:
        defaults = {
            "geometry": (self.geometry, Euclidean()),
            "lean": (self.lean, False),
            "max_norm": (self.max_norm, None),
            "nonfinite": (self.nonfinite, "propagate"),
            "repeat_randomness": (self.repeat_randomness, True),
            "keep": (self._selection.keep, 1.0),
            "when": (self.when, None),
            "local": (self.local, False),
        }
        return {name: value for name, (value, default) in defaults.items() if value != default}

    @property
    def sharpness(self) -> Tensor | None:
        """L(w + d) - L(w) of the last step, on the device; NaN where not measured.

        After a step by hand it is None, for nobody has told the losses. Where `select` keeps only a
        share of the samples, the closure's loss is taken to be the mean of what it returned, and
        whatever is added to that.
        """
        return self._sharpness

    def select(self, losses: Tensor) -> Tensor:
        """Return the mean of per-sample losses over the samples that count in this pass.

        In the first pass all; in the second the share `keep` whose loss grew most (ESAM).
        """
        if self._flight is not None and self._flight.looking:
            return losses.mean()
        if self._flight is not None and self._flight.ready:
            self._drop_unfinished()  # a new first pass has begun
        if self._flight is not None and self._flight.plain:
            return losses.mean()  # nothing was perturbed, and all samples count in both passes
        return self._selection.mean(losses, second=self._flight is not None)

    # The whole step -------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Closure | Sequence[Closure] | None = None) -> Any:
        """Make one step and return L(w).

        Args:
            closure: computes the loss, calls backward and returns the loss, or a tuple that begins
                with it; it runs twice. Gradients are cleared before each run. A list of closures, one
                a micro-batch, makes a perturbation for each and sums their gradients. None finishes a
                step whose `ascend` and `descend` were called by hand.
        """
        if hasattr(self, "found_inf"):
            self._step_for_scaler(closure)
            return None
        if closure is None:
            self._finish()
            return None
        closures: Any = closure if isinstance(closure, list | tuple) else [closure]
        if not closures or not all(callable(c) for c in closures):
            raise TypeError("step takes a function that computes the loss, or a list of them")
        if len(closures) > 1 and self.lean:
            raise ValueError("lean=True steps after the first pass: give it one closure")
        if len(closures) > 1 and self.when is not None and self.when.needs_norm:
            raise ValueError("an interval that reads the gradient norm decides by one closure")
        for each in closures:
            check_closure(each)
        if self._flight is not None and self._flight.by_hand and self._flight.ready:
            raise RuntimeError(
                "descend() has prepared a step, which step() without a closure finishes, and "
                "abandon() gives up; a framework that calls step for you may have given it one"
            )
        self._refuse_in_flight("begin a step")
        try:
            self._in_closures = True
            loss, self._sharpness = self._passes(closures)
        except BaseException as error:
            self._abandon(error)
            raise
        finally:
            self._in_closures = False
        self._finish()
        return loss

    def _step_for_scaler(self, closure: Any) -> None:
        try:
            if not self._heed_scaler(closure):
                self._finish()
        except BaseException:
            for name in ("grad_scale", "found_inf"):  # the scaler does so only if a step returns
                self.__dict__.pop(name, None)
            raise

    def _heed_scaler(self, closure: Any) -> bool:
        """Whether the GradScaler that called `step` wants no update; refuse what it would ruin."""
        scale, found = self.__dict__["grad_scale"], self.__dict__["found_inf"]
        flight = self._flight
        blind = flight is not None and not flight.scale_known
        away = flight is not None and (bool(flight.moved) or flight.looking)
        if closure is not None or (flight is None and scale is not None):
            raise RuntimeError(
                "under a GradScaler a step has two passes by hand: scale both losses, then "
                "ascend(scaler.get_scale()), scaler.unscale_(optimizer), descend(), "
                "scaler.step(optimizer)"
            )
        if away:
            self._refuse_in_flight("step")
        if scale is not None:
            raise RuntimeError("call scaler.unscale_(optimizer) before descend()")
        if blind:
            self._drop_unfinished()
            raise RuntimeError(
                "ascend() was not told by how much the GradScaler had scaled the first gradients: "
                "ascend(scaler.get_scale()), or ascend(1.0) if they were unscaled by hand"
            )
        if not bool(found):
            return False
        self._drop_unfinished()
        return True

    def _passes(self, closures: Sequence[Closure]) -> tuple[Any, Tensor]:
        """Run both passes of each closure and combine; return L(w) and the sharpness."""
        losses, rises = [], []
        sums = Sums()
        for closure in closures:
            self.begin()
            losses.append(self._run(closure, local=self.local))
            if self._take_off():
                second = self._run(closure)
                rises.append(self._selection.corrected(rise(second, losses[-1])))
            if len(closures) > 1:
                self._return_to_weights()
                sums.add(self._flight, self._layout())
                self._flight = None
        if len(closures) > 1:
            self._flight = sums.flight(self._layout())
        self._combine()
        if not rises:
            rises = [torch.zeros(()) if self._radius_is_zero() else torch.full((), torch.nan)]
        return total(losses), total(rises)

    def _run(self, closure: Closure, local: bool = False) -> Any:
        unsynchronised = self.model.no_sync() if local else contextlib.nullcontext()  # type: ignore[union-attr, operator]
        with torch.enable_grad(), unsynchronised:
            loss = closure()
        return detached(loss)

    # The step by hand -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a first pass: clear gradients, and let the second pass repeat its dropout masks.

        A loop by hand that does not call it must clear gradients itself, as ever.
        """
        self._refuse_wrapper()
        self._refuse_in_flight("begin a step")
        self._drop_unfinished()
        self._clear_gradients()
        self._selection.reset()
        self._random_before = self._random.read() if self.repeat_randomness else None

    @torch.no_grad()
    def ascend(self, grad_scale: float | Tensor | None = None) -> bool:
        """Take the gradients in `p.grad` as g0 and move the weights to w + d.

        Args:
            grad_scale: the factor a GradScaler has put on the loss, `scaler.get_scale()`.

        Returns:
            Whether the weights have moved. If not (see `when`), the second pass may be left out,
            unless a GradScaler is to look at its gradients.
        """
        self._refuse_wrapper()
        refuse_shared(self)
        self._sharpness = None  # the losses of these passes are not known here
        return self._take_off(grad_scale, by_hand=True)

    @torch.no_grad()
    def abandon(self) -> None:
        """Give up a step begun by hand: the weights are put back to w, bit for bit.

        Statistics and generators are as the first pass left them: a batch that is tried again counts
        twice in them.

        For an `except` around the passes. Where no step is under way it does nothing. With
        `lean=True` the base has stepped by then, which cannot be undone: a note says so. After
        `scaler.unscale_` call `scaler.update()`, too.
        """
        self._refuse_wrapper()
        if self._flight is not None and self._flight.looking:
            raise RuntimeError("abandon() inside perturbed(), where one only looks: leave it first")
        if self._in_closures:
            raise RuntimeError("abandon() inside a closure: raise an exception, step() sees to it")
        self._abandon(sys.exc_info()[1])

    @torch.no_grad()
    def descend(self) -> None:
        """Take `p.grad` as g1, put the weights back at w and leave in `p.grad` what the base is fed."""
        self._refuse_wrapper()
        if self._flight is not None and self._flight.looking:
            raise RuntimeError("descend() inside perturbed(), where one only looks: leave it first")
        if self._flight is None or self._flight.ready:
            raise RuntimeError("descend() without ascend(): the weights are not at w + d")
        try:
            self._return_to_weights()
            self._combine()
        except BaseException as error:
            self._abandon(error)
            raise

    def first_step(self, zero_grad: bool = False) -> None:
        """`ascend`, under the name other SAM code uses; it takes the gradients away in any case."""
        self.ascend()

    def second_step(self, zero_grad: bool = False) -> None:
        """`descend` and `step`, under the name other SAM code uses."""
        self.descend()
        self.step()
        if zero_grad:
            self.zero_grad()

    @contextlib.contextmanager
    def perturbed(self) -> Iterator[None]:
        """Hold the weights at w + d, by the gradients that lie in `p.grad`, to look at them there."""
        self._refuse_wrapper()
        self._refuse_in_flight("perturb again")
        self._refresh()
        flight = Flight(update.gather(self._layout(anew=True)), looking=True)
        if not flight.blocks:
            raise RuntimeError("perturbed() needs gradients: call backward() before it")
        kept = update.pairs(flight.blocks)
        prepared, self._flight = self._flight, flight
        try:
            with torch.no_grad():
                update.detach_gradients(flight.blocks)
                kept = update.pairs(flight.blocks)  # a backward pass in there spares these for sure
                perturb(flight, self._mask(), self.geometry, spend=False)
            torch.clear_autocast_cache()
            self._statistics.hold()
            yield
        finally:
            with torch.no_grad():
                self._return_to_weights()
            self._flight = prepared  # a step that waits for its update goes on waiting
            for p, g in kept:
                p.grad = g
