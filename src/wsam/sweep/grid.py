"""Grids: runs that differ in a few settings."""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wsam.lab.files import read_regular
from wsam.lab.run import Run
from wsam.lab.settings import Value, join_names

Point = dict[str, Value]
"""A value for each axis."""

MAX_POINTS = 10_000
"""The largest grid that a file may describe. All of its runs are checked before the first starts."""
_PLAIN = ("epochs", "batch_size", "noise")
_SEEDS = ("seed", "noise_seed")


def with_value(run: Run, name: str, value: Value) -> Run:
    """Return the run with one setting changed.

    Args:
        run: The run.
        name: A hyperparameter of its method, an argument of its base optimizer, or one of epochs,
            batch_size and noise, searched in this order. Seeds cannot be varied: every point of a
            grid is run with the same seeds.
        value: The new value.

    Raises:
        ValueError: The run has no such setting.

    Example:
        >>> run = with_value(Run(method="wsam"), "gamma", 0.8)
        >>> with_value(run, "lr", 0.1).title
        'digits cnn wsam gamma=0.8 rho=0.05 seed=0'
    """
    if name in run.hyper:
        return run.replace(hyper={**run.hyper, name: value})
    if name in run.base_args:
        return run.replace(base_args={**run.base_args, name: value})
    if name in _PLAIN:
        return run.replace(**{name: value})
    known = [*run.hyper, *run.base_args, *_PLAIN]
    raise ValueError(f"a {run.method} run has no setting {name!r}; it has: {join_names(known)}")


def is_integer_setting(run: Run, name: str) -> bool:
    """Return whether a setting is an integer.

    Example:
        >>> is_integer_setting(Run(), "epochs"), is_integer_setting(Run(hyper={"rho": 1}), "rho")
        (True, False)
    """
    plain = {setting: getattr(run, setting) for setting in _PLAIN}
    value = {**plain, **run.base_args, **run.hyper}[name]
    return isinstance(value, int) and not isinstance(value, bool)


def with_seeds(run: Run, seeds: Sequence[int]) -> tuple[Run, ...]:
    """Return a run once per seed, which also seeds the label noise so that repeats are independent."""
    return tuple(run.replace(seed=seed, noise_seed=seed) for seed in seeds)


@dataclass(frozen=True)
class Grid:
    """All combinations of values of some settings, for one or several base runs.

    Args:
        name: The grid's name.
        title: A short description.
        bases: The runs that the grid varies, by the name of their column.
        axes: The values of each varied setting; see `with_value` for their names.
        notes: Remarks to print with the results.
        epochs: The number of epochs that a shortened grid is scaled from; None for that of the
            first base run.

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

    @property
    def reference(self) -> int:
        """The number of epochs that a shortened grid is scaled from."""
        return self.epochs or next(iter(self.bases.values())).epochs

    def points(self) -> Iterator[Point]:
        """Yield every combination; the last axis varies fastest."""
        for values in itertools.product(*self.axes.values()):
            yield dict(zip(self.axes, values, strict=True))

    def run(self, column: str, point: Mapping[str, Value]) -> Run:
        """Return the run at a point."""
        run = self.bases[column]
        for name, value in point.items():
            run = with_value(run, name, value)
        return run

    def map(self, change: Callable[[Run], Run]) -> Grid:
        """Return the grid with `change` applied to every base run."""
        return replace(self, bases={name: change(run) for name, run in self.bases.items()})


def read_grid(path: Path) -> Grid:
    """Read a grid from a TOML file.

    The table ``run`` has settings of `wsam.lab.run.Run`, the table ``grid`` a list of values for
    each varied setting::

        title = "radius and weight on digits"
        [run]
        method = "wsam"
        epochs = 20
        [grid]
        rho = [0.05, 0.1, 0.2]
        gamma = [0.8, 0.88]

    Raises:
        ValueError: The file is not such a grid.
    """
    try:
        content = tomllib.loads(read_regular(path).decode("utf-8"))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from error
    unknown = sorted(set(content) - {"title", "run", "grid"})
    if unknown:
        raise ValueError(f"{path}: unknown entry {unknown[0]!r}; known: title, run, grid")
    run, axes = _table(content, "run", path), _table(content, "grid", path)
    for name in _SEEDS:
        for table, settings in (("run", run), ("grid", axes)):
            if name in settings:  # `with_seeds` sets both
                raise ValueError(f"{path}: {table}.{name} cannot be set in a grid: use --seeds")
    for name, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"{path}: grid.{name} must be a list of values, got {values!r}")
        if len(set(map(str, values))) < len(values):
            raise ValueError(f"{path}: grid.{name} has a value twice: {values!r}")
    if not axes:
        raise ValueError(f"{path}: the table [grid] has no setting to vary")
    base = Run.from_dict(run)
    grid = Grid(
        path.stem,
        str(content.get("title", path.stem)),
        {f"{base.data} {base.model}": base},
        {name: tuple(values) for name, values in axes.items()},
    )
    if (count := math.prod(map(len, grid.axes.values()))) > MAX_POINTS:
        raise ValueError(f"{path} has {count:,} grid points: at most {MAX_POINTS:,} are allowed")
    for point in grid.points():
        grid.run(next(iter(grid.bases)), point)  # refuse invalid values before anything runs
    return grid


def _table(content: dict[str, Any], name: str, path: Path) -> dict[str, Any]:
    value = content.get(name, {})
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {name} must be a table, [{name}]")
    return value
