"""Group values and what is saved of them: one truth shared with the base optimizer."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from wsam.checks import number
from wsam.rule import Rule
from wsam.schedule import Interval, Schedule, pack

PREFIX = "sam_"
STEP = PREFIX + "step"
FAMILY = ("rho", "gamma", "alpha", "beta", "eta")
"""Names of hyperparameters in the family: what a group says by one of them is heeded or refused."""

Value = float | Schedule


def check_value(name: str, value: Any, rule: Rule) -> Any:
    """Return a hyperparameter's value, number or schedule, or raise saying what is allowed."""
    if isinstance(value, Schedule):
        for extreme in value.extremes():
            check_value(name, extreme, rule)
        return value
    if callable(value):
        raise TypeError(
            f"{name} must be a number or a schedule; of a function f of the step "
            "wsam.schedule.Function(f) makes one"
        )
    if isinstance(value, Tensor):
        if value.numel() != 1:
            shape = tuple(value.shape)
            raise ValueError(f"{name} must be one number, got a tensor of shape {shape}")
        if value.device.type == "cpu":  # to look at another one would be to wait for its device
            check_value(name, value.item(), rule)
        return value if value.dim() == 0 else value.reshape(())
    return number(name, value) if name == "rho" else rule.check(name, value)


def check_present(name: str, value: Any, rule: Rule) -> Any:
    """Return the value that a group has at a step, or raise: it may have been set by hand."""
    if isinstance(value, Schedule):
        raise TypeError(
            f"{PREFIX + name!r} of a group is a number, the one of the present step: give a schedule "
            f"to the constructor, or to a group as {name!r} before"
        )
    return check_value(name, value, rule)


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


def all_zero(groups: list[dict[str, Any]]) -> bool:
    """Whether learning rates and gradients are all zero: how checkpointing initialises a state."""
    if any(float(group.get("lr", 1.0)) != 0.0 for group in groups):
        return False
    grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    return not any(bool(torch.count_nonzero(g)) for g in grads)
