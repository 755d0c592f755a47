"""Loading a state: refused before anything changes, or taken over whole."""

import copy
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from wsam.schedule import Interval, Schedule, unpack
from wsam.state import has_own_format, has_torch_format, values_of

Part = TypeVar("Part", Schedule, Interval)


def check_loadable(state_dict: dict[str, Any], base: Optimizer) -> None:
    """Refuse a state of other groups or shapes before anything is changed."""
    if not isinstance(state_dict, dict):
        raise TypeError(f"not an optimizer's state_dict: {type(state_dict).__name__}")
    of_torch = has_torch_format(state_dict)
    if not of_torch and not has_own_format(base):
        _refuse_format(state_dict)
    groups = base.param_groups
    extra = state_dict.get("sharpness")
    if extra is not None and not {"shapes", "schedules", "interval", "skipped"} <= set(extra):
        raise ValueError("the entry 'sharpness' of the state_dict is damaged")
    if of_torch:
        _check_groups(state_dict["param_groups"], groups)
    elif extra is not None:
        _check_count(len(extra["schedules"]), len(groups))
    owners = [p for group in groups for p in group["params"]]
    if extra is not None and extra["shapes"] is not None:
        _check_shapes([shape for group in extra["shapes"] for shape in group], owners)
    if of_torch and type(base).__module__.startswith("torch.optim."):
        for key, p in _owned(state_dict["param_groups"], base):
            _check_momentum(key, state_dict["state"].get(key, {}), p)


def _refuse_format(state_dict: dict[str, Any]) -> None:
    missing = [key for key in ("state", "param_groups") if key not in state_dict]
    if missing:
        raise ValueError(f"not an optimizer's state_dict: it has no {' and no '.join(missing)}")
    raise ValueError(
        "not an optimizer's state_dict: param_groups must be a list of dicts with 'params', and state "
        "a dict"
    )


def _check_count(saved: int, present: int) -> None:
    if saved != present:
        raise ValueError(f"the state has {saved} parameter groups, the optimizer {present}")


