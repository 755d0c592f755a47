"""Tasks for ranks under DistributedDataParallel. Each returns plain tensors and numbers."""

import contextlib
import copy
import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from helpers import member, snapshot
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import wsam

from .problem import STEPS, Net, base_of, net, share

VIEWS = {
    "copies": {},
    "views": {"gradient_as_bucket_view": True},
    # A bucket with one tensor: the view is as large as what it is a view of.
    "views of one": {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-6},
}


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def first_pass(model: nn.Module, local: bool) -> Any:
    return model.no_sync() if local else contextlib.nullcontext()


def step(opt: wsam.SharpnessAware, model: nn.Module, x: Tensor, style: str) -> None:
    """One step as a user writes it, in one of the two forms."""

    def backward() -> Tensor:
        loss = opt.select(model(x))
        loss.backward()
        return loss

    if style == "closure":
        opt.step(backward)
        return
    opt.zero_grad()
    opt.begin()
    with first_pass(model, opt.local):
        backward()
    opt.ascend()
    backward()
    opt.descend()
    opt.step()


def train(
    name: str,
    *,
    style: str = "closure",
    buckets: str = "copies",
    base: str = "momentum",
    steps: int = STEPS,
    ddp: dict[str, Any] | None = None,
    **options: Any,
) -> list[Tensor]:
    """Train a few steps; return the weights."""
    model = DDP(net(), **VIEWS[buckets], **(ddp or {}))
    opt = member(name, base_of(model, base), model=model, **options)
    for t in range(steps):
        step(opt, model, share(t, dist.get_rank()), style)
    return weights(model)


def long_run(name: str, local: bool, base: str, steps: int) -> dict[str, Any]:
    """Train in float32, where rounding shows; return weights, state and groups."""
    model = DDP(net(torch.float32), gradient_as_bucket_view=True)
    opt = member(name, base_of(model, base), model=model, local=local, max_norm=1.0)
    for t in range(steps):
        step(opt, model, share(t, dist.get_rank(), torch.float32), "closure")
    return snapshot(opt)


def frozen(local: bool) -> tuple[list[Tensor], bool]:
    """One parameter is frozen; return the weights, and whether the base has a state for it."""
    plain = net()
    plain.second.weight.requires_grad_(False)
    model = DDP(plain)
    opt = wsam.WSAM(base_of(model, "adamw"), model=model, local=local)
    for t in range(STEPS):
        step(opt, model, share(t, dist.get_rank()), "closure")
    return weights(model), bool(opt.state.get(plain.second.weight))


def poisoned(name: str, local: bool, where: int, policy: str) -> dict[str, Any]:
    """One rank's gradient is not finite, at step 1 in the given pass; the other steps are sound."""
    model = DDP(net(), gradient_as_bucket_view=True)
    opt = member(name, base_of(model, "adam"), model=model, local=local, nonfinite=policy)
    before: Any = None
    after: Any = None
    raised = ""
    for t in range(3):
        x, passes = share(t, dist.get_rank()), 0

        def closure(t: int = t, x: Tensor = x) -> Tensor:
            nonlocal passes
            passes += 1
            loss = opt.select(model(x))
            if t == 1 and passes == where and dist.get_rank() == 1:
                loss = loss * torch.inf
            loss.backward()
            return loss

        if t == 1:
            before = snapshot(opt)
        try:
            opt.step(closure)
        except FloatingPointError as error:
            raised = str(error)
        if t == 1:
            after = snapshot(opt)
    return {
        "before": before,
        "after": after,
        "end": snapshot(opt),
        "skipped": opt.skipped,
        "raised": raised,
    }


def uneven(name: str, local: bool, initial: bool) -> tuple[str, list[Tensor]]:
    """Rank 1 runs out of batches after the second step; return an error, and the weights."""
    model = DDP(net())
    opt = member(name, base_of(model, "momentum"), model=model, local=local)
    rank = dist.get_rank()
    try:
        with Join([model], divide_by_initial_world_size=initial):
            for t in range(2 if rank == 1 else STEPS):
                step(opt, model, share(t, rank), "closure")
    except RuntimeError as error:
        return str(error), weights(model)
    return "", weights(model)


