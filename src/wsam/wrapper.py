"""An optimizer around an optimizer's instance: one set of groups, one state, one checkpoint."""

import operator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wsam import loading
from wsam import state as saving
from wsam.block import DEVICE, DTYPE, Block, blocks_of
from wsam.checks import warn
from wsam.geometry import Geometry
from wsam.rule import Rule
from wsam.schedule import Interval, Schedule
from wsam.update import Flight


def of_base(name: str) -> Any:
    """Return a property that is the base's attribute; while there is no base yet, one's own."""

    def get(self: "Wrapper") -> Any:
        own = self.__dict__
        return own[name] if name in own else getattr(self.base, name)

    def put(self: "Wrapper", value: Any) -> None:
        # Frameworks wrap us in objects of a class made of ours, which reach `base` by __getattr__.
        base = getattr(self, "base", None)
        if base is None:
            self.__dict__[name] = value
        else:
            setattr(base, name, value)

    return property(get, put)


def own(wrapper: "Wrapper", name: str) -> Any:
    """Return what a property keeps under its own name, as Python does where there is none."""
    if name not in wrapper.__dict__:
        raise AttributeError(f"{type(wrapper).__name__} has no attribute {name!r}")
    return wrapper.__dict__[name]


def of_groups(name: str) -> Any:
    """Return a property for a hyperparameter, which is each group's and not the optimizer's."""

    def refuse(self: "Wrapper") -> None:
        if name in self.__dict__.get("_hyper", ()):
            key = saving.PREFIX + name
            raise AttributeError(
                f"{name} is set group by group: optimizer.param_groups[i][{key!r}]"
            )

    def get(self: "Wrapper") -> Any:
        refuse(self)
        return own(self, name)

    def put(self: "Wrapper", value: Any) -> None:
        refuse(self)
        self.__dict__[name] = value

    return property(get, put)


def elsewhere(name: str, at: str | None, how: str) -> Any:
    """Return a property for a constructor's argument that is kept elsewhere and not set here.

    Args:
        name: of the argument.
        at: where it is read, such as "geometry.eta"; None where it cannot be read.
        how: says how to change it.
    """

    def refusal(self: "Wrapper") -> AttributeError:
        return AttributeError(f"{name} is no attribute of {type(self).__name__} to set: {how}")

    def get(self: "Wrapper") -> Any:
        if name in self.__dict__:
            return self.__dict__[name]
        if at is None:
            raise refusal(self)
        return operator.attrgetter(at)(self)

    def put(self: "Wrapper", value: Any) -> None:
        if type(self).__module__.partition(".")[0] == __package__:
            raise refusal(self)
        self.__dict__[name] = value  # a subclass elsewhere may have an attribute of that name

    return property(get, put)


def option(name: str) -> Any:
    """Return a property for an option that is checked, together with the others, when it is set."""

    def get(self: "Wrapper") -> Any:
        return own(self, name)

    def put(self: "Wrapper", value: Any) -> None:
        options = self.__dict__
        before, options[name] = options.get(name), value
        try:
            if "base" in options:
                self._check_options()
        except Exception:
            options[name] = before
            raise

    return property(get, put)


def check_base(base: Any, rule: Any) -> None:
    """Refuse what cannot be a base optimizer, and say what to write instead."""
    if isinstance(base, type) or not isinstance(base, Optimizer):
        raise TypeError(
            "base must be an instance of a torch.optim.Optimizer, such as "
            f"torch.optim.SGD(model.parameters(), lr=0.1); got {base!r}"
        )
    if not isinstance(rule, Rule):
        raise TypeError(f"rule must be a wsam.rule.Rule, got {rule!r}")
    name = type(base).__name__
    if isinstance(base, Wrapper):
        raise TypeError(f"base is already sharpness-aware ({name}): wrap a plain optimizer")
    if isinstance(base, torch.optim.LBFGS):
        raise TypeError("LBFGS evaluates its closure by itself and cannot be a base")
    if isinstance(base, torch.optim.SparseAdam):
        raise TypeError("SparseAdam takes sparse gradients, sharpness-aware steps need dense ones")
    for group in base.param_groups:
        check_group(group, base, rule)


def check_group(group: dict[str, Any], base: Optimizer, rule: Rule) -> None:
    """Refuse a group of parameters that no step can be right for."""
    if "lr" not in group:
        name = type(base).__name__
        raise TypeError(f"{name} has no 'lr' in its groups, which the update needs")
    if any(p.is_complex() for p in group["params"]):
        raise TypeError("complex parameters are not supported: view them as real pairs")
    if group.get("differentiable") and not rule.feeds_second:
        raise ValueError(
            f"the base is differentiable, but what {type(rule).__name__} applies beside it is no part "
            "of its graph: take CoupledWSAM"
        )


