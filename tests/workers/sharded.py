"""Tasks with sharded parameters: FSDP2 (`fully_shard`) and tensor parallelism."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from helpers import batch, make_method
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

from .problem import STEPS, Net, base_of, local_batch, net


def whole(tensor: Tensor) -> Tensor:
    """Return the unsharded tensor."""
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
    """Shard each layer, then the rest."""
    for layer in (model.first, model.second):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def train(name: str, *, style: str = "closure", base: str = "momentum", **options: Any) -> Any:
    model = sharded(net())
    opt = make_method(name, base_of(model, base), **options)
    for t in range(STEPS):
        x = local_batch(t, dist.get_rank())
        step(opt, lambda x=x: opt.select(model(x)), style)
    return weights(model)


def geometry(kind: wsam.Geometry, base: str) -> tuple[list[Tensor], list[Tensor]]:
    """Train WSAM with a geometry; return the weights, and those of one process."""
    model, alone = sharded(net()), net()
    options: dict[str, Any] = {"geometry": kind, "gamma": 0.6, "rho": 0.1}
    opt = wsam.WSAM(base_of(model, base), **options)
    single = wsam.WSAM(base_of(alone, base), **options)
    for t in range(STEPS):
        x = local_batch(t, dist.get_rank())
        step(opt, lambda x=x: model(x).mean())
        step(single, lambda t=t: alone(batch(t)).mean())
    return weights(model), weights(alone)


def restored(name: str) -> tuple[bool, bool, int]:
    """Return whether weights move, whether they return bitwise, and how many storages are the same."""
    model = sharded(net(torch.float32))
    opt = make_method(name, base_of(model, "momentum"), rho=0.3)
    shards = [p.to_local() for p in model.parameters()]
    before = [s.detach().clone() for s in shards]
    x = local_batch(0, dist.get_rank(), torch.float32)
    opt.select(model(x)).backward()
    opt.ascend()
    moved = any(not torch.equal(s, b) for s, b in zip(shards, before, strict=True))
    opt.select(model(x)).backward()
    opt.descend()
    back = all(torch.equal(s, b) for s, b in zip(shards, before, strict=True))
    now = [p.to_local() for p in model.parameters()]
    same = sum(a.data_ptr() == b.data_ptr() for a, b in zip(shards, now, strict=True))
    return moved, back, same


def evaluated(name: str) -> tuple[list[float], list[float]]:
    """Evaluate the model at w, at w + d and at w again; return the losses, and those of one process."""

    def losses(opt: wsam.SharpnessAware, run: nn.Module, x: Tensor) -> list[float]:
        run(x).mean().backward()

        @torch.no_grad()
        def evaluate() -> float:
            loss = run(x).mean()
            dist.all_reduce(loss)
            return float(loss) / dist.get_world_size()

        found = [evaluate()]
        with opt.perturbed():
            found.append(evaluate())
        return [*found, evaluate()]

    model, alone = fully_shard(net()), net()
    opt = make_method(name, base_of(model, "momentum"), model=model, rho=0.5)
    single = make_method(name, base_of(alone, "momentum"), rho=0.5)
    return losses(opt, model, local_batch(0, dist.get_rank())), losses(single, alone, batch(0))


def gathered(name: str, reason: str, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Train where FSDP2 keeps gathered weights; return the weights, and those of one process."""
    model, alone = fully_shard(net()), net()
    model.set_reshard_after_backward(reason != "after backward")
    opt = make_method(name, base_of(model, "momentum"), model=model, **options)
    single = make_method(name, base_of(alone, "momentum"), **options)
    for t in range(STEPS):
        x = local_batch(t, dist.get_rank())
        if reason == "after an evaluation":
            with torch.no_grad():
                model(x)
        step(opt, lambda x=x: opt.select(model(x)))
        step(single, lambda t=t: sum(single.select(alone(local_batch(t, r))) / 2 for r in range(2)))
    return weights(model), weights(alone)


def overflow_on_one_rank(name: str) -> tuple[int, bool, bool]:
    """Train with infinite data on rank 1 at step 1.

    Returns:
        The number of skipped steps, and whether the weights stayed at step 1 and at step 2.
    """
    model = sharded(net())
    opt = make_method(name, base_of(model, "momentum"), nonfinite="skip")
    kept = []
    for t in range(3):
        x = local_batch(t, dist.get_rank()) * (
            torch.inf if t == 1 and dist.get_rank() == 1 else 1.0
        )
        step(opt, lambda x=x: opt.select(model(x)))
        kept.append(weights(model))
    equal = [
        all(torch.equal(u, v) for u, v in zip(kept[i], kept[i + 1], strict=True)) for i in range(2)
    ]
    return opt.skipped, equal[0], equal[1]


def accumulated(name: str) -> list[Tensor]:
    """Accumulate micro-batches in the closure; only the last one reduces."""
    model: Any = sharded(net())
    opt = make_method(name, base_of(model, "momentum"))
    for t in range(STEPS):
        x = local_batch(t, dist.get_rank())
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
    """Perturb for each micro-batch; return the weights, and those of one process."""
    alone, model = net(), net()
    fully_shard(model.second)
    opt = make_method(name, base_of(model, "momentum"))
    single = make_method(name, base_of(alone, "momentum"))

    def closure(of: wsam.SharpnessAware, run: nn.Module, x: Tensor) -> Callable[[], Tensor]:
        def backward() -> Tensor:
            loss = of.select(run(x)) / 2
            loss.backward()
            return loss

        return backward

    for t in range(3):
        # All ranks have the same samples, so unsharded gradients need no reduction.
        opt.step([closure(opt, model, x) for x in batch(t).chunk(2)])
        single.step([closure(single, alone, x) for x in batch(t).chunk(2)])
    return weights(model), weights(alone)