class Branches(nn.Module):
    """Takes one of two ways, and has one that nobody takes."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.left, self.right, self.never = (nn.Linear(5, 5) for _ in range(4))

    def forward(self, x: Tensor, left: bool) -> Tensor:
        """Return one loss for each sample."""
        way = self.left if left else self.right
        return way(torch.tanh(self.shared(x))).square().sum(1)


def branches(name: str, plain: bool, ways: list[list[bool]]) -> tuple[list[Tensor], list[Tensor]]:
    """Ranks take other branches; return the weights, and those of one process that takes them all.

    The judge is the library in one process, which is judged elsewhere.
    """
    torch.manual_seed(2)
    alone = Branches().double()
    model = DDP(copy.deepcopy(alone), find_unused_parameters=True, gradient_as_bucket_view=True)
    options: dict[str, Any] = {"when": wsam.schedule.Every(2, offset=1)} if plain else {}
    opt = member(name, base_of(model, "adamw"), model=model, **options)
    judge = member(name, base_of(alone, "adamw"), **options)
    rank = dist.get_rank()
    for t, way in enumerate(ways):

        def closure(t: int = t, way: list[bool] = way) -> Tensor:
            loss = model(share(t, rank), way[rank]).mean()
            loss.backward()
            return loss

        def whole(t: int = t, way: list[bool] = way) -> Tensor:
            loss = sum(alone(share(t, r), way[r]).mean() / 2 for r in range(2))
            loss.backward()
            return loss

        opt.step(closure)
        judge.step(whole)
    return weights(model), weights(alone)


def refused(kind: str) -> str:
    """What is said of a model that `local=True` cannot work with."""
    model: Any = Net()
    if kind == "fsdp2":
        fully_shard(model)
    elif kind != "plain":
        model = DDP(model, **{kind: True})
    try:
        wsam.SAM(base_of(model, "sgd"), model=model, local=True)
    except ValueError as error:
        return str(error)
    return ""


def micro_batches(name: str, local: bool, buckets: str) -> tuple[list[Tensor], list[Tensor]]:
    """A perturbation for each of two micro-batches a rank; and the same in one process."""
    alone = net()
    model = DDP(net(), **VIEWS[buckets])
    opt = member(name, base_of(model, "momentum"), model=model, local=local)
    judge = member(name, base_of(alone, "momentum"))

    def closure(of: wsam.SharpnessAware, run: nn.Module, count: int, *parts: Tensor) -> Any:
        def backward() -> Tensor:
            loss = sum(of.select(run(x)) for x in parts) / count
            loss.backward()
            return loss

        return backward

    for t in range(3):
        halves = [share(t, rank).chunk(2) for rank in range(2)]
        mine = halves[dist.get_rank()]
        # Each rank's mean counts half, by DistributedDataParallel's own average.
        opt.step([closure(opt, model, 2, x) for x in mine])
        if local:
            judge.step([closure(judge, alone, 4, x) for half in halves for x in half])
        else:
            judge.step([closure(judge, alone, 4, *both) for both in zip(*halves, strict=True)])
    return weights(model), weights(alone)


def accumulated(name: str, local: bool, lean: bool) -> list[Tensor]:
    """Micro-batches inside the closure, all but the last under no_sync."""
    model = DDP(net(), gradient_as_bucket_view=True)
    options = {"lean": True} if lean else {"local": local}
    opt = member(name, base_of(model, "momentum"), model=model, **options)
    for t in range(STEPS):
        x = share(t, dist.get_rank())
        parts = x.split([2, len(x) - 2])

        def closure(parts: Any = parts, size: int = len(x)) -> Tensor:
            losses = []
            for number, part in enumerate(parts):
                with first_pass(model, number < len(parts) - 1):
                    loss = model(part).sum() / size
                    loss.backward()
                    losses.append(loss.detach())
            return sum(losses)

        opt.step(closure)
    return weights(model)


def looked_at(buckets: str) -> tuple[bool, bool]:
    """Whether gradients and weights survive a backward pass inside `perturbed()`."""
    model = DDP(net(), **VIEWS[buckets])
    opt = wsam.SAM(base_of(model, "momentum"))
    x = share(0, dist.get_rank())
    for _ in range(3):  # after the first pass the buckets are made anew
        opt.zero_grad()
        model(x).mean().backward()
    before = [p.grad.clone() for p in model.parameters()], weights(model)
    with opt.perturbed():
        model(3 * x).mean().backward()
    after = [p.grad for p in model.parameters()], weights(model)
    pairs = [zip(u, v, strict=True) for u, v in zip(before, after, strict=True)]
    same = [all(torch.equal(u, v) for u, v in pair) for pair in pairs]
    return same[0], same[1]


def scaled(local: bool) -> dict[str, Any]:
    """A GradScaler's loop; at step 1 the first pass of rank 1 alone overflows."""
    model = DDP(net(torch.float32))
    opt = wsam.WSAM(base_of(model, "momentum"), model=model, local=local)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    kept: list[list[Tensor]] = []
    for t in range(3):
        x = share(t, dist.get_rank(), torch.float32)
        factor = torch.inf if t == 1 and dist.get_rank() == 1 else 1.0
        opt.zero_grad()
        opt.begin()
        with first_pass(model, local):
            (scaler.scale(model(x).mean()) * factor).backward()
        opt.ascend(scaler.get_scale())
        scaler.scale(model(x).mean()).backward()
        scaler.unscale_(opt)
        opt.descend()
        scaler.step(opt)
        scaler.update()
        kept.append(weights(model))
    return {"weights": kept, "scale": scaler.get_scale(), "skipped": opt.skipped}


class Normed(nn.Module):
    """With running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Return one loss for each sample."""
        return self.net(x).square().sum(1)


def statistics(local: bool) -> list[list[Tensor]]:
    """Running statistics after three steps of SAM with learning rate 0, and of plain forward passes."""
    torch.manual_seed(0)
    models = [DDP(copy.deepcopy(m)) for m in [Normed().double()] * 2]
    opt = wsam.SAM(torch.optim.SGD(models[0].parameters(), lr=0.0), model=models[0], local=local)
    for t in range(3):
        x = share(t, dist.get_rank())
        step(opt, models[0], x, "closure")
        models[1](x).mean().backward()
    return [[b.clone() for b in model.buffers()] for model in models]


def deserted(how: str, local: bool, patience: float) -> tuple[str, float, bool]:
    """Rank 1 leaves in its second pass; what rank 0 hears, how long it waited, its weights restored."""
    group = dist.new_group(timeout=timedelta(seconds=patience))
    model = DDP(net(), process_group=group)
    opt = wsam.WSAM(base_of(model, "momentum"), model=model, local=local)
    x, passes = share(0, dist.get_rank()), 0
    step(opt, model, x, "closure")
    before = weights(model)

    def closure() -> Tensor:
        nonlocal passes
        passes += 1
        if passes == 2 and dist.get_rank() == 1:
            if how == "dies":
                os._exit(9)
            time.sleep(patience + 2)
        loss = model(x).mean()
        loss.backward()
        return loss

    start = time.monotonic()
    try:
        opt.step(closure)
    except RuntimeError as error:
        kept = all(torch.equal(u, v) for u, v in zip(before, weights(model), strict=True))
        return str(error), time.monotonic() - start, kept
    return "", 0.0, False
