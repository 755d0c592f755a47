"""Saving and loading the optimizer's state.

A state is the base's own plus an entry "sharpness" of plain values, so that a plain base optimizer
can load it and no code is executed. A state that does not fit is rejected before anything changes.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from wsam._core.param_groups import PREFIX, own_values
from wsam._core.schedule_base import pack, unpack
from wsam._core.validation import warn

if TYPE_CHECKING:
    from wsam.optimizer import SharpnessAware

ENTRY = "sharpness"
_SHAPED = frozenset(
    ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")
)
"""State of torch's optimizers that has the shape of its parameter."""
_COUNTERS = frozenset(("mu_product", "eta", "mu"))
"""Counters of torch's optimizers other than "step"."""


def sharpness_entry(opt: "SharpnessAware", state: dict[str, Any]) -> dict[str, Any]:
    """Return what a resume needs in addition to the base's `state`.

    A schedule or interval that cannot be saved is None; "interval_lost" tells that there was one.
    """
    groups = opt.param_groups
    interval = None if opt.when is None else pack(opt.when)
    entry = {
        "shapes": [
            [None if is_lazy(p) else list(p.shape) for p in group["params"]] for group in groups
        ],
        "schedules": [{k: pack(v) for k, v in named.items()} for named in opt._values.schedules],
        "interval": interval,
        "interval_lost": opt.when is not None and interval is None,
        "skipped": opt.skipped,
        "rule": type(opt.rule).__name__,
        "base": type(opt.base).__name__,
        "options": _options(opt),
    }
    if opt._base_writes_grads:
        entry["base_writes_grads"] = True
    if opt._reserved:
        index = {p: i for i, p in enumerate(p for group in groups for p in group["params"])}
        entry["reserved"] = sorted([index[p], name] for p, name in opt._reserved)
    own = [own_values(group) for group in groups]
    saved = state["param_groups"] if _has_torch_format(state) else []
    complete = len(saved) == len(own) and all(
        mine.keys() <= theirs.keys() for mine, theirs in zip(own, saved, strict=True)
    )
    return entry if complete else {**entry, "values": own}


def load(opt: "SharpnessAware", state: dict[str, Any]) -> None:
    """Load what `state_dict` returned, or the state of a plain base.

    Raises:
        ValueError: if the state has other groups or shapes.
    """
    base, values, interval = opt.base, opt._values, opt.when
    torch_format = _has_torch_format(state)
    entry = state.get(ENTRY) or {}
    _check_fits(state, base, entry, torch_format)
    saved_groups = entry.get("values") or (state if torch_format else base.__dict__)["param_groups"]
    saved_values = [copy.deepcopy(own_values(group)) for group in saved_groups]
    schedules = values.schedules
    if entry:
        schedules = [
            {name: schedule for name, schedule in own.items() if PREFIX + name not in group}
            | {name: _unpacked(name, packed, own.get(name)) for name, packed in saved.items()}
            for group, saved, own in zip(saved_values, entry["schedules"], schedules, strict=True)
        ]
        if entry["interval"] is not None or entry.get("interval_lost"):
            interval = _unpacked("interval `when`", entry["interval"], interval)
        elif "interval_lost" in entry:  # absent from states of earlier versions
            interval = None
    _load_base({key: v for key, v in state.items() if key != ENTRY}, base, torch_format)
    values.replace(saved_values, schedules)
    opt.when, opt.skipped = interval, entry.get("skipped", opt.skipped)
    params = [p for group in base.param_groups for p in group["params"]]
    opt._reserved.clear()
    opt._reserved.update((params[i], name) for i, name in entry.get("reserved", ()))
    if entry.get("base_writes_grads"):  # a lean step has found that, and later steps were not lean
        opt.lean, opt._base_writes_grads = False, True
    _warn_about_differences(opt, entry)  # last: a state that is rejected needs no warning


def _options(opt: "SharpnessAware") -> dict[str, str]:
    """Return the geometry and the rule's options, which a load does not replace, as text."""
    options = {name: repr(getattr(opt.rule, name)) for name in opt.rule.options}
    return {**options, "geometry": repr(opt.geometry)}