def average_plain(model: nn.Module) -> None:
    """Average the gradients of unsharded parameters, which FSDP2 does not reduce."""
    for p in model.parameters():
        if not isinstance(p, DTensor) and p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def mixed(name: str, kind: str) -> list[Tensor]:
    """Train with some parameters sharded, others plain or replicated DTensors."""
    model = net()
    if kind == "plain":
        fully_shard(model.first)
    elif kind == "ignored":
        fully_shard(model, ignored_params={model.second.weight, model.scale})
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model.scale = nn.Parameter(distribute_tensor(model.scale.detach(), mesh, [Replicate()]))
        fully_shard(model.first, mesh=mesh)
    opt = make_method(name, base_of(model, "momentum"))
    for t in range(STEPS):

        def closure(t: int = t) -> Tensor:
            loss = opt.select(run(model, local_batch(t, dist.get_rank()), kind))
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
    """Train with MixedPrecisionPolicy in bfloat16, and in one process with weights cast by hand.

    Returns:
        The distance between the two results, and from the initial weights.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    start = [p.detach().clone() for p in net(torch.float32).parameters()]
    model, alone = sharded(net(torch.float32), mp_policy=policy), net(torch.float32)
    opt = make_method(name, base_of(model, "momentum"))
    single = make_method(name, base_of(alone, "momentum"))
    names = [key for key, _ in alone.named_parameters()]

    def cast(x: Tensor) -> Tensor:
        low = {k: p.bfloat16() for k, p in zip(names, alone.parameters(), strict=True)}
        return single.select(torch.func.functional_call(alone, low, (x.bfloat16(),)))

    for t in range(STEPS):
        shares = [local_batch(t, r, torch.float32) for r in range(2)]
        mine = shares[dist.get_rank()]
        step(opt, lambda x=mine: opt.select(model(x)))
        step(single, lambda xs=shares: sum(cast(x) for x in xs) / 2)
    flat = [torch.cat([p.reshape(-1) for p in w]) for w in (weights(model), weights(alone), start)]
    dtypes = {p.dtype for p in model.parameters()}
    assert dtypes == {torch.float32}
    return float((flat[0] - flat[1]).norm()), float((flat[1] - flat[2]).norm())


class Normed(Net):
    """A network with a norm whose weights are replicated while its inputs are sharded."""

    def __init__(self) -> None:
        super().__init__(hidden=8)
        self.norm = nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        """Return one loss for each sample."""
        return super().forward(self.norm(x))


def normed() -> Normed:
    torch.manual_seed(1)
    return Normed().double()


def tensor_parallel(name: str, style: str) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """Train with layers split by columns and rows, a norm with sharded inputs, a plain parameter.

    Returns:
        The weights, those of one process, and the placements of the gradients after backward.
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
    opt = make_method(name, base_of(model, "momentum"))
    single = make_method(name, base_of(alone, "momentum"))
    opt.zero_grad()
    model(batch(0)).mean().backward()
    grads = [p.grad for p in model.parameters()]
    kinds = sorted({str(g.placements) for g in grads if isinstance(g, DTensor)})
    opt.zero_grad()
    for t in range(STEPS):
        step(opt, lambda t=t: opt.select(model(batch(t))), style)
        step(single, lambda t=t: single.select(alone(batch(t))), style)
    return weights(model), weights(alone), kinds


def two_dimensions(name: str) -> tuple[list[Tensor], list[str]]:
    """Train with FSDP2 over tensor parallelism, on a mesh of two by two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model = net(hidden=8)
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    parallelize_module(model, mesh["model"], plan)
    fully_shard(model, mesh=mesh["data"], ignored_params={model.scale})
    opt = make_method(name, base_of(model, "momentum"))
    for t in range(STEPS):

        def closure(t: int = t) -> Tensor:
            loss = opt.select(model(local_batch(t, mesh["data"].get_local_rank())))
            loss.backward()
            average_plain(model)
            return loss

        opt.step(closure)
    kinds = {str(p.placements) for p in model.parameters() if isinstance(p, DTensor)}
    return weights(model), sorted(kinds)


def hybrid(name: str) -> list[Tensor]:
    """Train with shards over two ranks, replicated twice."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = sharded(net(), mesh=mesh)
    opt = make_method(name, base_of(model, "momentum"))
    for t in range(STEPS):
        x = local_batch(t, dist.get_rank() % 2)
        step(opt, lambda x=x: opt.select(model(x)))
    return weights(model)


def fsdp1_error(whole: bool) -> str:
    """Return the error message for FSDP's first version."""
    device = torch.device("cpu")
    model = FullyShardedDataParallel(net(), use_orig_params=not whole, device_id=device)
    try:
        wsam.SAM(base_of(model, "momentum"))
    except TypeError as error:
        return str(error)
    return ""
