"""Tasks with checkpoints: save on some ranks, load on others, continue."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import make_method, make_step, same
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel as DDP

import wsam

from .problem import base_of, local_batch, net
from .sharded import sharded, step, weights, whole

HALF = 2
"""The number of steps before the checkpoint, and after it."""


class Run:
    """A model and its optimizer, in one process or on one of several ranks."""

    def __init__(self, name: str, base: str, kind: str, **options: Any) -> None:
        model: Any = net()
        self.alone = kind == "alone"
        if kind == "ddp":
            model = DDP(model)
        elif kind == "fsdp2":
            model = sharded(model)
        self.model = model
        # A scheduled radius shows whether the number of steps is lost.
        rho = wsam.schedule.InverseSqrt(0.3)
        self.opt = make_method(name, base_of(model, base), rho=rho, **options)

    def train(self, first: int, count: int = HALF) -> None:
        for t in range(first, first + count):
            ranks = range(2) if self.alone else [dist.get_rank()]
            samples = [local_batch(t, rank) for rank in ranks]
            step(self.opt, lambda xs=samples: self.loss(xs))

    def loss(self, samples: list[Tensor]) -> Tensor:
        """Return the mean over the ranks; each selects among its own samples."""
        return sum(self.opt.select(self.model(x)) for x in samples) / len(samples)

    def states(self, flatten: bool) -> dict[str, Any]:
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.opt, options=options),
        }

    def summary(self) -> dict[str, Any]:
        """Return unsharded weights, base state and the number of steps."""
        state = [self.opt.state.get(p, {}) for p in self.model.parameters()]
        return {
            "weights": weights(self.model),
            "state": [
                {k: whole(v) if isinstance(v, Tensor) else v for k, v in values.items()}
                for values in state
            ],
            "step": self.opt.param_groups[0]["sam_step"],
            "rho": self.opt.param_groups[0]["sam_rho"],
        }


def save(folder: str, name: str, base: str, kind: str, flatten: bool, **options: Any) -> Any:
    """Save half-way; return the summaries then and at the end."""
    run = Run(name, base, kind, **options)
    run.train(0)
    dcp.save(run.states(flatten), checkpoint_id=folder)
    middle = run.summary()
    run.train(HALF)
    return middle, run.summary()


def resume(
    folder: str, name: str, base: str, kind: str, flatten: bool, used: bool, **options: Any
) -> Any:
    """Load into a fresh or a used optimizer and continue; return the summaries then and at the end."""
    run = Run(name, base, kind, **options)
    if used:
        run.train(7)
    states = run.states(flatten)
    dcp.load(states, checkpoint_id=folder)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    set_model_state_dict(run.model, states["model"])
    set_optimizer_state_dict(run.model, run.opt, states["optimizer"], options=options)
    middle = run.summary()
    run.train(HALF)
    return middle, run.summary()


def resume_zero_redundancy() -> list[bool]:
    """Save half a run with ZeroRedundancyOptimizer on rank 0, and load it on all ranks.

    Returns:
        Whether the state is complete, and whether both runs end with the same weights.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns about torch.jit

    def build() -> tuple[torch.nn.Module, wsam.SharpnessAware]:
        model = DDP(net())
        base = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        return model, wsam.WSAM(base, rho=0.1, model=model)

    def train(model: torch.nn.Module, opt: wsam.SharpnessAware, steps: range) -> None:
        for t in steps:
            make_step(opt, lambda t=t: model(local_batch(t, dist.get_rank())).square().mean())

    model, opt = build()
    train(model, opt, range(HALF))
    opt.base.consolidate_state_dict(to=0)
    saved = [opt.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(saved, src=0)
    other, resumed = build()
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(saved[0])
    train(model, opt, range(HALF, 2 * HALF))
    train(other, resumed, range(HALF, 2 * HALF))
    complete = len(saved[0]["state"]) == len(list(model.parameters()))
    return [complete, same(list(model.parameters()), list(other.parameters()))]