def warn_of_low_precision(groups: list[dict[str, Any]]) -> None:
    """Say once that small perturbations vanish in the rounding of low-precision weights."""
    low = (torch.float16, torch.bfloat16)
    if any(p.dtype in low for group in groups for p in group["params"]):
        warn(
            "parameters are float16 or bfloat16: at small radii most of the perturbation is lost in "
            "rounding (at rho 0.05 only 1 to 23% of bfloat16 weights move); keep float32 weights and "
            "use torch.autocast"
        )


def share_kept(name: str) -> Any:
    """Return a property for the share of samples that the second pass keeps, by whatever name."""
    how = "the share of samples is fixed; wrap optimizer.base again to change it"
    return elsewhere(name, "_selection.keep", how)


def hear_original(
    group: dict[str, Any], known: list[dict[str, Any]], schedules: list[dict[str, Schedule]]
) -> None:
    """Give a new group that is a copy of a known one the schedules its values came from.

    A value is a copy if it is the same object: one that was written there is another.
    """
    if saving.STEP not in group:
        return
    for key in [key for key in group if key.startswith(saving.PREFIX)]:
        name = key.removeprefix(saving.PREFIX)
        pairs = zip(known, schedules, strict=True)
        found = [own[name] for one, own in pairs if name in own and one.get(key) is group[key]]
        if found and all(schedule == found[0] for schedule in found):
            group[key] = found[0]


