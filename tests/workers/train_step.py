"""Tasks with `train_step` under DistributedDataParallel and FSDP2."""

from typing import Any

import torch
import torch.distributed as dist
from helpers import make_method
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import wsam

from .problem import STEPS, base_of, local_batch, net
from .sharded import weights

Reductions = list[int]


def ddp(
    name: str,
    *,
    local: bool = False,
    scaled: bool = False,
    method: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Train; return the weights, and how many backward passes reduced gradients in each step."""
    model = DDP(net(), gradient_as_bucket_view=True)
    reductions: Reductions = []
    model.register_comm_hook(reductions, count_reductions)
    base = base_of(model, "momentum")
    opt = make_method(name, base, model=model, local=local, all_samples=True, **(method or {}))
    if scaled:
        options["scaler"] = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return train(model, opt, reductions, **options)


def count_reductions(
    reductions: Reductions, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    reductions[-1] += bucket.is_last()
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def fsdp2(name: str, **options: Any) -> Any:
    model = net()
    for layer in (model.first, model.second):
        fully_shard(layer)
    fully_shard(model)
    reductions: Reductions = []

    def count_reduced(p: Tensor) -> None:
        reductions[-1] += 1

    model.scale.register_post_accumulate_grad_hook(count_reduced)
    opt = make_method(name, base_of(model, "momentum"), model=model, all_samples=True)
    return train(model, opt, reductions, **options)


def train(model: Any, opt: Any, reductions: Reductions, **options: Any) -> Any:
    def loss_fn(x: Tensor) -> tuple[Tensor, Tensor]:
        each = model(x)
        return opt.select(each), each

    step = wsam.train_step(opt, loss_fn, **options)
    for t in range(STEPS):
        reductions.append(0)
        _, outputs = step(local_batch(t, dist.get_rank()))
        assert outputs.shape == (5,)
    return weights(model), reductions
