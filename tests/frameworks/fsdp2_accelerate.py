"""Program of test_accelerate: two processes that shard the model (FSDP2) save whole weights."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import ddp_pair
import torch
from accelerate import ParallelismConfig
from accelerate_helpers import Run, shard_on_cpu
from framework_helpers import net, new_scaler, reset_accelerate, wsam_over_adamw, wsam_over_sgd
from torch import Tensor


def sharded(make: Callable[..., Any], parallelism: Any = None, **options: Any) -> Run:
    reset_accelerate()
    setup = functools.partial(shard_on_cpu, parallelism=parallelism)
    body = net(torch.float64)
    whole = [weakref.ref(p) for p in body.parameters()]
    run = Run(make, accumulate=2, size=2, model=body, setup=setup, **options)
    run.scheduler.step = lambda: None  # it would step once for each process
    assert run.accelerator.num_processes == 2
    assert not any(reference() for reference in whole), "unsharded parameters are still referenced"
    return run


def weights(run: Run) -> dict[str, Tensor]:
    return {key: shard.full_tensor() for key, shard in run.model.state_dict().items()}


def resumed(folder: str) -> bool:
    """Whether a run that is loaded from a checkpoint ends with the weights of one that went on."""
    first = sharded(wsam_over_adamw).epochs()
    first.accelerator.save_state(folder)
    first.epochs()
    second = sharded(wsam_over_adamw)
    second.accelerator.load_state(folder)
    assert second.optimizer.param_groups[0]["sam_step"] == 3
    second.epochs()
    one, other = weights(first), weights(second)
    return all(torch.equal(one[key], other[key]) for key in one)


def clipping_error() -> str:
    run = sharded(wsam_over_sgd)
    batches = iter(run.loader)
    for _ in range(2):
        with run.accelerator.accumulate(run.model):
            run.passes.backward(run.loss, *next(batches))
    run.accelerator.clip_grad_norm_(run.model.parameters(), 0.1)
    try:
        run.optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


def work(rank: int, folder: str) -> None:
    clipped = functools.partial(wsam_over_sgd, max_norm=0.3)
    config = ParallelismConfig(dp_shard_size=2)
    found = {
        "dp_shard_size": weights(sharded(wsam_over_sgd, config).epochs()),
        "sgd": weights(sharded(clipped).epochs()),
        "adamw": weights(sharded(wsam_over_adamw).epochs()),
        "scaler": weights(sharded(wsam_over_sgd, scaler=new_scaler()).epochs()),
        "resumed": resumed(f"{folder}/checkpoint"),
        "clipping_error": clipping_error(),
    }
    if rank == 0:
        torch.save(found, f"{folder}/two.pt")


if __name__ == "__main__":
    ddp_pair.start(work)
