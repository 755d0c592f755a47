"""SAM implementations of other libraries, used as their documentation shows.

pytorch_optimizer is measured if it is installed. Others are loaded from a file, whose code is executed:
it must define a class `SAM(params, base_class, ...)` or `WeightedSAM(model, base, ...)`.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from wsam.bench.cases import (
    LOOKSAM_INTERVAL,
    PEER,
    Case,
    Step,
    StepFactory,
    capture_graph,
    forward_backward,
    warm_up,
)
from wsam.bench.workload import BASE_ARGS, GAMMA, RHO, Workload
from wsam.lab.errors import UserCodeError
from wsam.lab.files import file_sha256
from wsam.lab.user_code import load

_BatchNorm = nn.modules.batchnorm._BatchNorm


def disable_running_stats(model: nn.Module) -> None:
    """Freeze BatchNorm statistics by setting the momentum to zero, as SAM's README recommends."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.__dict__.setdefault("backup_momentum", module.momentum)
            module.momentum = 0.0


def enable_running_stats(model: nn.Module) -> None:
    """Undo `disable_running_stats`."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and "backup_momentum" in module.__dict__:
            module.momentum = module.__dict__.pop("backup_momentum")


def first_second_step(workload: Workload, form: str, model: nn.Module, optimizer: Any) -> Step:
    """Return a step with `first_step` and `second_step`, BatchNorm frozen in the second pass."""
    closure = forward_backward(workload, workload.forward(model, form), torch.mean)

    def step() -> None:
        enable_running_stats(model)
        closure()
        optimizer.first_step(zero_grad=True)
        disable_running_stats(model)
        closure()
        optimizer.second_step(zero_grad=True)

    return capture_peer(step, model) if form == "captured" else step


def closure_step(
    workload: Workload,
    form: str,
    model: nn.Module,
    optimizer: Any,
    first_pass: bool,
    period: int = 1,
) -> Step:
    """Return ``step(closure)``; with `first_pass` the closure is called once before."""
    backward = forward_backward(workload, workload.forward(model, form), torch.mean)

    def closure() -> object:
        optimizer.zero_grad()
        return backward()

    def step() -> None:
        if first_pass:
            closure()
        optimizer.step(closure)

    return capture_peer(step, model, period) if form == "captured" else step


class NotCapturableError(Exception):
    """A step that a CUDA graph cannot repeat."""


def capture_peer(step: Step, model: nn.Module, period: int = 1) -> Step:
    """Capture the steps of another library in CUDA graphs by hand.

    Args:
        step: Makes one step.
        model: Its parameters must stay at the same addresses.
        period: If the steps of a period differ, each gets a graph of its own.

    Raises:
        NotCapturableError: The step synchronizes with the host, or moves the weights to other memory.
    """
    params = list(model.parameters())
    warm_up(step, 2 * period)
    check_addresses(lambda: warm_up(step, 1), params)
    warm_up(step, period - 1)  # the graphs begin at the first step of a period
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        warm_up(step, period)
    except RuntimeError as error:
        raise NotCapturableError(f"synchronizes with the host ({first_line(error)})") from error
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    try:
        graphs = [capture_graph(step, warm=0) for _ in range(period)]
    except RuntimeError as error:
        raise NotCapturableError(first_line(error)) from error
    return graphs[0] if period == 1 else in_turn(graphs)


def check_addresses(step: Step, params: list[nn.Parameter]) -> None:
    """Make a step and check that it leaves the parameters where they are.

    Raises:
        NotCapturableError: A graph would read the old addresses.
    """
    before = [p.data_ptr() for p in params]
    step()
    if [p.data_ptr() for p in params] != before:
        raise NotCapturableError("each step moves the weights to other memory")


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().partition("\n")[0]


def in_turn(steps: list[Step]) -> Step:
    """Return a function that calls the next step each time."""
    turns = itertools.cycle(steps)

    def step() -> None:
        next(turns)()

    return step


def pytorch_optimizer_step(name: str, foreach: bool | None = None) -> StepFactory:
    """Return a factory for steps of one of pytorch_optimizer's methods."""

    def make(workload: Workload, form: str) -> Step:
        import pytorch_optimizer as package

        model = workload.build_model()
        options: dict[str, Any] = {"base_optimizer": torch.optim.SGD, "rho": RHO, **BASE_ARGS}
        options["foreach"] = foreach
        if name == "WSAM":
            optimizer = package.WSAM(model, model.parameters(), gamma=GAMMA, **options)
            return closure_step(workload, form, model, optimizer, first_pass=False)
        period = 1
        if name == "LookSAM":
            options["k"] = period = LOOKSAM_INTERVAL
        optimizer = getattr(package, name)(model.parameters(), **options)
        # It expects gradients to be there when step(closure) is called.
        return closure_step(workload, form, model, optimizer, first_pass=True, period=period)

    return make


