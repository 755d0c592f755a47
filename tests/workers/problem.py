"""A small problem for tests with several ranks, and its expected result from the reference."""

import dataclasses
import functools
from typing import Any

import reference
import torch
from helpers import batch, reference_base, torch_base
from torch import Tensor, nn
from torch.func import functional_call

import wsam

RANKS = 2
STEPS = 4
DECAY = 0.01
Weights = list[Tensor]


class Net(nn.Module):
    """A network with odd sizes by default, so that shards are uneven and one is empty."""

    def __init__(self, hidden: int = 7) -> None:
        super().__init__()
        self.first = nn.Linear(5, hidden)
        self.second = nn.Linear(hidden, 3)
        self.scale = nn.Parameter(torch.full((1,), 0.8))

    def forward(self, x: Tensor) -> Tensor:
        """Return one loss for each sample."""
        scaled = self.second(torch.tanh(self.first(x))) * self.scale
        return (scaled - x[:, :3]).square().sum(1)


def net(dtype: torch.dtype = torch.float64, hidden: int = 7) -> Net:
    """Return the network with the same weights on all ranks."""
    torch.manual_seed(1)
    return Net(hidden).to(dtype)


def local_batch(step: int, rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return a rank's samples of this step's batch."""
    return batch(step).to(dtype).chunk(RANKS)[rank]


def base_of(model: nn.Module, base: str) -> torch.optim.Optimizer:
    return torch_base(base, model.parameters(), weight_decay=DECAY)


def average(lists: list[Weights]) -> Weights:
    return [torch.stack(tensors).mean(0) for tensors in zip(*lists, strict=True)]


@functools.cache
def expected_weights(
    name: str,
    local: bool = False,
    base: str = "momentum",
    steps: int = STEPS,
    max_norm: float | None = None,
    base_steps: tuple[int, ...] = (),
    idle_after: int = STEPS,
    halved: bool = False,
    hidden: int = 7,
    ascent_steps: int = 1,
) -> Weights:
    """Return the weights after these steps by the reference, without torch.distributed.

    Args:
        name: the method.
        local: whether each rank is perturbed by its own gradient.
        base: the base optimizer.
        steps: the number of steps.
        max_norm: for clipping.
        base_steps: the steps that the base makes alone.
        idle_after: from this step on only rank 0 has samples.
        halved: whether its gradients then count half.
        hidden: the number of hidden units.
        ascent_steps: that lead from w to w + d; with `local` only.
    """
    model = net(hidden=hidden)
    method = dataclasses.replace(reference.METHODS[name], ascent_steps=ascent_steps)
    if max_norm is not None:
        method = dataclasses.replace(method, max_norm=max_norm)
    keys = [key for key, _ in model.named_parameters()]
    w = [p.detach().clone() for p in model.parameters()]
    plain = reference_base(base, DECAY)
    memory: reference.Memory = {}
    for step in range(steps):
        mask = mask_of(name, step, len(w))
        busy, factor = (1, 0.5 if halved else 1.0) if step >= idle_after else (RANKS, 1.0)
        losses = [
            functools.partial(losses_of, model, keys, local_batch(step, r), factor)
            for r in range(busy)
        ]
        if local:
            pairs = [reference.two_gradients(method, w, each, mask, memory) for each in losses]
            g0, g1 = (average([pair[i] for pair in pairs]) for i in range(2))
        else:
            g0, g1 = synchronized_gradients(method, w, losses, mask, memory)
        if step in base_steps:
            w = plain.step(w, g0)
        else:
            w = reference.update(method, plain, w, g0, g1, memory)
    return w


def losses_of(model: nn.Module, keys: list[str], x: Tensor, factor: float, w: Weights) -> Tensor:
    return factor * functional_call(model, dict(zip(keys, w, strict=True)), (x,))


def synchronized_gradients(
    method: Any, w: Weights, losses: list[Any], mask: Any, memory: reference.Memory
) -> tuple[Weights, Weights]:
    """Return both gradients of all ranks, perturbed by the average; each selects its own samples."""
    firsts = [reference.gradient(each, w, None) for each in losses]
    g0 = average([g for _, g in firsts])
    along = reference.vector(method, g0, memory)
    moved = [p + d for p, d in zip(w, reference.perturbation(method, w, along, mask), strict=True)]
    seconds = []
    for each, (before, _) in zip(losses, firsts, strict=True):
        chosen = None
        if method.keep < 1:
            chosen = reference.kept_samples(before, each(moved).detach(), method.keep)
        seconds.append(reference.gradient(each, moved, chosen)[1])
    return g0, average(seconds)


def mask_of(name: str, step: int, tensors: int) -> list[bool] | None:
    """Return which tensors ESAM perturbs; the library's own draw, which is not tested here."""
    return wsam.Masked().mask(step, tensors) if name == "esam" else None
