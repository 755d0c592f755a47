"""Grids: runs that differ in a few settings."""

from __future__ import annotations

import itertools
import math
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wsam.lab.files import read_regular
from wsam.lab.run import Run, check_setting_names, with_seed, with_wsam_defaults
from wsam.lab.settings import DATA_SETTINGS
from wsam.lab.user_code import is_code
from wsam.lab.values import Value
from wsam.sweep.settings import DECISIVE, SEEDS, has_setting, in_order, with_value

Point = dict[str, Value]
"""A value for each axis that the run has."""

MAX_POINTS = 10_000
"""The largest grid that a user may describe. All of its runs are checked before the first starts."""


def with_seeds(run: Run, seeds: Sequence[int]) -> tuple[Run, ...]:
    """Return a run once per seed; see `with_seed`."""
    return tuple(with_seed(run, seed) for seed in seeds)


@dataclass(frozen=True)
class Grid:
    """All combinations of values of some settings, for one or several base runs.

    Args:
        name: The grid's name.
        title: A short description.
        bases: The runs that the grid varies, by the name of their column.
        axes: The values of each varied setting; see `with_value` for their names. Runs that do not
            have a setting, such as gamma with SAM, ignore it.
        notes: Remarks to print with the results.
        epochs: The number of epochs that a shortened grid is scaled from; None for that of the
            first base run.
        given: The hyperparameters and options of the base runs that were given; the others have the
            defaults of `wsam.WSAM`. None: the base runs are used as they are.

    Example:
        >>> axes = {"rho": (0.1, 0.2), "gamma": (0.8, 0.9)}
        >>> grid = Grid("mine", "a small one", {"digits": Run()}, axes)
        >>> len(list(grid.points()))
        4
    """

    name: str
    title: str
    bases: Mapping[str, Run]
    axes: Mapping[str, tuple[Value, ...]]
    notes: tuple[str, ...] = ()
    epochs: int | None = None
    given: frozenset[str] | None = None

    @property
    def reference(self) -> int:
        """The number of epochs that a shortened grid is scaled from."""
        return self.epochs or next(iter(self.bases.values())).epochs

    def points(self) -> Iterator[Point]:
        """Yield every combination once; the last axis varies fastest.

        A point has only the axes that its runs have, so points that differ in others are one.
        """
        seen = set()
        for values in itertools.product(*self.axes.values()):
            whole = dict(zip(self.axes, values, strict=True))
            used = {name for column in self.bases for name in self.used_axes(column, whole)}
            point = {name: value for name, value in whole.items() if name in used}
            if (key := repr(point)) not in seen:
                seen.add(key)
                yield point

    def run(self, column: str, point: Mapping[str, Value]) -> Run:
        """Return the run at a point. Settings that the run does not have are ignored."""
        run = self.bases[column]
        for name in in_order(point):
            if has_setting(run, name):
                run = with_value(run, name, point[name])
        if self.given is None:
            return run
        return with_wsam_defaults(run, self.given | {name.rpartition(".")[2] for name in point})

    def used_axes(self, column: str, point: Mapping[str, Value]) -> list[str]:
        """Return the settings of a point that its run has."""
        run = self.run(column, {name: point[name] for name in DECISIVE if name in point})
        return [name for name in point if has_setting(run, name)]

    def check(self) -> None:
        """Check all points.

        Raises:
            ValueError: An axis that no run has, a value that an optimizer rejects, or too many points.
        """
        if (count := math.prod(map(len, self.axes.values()))) > MAX_POINTS:
            raise ValueError(f"{count:,} grid points: at most {MAX_POINTS:,} are allowed")
        used: set[str] = set()
        for point in self.points():
            used |= point.keys()
            for column in self.bases:
                check_optimizer(self.run(column, point))
        for name in self.axes:
            if name not in used:  # of all runs: the first has the message with the known names
                with_value(self.run(next(iter(self.bases)), next(self.points())), name, None)

    def map(self, change: Callable[[Run], Run]) -> Grid:
        """Return the grid with `change` applied to every base run."""
        return replace(self, bases={name: change(run) for name, run in self.bases.items()})


