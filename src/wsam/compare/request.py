"""What to compare: a problem, methods, seeds and a time budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from wsam.compare.contenders import BASE, CHEAP, EVERY, Contender, contender
from wsam.lab.data.loader_feed import Data, as_data
from wsam.lab.errors import UserCodeError, explain
from wsam.lab.run import Run
from wsam.lab.settings import CLASS, VANILLA, method_defaults
from wsam.lab.user_code import is_code, load, source_file
from wsam.lab.values import check_choice
from wsam.report.labels import method_colors

TRIALS = 8
VALIDATION = 0.2
EQUAL = {"time": "training time", "passes": "number of passes"}
"""What may be equal in all runs of a comparison, in words."""


@dataclass(frozen=True)
class Request:
    """A comparison.

    Args:
        run: The problem and the base optimizer, with its central learning rate: a vanilla run with a
            validation split. Its epochs are those of the base in trials and final runs.
        methods: ``base``, names of `wsam.METHODS`, ``cheap``, and classes of the user's own,
            ``path/file.py:Class``. The base is always included.
        seeds: Seeds of the final runs.
        budget: Seconds for the whole comparison.
        trials: Settings tried for each method; fewer if the budget requires it.
        every: Steps between the two-pass steps of ``cheap``.
        equal: What is equal in all runs: ``time``, measured on this machine, or ``passes``, the number
            of forward and backward passes, which does not depend on the machine.
        own: The runs of the user's own methods at their defaults, by name. Computed if not given, which
            imports their files.

    Example:
        >>> Request(Run(method="vanilla", validation=0.2), ("sam", "wsam"), budget=60).methods
        ('base', 'sam', 'wsam')
    """

    run: Run
    methods: tuple[str, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    budget: float = 1200.0
    trials: int = TRIALS
    every: int = EVERY
    equal: str = "time"
    own: Mapping[str, Run] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the methods."""
        object.__setattr__(self, "methods", _checked_methods(self.methods))
        names = filter(is_code, self.methods)
        own = {name: self.own.get(name) or self.run.replace(method=name) for name in names}
        object.__setattr__(self, "own", own)
        if own and self.equal == "passes":
            raise ValueError(
                f"the number of passes of {next(iter(own))} is not known: use --equal time"
            )
        titles = [method.title for method in self.contenders.values()]
        if twice := [title for title in titles if titles.count(title) > 1]:
            raise ValueError(f"two methods have the title {twice[0]}: rename your class")

    @property
    def contenders(self) -> dict[str, Contender]:
        """The methods by name, with the settings that the search tries."""
        found = {
            name: contender(name, self.run, self.every, self.own.get(name)) for name in self.methods
        }
        colors = method_colors(method.run.method for method in found.values())
        return {
            name: replace(method, color=colors[method.run.method]) for name, method in found.items()
        }

    @property
    def effort(self) -> str:
        """What is equal in all runs, in words."""
        return EQUAL[self.equal]

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON-compatible data."""
        lists = {"methods": list(self.methods), "seeds": list(self.seeds)}
        own = {name: run.to_dict() for name, run in self.own.items()}
        found = {**vars(self), "run": self.run.to_dict(), **lists, "own": own}
        return {name: value for name, value in found.items() if name != "own" or own}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Request:
        """Return the comparison whose `to_dict` is given. Executes no code.

        Raises:
            ValueError: The run of a method of the user's own is missing.
        """
        own = {name: Run.from_dict(run) for name, run in data.get("own", {}).items()}
        if missing := [name for name in data["methods"] if is_code(name) and name not in own]:
            raise ValueError(f"the run of {missing[0]} is missing")
        run, seeds = Run.from_dict(data["run"]), tuple(data["seeds"])
        return cls(**{**data, "run": run, "seeds": seeds, "own": own})


def _checked_methods(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names without repetitions, the base first."""
    known = [BASE, *(name for name in method_defaults() if name != VANILLA), CHEAP, CLASS]
    named = [BASE if name == VANILLA else name for name in names]
    found = [name if is_code(name) else check_choice("method", name, known) for name in named]
    if {*found} <= {BASE}:
        raise ValueError(f"nothing to compare: name a method besides {BASE}")
    return tuple(dict.fromkeys([BASE, *found]))


def with_validation(run: Run) -> Run:
    """Return the run with a validation split, unless its data provides one.

    Raises:
        UserCodeError: The user's data function raises an exception.
    """
    if run.validation is not None or _has_validation(run):
        return run
    return run.replace(validation=VALIDATION)


def _has_validation(run: Run) -> bool:
    """Return whether the user's own data has a validation split."""
    if not is_code(run.data):
        return False
    found = load(run.data)
    if callable(found) and not isinstance(found, Data):
        with explain(run.data, source_file(run.data)):
            found = found()
    data = as_data(found, run.data)
    if data.validation is None and isinstance(data.train, DataLoader | IterableDataset):
        raise UserCodeError(
            f"{run.data} has a training loader: return a validation split, too, by which settings are "
            "chosen: wsam.lab.Data(train, test, validation=...)"
        )
    return data.validation is not None
