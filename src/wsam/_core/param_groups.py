"""Hyperparameters in the parameter groups, and the schedules that change them.

The optimizer shares its groups with the base optimizer. Its own values have the prefix "sam_", which
no base uses: "sam_rho", "sam_gamma", and "sam_step", the number of updates.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from wsam._core.mix import Scalar
from wsam._core.schedule_base import Schedule
from wsam._core.validation import number, warn

if TYPE_CHECKING:
    from wsam.rule import Rule

PREFIX = "sam_"
STEP = PREFIX + "step"
RHO = PREFIX + "rho"
HYPERPARAMETERS = ("rho", "gamma", "alpha", "beta", "eta")
"""Hyperparameters of any method. A group that sets one is either honored or rejected."""

Value = float | Schedule


def rule_values(group: dict[str, Any], rule: "Rule") -> dict[str, Scalar]:
    """Return the values of the rule's hyperparameters in a group."""
    return {name: group[PREFIX + name] for name in rule.hyper()}


def own_values(entries: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a group, or of a parameter's state, that belong to this library."""
    return {key: value for key, value in entries.items() if key.startswith(PREFIX)}


def check_value(name: str, value: Any, rule: "Rule") -> Any:
    """Return a valid number, 0-d tensor or schedule, or raise an error that states what is allowed."""
    if isinstance(value, Schedule):
        for extreme in value.extremes():
            check_value(name, extreme, rule)
        return value
    if isinstance(value, Tensor):
        if value.device.type == "cpu":  # reading any other tensor would synchronize
            check_value(name, value.item(), rule)
        return value if value.dim() == 0 else value.reshape(())
    return number(name, value) if name == "rho" else rule.check(name, value)


class GroupValues:
    """The hyperparameters in the base's groups; `defaults` are for groups that do not set them."""

    def __init__(self, base: Optimizer, rule: "Rule", defaults: dict[str, Value]) -> None:
        self._base, self._rule = base, rule
        self.defaults = {name: check_value(name, v, rule) for name, v in defaults.items()}
        known = dict.fromkeys((*HYPERPARAMETERS, *defaults))
        names = [name for name in known if name not in base.defaults]
        # A base of another library may store its own values under these names: they are left to it.
        kinds = [kind for kind in type(base).__mro__ if kind is not Optimizer]
        is_of_torch = any(kind.__module__.startswith("torch.optim.") for kind in kinds)
        self._plain_names, self._left_to_base = (names, []) if is_of_torch else ([], names)
        self.schedules: list[dict[str, Schedule]] = []
        """For each group the schedules by name."""
        self._groups: list[dict[str, Any]] = []
        self._valid: dict[tuple[int, str], Any] = {}
        settings = []
        for group in base.param_groups:
            earlier = own_values(group) if STEP in group else {}  # of another wrapper of this base
            settings.append(self._settings({k: v for k, v in group.items() if k not in earlier}))
        for group, setting in zip(base.param_groups, settings, strict=True):
            self._adopt(group, setting)
        self.sync()

    def sync(self) -> None:
        """Give values to new groups, take over schedules written into groups, and bind them."""
        groups = self._base.param_groups
        del self._groups[len(groups) :], self.schedules[len(groups) :]
        for i, group in enumerate(groups):
            if i == len(self._groups):
                self._adopt(group, self._settings(group))
            elif group is not self._groups[i]:  # loading a state replaces the dicts
                group.update({**own_values(self._groups[i]), **own_values(group)})
                self._groups[i] = group
            schedules = self.schedules[i]
            for name in self.defaults:
                value = group.get(PREFIX + name)
                if isinstance(value, Schedule):
                    schedules[name] = bound = check_value(name, value, self._rule).bind(group)
                    group[PREFIX + name] = bound.value(group[STEP], group["lr"])
            for name, schedule in schedules.items():
                schedules[name] = schedule.bind(group)

    def _settings(self, group: dict[str, Any]) -> dict[str, Value]:
        """Return the validated hyperparameters of a new group.

        A group may set "sam_rho", or plain "rho" where the base has no such key itself.
        """
        given = {key.removeprefix(PREFIX): v for key, v in own_values(group).items() if key != STEP}
        given.update({name: group[name] for name in self._plain_names if name in group})
        for name in self._left_to_base:
            if name in group and name not in given:
                warn(
                    f"a group's {name!r} is left to the base, {type(self._base).__name__}; to set it "
                    f"for this method, write {PREFIX + name!r}"
                )
        for name in given:
            if name not in self.defaults:
                raise ValueError(
                    f"a parameter group sets {name!r}; groups of this method may set "
                    f"{', '.join(self.defaults)}"
                )
        merged = {**self.defaults, **given}
        return {name: check_value(name, value, self._rule) for name, value in merged.items()}

    def _adopt(self, group: dict[str, Any], settings: dict[str, Value]) -> None:
        """Write the hyperparameters into a new group; `sync` takes over those that are schedules."""
        for key in (*own_values(group), *self._plain_names):
            group.pop(key, None)
        group[STEP] = 0
        group.update({PREFIX + name: value for name, value in settings.items()})
        self._groups.append(group)
        self.schedules.append({})

    def refresh(self) -> None:
        """Evaluate schedules for the next step, and validate values that were set since the last."""
        self.sync()
        for i, (group, schedules) in enumerate(zip(self._groups, self.schedules, strict=True)):
            for name in self.defaults:
                value = group[PREFIX + name]
                if name in schedules:
                    value = schedules[name].value(group[STEP], group["lr"])
                if self._valid.get((i, name)) is not value:
                    value = check_value(name, value, self._rule)
                self._valid[i, name] = group[PREFIX + name] = value
            for name in self._plain_names:
                if name in group and name in self.defaults:
                    raise ValueError(f"set group[{PREFIX + name!r}] instead of group[{name!r}]")

    def set(self, name: str, value: Value) -> None:
        """Set a hyperparameter in all groups."""
        value = check_value(name, value, self._rule)
        for schedules in self.schedules:
            schedules.pop(name, None)
        for group in self._base.param_groups:
            group[PREFIX + name] = value
        self.sync()

    def replace(self, values: list[dict[str, Any]], schedules: list[dict[str, Schedule]]) -> None:
        """Take over the values and schedules of a loaded state."""
        self.sync()
        for group, loaded in zip(self._groups, values, strict=True):
            group.update(loaded)
        self.schedules = schedules

    def count_update(self) -> None:
        """Increment the number of updates."""
        for group in self._base.param_groups:
            group[STEP] += 1
