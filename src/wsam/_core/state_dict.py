"""Saving and loading the optimizer's state.

A state is the base's own plus an entry "sharpness" of plain values, so that a plain base optimizer
can load it and no code is executed. A state that does not fit is rejected before anything changes.
"""

import copy
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from wsam._core.param_groups import PREFIX, GroupValues, check_value, own_values
from wsam._core.schedule_base import Interval, Schedule, pack, unpack
from wsam._core.validation import warn

if TYPE_CHECKING:
    from wsam.rule import Rule

ENTRY = "sharpness"
_DAMAGED = "the entry 'sharpness' of the state_dict is damaged"


def base_state(base: Optimizer) -> dict[str, Any]:
    """Return the base's own state, or raise if our entry cannot be added to it."""
    state: Any = base.state_dict()
    name = type(base).__name__
    if not isinstance(state, dict):
        raise TypeError(f"{name}.state_dict() must return a dict, got {type(state).__name__}")
    if ENTRY in state:
        raise ValueError(f"{name}.state_dict() already has an entry {ENTRY!r}")
    return dict(state)


def sharpness_entry(
    state: dict[str, Any],
    groups: list[dict[str, Any]],
    values: GroupValues,
    interval: Interval | None,
    skipped: int,
    rule: "Rule",
    method: str,
) -> dict[str, Any]:
    """Return what a resume needs in addition to the base's `state`.

    A schedule or interval that cannot be saved is None; "interval_lost" tells that there was one.
    """
    packed = None if interval is None else pack(interval)
    entry = {
        "shapes": [[list(p.shape) for p in group["params"]] for group in groups],
        "schedules": [{k: pack(v) for k, v in named.items()} for named in values.schedules],
        "interval": packed,
        "interval_lost": interval is not None and packed is None,
        "skipped": skipped,
        "rule": type(rule).__name__,
        "method": method,
    }
    own = [own_values(group) for group in groups]
    saved = state["param_groups"] if _has_torch_format(state) else []
    complete = len(saved) == len(own) and all(
        mine.keys() <= theirs.keys() for mine, theirs in zip(own, saved, strict=True)
    )
    return entry if complete else {**entry, "values": own}


def _has_torch_format(state: dict[str, Any]) -> bool:
    """Whether the state has the form that `torch.optim.Optimizer.state_dict` returns."""
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not isinstance(state.get("state"), dict):
        return False
    return all(isinstance(group, dict) and "params" in group for group in groups)