def file_step(optimizer_class: type) -> StepFactory:
    """Return a factory for steps of a class that was loaded from a file."""

    def make(workload: Workload, form: str) -> Step:
        model = workload.build_model()
        if optimizer_class.__name__ == "SAM":
            params = model.parameters()
            optimizer = optimizer_class(params, torch.optim.SGD, rho=RHO, **BASE_ARGS)
        else:
            base = workload.base(model)
            optimizer = optimizer_class(model, base, rho=RHO, gamma=GAMMA, max_norm=None)
        return first_second_step(workload, form, model, optimizer)

    return make


def installed_cases(forms: Iterable[str], more: Iterable[str] = ()) -> tuple[list[Case], list[str]]:
    """Return the cases of installed packages, and notes about missing ones.

    Args:
        forms: Forms of a step.
        more: Methods of pytorch_optimizer in addition to SAM and WSAM.
    """
    if importlib.util.find_spec("pytorch_optimizer") is None:
        return [], ["pytorch_optimizer is not installed: its SAM and WSAM were left out"]
    cases = []
    for form in forms:
        for name in ("SAM", "WSAM", *more):
            step = pytorch_optimizer_step(name)
            period = LOOKSAM_INTERVAL if name == "LookSAM" else 1
            cases.append(Case(f"pytorch_optimizer {name}", form, PEER, step, period=period))
        foreach = pytorch_optimizer_step("WSAM", True)
        cases.append(Case("pytorch_optimizer WSAM foreach", form, PEER, foreach))
    return cases, []


def file_cases(peers: Iterable[str], forms: Iterable[str]) -> list[Case]:
    """Return the cases of files given as ``NAME=PATH``.

    Raises:
        ValueError: Not of that form, or the file has no suitable class.
        OSError: No such file.
    """
    cases = []
    for name, path in map(parse_peer, peers):
        optimizer_class = load_class(path)
        cases += [Case(name, form, PEER, file_step(optimizer_class)) for form in forms]
    return cases


def parse_peer(text: str) -> tuple[str, Path]:
    """Parse ``NAME=PATH``.

    Raises:
        ValueError: Not of that form.
    """
    name, equals, path = text.partition("=")
    if not equals or not name or not path:
        raise ValueError(f"--peer takes NAME=PATH, got {text!r}")
    return name, Path(path)


def file_digests(peers: Iterable[str]) -> dict[str, str]:
    """Return the first 12 digits of each file's SHA-256, to identify its version."""
    return {name: file_sha256(path)[:12] for name, path in map(parse_peer, peers)}


def load_class(path: Path) -> Any:
    """Execute a file and return its class `WeightedSAM` or `SAM`.

    Raises:
        UserCodeError: The file cannot be imported, or has no such class.
        FileNotFoundError: No such file.
    """
    with atorch_stub():
        try:
            return load(f"{path}:WeightedSAM")
        except UserCodeError:
            return load(f"{path}:SAM")


@contextmanager
def atorch_stub() -> Iterator[None]:
    """Provide the two functions that the authors' WSAM file imports from atorch."""
    utils: Any = ModuleType("atorch.optimizers.utils")
    utils.enable_running_stats = enable_running_stats
    utils.disable_running_stats = disable_running_stats
    modules = {
        "atorch": ModuleType("atorch"),
        "atorch.optimizers": ModuleType("atorch.optimizers"),
        "atorch.optimizers.utils": utils,
    }
    added = [name for name in modules if name not in sys.modules]
    sys.modules.update({name: modules[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]
