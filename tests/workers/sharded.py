"""Tasks for ranks that hold shards: FSDP2 (`fully_shard`) and tensor parallelism."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from helpers import batch, member
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import wsam

from .problem import STEPS, Net, base_of, net, share


def whole(tensor: Tensor) -> Tensor:
    """The tensor out of its shards."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def weights(model: nn.Module) -> list[Tensor]:
    return [whole(p) for p in model.parameters()]


def step(opt: wsam.SharpnessAware, loss: Callable[[], Tensor], style: str = "closure") -> None:
    def backward() -> Tensor:
        value = loss()
        value.backward()
        return value.detach()

    if style == "closure":
        opt.step(backward)
        return
    opt.zero_grad()
    opt.begin()
    backward()
    opt.ascend()
    backward()
    opt.descend()
    opt.step()


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    """Each layer a group of its own, the rest another, as a user shards a model."""
    for layer in (model.first, model.second):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def train(name: str, *, style: str = "closure", base: str = "momentum", **options: Any) -> Any:
    model = sharded(net())
    opt = member(name, base_of(model, base), **options)
    for t in range(STEPS):
        x = share(t, dist.get_rank())
        step(opt, lambda x=x: opt.select(model(x)), style)
    return weights(model)


def restored(name: str) -> tuple[bool, bool, int]:
    """Whether weights move and come back bit for bit, by copy into the very same shards."""
    model = sharded(net(torch.float32))
    opt = member(name, base_of(model, "momentum"), rho=0.3)
    shards = [p.to_local() for p in model.parameters()]
    before = [s.detach().clone() for s in shards]
    x = share(0, dist.get_rank(), torch.float32)
    opt.select(model(x)).backward()
    opt.ascend()
    moved = any(not torch.equal(s, b) for s, b in zip(shards, before, strict=True))
    opt.select(model(x)).backward()
    opt.descend()
    back = all(torch.equal(s, b) for s, b in zip(shards, before, strict=True))
    now = [p.to_local() for p in model.parameters()]
    same = sum(a.data_ptr() == b.data_ptr() for a, b in zip(shards, now, strict=True))
    return moved, back, same


def poisoned(name: str) -> tuple[int, bool, bool]:
    """One rank's data are infinite at step 1; return skips, and whether weights stayed and moved on."""
    model = sharded(net())
    opt = member(name, base_of(model, "momentum"), nonfinite="skip")
    kept = []
    for t in range(3):
        x = share(t, dist.get_rank()) * (torch.inf if t == 1 and dist.get_rank() == 1 else 1.0)
        step(opt, lambda x=x: opt.select(model(x)))
        kept.append(weights(model))
    equal = [
        all(torch.equal(u, v) for u, v in zip(kept[i], kept[i + 1], strict=True)) for i in range(2)
    ]
    return opt.skipped, equal[0], equal[1]


def accumulated(name: str, lean: bool) -> list[Tensor]:
    """Micro-batches inside the closure; only the last one reduces."""
    model: Any = sharded(net())
    opt = member(name, base_of(model, "momentum"), lean=lean)
    for t in range(STEPS):
        x = share(t, dist.get_rank())
        parts = x.split([2, len(x) - 2])

        def closure(parts: Any = parts, size: int = len(x)) -> Tensor:
            losses = []
            for number, part in enumerate(parts):
                model.set_requires_gradient_sync(number == len(parts) - 1)
                loss = model(part).sum() / size
                loss.backward()
                losses.append(loss.detach())
            return sum(losses)

        opt.step(closure)
    return weights(model)


def micro_batches(name: str) -> tuple[list[Tensor], list[Tensor]]:
    """A perturbation for each micro-batch, with some parameters plain; and the same in one process."""
    alone, model = net(), net()
    fully_shard(model.second)
    opt = member(name, base_of(model, "momentum"))
    judge = member(name, base_of(alone, "momentum"))

    def closure(of: wsam.SharpnessAware, run: nn.Module, x: Tensor) -> Callable[[], Tensor]:
        def backward() -> Tensor:
            loss = of.select(run(x)) / 2
            loss.backward()
            return loss

        return backward

    for t in range(3):
        # All ranks have the same samples: then plain gradients need no reduction.
        opt.step([closure(opt, model, x) for x in batch(t).chunk(2)])
        judge.step([closure(judge, alone, x) for x in batch(t).chunk(2)])
    return weights(model), weights(alone)


def average_plain(model: nn.Module) -> None:
    """What a user must do for parameters that nobody reduces."""
    for p in model.parameters():
        if not isinstance(p, DTensor) and p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def mixed(name: str, lean: bool, kind: str) -> list[Tensor]:
    """Some parameters sharded, some plain or replicated DTensors."""
    model = net()
    if kind == "plain":
        fully_shard(model.first)
    elif kind == "ignored":
        fully_shard(model, ignored_params={model.second.weight, model.scale})
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model.scale = nn.Parameter(distribute_tensor(model.scale.detach(), mesh, [Replicate()]))
        fully_shard(model.first, mesh=mesh)
    opt = member(name, base_of(model, "momentum"), lean=lean)
    for t in range(STEPS):

        def closure(t: int = t) -> Tensor:
            loss = opt.select(run(model, share(t, dist.get_rank()), kind))
            loss.backward()
            average_plain(model)
            if kind == "replicated":
                part = model.scale.grad.to_local() / dist.get_world_size()
                model.scale.grad = DTensor.from_local(part, mesh, [Partial()])
            return loss

        opt.step(closure)
    return weights(model)


