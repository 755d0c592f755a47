"""What the frameworks' tests share: a small problem, and the plain loop they are compared with."""

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
Window = Sequence[Batch]


def samples(count: int = 24, dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 5, generator=generator, dtype=dtype)
    return TensorDataset(x, torch.randint(0, 3, (count,), generator=generator))


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def windows(data: TensorDataset, size: int, every: int = 1, epochs: int = 1) -> list[Window]:
    """The batches in order, as many to a step as are accumulated; the last step may have fewer."""
    x, y = data.tensors
    batches = list(zip(x.split(size), y.split(size), strict=True))
    return [batches[i : i + every] for i in range(0, len(batches), every)] * epochs


def wsam_over_sgd(params: Iterable[nn.Parameter], **options: Any) -> wsam.SharpnessAware:
    base = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    return wsam.WSAM(base, rho=0.1, gamma=0.8, **options)


def plain_loop(
    model: nn.Module,
    optimizer: wsam.SharpnessAware,
    steps: Iterable[Window],
    *,
    every: int = 1,
    after: Callable[[], Any] = lambda: None,
    autocast: torch.dtype | None = None,
) -> list[float]:
    """The loop a user writes by hand: all micro-batches of a step inside the closure."""
    losses = []
    for window in steps:

        def closure(window: Window = window) -> Tensor:
            total = torch.zeros(())
            for x, y in window:
                with mixed(autocast):
                    loss = optimizer.select(cross_entropy(model(x), y, reduction="none")) / every
                loss.backward()
                total = total + loss.detach()
            return total

        losses.append(float(optimizer.step(closure)))
        after()
    return losses


def by_hand(
    make: Callable[..., Any] = wsam_over_sgd, count: int = 24, every: int = 1, **options: Any
) -> Any:
    """The same training as in the frameworks' tests, two epochs with a scheduler, in a plain loop."""
    model = net()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    steps = windows(samples(count), 4, every, epochs=2)
    losses = plain_loop(model, optimizer, steps, every=every, after=scheduler.step, **options)
    return model, optimizer, losses


def scaled_loop(
    model: nn.Module,
    optimizer: wsam.SharpnessAware,
    steps: Iterable[Window],
    scaler: torch.amp.GradScaler,
    *,
    every: int = 1,
    after: Callable[[], Any] = lambda: None,
    autocast: torch.dtype | None = torch.float16,
) -> None:
    """The same by hand with a GradScaler, as the recipes show it."""
    for window in steps:

        def one_pass(window: Window = window) -> None:
            for x, y in window:
                with mixed(autocast):
                    loss = cross_entropy(model(x), y) / every
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
        after()


def new_scaler(scale: float = 1024.0) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale)


def mixed(dtype: torch.dtype | None) -> Any:
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


def pretend_ddp(model: nn.Module) -> nn.Module:
    """A model that passes for one in DistributedDataParallel, as `local=True` wants it."""
    model.require_backward_grad_sync = True
    model.find_unused_parameters = model.static_graph = False
    return model


def forget_accelerators() -> None:
    """Accelerate keeps its settings in one place for the whole process: begin afresh."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def run_script(name: str, *arguments: str, timeout: float = 240.0) -> str:
    """Run a program of this folder, as a user would run one, and return what it printed."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "frameworks" / name), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
