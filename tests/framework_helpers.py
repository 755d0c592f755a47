"""Helpers of the framework tests: a small problem, and the plain loops to compare with."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import wsam

Batch = tuple[Tensor, Tensor]
Step = Sequence[Batch]
"""The micro-batches of a step."""


def samples(count: int = 24, dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 5, generator=generator, dtype=dtype)
    return TensorDataset(x, torch.randint(0, 3, (count,), generator=generator))


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def split_into_steps(
    data: TensorDataset, size: int, accumulate: int = 1, epochs: int = 1
) -> list[Step]:
    """Return batches in order, `accumulate` of them per step; an epoch's last step may have fewer."""
    x, y = data.tensors
    batches = list(zip(x.split(size), y.split(size), strict=True))
    return [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)] * epochs


def wsam_over_sgd(params: Iterable[nn.Parameter], **options: Any) -> wsam.SharpnessAware:
    base = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    return wsam.WSAM(base, rho=0.1, gamma=0.8, **options)


def wsam_over_adamw(params: Iterable[nn.Parameter], **options: Any) -> wsam.SharpnessAware:
    return wsam.WSAM(torch.optim.AdamW(params, lr=0.02), rho=0.1, gamma=0.5, **options)


def plain_loop(
    model: nn.Module,
    optimizer: wsam.SharpnessAware,
    steps: Iterable[Step],
    *,
    accumulate: int = 1,
    after_step: Callable[[], Any] = lambda: None,
    autocast: torch.dtype | None = None,
) -> list[float]:
    """Train with `step(closure)`, all micro-batches of a step inside the closure; return losses."""
    losses = []
    for batches in steps:

        def closure(batches: Step = batches) -> Tensor:
            total = torch.zeros(())
            for x, y in batches:
                with autocast_to(autocast):
                    per_sample = cross_entropy(model(x), y, reduction="none")
                    loss = optimizer.select(per_sample) / accumulate
                loss.backward()
                total = total + loss.detach()
            return total

        losses.append(float(optimizer.step(closure)))
        after_step()
    return losses


def train_plain(
    make: Callable[..., Any] = wsam_over_sgd, count: int = 24, accumulate: int = 1, **options: Any
) -> Any:
    """Train in a plain loop as the framework tests do: two epochs with a scheduler."""
    model = net()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    steps = split_into_steps(samples(count), 4, accumulate, epochs=2)
    losses = plain_loop(
        model, optimizer, steps, accumulate=accumulate, after_step=scheduler.step, **options
    )
    return model, optimizer, losses


def scaled_loop(
    model: nn.Module,
    optimizer: wsam.SharpnessAware,
    steps: Iterable[Step],
    scaler: torch.amp.GradScaler,
    *,
    accumulate: int = 1,
    after_step: Callable[[], Any] = lambda: None,
    autocast: torch.dtype | None = torch.float16,
) -> None:
    """Train with a GradScaler, as docs/recipes.md shows."""
    for batches in steps:

        def one_pass(batches: Step = batches) -> None:
            for x, y in batches:
                with autocast_to(autocast):
                    loss = cross_entropy(model(x), y) / accumulate
                scaler.scale(loss).backward()

        optimizer.zero_grad()
        optimizer.begin()
        one_pass()
        optimizer.ascend(grad_scale=scaler.get_scale())
        one_pass()
        scaler.unscale_(optimizer)
        optimizer.descend()
        scaler.step(optimizer)
        scaler.update()
        after_step()


def new_scaler(scale: float = 1024.0) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale)


def autocast_to(dtype: torch.dtype | None) -> Any:
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


def gap(weights: dict[str, Tensor], model: nn.Module) -> float:
    """Return the largest difference between saved weights and those of a model."""
    return max(float((weights[key] - w).abs().max()) for key, w in model.state_dict().items())


def pretend_ddp(model: nn.Module) -> nn.Module:
    """Give a model the attributes of DistributedDataParallel that `local=True` checks."""
    model.require_backward_grad_sync = True
    model.find_unused_parameters = model.static_graph = False
    return model


def reset_accelerate() -> None:
    """Reset the settings that Accelerate keeps for the whole process."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def run_script(name: str, *arguments: str, timeout: float = 240.0) -> str:
    """Run a program of tests/frameworks in a new process and return its output."""
    tests = Path(__file__).parent
    python_path = os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(tests / "frameworks" / name), *arguments],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": python_path.rstrip(os.pathsep),
            "PYTHONWARNINGS": "ignore",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
