"""Hugging Face Trainer: a subclass whose steps are sharpness-aware.

    trainer = SharpnessAwareTrainer(
        model=model, args=args, train_dataset=data,
        wrap=lambda base: SAM(base, rho=0.05),
    )

`wrap` receives the optimizer that the Trainer creates from its arguments. To extend your own Trainer,
list `SharpnessAwareMixin` as its first base class.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wsam._core.param_blocks import is_sharded
from wsam.integrations.accelerate import check_accelerator
from wsam.integrations.metrics import metrics_unchanged
from wsam.integrations.microbatch_replay import MicrobatchReplay, clip_in_optimizer, unwrap
from wsam.optimizer import SharpnessAware

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object

UPDATE_IN_BACKWARD = ("lomo", "layerwise")
"""Parts of the names of the Trainer's optimizers that update during the backward pass."""


class SharpnessAwareMixin(Trainer):  # type: ignore[misc]
    """Makes the steps of a Trainer sharpness-aware. List it before Trainer.

    The micro-batches of a step run as usual. After the last one the weights move to w + d, all
    micro-batches run again, and the weights return to w. The Trainer continues with the gradient for
    the base in `p.grad`. `max_grad_norm` becomes `max_norm` of the optimizer, unless that is set. In
    the second pass `self.log` does nothing, and metrics of torchmetrics that are attributes of the
    Trainer or submodules of the model keep their states.

    Args:
        *args: arguments of Trainer.
        wrap: returns a sharpness-aware optimizer around the one that the Trainer creates. Not needed if
            `optimizers` contains a sharpness-aware optimizer.
        **kwargs: arguments of Trainer.
    """

    optimizer: Any
    _replay: MicrobatchReplay | None = None

    def __init__(
        self,
        *args: Any,
        wrap: Callable[[Optimizer], SharpnessAware] | None = None,
        **kwargs: Any,
    ) -> None:
        self._wrap = wrap
        super().__init__(*args, **kwargs)

    @property
    def in_second_pass(self) -> bool:
        """Whether `compute_loss` is running at w + d. Do not update metrics of your own then."""
        return self._replay is not None and self._replay.in_second_pass

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the base optimizer as the Trainer does, and wrap it."""
        check_accelerator(self.accelerator)
        if unwrap(self.optimizer) is not None:
            return self.optimizer
        name = str(getattr(self.args.optim, "value", self.args.optim))
        if any(part in name for part in UPDATE_IN_BACKWARD):
            raise ValueError(
                f"optim={name!r} updates during the backward pass, so it cannot be a base optimizer"
            )
        base = super().create_optimizer(*args, **kwargs)
        self.optimizer = self._wrap(base) if callable(self._wrap) else base
        if unwrap(self.optimizer) is None:
            raise TypeError(
                "the Trainer needs a sharpness-aware optimizer: pass a function, such as "
                f"wrap=lambda base: wsam.SAM(base, rho=0.05), got wrap={self._wrap!r}"
            )
        return self.optimizer

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """Run the first pass of a micro-batch, and after a step's last one the second pass of all."""
        run = super().training_step
        if self._replay is None:
            self._replay = self._new_replay(model)
        loss = self._replay.run_first_pass(
            functools.partial(run, model, inputs, num_items_in_batch)
        )
        if self.accelerator.sync_gradients:
            with metrics_unchanged([*model.modules(), *vars(self).values()]):
                self._replay.run_second_pass(self.accelerator.scaler)
        return loss

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log in the first pass only."""
        if not self.in_second_pass:
            super().log(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does."""
        self._replay = None
        return super().train(*args, **kwargs)

    def _new_replay(self, model: nn.Module) -> MicrobatchReplay:
        optimizer = unwrap(self.optimizer)
        assert optimizer is not None
        if not hasattr(super(), "_clip_grad_norm") or not hasattr(super(), "_get_grad_norm"):
            raise RuntimeError(
                "this version of transformers is not supported: Trainer has no _clip_grad_norm to "
                "override; use version 5.12.1 or newer"
            )
        if self.args.max_grad_norm and optimizer.max_norm is None:
            clip_in_optimizer(optimizer, self.args.max_grad_norm, "max_grad_norm")
        return MicrobatchReplay(optimizer, functools.partial(self.accelerator.no_sync, model))

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Do nothing: the optimizer clips by its own `max_norm`."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Tensor:
        """Return the norm of the base's gradient."""
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in model.parameters() if p.grad is not None]
        )
        return norm.full_tensor() if is_sharded(norm) else norm  # type: ignore[attr-defined]


def __getattr__(name: str) -> Any:
    """Create `SharpnessAwareTrainer` on first use, so that importing this module needs only torch."""
    if name != "SharpnessAwareTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from transformers import Trainer

    kind = type(name, (SharpnessAwareMixin, Trainer), {"__module__": __name__})
    kind.__doc__ = "A Trainer whose steps are sharpness-aware; see `SharpnessAwareMixin`."
    globals()[name] = kind
    return kind