def _warn_about_differences(opt: "SharpnessAware", entry: dict[str, Any]) -> None:
    """Warn if the state is of another base, rule or geometry, or has other options.

    States of version 0.1 have no options, and some no rule.
    """
    own = {"base": type(opt.base).__name__, "rule": type(opt.rule).__name__, **_options(opt)}
    saved = {"base": entry.get("base"), "rule": entry.get("rule"), **entry.get("options", {})}
    different = {k: v for k, v in saved.items() if v is not None and v != own.get(k)}
    if different:
        before = ", ".join(f"{name}={value}" for name, value in different.items())
        now = ", ".join(f"{name}={own.get(name)}" for name in different)
        warn(
            f"the state was saved with {before}, the optimizer has {now}, which a load does not "
            "change: to continue the same run, pass the saved values to the constructor"
        )


def _has_torch_format(state: dict[str, Any]) -> bool:
    """Whether the state has the form that `torch.optim.Optimizer.state_dict` returns."""
    return isinstance(state.get("param_groups"), list) and isinstance(state.get("state"), dict)


def _check_fits(
    state: dict[str, Any], base: Optimizer, entry: dict[str, Any], torch_format: bool
) -> None:
    """Raise if the state has other groups, or tensors of other shapes."""
    if entry:
        present = [len(group["params"]) for group in base.param_groups]
        saved = [len(shapes) for shapes in entry["shapes"]]
        if saved != present:
            raise ValueError(
                f"the parameter groups of the state have {saved} parameters, those of the optimizer "
                f"{present}"
            )
        params = [p for group in base.param_groups for p in group["params"]]
        shapes = [shape for group in entry["shapes"] for shape in group]
        for i, (shape, p) in enumerate(zip(shapes, params, strict=True)):
            _check_shape(f"parameter {i}", shape, p)
    if torch_format and type(base).__module__.startswith("torch.optim."):
        for key, tensors, p in _saved_tensors(state, base):
            for name in _SHAPED.intersection(tensors):
                if isinstance(tensors[name], Tensor):
                    _check_shape(f"{name} of parameter {key}", tensors[name].shape, p)


def _check_shape(what: str, shape: Sequence[int] | None, p: Tensor) -> None:
    if shape is None or is_lazy(p):  # of a lazy module that has not run
        return
    if list(shape) != list(p.shape):
        raise ValueError(
            f"{what} has shape {tuple(shape)} in the state, {tuple(p.shape)} in the optimizer"
        )


def _saved_tensors(
    state: dict[str, Any], base: Optimizer
) -> Iterator[tuple[Any, dict[str, Any], Tensor]]:
    """Yield the key of each parameter in the state, what the state holds for it, and the parameter."""
    for saved, group in zip(state["param_groups"], base.param_groups, strict=False):
        for key, p in zip(saved["params"], group["params"], strict=False):  # torch compares numbers
            yield key, state["state"].get(key) or {}, p


def _unpacked(name: str, packed: Any, own: Any) -> Any:
    """Return a saved schedule or interval. One that a state cannot hold stays as constructed."""
    if packed is not None:
        return unpack(packed)
    if own is None:
        raise ValueError(
            f"the saved {name} is a function or of your own class, which a state cannot hold: "
            "construct the optimizer with it before loading"
        )
    return own


def _load_base(state: dict[str, Any], base: Optimizer, torch_format: bool) -> None:
    """Load the base's part, without sharing tensors with the source.

    torch casts all floating-point state but "step" to the parameter's dtype, which would round
    other counters of bfloat16 parameters, such as NAdam's "mu_product".
    """
    before = dict(base.__dict__)
    try:
        base.load_state_dict(copy.deepcopy(state))
    except Exception:
        base.__dict__.update(before)
        raise
    if torch_format:
        for _, saved, p in _saved_tensors(state, base):
            for name in _COUNTERS.intersection(saved, base.state.get(p) or ()):
                if isinstance(saved[name], Tensor):
                    loaded = base.state[p][name]
                    base.state[p][name] = saved[name].detach().clone().to(loaded.device)
