"""The parameters of a model that a measurement differentiates, and their precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

ParameterFilter = Callable[[str], bool] | Iterable[str]


def unwrap_model(model: nn.Module) -> nn.Module:
    """Remove wrappers of torch.compile and data parallelism, which have no second derivatives."""
    parallel = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while True:  # wrappers may be nested in any order
        inner = getattr(model, "module" if isinstance(model, parallel) else "_orig_mod", None)
        if inner is None:
            return model
        model = inner


def select_parameters(model: nn.Module, params: ParameterFilter | None) -> dict[str, nn.Parameter]:
    """Return the parameters to differentiate: by name, by a function, or all that are trained."""
    named = dict(model.named_parameters())
    if params is None:
        selected = {name: p for name, p in named.items() if p.requires_grad}
    elif callable(params):
        selected = {name: p for name, p in named.items() if params(name)}
    else:
        names = {params} if isinstance(params, str) else set(params)
        if unknown := sorted(names - named.keys()):
            raise ValueError(f"the model has no parameter named {unknown[0]!r}")
        selected = {name: p for name, p in named.items() if name in names}
    if not any(p.numel() for p in selected.values()):
        raise ValueError("the model has no parameters to differentiate")
    return selected


def select_dtype(parameters: Mapping[str, Tensor], dtype: torch.dtype | None) -> torch.dtype:
    """Return the precision to compute in: `dtype`, or that of all parameters."""
    given = {p.dtype for p in parameters.values()}
    computed = {dtype or one for one in given}
    is_complex = any(one.is_complex for one in given)
    if is_complex or len(computed) > 1 or not computed <= {torch.float32, torch.float64}:
        raise ValueError(
            f"curvature is computed in float32 or float64; the parameters are {given}: choose one "
            "with the argument dtype, and select real parameters with the argument params"
        )
    return computed.pop()
