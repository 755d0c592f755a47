"""Hugging Face's Trainer: a subclass that makes each of its steps one of two passes.

    trainer = SharpnessAwareTrainer(
        model=model, args=args, train_dataset=data,
        wrap=lambda base: CoupledWSAM(base, rho=0.05, gamma=0.5),
    )

`wrap` is given the optimizer the Trainer makes of its arguments. A Trainer of your own takes
`SharpnessAwareMixin` as its first base class.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wsam.integrations.accelerate import check_accelerator
from wsam.integrations.window import Window, take_over_clipping, unwrap
from wsam.optimizer import SharpnessAware

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object

STEP_BY_THEMSELVES = ("lomo", "layerwise")
"""Optimizers of the Trainer that update during the backward pass."""


class SharpnessAwareMixin(Trainer):  # type: ignore[misc]
    """Makes a Trainer's step a sharpness-aware one. List it before Trainer.

    The micro-batches of a step run as usual; after the last one the weights move to w + d, all run
    again, and the Trainer goes on with what the base is fed in `p.grad`. `max_grad_norm` is handed to
    the optimizer, which scales both terms of its update alike; a `max_norm` of its own wins.

    Args:
        *args: as for Trainer.
        wrap: makes a sharpness-aware optimizer around the one that the Trainer creates from its
            arguments. Not needed if `optimizers` has a sharpness-aware one.
        **kwargs: as for Trainer.
    """

    optimizer: Any
    _window: Window | None = None

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
        """Whether `compute_loss` runs at w + d now: a metric kept by hand should not count then."""
        return self._window is not None and self._window.replaying

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the base optimizer as the Trainer does, and wrap it."""
        check_accelerator(self.accelerator)
        if unwrap(self.optimizer) is not None:
            return self.optimizer
        if self._wrap is None:
            raise TypeError(
                "the Trainer has no sharpness-aware optimizer: give it one, such as "
                "wrap=lambda base: wsam.CoupledWSAM(base, rho=0.05, gamma=0.5)"
            )
        name = str(getattr(self.args.optim, "value", self.args.optim))
        if any(word in name for word in STEP_BY_THEMSELVES):
            raise ValueError(
                f"optim={name!r} updates during the backward pass: it cannot be a base"
            )
        self.optimizer = self._wrap(super().create_optimizer(*args, **kwargs))
        return self.optimizer

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """Make the first pass of a micro-batch; after the window's last, the second pass of all."""
        run = super().training_step
        if self._window is None:
            self._window = self._open_window(model)
        loss = self._window.first(functools.partial(run, model, inputs, num_items_in_batch))
        if self.accelerator.sync_gradients:
            self._window.finish(self.accelerator.scaler)
        return loss

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, with a fresh window."""
        self._window = None
        return super().train(*args, **kwargs)

    def _open_window(self, model: nn.Module) -> Window:
        optimizer = unwrap(self.optimizer)
        assert optimizer is not None
        if not hasattr(super(), "_clip_grad_norm") or not hasattr(super(), "_get_grad_norm"):
            raise RuntimeError("this version of transformers clips where it cannot be taken over")
        if self.args.max_grad_norm and optimizer.max_norm is None:
            take_over_clipping(optimizer, self.args.max_grad_norm, "max_grad_norm")
        return Window(optimizer, functools.partial(self.accelerator.no_sync, model))

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Do nothing: the optimizer has clipped."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Tensor:
        """Return the norm of what the base is fed."""
        return torch.nn.utils.get_total_norm(
            [p.grad for p in model.parameters() if p.grad is not None]
        )


def __getattr__(name: str) -> Any:
    if name != "SharpnessAwareTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from transformers import Trainer

    kind = type(name, (SharpnessAwareMixin, Trainer), {"__module__": __name__})
    kind.__doc__ = "A Trainer whose steps are sharpness-aware; see `SharpnessAwareMixin`."
    globals()[name] = kind
    return kind
