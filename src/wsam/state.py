"""Group values, saving and loading: one truth shared with the base optimizer."""

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from wsam.checks import number
from wsam.rule import Rule
from wsam.schedule import Interval, Schedule, pack, unpack

PREFIX = "sam_"
STEP = PREFIX + "step"
FAMILY = ("rho", "gamma", "alpha", "beta", "eta")
"""Names of hyperparameters in the family: what a group says by one of them is heeded or refused."""

Value = float | Schedule
Part = TypeVar("Part", Schedule, Interval)


def check_value(name: str, value: Any, rule: Rule) -> Any:
    """Return a hyperparameter's value, number or schedule, or raise saying what is allowed."""
    if isinstance(value, Schedule):
        for extreme in value.extremes():
            check_value(name, extreme, rule)
        return value
    if isinstance(value, Tensor):
        if value.numel() != 1:
            shape = tuple(value.shape)
            raise ValueError(f"{name} must be one number, got a tensor of shape {shape}")
        if value.device.type == "cpu":  # to look at another one would be to wait for its device
            check_value(name, value.item(), rule)
        return value if value.dim() == 0 else value.reshape(())
    return number(name, value) if name == "rho" else rule.check(name, value)


class Adopted(NamedTuple):
    """What a group's values are made of."""

    schedules: dict[str, Schedule]
    said: dict[str, Value]
    """What the group said itself, where it did not take what the optimizer was given."""


class Heard(NamedTuple):
    """What groups said, each beside the dict that it was then."""

    groups: list[dict[str, Any]]
    said: list[dict[str, Value]]


SAID: "WeakKeyDictionary[Optimizer, Heard]" = WeakKeyDictionary()
"""What the groups of a wrapped base had said to its newest wrapper, for another one to hear."""


def adopt(
    group: dict[str, Any], defaults: dict[str, Value], taken: dict[str, Any], rule: Rule
) -> Adopted:
    """Give a group its values under names no base optimizer uses.

    A group may say "sam_rho", or plainly "rho" where the base (whose own keys are `taken`) has no
    use for that name. What the rule cannot honour is refused.
    """
    for name in dict.fromkeys((*FAMILY, *defaults)):
        if name in group and name not in taken:
            group[PREFIX + name] = group.pop(name)
    own = {PREFIX + name for name in (*defaults, "step")}
    for key in group:
        if key.startswith(PREFIX) and key not in own:
            raise ValueError(
                f"a parameter group sets {key.removeprefix(PREFIX)!r}; groups of this method may set "
                f"{', '.join(defaults)}"
            )
    schedules, said = {}, {}
    for name, default in defaults.items():
        value = check_value(name, group.get(PREFIX + name, default), rule)
        if PREFIX + name in group:
            said[name] = value
        if isinstance(value, Schedule):
            schedules[name] = value = value.heed(group)
            value = value.value(group.get(STEP, 0), group.get("lr", 0.0))
        group[PREFIX + name] = value
    group.setdefault(STEP, 0)
    return Adopted(schedules, said)


@contextlib.contextmanager
def unchanged_on_error(groups: list[dict[str, Any]]) -> Iterator[None]:
    """Leave the groups as they were if they are refused."""
    before = [dict(group) for group in groups]
    try:
        yield
    except BaseException:
        for group, old in zip(groups, before, strict=True):
            group.clear()
            group.update(old)
        raise


def forget(base: Optimizer, names: Iterable[str]) -> None:
    """Drop what an earlier wrapper of the base left in its groups, but what the groups had said."""
    groups = base.param_groups
    heard = SAID.get(base) or Heard([], [])
    for group, place in zip(groups, _known_as(groups, heard.groups), strict=True):
        before = {} if place is None else heard.groups[place]
        left = {**before, **group}  # a state that the base has loaded may lack some
        for key in values_of([group])[0] if STEP in group else ():
            del group[key]
        for name, value in () if place is None else heard.said[place].items():
            if name in names:
                kept = value if isinstance(value, Schedule) else left.get(PREFIX + name, value)
                group.setdefault(PREFIX + name, kept)


