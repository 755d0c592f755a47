"""The optimizer of a run, and its learning rate at each step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from wsam.geometry import Geometry, Only
from wsam.lab import settings
from wsam.lab.errors import RunError, explain
from wsam.lab.run import Run
from wsam.lab.user_code import is_code
from wsam.rule import Reuse
from wsam.schedule import Every, FollowLR, Interval, NormAbove, Warmup

WARMUP_SHARE = 0.05
"""Share of the steps in which ``warmup-cosine`` raises the learning rate."""


def make_optimizer(run: Run, model: nn.Module, steps: int = 1) -> torch.optim.Optimizer:
    """Return the base optimizer, wrapped in the method unless the run is vanilla.

    Args:
        run: Has the method and the base optimizer.
        model: The model. Frozen parameters are left out.
        steps: Steps of the whole run.

    Raises:
        ValueError: A hyperparameter is out of range, or the method is the user's own and raises.
    """
    base_class = getattr(torch.optim, settings.BASE_CLASSES[run.base])
    trained = [p for p in model.parameters() if p.requires_grad]
    base = cast(torch.optim.Optimizer, base_class(trained, **run.base_args))
    if run.method == settings.VANILLA:
        return base
    method = settings.method_class(run.method)
    arguments: dict[str, Any] = {**_with_schedules(run, steps), "model": model}
    if settings.accepts(run.method, "precondition"):
        arguments["precondition"] = False  # a run has the published form by default
    for name in ("lean", "max_norm", "precondition"):
        if name in run.options:
            arguments[name] = run.options[name]
    if (when := _interval(run, steps)) is not None:
        arguments["when"] = when
    if run.options.get("reuse"):
        arguments["reuse"] = _reuse(dict(run.options))
    if run.geometry is not None:
        arguments["geometry"] = _make_geometry(run, model)
    arguments |= _seed_argument(method, run.seed)
    with explain(run.method) if is_code(run.method) else nullcontext():
        return method(base, **arguments)


def _with_schedules(run: Run, steps: int) -> dict[str, Any]:
    """Return the hyperparameters of a method; those that change over the steps as schedules."""
    hyper: dict[str, Any] = dict(run.hyper)
    for name in ("rho", "gamma"):
        if share := run.options.get(f"{name}_warmup"):
            hyper[name] = Warmup(hyper[name], max(1, round(cast(float, share) * steps)))
    if run.options.get("rho_follows_lr"):
        hyper["rho"] = FollowLR(hyper["rho"], 0.0, lr_high=cast(float, run.base_args["lr"]))
    return hyper


def _interval(run: Run, steps: int) -> Interval | None:
    """Return which steps have two passes; None for the method's own choice."""
    options: dict[str, Any] = dict(run.options)
    if (factor := options.get("threshold")) is not None:
        return NormAbove(factor, final=-factor, steps=steps)
    start = round(options.get("start", 0.0) * steps)
    every = run.hyper.get("n", options.get("every", 1))  # LookSAM has n
    return Every(cast(int, every), start) if start or "every" in options else None


def _reuse(options: dict[str, Any]) -> Reuse:
    return Reuse(
        scale_by_norm=options.get("reuse_scaled", False),
        average=options.get("reuse_average", 0.0),
        weight=options.get("reuse_weight", 1.0),
    )


def can_capture(run: Run) -> bool:
    """Return whether the steps of a run can be captured.

    They cannot if gradient norms choose the steps with two passes, or over torch's Adagrad. A method
    of the user's own may do work on the host, which a captured step does not repeat.
    """
    by_norm = run.options.get("threshold") is not None
    return not (by_norm or run.base == "adagrad" or is_code(run.method))


def _make_geometry(run: Run, model: nn.Module) -> Geometry:
    arguments: dict[str, Any] = dict(run.geometry or {})
    name = arguments.pop("name")
    geometry = settings.geometry_classes()[name]
    if name != "norm-layers":
        return geometry(**arguments, **_seed_argument(geometry, run.seed))
    found = Only.layers(model)
    if not any(model.get_parameter(name).requires_grad for name in found.names):
        raise RunError(
            f"the geometry norm-layers perturbs normalization layers, and {run.model} trains none: "
            "use another model or geometry"
        )
    return found


def _seed_argument(function: Callable[..., object], seed: int) -> dict[str, int]:
    """Return ``{"seed": seed}`` if the function has such a parameter."""
    has_seed = settings.SEED in inspect.signature(function).parameters
    return {settings.SEED: seed} if has_seed else {}


def learning_rate(run: Run, step: int, steps: int) -> float:
    """Return the learning rate of a step: ``lr * (1 + cos(pi * step/steps)) / 2`` for cosine.

    ``warmup-cosine`` rises linearly to lr first, and ``decay_start`` holds it there; the cosine is over
    the steps that remain.

    Args:
        run: Has the schedule and the initial learning rate.
        step: From 0.
        steps: Steps of the whole run.
    """
    initial = cast(float, run.base_args["lr"])
    if run.schedule == "constant":
        return initial
    first = 0
    if run.schedule == "warmup-cosine":
        first = max(1, round(WARMUP_SHARE * steps))
        if step < first:
            return initial * (step + 1) / first
    first = max(first, round((run.decay_start or 0.0) * steps))
    if step < first:
        return initial
    return initial * (1 + math.cos(math.pi * (step - first) / max(1, steps - first))) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of all groups; a tensor, as read by a CUDA graph, is set in place."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value
