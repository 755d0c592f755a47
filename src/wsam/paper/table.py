"""A table or figure of the paper as data: rows, columns, cells; a cell holds runs and a quotation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase

from wsam.lab.run import Run
from wsam.sweep.grid import repeated

SEEDS = (0, 1, 2, 3, 4)
"""The paper repeats its experiments five times."""


class Kind(StrEnum):
    """What a table is in the paper."""

    TABLE = "table"
    FIGURE = "figure"
    SEARCH = "search"


class Measure(StrEnum):
    """What a cell tells of its runs."""

    TEST_ERROR = "test error (%)"
    TEST_ACCURACY = "test accuracy (%)"
    BEST_ACCURACY = "test accuracy (%), best epoch"
    TRAIN_LOSS = "train loss"
    ACCURACY = "test accuracy"
    TOP_EIGENVALUE = "top Hessian eigenvalue"
    EIGENVALUE_BY_BATCHES = "top Hessian eigenvalue, BatchNorm by batches"
    EIGENVALUE_ON_TEST = "top Hessian eigenvalue, test images"

    @property
    def decimals(self) -> int:
        """Digits behind the point, as the paper prints it."""
        return 4 if self in (Measure.TRAIN_LOSS, Measure.ACCURACY) else 2


@dataclass(frozen=True)
class Quoted:
    """A figure as the paper prints it: a mean and, where it has one, a deviation."""

    mean: float
    deviation: float | None = None


@dataclass(frozen=True)
class Cell:
    """One cell: the runs that make it, one per seed, and what the paper says.

    Args:
        row: The row's labels, from the outermost.
        column: The column's label.
        runs: Same settings, different seeds.
        paper: The paper's figure; None where it prints none.
        measure: What is told of the runs.
    """

    row: tuple[str, ...]
    column: str
    runs: tuple[Run, ...]
    paper: Quoted | None = None
    measure: Measure = Measure.TEST_ERROR

    @property
    def name(self) -> str:
        """Its address: ``ResNet18/WSAM/CIFAR-10``."""
        return "/".join((*self.row, self.column))

    def matches(self, pattern: str) -> bool:
        """Tell whether a pattern names the cell, by its address or by one part of it."""
        pattern = pattern.lower()
        if "/" in pattern:
            return fnmatchcase(self.name.lower(), pattern)
        return any(fnmatchcase(part.lower(), pattern) for part in (*self.row, self.column))


@dataclass(frozen=True)
class Table:
    """A table or figure of the paper.

    Args:
        name: What the command line calls it.
        title: A line for people.
        heads: What the labels of a row are: ``("model", "method")``.
        cells: All cells, row by row.
        kind: Table, figure or search.
        epochs: Those of a run that is not vanilla.
        notes: Where the paper leaves something open: what was chosen here.
        comparable: Whether figures of its runs may be compared with the paper's; see `Profile`.
    """

    name: str
    title: str
    heads: tuple[str, ...]
    cells: tuple[Cell, ...]
    kind: Kind = Kind.TABLE
    epochs: int = 200
    notes: tuple[str, ...] = ()
    comparable: bool = True

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """The rows' labels, in order."""
        return tuple(dict.fromkeys(cell.row for cell in self.cells))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns' labels, in order."""
        return tuple(dict.fromkeys(cell.column for cell in self.cells))

    @property
    def runs(self) -> tuple[Run, ...]:
        """Every run once: all cells of the first seed, then all of the next."""
        deepest = max((len(cell.runs) for cell in self.cells), default=0)
        by_seed = (
            cell.runs[number]
            for number in range(deepest)
            for cell in self.cells
            if number < len(cell.runs)
        )
        return tuple({run.key: run for run in by_seed}.values())

    def cell(self, row: Sequence[str], column: str) -> Cell | None:
        """Return a cell, or None where the table has a gap."""
        found = (c for c in self.cells if c.row == tuple(row) and c.column == column)
        return next(found, None)

    def select(self, pattern: str) -> Table:
        """Return the cells that a pattern names.

        Args:
            pattern: Of an address, ``ResNet18/*/CIFAR-10``, or of one label, ``WSAM``; case does
                not matter.

        Raises:
            ValueError: It names none; the message shows what there is.
        """
        chosen = tuple(cell for cell in self.cells if cell.matches(pattern))
        if not chosen:
            raise ValueError(
                f"no cell of {self.name} is named by {pattern!r}; its first is {self.cells[0].name}"
            )
        return replace(self, cells=chosen)

    def map(self, change: Callable[[Run], Run]) -> Table:
        """Return the same table of other runs."""
        return replace(
            self,
            cells=tuple(
                replace(cell, runs=tuple(change(run) for run in cell.runs)) for cell in self.cells
            ),
        )

    def seeded(self, seeds: Sequence[int]) -> Table:
        """Return the same table for other seeds; the seed of label noise goes with them."""
        return replace(
            self,
            cells=tuple(replace(cell, runs=repeated(cell.runs[0], seeds)) for cell in self.cells),
        )


def number(value: float, decimals: int) -> str:
    """Return a number as text; a small one keeps one significant digit.

    Example:
        >>> number(3.616, 2), number(0.003, 2), number(0.0, 2)
        ('3.62', '0.003', '0.00')
    """
    if 0 < abs(value) < 0.5 * 10**-decimals:
        decimals = math.ceil(-math.log10(abs(value)))
    return f"{value:.{decimals}f}"


def with_deviation(mean: float, deviation: float | None, decimals: int) -> str:
    """Return ``3.62 ± 0.10``, or the mean alone."""
    if deviation is None:
        return number(mean, decimals)
    digits = decimals
    if 0 < deviation < 10**-decimals:
        digits = math.ceil(-math.log10(deviation))
    return f"{number(mean, decimals)} ± {deviation:.{digits}f}"