class LoadedState:
    """A state that was checked against the optimizer that will load it.

    Args:
        state: what `state_dict` returned, or the state of a plain base.
        base: the base optimizer.
        values: the hyperparameters of its groups.
        interval: the optimizer's own interval.
        rule: the optimizer's rule.
        method: the name of the optimizer's class, for messages.

    Raises:
        ValueError: if the state has other groups or shapes, or is damaged.
    """

    def __init__(
        self,
        state: Any,
        base: Optimizer,
        values: GroupValues,
        interval: Interval | None,
        rule: "Rule",
        method: str,
    ) -> None:
        if not isinstance(state, dict):
            raise TypeError(f"not an optimizer's state_dict: {type(state).__name__}")
        self._state, self._base = state, base
        self._has_torch_format = _has_torch_format(state)
        own_format = getattr(base.state_dict, "__func__", None) is not Optimizer.state_dict
        if not self._has_torch_format and not own_format:
            raise ValueError(
                "not an optimizer's state_dict: it needs 'state', a dict, and 'param_groups', a list "
                f"of dicts with 'params'; it has {', '.join(map(repr, state)) or 'nothing'}"
            )
        self.entry: Any = state.get(ENTRY)
        self._check_shapes()
        self.values = self._saved_values(values, rule)
        self.schedules, self.interval = values.schedules, interval
        if self.entry is not None:
            self.schedules = self._saved_schedules(values)
            self.interval = self._saved_interval(interval)
            if self.entry.get("rule", type(rule).__name__) != type(rule).__name__:
                saved = self.entry.get("method", f"a method with the rule {self.entry['rule']}")
                warn(
                    f"the state is of {saved}, the optimizer is {method}: hyperparameters may have "
                    "another meaning"
                )

    def _check_shapes(self) -> None:
        groups = self._base.param_groups
        entry = self.entry
        if entry is not None and not {"shapes", "schedules", "interval", "skipped"} <= set(entry):
            raise ValueError(_DAMAGED)
        if self._has_torch_format:
            saved = self._state["param_groups"]
            _check_count("parameter groups", len(saved), len(groups))
            for index, (old, new) in enumerate(zip(saved, groups, strict=True)):
                _check_count(f"parameters in group {index}", len(old["params"]), len(new["params"]))
        elif entry is not None:
            _check_count("parameter groups", len(entry["schedules"]), len(groups))
        params = [p for group in groups for p in group["params"]]
        if entry is not None and entry["shapes"] is not None:
            shapes = [shape for group in entry["shapes"] for shape in group]
            if len(shapes) != len(params):
                raise ValueError(f"{_DAMAGED}: its shapes")
            for index, (shape, p) in enumerate(zip(shapes, params, strict=True)):
                _check_shape(f"parameter {index}", shape, p)
        if self._has_torch_format and type(self._base).__module__.startswith("torch.optim."):
            for key, p in self._saved_params():
                saved_state = self._state["state"].get(key, {})
                for name in _SHAPED.intersection(saved_state):
                    if isinstance(saved_state[name], Tensor):
                        _check_shape(f"{name} of parameter {key}", saved_state[name].shape, p)

    def _saved_params(self) -> list[tuple[Any, Tensor]]:
        """Return each key of the saved state with the parameter that it belongs to."""
        keys = [key for group in self._state["param_groups"] for key in group["params"]]
        params = [p for group in self._base.param_groups for p in group["params"]]
        return list(zip(keys, params, strict=True))

    def _saved_values(self, values: GroupValues, rule: "Rule") -> list[dict[str, Any]]:
        groups = self._base.param_groups
        saved = (self.entry or {}).get("values")
        if saved is None:
            saved = self._state["param_groups"] if self._has_torch_format else [{} for _ in groups]
        if not isinstance(saved, list) or len(saved) != len(groups):
            raise ValueError(f"{_DAMAGED}: its values")
        result = [copy.deepcopy(own_values(group)) for group in saved]
        for group in result:
            for name in values.defaults:
                if PREFIX + name in group:
                    check_value(name, group[PREFIX + name], rule)
        return result

    def _saved_schedules(self, values: GroupValues) -> list[dict[str, Schedule]]:
        """Return the saved schedules. One that could not be saved stays as it was constructed."""
        if len(self.entry["schedules"]) != len(values.schedules):
            raise ValueError(f"{_DAMAGED}: its schedules")
        loaded = []
        for saved, own in zip(self.entry["schedules"], values.schedules, strict=True):
            lost = [name for name, packed in saved.items() if packed is None and name not in own]
            if lost:
                raise ValueError(
                    f"the saved schedule of {', '.join(lost)} was a function, which a state cannot "
                    "hold: construct the optimizer with it before loading"
                )
            loaded.append(
                {
                    name: own[name] if packed is None else unpack(packed, Schedule)
                    for name, packed in saved.items()
                }
            )
        return loaded

    def _saved_interval(self, own: Interval | None) -> Interval | None:
        """Return the saved interval. One that could not be saved stays as it was constructed."""
        entry = self.entry
        if entry["interval"] is not None:
            return unpack(entry["interval"], Interval)
        if entry.get("interval_lost") and own is None:
            raise ValueError(
                "the saved interval `when` is of your own class, which a state cannot hold: construct "
                "the optimizer with it before loading"
            )
        return own if entry.get("interval_lost", True) else None

    def load_base(self) -> None:
        """Load the base's part, without sharing tensors with the source.

        torch casts all floating-point state but "step" to the parameter's dtype, which would round
        other counters of bfloat16 parameters, such as NAdam's "mu_product".
        """
        theirs = {key: value for key, value in self._state.items() if key != ENTRY}
        before = dict(self._base.__dict__)
        try:
            self._base.load_state_dict(copy.deepcopy(theirs))
        except BaseException as error:
            self._base.__dict__.clear()
            self._base.__dict__.update(before)
            if not isinstance(error, KeyError):
                raise
            raise ValueError(
                f"{type(self._base).__name__} finds no {error} in the state_dict: it may belong to "
                "another optimizer"
            ) from error
        if not self._has_torch_format:
            return
        for key, p in self._saved_params():
            loaded: Any = self._base.state.get(p)
            saved: Any = theirs["state"].get(key)
            for name in _COUNTERS.intersection(saved or ()) if loaded else ():
                if isinstance(saved[name], Tensor):
                    loaded[name] = saved[name].detach().clone().to(loaded[name].device)


_SHAPED = frozenset(
    ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")
)
"""State of torch's optimizers that has the shape of its parameter."""
_COUNTERS = frozenset(("mu_product", "eta", "mu"))
"""Counters of torch's optimizers other than "step"."""


def _check_count(what: str, saved: int, present: int) -> None:
    if saved != present:
        raise ValueError(f"the state has {saved} {what}, the optimizer {present}")


def _check_shape(what: str, shape: Any, p: Tensor) -> None:
    if list(shape) != list(p.shape):
        raise ValueError(
            f"{what} has shape {tuple(shape)} in the state, {tuple(p.shape)} in the optimizer"
        )