def _known_as(groups: list[dict[str, Any]], known: list[dict[str, Any]]) -> list[int | None]:
    """Return which of the known groups each is, as far as that can be told.

    Loading makes another dict of every group, with the parameters of the old one. Where these are
    others, too, order tells which is which of the dicts that have our values.
    """
    index_of = {id(group): index for index, group in enumerate(known)}
    found = [index_of.get(id(group)) for group in groups]
    left = {i: [*map(id, g["params"])] for i, g in enumerate(known) if i not in found}
    others = [at for at, place in enumerate(found) if place is None]
    for at in others:
        held = [*map(id, groups[at]["params"])]
        found[at] = next((i for i, params in left.items() if params == held), None)
        left = {i: params for i, params in left.items() if i != found[at]}
    remade = [at for at in others if found[at] is None and STEP in groups[at]]
    if len(left) <= len(remade):
        for at, place in zip(remade, left, strict=False):
            found[at] = place
    return found


def found_again(groups: list[dict[str, Any]], known: list[dict[str, Any]]) -> list[int | None]:
    """Return which of the known groups each group is, wherever it stands now; None for a new one."""
    found = _known_as(groups, known)
    if not set(range(len(known))) <= set(found):
        raise RuntimeError("a parameter group was removed from the base: wrap it again")
    return found


def state_of(base: Optimizer) -> dict[str, Any]:
    """Return what the base saves of itself, or say why ours cannot stand beside it."""
    state: Any = base.state_dict()
    name = type(base).__name__
    if not isinstance(state, dict):
        raise TypeError(
            f"{name}.state_dict() returns a {type(state).__name__} and no dict: nothing can be saved "
            "beside it"
        )
    if "sharpness" in state:
        raise ValueError(
            f"{name}.state_dict() has an entry 'sharpness' of its own: ours cannot be saved beside it"
        )
    return dict(state)


def values_of(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what we keep in each group."""
    return [{k: v for k, v in group.items() if k.startswith(PREFIX)} for group in groups]


def are_in(values: list[dict[str, Any]], state: dict[str, Any]) -> bool:
    """Whether the groups of a base's state have our values; a format of its own may lack them."""
    if not has_torch_format(state) or len(state["param_groups"]) != len(values):
        return False
    pairs = zip(values, state["param_groups"], strict=True)
    return all(own.keys() <= group.keys() for own, group in pairs)


def has_torch_format(state: dict[str, Any]) -> bool:
    """Whether a state has groups and a state of each parameter, as torch saves them."""
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not isinstance(state.get("state"), dict):
        return False
    return all(isinstance(group, dict) and "params" in group for group in groups)


def has_own_format(base: Optimizer) -> bool:
    """Whether the base saves in a way of its own, which may be any."""
    return getattr(base.state_dict, "__func__", None) is not Optimizer.state_dict


def extras(
    groups: list[dict[str, Any]],
    schedules: list[dict[str, Schedule]],
    interval: Interval | None,
    skipped: int,
) -> dict[str, Any]:
    """Return what a resume needs beyond the base's state, as plain values.

    A schedule or an interval that cannot be saved is None there; that the interval is such a one, and
    not simply none, "interval_lost" tells.
    """
    packed = None if interval is None else pack(interval)
    return {
        "shapes": [[list(p.shape) for p in group["params"]] for group in groups],
        "schedules": [{k: pack(v) for k, v in named.items()} for named in schedules],
        "interval": packed,
        "interval_lost": interval is not None and packed is None,
        "skipped": skipped,
    }


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
    try:
        base.load_state_dict(copy.deepcopy(theirs))
    except KeyError as error:
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


def all_zero(groups: list[dict[str, Any]]) -> bool:
    """Whether learning rates and gradients are all zero: how checkpointing initialises a state."""
    if any(float(group.get("lr", 1.0)) != 0.0 for group in groups):
        return False
    grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    return not any(bool(torch.count_nonzero(g)) for g in grads)
