"""Other people's optimizers, each in the use its own documentation shows.

pytorch_optimizer is measured where it is installed. Others are given by the path of their file,
whose code is then run: a class `SAM(params, base class, ...)` or `WeightedSAM(model, base, ...)`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from wsam.bench.cases import PEER, Case, Step, backward_of
from wsam.bench.problem import BASE, GAMMA, RHO, Problem
from wsam.lab.files import file_sha256

_Norm = nn.modules.batchnorm._BatchNorm


def pause_statistics(model: nn.Module) -> None:
    """Stop running statistics by a momentum of zero, as SAM's users are told to."""
    for module in model.modules():
        if isinstance(module, _Norm):
            module.__dict__.setdefault("paused_momentum", module.momentum)
            module.momentum = 0.0


def resume_statistics(model: nn.Module) -> None:
    """Let running statistics move again."""
    for module in model.modules():
        if isinstance(module, _Norm) and "paused_momentum" in module.__dict__:
            module.momentum = module.__dict__.pop("paused_momentum")


def by_two_steps(problem: Problem, form: str, model: nn.Module, optimizer: Any) -> Step:
    """Return the loop by hand: pass, first_step, pass with statistics paused, second_step."""
    closure = backward_of(problem, problem.forward(model, form), torch.mean)

    def step() -> None:
        resume_statistics(model)
        closure()
        optimizer.first_step(zero_grad=True)
        pause_statistics(model)
        closure()
        optimizer.second_step(zero_grad=True)

    return step


def by_closure(problem: Problem, form: str, model: nn.Module, optimizer: Any, before: bool) -> Step:
    """Return `step(closure)`; SAM of pytorch_optimizer wants the first pass made `before` it."""
    backward = backward_of(problem, problem.forward(model, form), torch.mean)

    def closure() -> object:
        optimizer.zero_grad()
        return backward()

    def step() -> None:
        if before:
            closure()
        optimizer.step(closure)

    return step


def of_package(kind: str, foreach: bool | None) -> Callable[[Problem, str], Step]:
    """Return what builds a case of pytorch_optimizer's SAM or WSAM."""

    def make(problem: Problem, form: str) -> Step:
        import pytorch_optimizer as package

        model = problem.build()
        shared = {"base_optimizer": torch.optim.SGD, "rho": RHO, "foreach": foreach, **BASE}
        if kind == "SAM":
            optimizer = package.SAM(model.parameters(), **shared)
        else:
            optimizer = package.WSAM(model, model.parameters(), gamma=GAMMA, **shared)
        return by_closure(problem, form, model, optimizer, before=kind == "SAM")

    return make


def of_file(kind: type) -> Callable[[Problem, str], Step]:
    """Return what builds a case of a class that was read from a file."""

    def make(problem: Problem, form: str) -> Step:
        model = problem.build()
        if kind.__name__ == "SAM":
            optimizer = kind(model.parameters(), torch.optim.SGD, rho=RHO, **BASE)
        else:
            optimizer = kind(model, problem.base(model), rho=RHO, gamma=GAMMA, max_norm=None)
        return by_two_steps(problem, form, model, optimizer)

    return make


def installed(forms: Iterable[str]) -> tuple[list[Case], list[str]]:
    """Return the cases of installed packages, and a note on what is missing."""
    if importlib.util.find_spec("pytorch_optimizer") is None:
        return [], ["pytorch_optimizer is not installed: its SAM and WSAM were left out"]
    cases = []
    for form in forms:
        for kind in ("SAM", "WSAM"):
            cases.append(Case(f"pytorch_optimizer {kind}", form, PEER, of_package(kind, None)))
        foreach = of_package("WSAM", True)
        cases.append(Case("pytorch_optimizer WSAM foreach", form, PEER, foreach))
    return cases, []


def by_path(named: Iterable[str], forms: Iterable[str]) -> list[Case]:
    """Return the cases of files given as ``NAME=PATH``.

    Raises:
        ValueError: Not of that form, or the file has no class we know how to use.
        OSError: No such file.
    """
    cases = []
    for name, path in map(name_and_path, named):
        kind = load_class(path)
        cases += [Case(name, form, PEER, of_file(kind)) for form in forms]
    return cases


def name_and_path(given: str) -> tuple[str, Path]:
    """Split ``NAME=PATH``.

    Raises:
        ValueError: Not of that form.
    """
    name, equals, path = given.partition("=")
    if not equals or not name or not path:
        raise ValueError(f"--peer takes NAME=PATH, got {given!r}")
    return name, Path(path)


def digests(named: Iterable[str]) -> dict[str, str]:
    """Return which versions of the files are compared: what their SHA-256 begins with."""
    found = map(name_and_path, named)
    return {name: file_sha256(path)[:12] for name, path in found if path.is_file()}


def load_class(path: Path) -> type:
    """Run a file's code and return its class `SAM` or `WeightedSAM`."""
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    spec = importlib.util.spec_from_file_location(f"wsam_peer_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    with stand_ins():
        try:
            spec.loader.exec_module(module)
        except (ImportError, SyntaxError) as error:
            raise ValueError(f"{path} does not import: {error}") from error
    for name in ("WeightedSAM", "SAM"):
        found = getattr(module, name, None)
        if isinstance(found, type):
            return found
    raise ValueError(f"{path} has no class SAM or WeightedSAM")


@contextmanager
def stand_ins() -> Iterator[None]:
    """Let a file that belongs to atorch be imported without the rest of that package."""
    utilities: Any = ModuleType("atorch.optimizers.utils")
    utilities.enable_running_stats = resume_statistics
    utilities.disable_running_stats = pause_statistics
    parts = {
        "atorch": ModuleType("atorch"),
        "atorch.optimizers": ModuleType("atorch.optimizers"),
        "atorch.optimizers.utils": utilities,
    }
    added = [name for name in parts if name not in sys.modules]
    sys.modules.update({name: parts[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]
