"""A grid as data: runs that differ in a few settings."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wsam.lab.names import Value, listed
from wsam.lab.run import Run

Point = dict[str, Value]
"""A value for every axis."""

_PLAIN = ("epochs", "batch_size", "noise")
_SEEDS = ("seed", "noise_seed")


def with_value(run: Run, name: str, value: Value) -> Run:
    """Return the run with one setting changed, wherever that setting lives.

    Args:
        run: The run.
        name: A hyperparameter of its method, an argument of its base optimizer, or one of epochs,
            batch_size and noise; looked for in this order. Seeds are no axis: every point of a
            grid is run for the same seeds.
        value: The new value.

    Raises:
        ValueError: Neither of them has such a setting.

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
    raise ValueError(f"a {run.method} run has no setting {name!r}; it has: {listed(known)}")


def is_whole(run: Run, name: str) -> bool:
    """Tell whether a setting takes whole numbers alone: by its own value, which has its type.

    Example:
        >>> is_whole(Run(), "epochs"), is_whole(Run(hyper={"rho": 1}), "rho")
        (True, False)
    """
    plain = {setting: getattr(run, setting) for setting in _PLAIN}
    value = {**plain, **run.base_args, **run.hyper}[name]
    return isinstance(value, int) and not isinstance(value, bool)


def repeated(run: Run, seeds: Sequence[int]) -> tuple[Run, ...]:
    """Return a run once per seed. Noisy labels are drawn anew too, so that repeats are independent."""
    return tuple(run.replace(seed=seed, noise_seed=seed) for seed in seeds)


@dataclass(frozen=True)
class Grid:
    """All combinations of some settings' values, for one or several base runs.

    Args:
        name: What it is called.
        title: A line for people.
        bases: The runs that the grid varies, by their column's name.
        axes: The values of each varied setting; see `with_value` for their names.
        notes: What a reader should know.
        epochs: What the number of epochs is reckoned from where a grid is made shorter; None for
            the first base's own.

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
        """The number of epochs that a shorter version is reckoned from."""
        return self.epochs or next(iter(self.bases.values())).epochs

    def points(self) -> Iterator[Point]:
        """Yield every combination, the last axis varying fastest."""
        for values in itertools.product(*self.axes.values()):
            yield dict(zip(self.axes, values, strict=True))

    def run(self, column: str, point: Mapping[str, Value]) -> Run:
        """Return the run of a point."""
        run = self.bases[column]
        for name, value in point.items():
            run = with_value(run, name, value)
        return run

    def map(self, change: Callable[[Run], Run]) -> Grid:
        """Return the same grid over other base runs."""
        return replace(self, bases={name: change(run) for name, run in self.bases.items()})


def read_grid(path: Path) -> Grid:
    """Read a grid of one's own from a TOML file.

    The file has a table ``run`` with settings of `wsam.lab.run.Run` and a table ``grid`` with a
    list of values for each varied setting::

        title = "radius and weight on digits"
        [run]
        method = "wsam"
        epochs = 20
        [grid]
        rho = [0.05, 0.1, 0.2]
        gamma = [0.8, 0.88]

    Raises:
        ValueError: Not such a file; the message says what is wrong with it.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from error
    unknown = sorted(set(content) - {"title", "run", "grid"})
    if unknown:
        raise ValueError(f"{path}: unknown entry {unknown[0]!r}; known: title, run, grid")
    run, axes = _table(content, "run", path), _table(content, "grid", path)
    for name in _SEEDS:
        for table, settings in (("run", run), ("grid", axes)):
            if name in settings:  # `repeated` sets both
                raise ValueError(f"{path}: {table}.{name} is not for a grid to say: use --seeds")
    for name, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"{path}: grid.{name} must be a list of values, got {values!r}")
        if len(set(map(str, values))) < len(values):
            raise ValueError(f"{path}: grid.{name} names a value twice: {values!r}")
    if not axes:
        raise ValueError(f"{path}: the table [grid] names no setting to vary")
    base = Run.from_dict(run)
    grid = Grid(
        path.stem,
        str(content.get("title", path.stem)),
        {f"{base.data} {base.model}": base},
        {name: tuple(values) for name, values in axes.items()},
    )
    for point in grid.points():
        grid.run(next(iter(grid.bases)), point)  # a bad value is refused before anything runs
    return grid


def _table(content: dict[str, Any], name: str, path: Path) -> dict[str, Any]:
    value = content.get(name, {})
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {name} must be a table, [{name}]")
    return value