def _check_groups(saved: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    _check_count(len(saved), len(groups))
    for index, (old, new) in enumerate(zip(saved, groups, strict=True)):
        if len(old["params"]) != len(new["params"]):
            raise ValueError(
                f"group {index} has {len(old['params'])} parameters in the state, "
                f"{len(new['params'])} in the optimizer"
            )


def _owned(saved: list[dict[str, Any]], base: Optimizer) -> Iterator[tuple[Any, Tensor]]:
    """Return each parameter after the key that its state has among the saved ones."""
    keys = [key for group in saved for key in group["params"]]
    owners = [p for group in base.param_groups for p in group["params"]]
    return zip(keys, owners, strict=True)


def _check_shapes(shapes: list[Any], owners: list[Tensor]) -> None:
    if len(shapes) != len(owners):
        raise ValueError("the entry 'sharpness' of the state_dict is damaged: its shapes")
    for index, (shape, p) in enumerate(zip(shapes, owners, strict=True)):
        if list(shape) != list(p.shape):
            raise ValueError(
                f"parameter {index} has shape {tuple(shape)} in the state, "
                f"{tuple(p.shape)} in the optimizer"
            )


# State that has its parameter's shape in every optimizer of torch that has it; in others any.
SHAPED = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")


def _check_momentum(key: Any, values: Any, p: Tensor) -> None:
    for name in SHAPED:
        value = values.get(name) if isinstance(values, dict) else None
        if isinstance(value, Tensor) and value.shape != p.shape:
            raise ValueError(
                f"parameter {key} has {name} of shape {tuple(value.shape)} in the state, "
                f"but shape {tuple(p.shape)} in the optimizer"
            )


def saved_values(state_dict: dict[str, Any], groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what a state says of each group that is ours; nothing where it is a plain base's."""
    values = (state_dict.get("sharpness") or {}).get("values")
    if values is None:
        of_torch = has_torch_format(state_dict)
        values = values_of(state_dict["param_groups"]) if of_torch else [{} for _ in groups]
    elif not isinstance(values, list) or len(values) != len(groups):
        raise ValueError("the entry 'sharpness' of the state_dict is damaged: its values")
    return copy.deepcopy(values)


def load_base(base: Optimizer, state_dict: dict[str, Any]) -> None:
    """Load into the base without sharing tensors with the source, and keep counters' dtypes.

    torch casts every floating tensor but `step` to the parameter's dtype, which ruins other
    counters (NAdam's `mu_product`) of bfloat16 parameters.
    """
    theirs = {key: value for key, value in state_dict.items() if key != "sharpness"}
    before = dict(base.__dict__)
    try:
        base.load_state_dict(copy.deepcopy(theirs))
    except BaseException as error:
        base.__dict__.clear()
        base.__dict__.update(before)  # torch looks into groups and state when it has replaced them
        if not isinstance(error, KeyError):
            raise
        raise ValueError(
            f"{type(base).__name__} finds no {error} in the state_dict, which is perhaps another "
            "optimizer's"
        ) from error
    if has_torch_format(theirs):
        for key, p in _owned(theirs["param_groups"], base):
            _restore_counters(base.state.get(p), theirs["state"].get(key), p)


# Of torch's optimizers, beside `step`: what is one number for each parameter, of whatever size.
COUNTERS = ("mu_product", "eta", "mu")


def _restore_counters(loaded: Any, saved: Any, p: Tensor) -> None:
    if not isinstance(loaded, dict) or not isinstance(saved, dict):
        return  # of another rank's parameter, say
    for name, value in saved.items():
        present = loaded.get(name)
        if not isinstance(value, Tensor) or not isinstance(present, Tensor):
            continue
        counter = value.numel() == 1 and (value.shape != p.shape or name in COUNTERS)
        if counter and present.dtype != value.dtype:
            loaded[name] = value.detach().clone().to(present.device)


def load_schedules(
    packed: dict[str, Any] | None, own: list[dict[str, Schedule]]
) -> list[dict[str, Schedule]]:
    """Return the saved schedules: where none was saved there is none, whatever was constructed.

    One that could not be saved stays as it was constructed. So do all if the state is a plain base's.
    """
    if packed is None:
        return own
    if len(packed["schedules"]) != len(own):
        raise ValueError("the entry 'sharpness' of the state_dict is damaged: its schedules")
    loaded = []
    for saved, mine in zip(packed["schedules"], own, strict=True):
        kept = {k: v for k, v in mine.items() if k in saved}
        fresh = {k: _unpacked(v, Schedule) for k, v in saved.items() if v is not None}
        lost = [k for k, v in saved.items() if v is None and k not in mine]
        if lost:
            raise ValueError(
                f"the saved schedule of {', '.join(lost)} was a function, which a state cannot hold: "
                "construct the optimizer with it before loading"
            )
        loaded.append({**kept, **fresh})
    return loaded


def load_interval(packed: dict[str, Any] | None, own: Interval | None) -> Interval | None:
    """Return the saved interval, or none where none was saved, as `load_schedules` does.

    States of earlier versions do not say whether there was none or one that could not be saved:
    what was constructed stays.
    """
    if packed is None:
        return own
    if packed["interval"] is not None:
        return _unpacked(packed["interval"], Interval)
    if packed.get("interval_lost") and own is None:
        raise ValueError(
            "the saved interval `when` is of a class of your own, which a state cannot hold: "
            "construct the optimizer with it before loading"
        )
    return own if packed.get("interval_lost", True) else None


def _unpacked(packed: Any, kind: type[Part]) -> Part:
    try:
        part = unpack(packed)
    except Exception as error:
        raise ValueError(
            f"the entry 'sharpness' of the state_dict is damaged: no {kind.__name__.lower()} can be "
            f"made of {packed!r}"
        ) from error
    if not isinstance(part, kind):
        raise ValueError(f"the entry 'sharpness' of the state_dict is damaged: {packed!r}")
    return part
