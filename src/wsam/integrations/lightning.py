"""Lightning with automatic optimization: a mixin that makes `optimizer_step` one step of two passes.

    class Net(SharpnessAwareMixin, LightningModule):
        def configure_optimizers(self):
            return WSAM(torch.optim.SGD(self.parameters(), lr=0.1), rho=0.05, gamma=0.9)

All else stays as it is: the Trainer's accumulation, clipping, precision and checkpoints work.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from wsam._core.step_state import Phase
from wsam.integrations.window import Window, take_over_clipping, unwrap
from wsam.optimizer import SharpnessAware

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
else:
    LightningModule = object

STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")
"""Those that tests run; found by name, so that both packages Lightning comes in are known."""
OTHERS = ("DeepSpeedStrategy", "XLAStrategy", "SingleDeviceXLAStrategy")
"""Those that derive from a supported one and step in a way of their own."""


def is_supported(strategy: type) -> bool:
    """Whether each process holds all parameters, and the optimizer's own step updates them."""
    names = {kind.__name__ for kind in strategy.__mro__}
    return bool(names.intersection(STRATEGIES)) and not names.intersection(OTHERS)


class SharpnessAwareMixin(LightningModule):  # type: ignore[misc]
    """Makes a LightningModule's optimizer step a sharpness-aware one. List it before LightningModule.

    The first pass is Lightning's own. Then the optimizer moves to w + d, the micro-batches of the
    step run again through `training_step`, and Lightning goes on with what the base is fed in `p.grad`.
    What `training_step` logs in the second pass is dropped, so loggers see losses at w alone.
    """

    _window: Window | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for ancestor in cls.__mro__[: cls.__mro__.index(SharpnessAwareMixin)]:
            if "optimizer_step" in vars(ancestor) and not issubclass(ancestor, SharpnessAwareMixin):
                raise TypeError(
                    f"{cls.__name__} lists {ancestor.__name__} before SharpnessAwareMixin, which "
                    "hides the mixin's optimizer_step: list the mixin first"
                )

    @property
    def in_second_pass(self) -> bool:
        """Whether `training_step` runs at w + d now: a metric kept by hand should not count then."""
        return self._window is not None and self._window.replaying

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        """Keep the batch for the second pass."""
        optimizer = self._sharpness_aware()
        if optimizer is not None:
            every = self.trainer.accumulate_grad_batches
            if self._window is None or batch_idx % every == 0:
                strategy = self.trainer.strategy
                quiet = getattr(strategy, "block_backward_sync", contextlib.nullcontext)
                self._window = Window(optimizer, quiet)
            arguments = (batch, batch_idx) if self._takes_index() else (batch,)
            self._window.add(functools.partial(self._run_again, arguments, every, optimizer))
        return super().on_train_batch_start(batch, batch_idx)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Remember the losses at w, to tell the sharpness."""
        if self._window is not None and not self._window.replaying:
            self._window.note(loss)
        super().backward(loss, *args, **kwargs)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log what the first pass says."""
        if not self.in_second_pass:
            super().log(*args, **kwargs)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Make both passes where Lightning expects one, and let it go on from there."""
        own = unwrap(optimizer)
        if own is None or optimizer_closure is None:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            return
        window = self._checked_window(own, batch_idx)
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)

        def both_passes() -> Any:
            loss = optimizer_closure()
            # A training_step that returns None asks for its batch to be left out.
            if any(p.grad is not None for group in own.param_groups for p in group["params"]):
                window.finish(scaler, losses_are_scaled=True)
            return loss

        try:
            with _closure_runs_once(own):
                super().optimizer_step(epoch, batch_idx, optimizer, both_passes)
        finally:
            self._window = None

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Leave a sharpness-aware optimizer's gradients alone: it has clipped them itself."""
        if unwrap(optimizer) is None:
            super().configure_gradient_clipping(
                optimizer, gradient_clip_val, gradient_clip_algorithm
            )

    def _sharpness_aware(self) -> SharpnessAware | None:
        if not self.automatic_optimization or not self.trainer.optimizers:
            return None
        return unwrap(self.trainer.optimizers[0])

    def _takes_index(self) -> bool:
        """Whether `training_step` has a second argument: Lightning passes the index only then."""
        spec = inspect.getfullargspec(inspect.unwrap(self.training_step))
        return len(spec.args) > 2 or spec.varargs is not None

    def _run_again(
        self, arguments: tuple[Any, ...], divide_by: int, optimizer: SharpnessAware
    ) -> Tensor | None:
        strategy = self.trainer.strategy
        output = strategy.training_step(*arguments)
        loss: Tensor | None = output["loss"] if isinstance(output, Mapping) else output
        if loss is None:
            return None
        loss = loss / divide_by
        strategy.backward(loss, optimizer)
        return loss

    def _checked_window(self, optimizer: SharpnessAware, batch_idx: int) -> Window:
        """Refuse what would be silently wrong, and take over the Trainer's clipping."""
        trainer, window = self.trainer, self._window
        if not is_supported(type(trainer.strategy)):
            raise ValueError(
                f"{type(trainer.strategy).__name__} is not supported: it shards parameters or steps by "
                f"itself, so perturbations would be wrong; use one of {', '.join(STRATEGIES)}"
            )
        expected = batch_idx % trainer.accumulate_grad_batches + 1
        if window is None or len(window) != expected:
            raise RuntimeError(
                f"the step is made of {expected} batches, of which {len(window or ())} were kept for "
                "the second pass: an on_train_batch_start of your own must call "
                "super().on_train_batch_start(batch, batch_idx), and training_step must take a batch"
            )
        hook = type(self).configure_gradient_clipping
        if hook is not SharpnessAwareMixin.configure_gradient_clipping:
            raise TypeError(
                "configure_gradient_clipping is overridden, which would clip what the base is fed and "
                "not the sharpness term beside it: give the optimizer max_norm= instead"
            )
        if trainer.gradient_clip_val:
            self._take_over_clipping(optimizer)
        return window

    def _take_over_clipping(self, optimizer: SharpnessAware) -> None:
        wanted, algorithm = self.trainer.gradient_clip_val, self.trainer.gradient_clip_algorithm
        if "value" in str(algorithm).lower():
            raise ValueError(
                "gradient_clip_algorithm='value' cuts the two gradients to shapes whose difference "
                "means nothing: use 'norm', or max_norm= of the optimizer"
            )
        if optimizer.max_norm not in (None, wanted):
            raise ValueError(
                f"the Trainer has gradient_clip_val={wanted}, the optimizer max_norm="
                f"{optimizer.max_norm}: give one of them"
            )
        take_over_clipping(optimizer, wanted, "gradient_clip_val")


@contextlib.contextmanager
def _closure_runs_once(optimizer: SharpnessAware) -> Iterator[None]:
    """Let `optimizer.step(closure)` run the closure once, for it makes both passes by itself."""
    patched, step = vars(optimizer).get("step"), optimizer.step

    def run_once(closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        if optimizer._step_state.phase is not Phase.IDLE:
            step()
        return loss

    optimizer.step = run_once  # type: ignore[method-assign]
    try:
        yield
    finally:
        if patched is None:
            del optimizer.step
        else:
            optimizer.step = patched  # type: ignore[method-assign]
