"""WSAM that reuses the sharpness gradient, with a part of it renewed in every step.

    python benchmarks/renewed_sharpness.py --n 8 --gamma 0.8 --seeds 0 1 2 --data-dir DATA --out OUT

An experiment on the noise of sharpness. h = g1 - g0 comes from one batch and is applied n times, so
its noise grows with n. Most of h may be along g0, filter by filter. On the steps between two h, this
part is computed from the gradient g of the step:

    at every n-th step     h = g1 - g0
    for each filter        c = <h, g0> / <g0, g0>,    rest = h - c g0
    on the steps between   h = rest + c norm(g0) g / norm(g)

The norms are those of all gradients, and a tensor with one dimension counts as one filter. n steps
are one CUDA graph. All other settings are those of `wsam paper run cheap`.
"""

import argparse

import torch
from overlapped_passes import Form, OverlappedStepper, OverlappedTrainer, parse, train_seeds
from torch import Tensor
from torch.nn.utils import get_total_norm

from wsam.paper.cifar import EPOCHS


def split(h: list[Tensor], g0: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return h without its part along g0 in each filter, and the factors of g / norm(g)."""
    norm = get_total_norm(g0)
    rest, along = [], []
    for own, g in zip(h, g0, strict=True):
        dims = tuple(range(1, g.dim())) or (0,)
        squares = (g * g).sum(dims, keepdim=True).clamp(min=torch.finfo(g.dtype).tiny)
        c = (own * g).sum(dims, keepdim=True) / squares
        rest.append(own - c * g)
        along.append(c * norm)
    return rest, along


class RenewedStepper(OverlappedStepper):
    """Makes n steps when it has n batches, the first one with two passes."""

    def _make_steps(self, sharp: bool) -> tuple[Tensor, ...]:
        losses, counts = [], []
        increase = torch.zeros((), device=self.device)
        for i, batch in enumerate(self.batches):
            loss, count, gradient = self._pass(self.objective, self.params, batch)
            losses.append(loss)
            counts.append(count)
            if sharp and i == 0:
                self._copy_weights()
                self._perturb(gradient)
                second_loss, _, g1 = self._pass(self.second_objective, self.second_params, batch)
                increase = second_loss - loss
                self.h = list(torch._foreach_sub(g1, gradient))
                rest, along = split(self.h, gradient)
            elif sharp:
                unit = torch._foreach_div(gradient, get_total_norm(gradient) + 1e-12)
                self.h = list(torch._foreach_addcmul(rest, along, unit))
            self._update(gradient, self.rates[i], sharp)
        measured = torch.full((), float(sharp), device=self.device)
        return torch.stack(losses).sum(), torch.stack(counts).sum(0), increase, measured


class RenewedTrainer(OverlappedTrainer):
    """A `Trainer` that makes its steps with a `RenewedStepper`."""

    stepper = RenewedStepper
    recorded_as = "renewed"


def main() -> None:
    """Train, one run after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    options, execution = parse(parser)
    form = Form(n=options.n, start=options.start)
    train_seeds(RenewedTrainer, form, options.epochs, options, execution, {})


if __name__ == "__main__":
    main()
