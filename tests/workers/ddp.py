"""Tasks with DistributedDataParallel. Each returns plain tensors and numbers."""

import contextlib
import copy
import os
import time
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from helpers import make_method, snapshot
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import wsam

from .problem import STEPS, Net, base_of, local_batch, net

VIEWS = {
    "copies": {},
    "views": {"gradient_as_bucket_view": True},
    # A bucket with one tensor: the view has the size of its storage.
    "views of one": {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-6},
}


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def first_pass(model: nn.Module, local: bool) -> Any:
    return model.no_sync() if local else contextlib.nullcontext()


def step(opt: wsam.SharpnessAware, model: nn.Module, x: Tensor, style: str) -> None:
    """Make one step with a closure or by hand."""

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
    opt = make_method(name, base_of(model, base), model=model, **options)
    for t in range(steps):
        step(opt, model, local_batch(t, dist.get_rank()), style)
    return weights(model)


def against_one_process(name: str, local: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Train, and train in one process that perturbs each share if `local`; return both weights."""
    model, alone = DDP(net(), gradient_as_bucket_view=True), net()
    opt = make_method(
        name, base_of(model, "momentum"), model=model, **{"local": True} if local else {}
    )
    single = make_method(name, base_of(alone, "momentum"))

    def backward(*shares: Tensor) -> Tensor:
        loss = sum(single.select(alone(x)) for x in shares) / 2
        loss.backward()
        return loss

    for t in range(STEPS):
        step(opt, model, local_batch(t, dist.get_rank()), "closure")
        shares = [local_batch(t, rank) for rank in range(2)]
        each, both = [partial(backward, x) for x in shares], partial(backward, *shares)
        single.step(each if local else both)
    return weights(model), weights(alone)


def long_run(name: str, local: bool, base: str, steps: int) -> dict[str, Any]:
    """Train in float32, where rounding is visible; return weights, state and groups."""
    model = DDP(net(torch.float32), gradient_as_bucket_view=True)
    opt = make_method(name, base_of(model, base), model=model, local=local, max_norm=1.0)
    for t in range(steps):
        step(opt, model, local_batch(t, dist.get_rank(), torch.float32), "closure")
    return snapshot(opt)


def frozen(local: bool) -> tuple[list[Tensor], bool]:
    """Train with a frozen parameter; return the weights, and whether the base has a state for it."""
    plain = net()
    plain.second.weight.requires_grad_(False)
    model = DDP(plain)
    opt = wsam.WSAM(base_of(model, "adamw"), model=model, local=local)
    for t in range(STEPS):
        step(opt, model, local_batch(t, dist.get_rank()), "closure")
    return weights(model), bool(opt.state.get(plain.second.weight))


def overflow_on_one_rank(name: str, local: bool, bad_pass: int, policy: str) -> dict[str, Any]:
    """Train with an infinite gradient on rank 1 at step 1, in the given pass."""
    model = DDP(net(), gradient_as_bucket_view=True)
    opt = make_method(name, base_of(model, "adam"), model=model, local=local, nonfinite=policy)
    before: Any = None
    after: Any = None
    raised = ""
    for t in range(3):
        x, passes = local_batch(t, dist.get_rank()), 0

        def closure(t: int = t, x: Tensor = x) -> Tensor:
            nonlocal passes
            passes += 1
            loss = opt.select(model(x))
            if t == 1 and passes == bad_pass and dist.get_rank() == 1:
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
    """Train with fewer batches on rank 1; return the error message, and the weights."""
    model = DDP(net())
    opt = make_method(name, base_of(model, "momentum"), model=model, local=local)
    rank = dist.get_rank()
    try:
        with Join([model], divide_by_initial_world_size=initial):
            for t in range(2 if rank == 1 else STEPS):
                step(opt, model, local_batch(t, rank), "closure")
    except RuntimeError as error:
        return str(error), weights(model)
    return "", weights(model)


class Branches(nn.Module):
    """A model with two branches of which each pass uses one, and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.left, self.right, self.never = (nn.Linear(5, 5) for _ in range(4))

    def forward(self, x: Tensor, left: bool) -> Tensor:
        """Return one loss for each sample."""
        branch = self.left if left else self.right
        return branch(torch.tanh(self.shared(x))).square().sum(1)


def branches(
    name: str, alternating: bool, lefts: list[list[bool]]
) -> tuple[list[Tensor], list[Tensor]]:
    """Train with a different branch on each rank; return the weights, and those of one process."""
    torch.manual_seed(2)
    alone = Branches().double()
    model = DDP(copy.deepcopy(alone), find_unused_parameters=True, gradient_as_bucket_view=True)
    options: dict[str, Any] = {"when": wsam.schedule.Every(2, offset=1)} if alternating else {}
    opt = make_method(name, base_of(model, "adamw"), model=model, **options)
    single = make_method(name, base_of(alone, "adamw"), **options)
    rank = dist.get_rank()
    for t, left in enumerate(lefts):

        def closure(t: int = t, left: list[bool] = left) -> Tensor:
            loss = model(local_batch(t, rank), left[rank]).mean()
            loss.backward()
            return loss

        def whole(t: int = t, left: list[bool] = left) -> Tensor:
            loss = sum(alone(local_batch(t, r), left[r]).mean() / 2 for r in range(2))
            loss.backward()
            return loss

        opt.step(closure)
        single.step(whole)
    return weights(model), weights(alone)


def local_error(kind: str) -> str:
    """Return the error message for a model that does not support `local=True`."""
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
    """Perturb for each of two micro-batches per rank; return the weights, and those of one process."""
    alone = net()
    model = DDP(net(), **VIEWS[buckets])
    opt = make_method(name, base_of(model, "momentum"), model=model, local=local)
    single = make_method(name, base_of(alone, "momentum"))

    def closure(of: wsam.SharpnessAware, run: nn.Module, count: int, *parts: Tensor) -> Any:
        def backward() -> Tensor:
            loss = sum(of.select(run(x)) for x in parts) / count
            loss.backward()
            return loss

        return backward

    for t in range(3):
        halves = [local_batch(t, rank).chunk(2) for rank in range(2)]
        mine = halves[dist.get_rank()]
        # DistributedDataParallel averages over the ranks.
        opt.step([closure(opt, model, 2, x) for x in mine])
        if local:
            single.step([closure(single, alone, 4, x) for half in halves for x in half])
        else:
            single.step([closure(single, alone, 4, *both) for both in zip(*halves, strict=True)])
    return weights(model), weights(alone)


def accumulated(name: str, local: bool, by_flag: bool = False) -> list[Tensor]:
    """Accumulate micro-batches in the closure, all but the last without reduction."""
    model = DDP(net(), gradient_as_bucket_view=True)
    opt = make_method(name, base_of(model, "momentum"), model=model, local=local)
    for t in range(STEPS):
        x = local_batch(t, dist.get_rank())
        parts = x.split([2, len(x) - 2])

        def closure(parts: Any = parts, size: int = len(x)) -> Tensor:
            losses = []
            for number, part in enumerate(parts):
                is_last = number == len(parts) - 1
                if by_flag:  # as some programs do instead of no_sync
                    model.require_backward_grad_sync = is_last
                with first_pass(model, not by_flag and not is_last):
                    loss = model(part).sum() / size
                    loss.backward()
                    losses.append(loss.detach())
            return sum(losses)

        opt.step(closure)
    return weights(model)


def averaged_first_pass(kind: str) -> str:
    """Return the error message for a first pass that is reduced in spite of `local=True`."""
    model = DDP(net())
    opt = wsam.WSAM(base_of(model, "momentum"), model=model, local=True)
    try:
        if kind == "flag":
            accumulated("wsam", local=True, by_flag=True)
        loss = model(local_batch(0, dist.get_rank())).mean()
        with first_pass(model, kind == "forward outside"):
            loss.backward()
        opt.ascend()
    except RuntimeError as error:
        return str(error)
    return ""


def perturbed_with_backward(buckets: str) -> tuple[bool, bool]:
    """Return whether a backward pass inside `perturbed()` leaves gradients and weights unchanged."""
    model = DDP(net(), **VIEWS[buckets])
    opt = wsam.SAM(base_of(model, "momentum"))
    x = local_batch(0, dist.get_rank())
    for _ in range(3):  # the first pass rebuilds the buckets
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
    """Train with a GradScaler; the first pass of step 1 overflows on rank 1 only."""
    model = DDP(net(torch.float32))
    opt = wsam.WSAM(base_of(model, "momentum"), model=model, local=local)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    kept: list[list[Tensor]] = []
    for t in range(3):
        x = local_batch(t, dist.get_rank(), torch.float32)
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
    """A model with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Return one loss for each sample."""
        return self.net(x).square().sum(1)


def statistics(local: bool) -> list[list[Tensor]]:
    """Return running statistics after three steps of SAM at lr 0, and after plain forward passes."""
    torch.manual_seed(0)
    models = [DDP(copy.deepcopy(m)) for m in [Normed().double()] * 2]
    opt = wsam.SAM(torch.optim.SGD(models[0].parameters(), lr=0.0), model=models[0], local=local)
    for t in range(3):
        x = local_batch(t, dist.get_rank())
        step(opt, models[0], x, "closure")
        models[1](x).mean().backward()
    return [[b.clone() for b in model.buffers()] for model in models]


def lost_rank(how: str, local: bool, timeout: float) -> tuple[str, float, bool]:
    """Rank 1 hangs or dies in its second pass.

    Returns:
        The error of rank 0, the seconds it waited, and whether its weights are restored.
    """
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    model = DDP(net(), process_group=group)
    opt = wsam.WSAM(base_of(model, "momentum"), model=model, local=local)
    x, passes = local_batch(0, dist.get_rank()), 0
    step(opt, model, x, "closure")
    before = weights(model)

    def closure() -> Tensor:
        nonlocal passes
        passes += 1
        if passes == 2 and dist.get_rank() == 1:
            if how == "dies":
                os._exit(9)
            time.sleep(timeout + 2)
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
