"""Tasks for torch.distributed.checkpoint: save on some ranks, load on others, go on."""

from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import member
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

from .problem import base_of, net, share
from .sharded import sharded, step, weights, whole

HALF = 2
"""Steps before the checkpoint, and after it."""


class Run:
    """A model, its optimizer and its samples: in one process, or on this rank of several."""

    def __init__(self, name: str, base: str, kind: str) -> None:
        model: Any = net()
        self.alone = kind == "alone"
        if kind == "ddp":
            model = DDP(model)
        elif kind == "fsdp2":
            model = sharded(model)
        self.model = model
        # A radius that moves with the steps: losing the step's number would show.
        rho = wsam.schedule.InverseSqrt(0.3)
        self.opt = member(name, base_of(model, base), rho=rho)

    def train(self, first: int, count: int = HALF) -> None:
        for t in range(first, first + count):
            ranks = range(2) if self.alone else [dist.get_rank()]
            samples = [share(t, rank) for rank in ranks]
            step(self.opt, lambda xs=samples: self.loss(xs))

    def loss(self, samples: list[Tensor]) -> Tensor:
        """Return the mean over the ranks' means: each selects among its own samples."""
        return sum(self.opt.select(self.model(x)) for x in samples) / len(samples)

    def states(self, flatten: bool) -> dict[str, Any]:
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.opt, options=options),
        }

    def summary(self) -> dict[str, Any]:
        """Return weights, base state and the count of steps, whole."""
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


def save(folder: str, name: str, base: str, kind: str, flatten: bool) -> Any:
    """Save in the middle; return how things stood then and at the end."""
    run = Run(name, base, kind)
    run.train(0)
    dcp.save(run.states(flatten), checkpoint_id=folder)
    middle = run.summary()
    run.train(HALF)
    return middle, run.summary()


def resume(folder: str, name: str, base: str, kind: str, flatten: bool, used: bool) -> Any:
    """Load into a fresh or a used optimizer and go on; return the middle and the end."""
    run = Run(name, base, kind)
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