def check_optimizer(run: Run) -> None:
    """Raise a ValueError if the optimizer of a run rejects a value; the user's own are not created."""
    from torch import nn

    from wsam.lab.optimizers import make_optimizer

    if not is_code(run.method):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make_optimizer(run.replace(geometry=None), nn.Linear(1, 1))


def read_grid(path: Path) -> Grid:
    """Read a grid from a TOML file.

    The table ``run`` has settings of `wsam.lab.run.Run`, the table ``grid`` a list of values for
    each varied setting (see `with_value`)::

        title = "two methods on digits"
        [run]
        epochs = 20
        [grid]
        method = ["sam", "wsam"]
        lr = [0.02, 0.05]
        gamma = [0.8, 0.88]    # of WSAM only

    Raises:
        ValueError: The file is not such a grid.
    """
    try:
        content = tomllib.loads(read_regular(path).decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from error
    unknown = sorted(set(content) - {"title", "run", "grid"})
    if unknown:
        raise ValueError(f"{path}: unknown entry {unknown[0]!r}; known: title, run, grid")
    run, axes = (content.get(name, {}) for name in ("run", "grid"))
    if not (isinstance(run, dict) and isinstance(axes, dict)):
        raise ValueError(f"{path}: run and grid must be tables, [run] and [grid]")
    for name, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"{path}: grid.{name} must be a list of values, got {values!r}")
    try:
        return make_grid(path.stem, axes, run, str(content.get("title", path.stem)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def make_grid(
    name: str,
    axes: Mapping[str, Sequence[Any]],
    run: Mapping[str, Any] | None = None,
    title: str | None = None,
) -> Grid:
    """Return a checked grid of one base run.

    Args:
        name: Its name.
        axes: The values of each setting; one value fixes it.
        run: Settings of the base run. Arguments of its method and base optimizer also apply to the
            other methods and bases of the grid that have them.
        title: Its title. Default: the names of the axes.

    Raises:
        TypeError: A value of the wrong type.
        ValueError: An unknown setting, an invalid value, or too many points.

    Example:
        >>> grid = make_grid("mine", {"method": ["sam", "wsam"], "gamma": [0.8, 0.9]})
        >>> [grid.run("digits cnn", point).title for point in grid.points()][:2]
        ['digits cnn sam rho=0.05 seed=0', 'digits cnn wsam gamma=0.8 rho=0.05 seed=0']
    """
    settings, found = dict(run or {}), freeze_axes(axes)
    for seed in SEEDS:  # `with_seeds` sets both
        if seed in settings or seed in found:
            raise ValueError(f"a grid cannot set {seed}: use --seeds")
    for field, place in (("method", "hyper"), ("method", "options"), ("base", "base_args")):
        if field in found:  # a new method or base would drop its arguments
            for key, value in settings.pop(place, {}).items():
                found.setdefault(key, (value,))
    if "data" in found:
        for key in DATA_SETTINGS.keys() & settings.keys():
            found.setdefault(key, (settings.pop(key),))
    check_setting_names(settings)
    base = Run(**settings)
    shown = [axis.replace("_", " ") for axis, values in found.items() if len(values) > 1]
    fixed = [found.get(field, (getattr(base, field),)) for field in ("data", "model")]
    column = " ".join(str(values[0]) for values in fixed if len(values) == 1) or name
    given = frozenset({*settings.get("hyper", ()), *settings.get("options", ())})
    grid = Grid(name, title or ", ".join(shown) or name, {column: base}, found, given=given)
    grid.check()
    return grid


def freeze_axes(axes: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Value, ...]]:
    """Return axes as tuples; a list among the values becomes a tuple too.

    Raises:
        ValueError: A value is given twice.
    """
    found: dict[str, tuple[Value, ...]] = {
        name: tuple(tuple(value) if isinstance(value, list) else value for value in values)
        for name, values in axes.items()
    }
    for axis, values in found.items():
        if len(set(map(repr, values))) < len(values):
            raise ValueError(f"{axis} has a value twice: {', '.join(map(str, values))}")
    return found