class Wrapper(Optimizer):
    """Shares groups and state with `base`, so that schedulers, hooks and checkpoints see one truth.

    Hyperparameters of the wrapper live in the groups under names with the prefix "sam_", which no
    base optimizer uses.
    """

    param_groups = of_base("param_groups")
    state = of_base("state")
    defaults = of_base("defaults")
    rho = of_groups("rho")
    gamma = of_groups("gamma")
    alpha = of_groups("alpha")
    keep = share_kept("keep")
    geometry: Geometry = option("geometry")
    when: Interval | None = option("when")

    base: Optimizer
    rule: Rule
    model: nn.Module | None
    skipped: int

    # What `_prepare` makes anew and no copy takes along; "step" is what a scheduler patches over the
    # method.
    _scratch: ClassVar[tuple[str, ...]] = ("step", "_flight", "_known_layout")

    def __init__(self, base: Optimizer, hyper: dict[str, saving.Value]) -> None:
        for name, value in hyper.items():
            saving.check_value(name, value, self.rule)
        groups = base.param_groups
        with saving.unchanged_on_error(groups):
            saving.forget(base, hyper)
            super().__init__(groups, {})
            self._hyper = hyper
            self._schedules: list[dict[str, Schedule]] = []
            self._said: list[dict[str, saving.Value]] = []
            self._groups: list[dict[str, Any]] = []  # whose schedules and sayings these are
            for name in ("param_groups", "state", "defaults"):
                del self.__dict__[name]
            self.base = base
            self._prepare()
            self._adopt_groups()
            self._layout()
        saving.SAID[base] = saving.Heard(self._groups, self._said)

    def _prepare(self) -> None:
        """Make the scratch that no state holds."""
        self._flight: Flight | None = None
        self._known_layout: tuple[Any, list[Block]] | None = None

    def _refuse_in_flight(self, what: str) -> None:
        if self._flight is not None and not self._flight.ready:
            by_hand = self._flight.by_hand or self._flight.looking
            cure = "call descend() first, or abandon()" if by_hand else "not inside a closure"
            raise RuntimeError(f"cannot {what} while the weights are at w + d: {cure}")

    def _layout(self, anew: bool = False) -> list[Block]:
        """Return all parameters in blocks; with `anew`, look whether groups or parameters changed."""
        if self._known_layout is not None and not anew:
            return self._known_layout[1]
        mark = [
            (id(g), *(list(map(look, g["params"])) for look in (id, DTYPE, DEVICE)))
            for g in self.param_groups
        ]
        if self._known_layout is None or self._known_layout[0] != mark:
            named = self.model.named_parameters() if self.model is not None else ()
            names: dict[Tensor, str] = {p: name for name, p in named}
            blocks = blocks_of(self.param_groups, names)
            self.geometry.check_names(blocks)
            self._known_layout = (mark, blocks)
            self._look_at_model()
        return self._known_layout[1]

    def _look_at_model(self) -> None:
        """Find out what the model is made of; called again when there are other parameters."""

    def _adopt_groups(self) -> None:
        """Give values to groups that were added to the base directly, and hear what schedulers left."""
        self._follow_groups()
        for group, named in zip(self.param_groups, self._schedules, strict=True):
            for name, schedule in named.items():
                named[name] = schedule.heed(group)

    def _follow_groups(self) -> None:
        """Keep schedules with their groups, wherever they stand now, and adopt groups that are new."""
        groups = self.param_groups
        if len(groups) == len(self._groups) and all(map(operator.is_, groups, self._groups)):
            return
        newest = saving.SAID.get(self.base)
        adopted = []
        with saving.unchanged_on_error(groups):
            for group, place in zip(groups, saving.found_again(groups, self._groups), strict=True):
                if place is None:
                    check_group(group, self.base, self.rule)
                    hear_original(group, self._groups, self._schedules)
                    one = saving.adopt(group, self._hyper, self.defaults, self.rule)
                else:
                    one = saving.Adopted(self._schedules[place], self._said[place])
                    if newest is not None and newest.said is self._said:
                        group.update({**saving.values_of(self._groups)[place], **group})
                adopted.append(one)
        self._schedules[:] = [one.schedules for one in adopted]
        self._said[:] = [one.said for one in adopted]
        self._groups[:] = groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; it may set its own rho and gamma, as the first ones may."""
        if "base" not in self.__dict__:  # torch's constructor is listing the base's groups
            super().add_param_group(param_group)
            return
        self._refuse_in_flight("add a parameter group")
        with saving.unchanged_on_error([param_group] if isinstance(param_group, dict) else []):
            self._adopt_groups()
            self.base.add_param_group(param_group)
            try:
                self._adopt_groups()
                self._layout(anew=True)
            except Exception:
                self.base.param_groups.pop()
                for entries in (self._schedules, self._said, self._groups):
                    del entries[len(self.param_groups) :]
                raise

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resume needs, as tensors and plain values; the base can load it, too."""
        self._refuse_in_flight("save a state")
        self._adopt_groups()
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state, values = saving.state_of(self.base), saving.values_of(self.param_groups)
        beside = {} if saving.are_in(values, state) else {"values": values}
        for hook in self._optimizer_state_dict_post_hooks.values():
            changed = hook(self, state)
            state = state if changed is None else changed
        groups, named = self.param_groups, self._schedules
        state["sharpness"] = saving.extras(groups, named, self.when, self.skipped)
        state["sharpness"]["rule"] = type(self.rule).__name__
        state["sharpness"].update(beside)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer or of a plain base; refused before anything changes."""
        self._refuse_in_flight("load a state")
        state_dict = dict(state_dict) if isinstance(state_dict, dict) else state_dict
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        self._adopt_groups()
        loading.check_loadable(state_dict, self.base)
        values = loading.saved_values(state_dict, self.param_groups)
        for saved_group in values:
            for name in self._hyper:
                if saving.PREFIX + name in saved_group:
                    saving.check_value(name, saved_group[saving.PREFIX + name], self.rule)
        saved = state_dict.get("sharpness")
        rule = type(self.rule).__name__
        if saved is not None and saved.get("rule", rule) != rule:
            warn(
                f"the state is of an optimizer whose rule was {saved['rule']}, here it is {rule}: "
                "what the groups say of its hyperparameters may mean something else"
            )
        schedules = loading.load_schedules(saved, self._schedules)
        interval = loading.load_interval(saved, self.when)
        own = saving.values_of(self.param_groups)
        loading.load_base(self.base, state_dict)
        for group, before, said in zip(self.param_groups, own, values, strict=True):
            group.update({**before, **group, **said})
        self._schedules, self.__dict__["when"] = schedules, interval
        self._groups[:] = self.param_groups
        self._flight = None
        if saved is not None:
            self.skipped = saved["skipped"]
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_in_flight("copy the optimizer")
        hooks = [key for key in self.__dict__ if key.startswith("_optimizer_")]
        left_out = {*self._scratch, *hooks}
        return {key: value for key, value in self.__dict__.items() if key not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        super().__setstate__({})
        saving.SAID[self.base] = saving.Heard(self._groups, self._said)
        self._prepare()

    def __repr__(self) -> str:
        group, named = {**self._groups[0], **self.param_groups[0]}, self._schedules[0]
        shown = [
            f"{name}={named[name]!r}"
            if name in named
            else f"{name}={group[saving.PREFIX + name]:g}"
            for name in self._hyper
        ]
        shown += [f"{name}={value!r}" for name, value in self._options().items()]
        return f"{type(self).__name__}({', '.join(shown)}, base={self.base!r})"

    def _check_options(self) -> None:
        """Refuse options that are wrong, or wrong together."""

    def _options(self) -> dict[str, Any]:
        """Return what differs from the defaults and is no value of a group, for `repr`."""
        return {}
