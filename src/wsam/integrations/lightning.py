"""Lightning with automatic optimization: a mixin that adds the second pass to `optimizer_step`.

    class Net(SharpnessAwareMixin, LightningModule):
        def configure_optimizers(self):
            return WSAM(torch.optim.SGD(self.parameters(), lr=0.1), rho=0.05, gamma=0.9)

The Trainer's options for accumulation, clipping, precision and checkpoints work as usual.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from wsam._core.framework_checks import DEEPSPEED, FSDP1
from wsam._core.step_state import Phase
from wsam.integrations.metrics import metrics_unchanged
from wsam.integrations.microbatch_replay import MicrobatchReplay, clip_in_optimizer, unwrap
from wsam.optimizer import SharpnessAware

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
else:
    LightningModule = object

STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
"""Supported strategies. Names, because Lightning is published as two packages."""
UNSUPPORTED_SUBCLASSES = (
    "DeepSpeedStrategy",
    "FSDPStrategy",
    "XLAStrategy",
    "SingleDeviceXLAStrategy",
)
"""Strategies that step in their own way, although some derive from a supported one."""
_FSDP2 = "ModelParallelStrategy, and fully_shard in configure_model"


def is_supported(strategy: type) -> bool:
    """Whether parameters are whole or DTensors, and `optimizer.step` updates them."""
    names = _names(strategy)
    return bool(names.intersection(STRATEGIES)) and not names.intersection(UNSUPPORTED_SUBCLASSES)


def _names(strategy: type) -> set[str]:
    return {kind.__name__ for kind in strategy.__mro__}


def _check_strategy(strategy: type) -> None:
    if is_supported(strategy):
        return
    if "DeepSpeedStrategy" in _names(strategy):
        raise ValueError(f"{DEEPSPEED}: {_FSDP2}")
    if "FSDPStrategy" in _names(strategy):
        raise ValueError(f"{FSDP1}: {_FSDP2}")
    raise ValueError(
        f"{strategy.__name__} is not supported: it shards parameters or updates them itself, so the "
        f"perturbation would be wrong; use one of {', '.join(STRATEGIES)}"
    )


class SharpnessAwareMixin(LightningModule):  # type: ignore[misc]
    """Makes the optimizer step of a LightningModule sharpness-aware. List it before LightningModule.

    Lightning runs the first pass. Then the weights move to w + d, `training_step` runs again on the
    micro-batches of the step, and the weights return to w. Lightning continues with the gradient for
    the base in `p.grad`. In the second pass `self.log` and `self.log_dict` do nothing, and metrics of
    torchmetrics that are submodules keep their states, so that each sample is counted once, at w.
    """

    _replay: MicrobatchReplay | None = None

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
        """Whether the model is running at w + d. Do not update metrics of your own then."""
        if self._replay is not None:
            return self._replay.in_second_pass
        optimizers = self.trainer.optimizers if self._trainer is not None else ()
        return any(found.second_pass for found in map(unwrap, optimizers) if found is not None)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        """Record the batch for the second pass."""
        optimizer = self._sharpness_aware_optimizer()
        if optimizer is not None:
            accumulate = self.trainer.accumulate_grad_batches
            if self._replay is None or batch_idx % accumulate == 0:
                strategy = self.trainer.strategy
                _check_strategy(type(strategy))
                no_sync = getattr(strategy, "block_backward_sync", contextlib.nullcontext)
                self._replay = MicrobatchReplay(optimizer, no_sync)
            arguments = (batch, batch_idx) if self._takes_batch_idx() else (batch,)
            self._replay.add(functools.partial(self._run_again, arguments, accumulate, optimizer))
        return super().on_train_batch_start(batch, batch_idx)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Record the loss at w, from which the sharpness is computed."""
        if self._replay is not None and not self._replay.in_second_pass:
            self._replay.record_loss(loss)
        super().backward(loss, *args, **kwargs)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log in the first pass only."""
        if not self.in_second_pass:
            super().log(*args, **kwargs)

    def log_dict(self, *args: Any, **kwargs: Any) -> None:
        """Log in the first pass only."""
        if not self.in_second_pass:
            super().log_dict(*args, **kwargs)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Run both passes in place of Lightning's closure."""
        inner = unwrap(optimizer)
        if inner is None or optimizer_closure is None:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            return
        replay = self._checked_replay(inner, batch_idx)
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)

        def both_passes() -> Any:
            loss = optimizer_closure()
            # Without gradients, training_step has returned None to leave its batch out.
            if any(p.grad is not None for group in inner.param_groups for p in group["params"]):
                with metrics_unchanged(self.modules()):
                    replay.run_second_pass(scaler, losses_are_scaled=True)
            return loss

        try:
            with _run_closure_once(inner):
                super().optimizer_step(epoch, batch_idx, optimizer, both_passes)
        finally:
            self._replay = None

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Do nothing for a sharpness-aware optimizer, which clips by its own `max_norm`."""
        if unwrap(optimizer) is None:
            super().configure_gradient_clipping(
                optimizer, gradient_clip_val, gradient_clip_algorithm
            )

    def _sharpness_aware_optimizer(self) -> SharpnessAware | None:
        return unwrap(self.trainer.optimizers[0]) if self.automatic_optimization else None

    def _takes_batch_idx(self) -> bool:
        """Whether `training_step` has a second argument. Lightning passes the index only then."""
        spec = inspect.getfullargspec(inspect.unwrap(self.training_step))
        return len(spec.args) > 2 or spec.varargs is not None

    def _run_again(
        self, arguments: tuple[Any, ...], accumulate: int, optimizer: SharpnessAware
    ) -> Tensor | None:
        strategy = self.trainer.strategy
        output = strategy.training_step(*arguments)
        loss: Tensor | None = output["loss"] if isinstance(output, Mapping) else output
        if loss is None:
            return None
        loss = loss / accumulate
        strategy.backward(loss, optimizer)
        return loss

    def _checked_replay(self, optimizer: SharpnessAware, batch_idx: int) -> MicrobatchReplay:
        """Raise for settings whose results would be silently wrong; return the recorded batches."""
        trainer, replay = self.trainer, self._replay
        expected = batch_idx % trainer.accumulate_grad_batches + 1
        if replay is None or len(replay) != expected:
            raise RuntimeError(
                f"the step has {expected} batches, but {len(replay or ())} were recorded for the "
                "second pass: an overridden on_train_batch_start must call "
                "super().on_train_batch_start(batch, batch_idx), and training_step must take a batch"
            )
        hook = type(self).configure_gradient_clipping
        if hook is not SharpnessAwareMixin.configure_gradient_clipping:
            raise TypeError(
                "configure_gradient_clipping is overridden: it would clip the base's gradient but not "
                "the decoupled sharpness term; pass max_norm= to the optimizer instead"
            )
        if trainer.gradient_clip_val:
            self._clip_in_optimizer(optimizer)
        return replay

    def _clip_in_optimizer(self, optimizer: SharpnessAware) -> None:
        max_norm, algorithm = self.trainer.gradient_clip_val, self.trainer.gradient_clip_algorithm
        if "value" in str(algorithm).lower():
            raise ValueError(
                "gradient_clip_algorithm='value' distorts the difference of the two gradients: use "
                "'norm', or pass max_norm= to the optimizer"
            )
        if optimizer.max_norm not in (None, max_norm):
            raise ValueError(
                f"the Trainer has gradient_clip_val={max_norm}, but the optimizer has "
                f"max_norm={optimizer.max_norm}: set only one of them"
            )
        clip_in_optimizer(optimizer, max_norm, "gradient_clip_val")


@contextlib.contextmanager
def _run_closure_once(optimizer: SharpnessAware) -> Iterator[None]:
    """Let `optimizer.step(closure)` run the closure once, because it runs both passes itself."""
    patched, step = vars(optimizer).get("step"), optimizer.step

    def run_once(closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        if optimizer._step_state.phase is not Phase.IDLE:
            step()
        return loss

    optimizer.step = run_once  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if patched is None:
            del optimizer.step
        else:
            optimizer.step = patched  # type: ignore[method-assign]