def run(model: Net, x: Tensor, kind: str) -> Tensor:
    if kind != "replicated":
        return model(x)
    scaled = model.second(torch.tanh(model.first(x))) * model.scale.to_local()
    return (scaled - x[:, :3]).square().sum(1)


def low_precision(name: str) -> tuple[float, float]:
    """bfloat16 inside, float32 weights: distances to the same in one process, and travelled.

    In one process the weights are cast by hand and each rank's share runs by itself.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    start = [p.detach().clone() for p in net(torch.float32).parameters()]
    model, alone = sharded(net(torch.float32), mp_policy=policy), net(torch.float32)
    opt = member(name, base_of(model, "momentum"))
    judge = member(name, base_of(alone, "momentum"))
    names = [key for key, _ in alone.named_parameters()]

    def cast(x: Tensor) -> Tensor:
        low = {k: p.bfloat16() for k, p in zip(names, alone.parameters(), strict=True)}
        return judge.select(torch.func.functional_call(alone, low, (x.bfloat16(),)))

    for t in range(STEPS):
        shares = [share(t, r, torch.float32) for r in range(2)]
        mine = shares[dist.get_rank()]
        step(opt, lambda x=mine: opt.select(model(x)))
        step(judge, lambda xs=shares: sum(cast(x) for x in xs) / 2)
    flat = [torch.cat([p.reshape(-1) for p in w]) for w in (weights(model), weights(alone), start)]
    dtypes = {p.dtype for p in model.parameters()}
    assert dtypes == {torch.float32}
    return float((flat[0] - flat[1]).norm()), float((flat[1] - flat[2]).norm())


class Normed(Net):
    """With a norm whose weights are replicated while its inputs are sharded."""

    def __init__(self) -> None:
        super().__init__(hidden=8)
        self.norm = nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        """Return one loss for each sample."""
        return super().forward(self.norm(x))


def normed() -> Normed:
    torch.manual_seed(1)
    return Normed().double()


def tensor_parallel(
    name: str, lean: bool, style: str
) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """Layers split by columns and rows, a norm with sharded inputs, a plain parameter; and alone.

    Also returns the placements that the gradients had after a backward pass.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, alone = normed(), normed()
    parallelize_module(model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    distribute_module(model.norm, mesh)
    forward = model.norm.forward

    def over_samples(x: Tensor) -> Tensor:
        spread = DTensor.from_local(x, mesh, [Replicate()]).redistribute(mesh, [Shard(0)])
        return forward(spread).full_tensor()

    model.norm.forward = over_samples  # type: ignore[method-assign]
    opt = member(name, base_of(model, "momentum"), lean=lean)
    judge = member(name, base_of(alone, "momentum"), lean=lean)
    opt.zero_grad()
    model(batch(0)).mean().backward()
    grads = [p.grad for p in model.parameters()]
    kinds = sorted({str(g.placements) for g in grads if isinstance(g, DTensor)})
    opt.zero_grad()
    for t in range(STEPS):
        step(opt, lambda t=t: opt.select(model(batch(t))), style)
        step(judge, lambda t=t: judge.select(alone(batch(t))), style)
    return weights(model), weights(alone), kinds


def two_dimensions(name: str, lean: bool) -> tuple[list[Tensor], list[str]]:
    """FSDP2 over tensor parallelism, on a mesh of two by two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model = net(hidden=8)
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    parallelize_module(model, mesh["model"], plan)
    fully_shard(model, mesh=mesh["data"], ignored_params={model.scale})
    opt = member(name, base_of(model, "momentum"), lean=lean)
    for t in range(STEPS):

        def closure(t: int = t) -> Tensor:
            loss = opt.select(model(share(t, mesh["data"].get_local_rank())))
            loss.backward()
            average_plain(model)
            return loss

        opt.step(closure)
    kinds = {str(p.placements) for p in model.parameters() if isinstance(p, DTensor)}
    return weights(model), sorted(kinds)


def hybrid(name: str, lean: bool) -> list[Tensor]:
    """Shards over two ranks, replicated twice; ranks of a column see the same samples."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = sharded(net(), mesh=mesh)
    opt = member(name, base_of(model, "momentum"), lean=lean)
    for t in range(STEPS):
        x = share(t, dist.get_rank() % 2)
        step(opt, lambda x=x: opt.select(model(x)))
    return weights(model)


def first_version(whole: bool) -> str:
    """What is said of FSDP's first version."""
    device = torch.device("cpu")
    model = FullyShardedDataParallel(net(), use_orig_params=not whole, device_id=device)
    try:
        wsam.SAM(base_of(model, "momentum"))
    except TypeError as error:
        return str(error)
    return ""
