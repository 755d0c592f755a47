"""What is differentiated, and how exactly: model, parameters, precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

__all__ = ["ParameterFilter", "allows_tf32", "chosen_parameters", "chosen_precision", "unwrapped"]

ParameterFilter = Callable[[str], bool] | Iterable[str]


def unwrapped(model: nn.Module) -> nn.Module:
    """Look through torch.compile and data parallelism: neither allows second derivatives."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    while isinstance(inner := _inner(model), nn.Module):
        model = inner  # wrappers wrap each other in either order
    return model


def _inner(model: nn.Module) -> object:
    """Return what a wrapper wraps; None for any other module."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return model.module
    return getattr(model, "_orig_mod", None)


def chosen_parameters(model: nn.Module, params: ParameterFilter | None) -> dict[str, nn.Parameter]:
    """Return the parameters to differentiate by: by name, by a test, or all that are trained."""
    everything = dict(model.named_parameters())
    if params is None:
        chosen = {name: p for name, p in everything.items() if p.requires_grad}
    elif callable(params):
        chosen = {name: p for name, p in everything.items() if params(name)}
    else:
        names = {params} if isinstance(params, str) else set(params)
        if unknown := sorted(names - everything.keys()):
            raise ValueError(f"the model has no parameter named {unknown[0]!r}")
        chosen = {name: p for name, p in everything.items() if name in names}
    if not any(p.numel() for p in chosen.values()):
        raise ValueError("the model has no parameters to differentiate by")
    return chosen


def allows_tf32() -> bool:
    """Tell whether convolutions or matrix products may be rounded, however that was set."""
    try:
        return torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:  # the newer setting is in use, and the older cannot express it
        settings = (getattr(torch.backends.cudnn, "conv", None), torch.backends.cuda.matmul)
        return any(getattr(s, "fp32_precision", "tf32") == "tf32" for s in settings)


def chosen_precision(parameters: Mapping[str, Tensor], dtype: torch.dtype | None) -> torch.dtype:
    """Return the one precision to compute in, or say why there is none."""
    given = {p.dtype for p in parameters.values()}
    if dtype is None and len(given) > 1:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in given))
        raise ValueError(f"the parameters are of several types ({names}): choose one with dtype")
    chosen = dtype or given.pop()
    if chosen not in (torch.float32, torch.float64):
        name = str(chosen).removeprefix("torch.")
        raise ValueError(f"curvature is computed in float32 or float64, not {name}: give dtype")
    return chosen
