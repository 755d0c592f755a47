"""Data classes for a table: rows, columns, and cells with runs and published figures."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from itertools import zip_longest
from typing import Any

from wsam._utils.text import format_mean_std
from wsam.lab.run import Run
from wsam.sweep.grid import with_seeds

PAPER_SEEDS = (0, 1, 2, 3, 4)
"""The paper repeats its experiments five times."""
ABSENT = "–"
"""Label of a setting that the method of a row does not have."""


class Kind(StrEnum):
    """A table or figure of the paper, a hyperparameter search, or a study that is not in the paper."""

    TABLE = "table"
    FIGURE = "figure"
    SEARCH = "search"
    STUDY = "study"


class Measure(StrEnum):
    """The quantity that a cell reports for its runs."""

    TEST_ERROR = "test error (%)"
    BEST_ERROR = "test error (%), best epoch"
    TEST_ACCURACY = "test accuracy (%)"
    BEST_ACCURACY = "test accuracy (%), best epoch"
    TRAIN_LOSS = "train loss"
    ACCURACY = "test accuracy"
    TOP_EIGENVALUE = "top Hessian eigenvalue"
    EIGENVALUE_BY_BATCHES = "top Hessian eigenvalue, BatchNorm by batches"
    EIGENVALUE_ON_TEST = "top Hessian eigenvalue, test images"
    TEST_LOSS = "test loss"
    TEST_METRIC = "test metric"
    VALIDATION_ERROR = "validation error (%)"
    VALIDATION_LOSS = "validation loss"
    TRAIN_AUGMENTED_FULL = "top eigenvalue, train, augmented, all batches"
    TRAIN_AUGMENTED_BATCH = "top eigenvalue, train, augmented, one batch a step"
    TRAIN_PLAIN_FULL = "top eigenvalue, train, plain, all batches"
    TRAIN_PLAIN_BATCH = "top eigenvalue, train, plain, one batch a step"
    EVAL_AUGMENTED_FULL = "top eigenvalue, eval, augmented, all batches"
    EVAL_AUGMENTED_BATCH = "top eigenvalue, eval, augmented, one batch a step"
    EVAL_PLAIN_FULL = "top eigenvalue, eval, plain, all batches"
    EVAL_PLAIN_BATCH = "top eigenvalue, eval, plain, one batch a step"
    COST = "training time / SGD's"
    PASSES = "passes / SGD's"

    @property
    def is_cost(self) -> bool:
        """Whether it measures what a run costs, not its result."""
        return self in (Measure.COST, Measure.PASSES)

    @property
    def decimals(self) -> int:
        """Number of decimals, as the paper prints it."""
        if self in (Measure.TRAIN_LOSS, Measure.ACCURACY, Measure.TEST_METRIC):
            return 4
        return 3 if self in (Measure.TEST_LOSS, Measure.VALIDATION_LOSS) else 2


@dataclass(frozen=True)
class Quoted:
    """A figure as printed in the paper: a mean and, if given, a standard deviation."""

    mean: float
    deviation: float | None = None


@dataclass(frozen=True)
class Candidate:
    """A choice of hyperparameters that a cell may take.

    Args:
        text: The choice: ``rho 0.1``.
        run: The run with it, as reported.
        trial: The run that decides, on a validation split.
    """

    text: str
    run: Run
    trial: Run


@dataclass(frozen=True)
class Cell:
    """One cell: its runs, one per seed, and the paper's figure.

    Args:
        row: Labels of the row, outermost first.
        column: Label of the column.
        runs: Runs with equal settings and different seeds.
        paper: The paper's figure; None if it prints none.
        measure: The quantity reported for the runs.
        candidates: Of which the runs take the one that is best on the validation split; see `choose`.
            Before any trial has finished, they take the first.
        chosen: The candidate that was chosen, for a note; empty before any trial has finished.
        reference: Runs of the base optimizer, relative to which a cost is measured.
    """

    row: tuple[str, ...]
    column: str
    runs: tuple[Run, ...]
    paper: Quoted | None = None
    measure: Measure = Measure.TEST_ERROR
    candidates: tuple[Candidate, ...] = ()
    chosen: str = ""
    reference: tuple[Run, ...] = ()

    @property
    def has_choice(self) -> bool:
        """Whether it has several candidates."""
        return len(self.candidates) > 1

    @property
    def is_searched(self) -> bool:
        """Whether its candidates, if it has several, were compared."""
        return not self.has_choice or bool(self.chosen)

    @property
    def name(self) -> str:
        """The cell's address, such as ``ResNet18/WSAM/CIFAR-10``."""
        return "/".join((*self.row, self.column))

    def matches(self, pattern: str) -> bool:
        """Return whether a pattern matches the cell's address or one of its labels."""
        pattern = pattern.lower()
        if "/" in pattern:
            return fnmatchcase(self.name.lower(), pattern)
        return any(fnmatchcase(part.lower(), pattern) for part in (*self.row, self.column))


@dataclass(frozen=True)
class Table:
    """A table or figure of the paper, or one of our own.

    Args:
        name: Name on the command line.
        title: Title for readers.
        heads: Headers of the row labels, such as ``("model", "method")``.
        cells: All cells, row by row.
        kind: Table, figure, search or study.
        epochs: Epochs of a run, except for runs of the base optimizer alone.
        notes: Footnotes: choices made here where the paper leaves something open.
        comparable: Whether results may be compared with the paper's; see `Profile`.
        best_epoch: Show the best epoch next to the last one.
        baselines: Last labels of the rows with which others are compared; empty: each with each.
        conclude: Returns sentences about the results, to print below the table.
    """

    name: str
    title: str
    heads: tuple[str, ...]
    cells: tuple[Cell, ...]
    kind: Kind = Kind.TABLE
    epochs: int = 200
    notes: tuple[str, ...] = ()
    comparable: bool = True
    best_epoch: bool = False
    baselines: tuple[str, ...] = ()
    conclude: Callable[[Any], Sequence[str]] | None = None

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """Labels of all rows, in order."""
        return tuple(dict.fromkeys(cell.row for cell in self.cells))

    @property
    def columns(self) -> tuple[str, ...]:
        """Labels of all columns, in order."""
        return tuple(dict.fromkeys(cell.column for cell in self.cells))

    @property
    def runs(self) -> tuple[Run, ...]:
        """Every run once: all cells for the first seed, then for the second, and so on."""
        by_seed = zip_longest(*(cell.runs for cell in self.cells))
        runs = (run for of_seed in by_seed for run in of_seed if run is not None)
        return tuple({run.key: run for run in runs}.values())

    def cell(self, row: Sequence[str], column: str) -> Cell | None:
        """Return a cell, or None if the table has no such cell."""
        matches = (c for c in self.cells if c.row == tuple(row) and c.column == column)
        return next(matches, None)

    def select(self, pattern: str) -> Table:
        """Return the table with only the cells that match a pattern.

        Args:
            pattern: Wildcards for an address, ``ResNet18/*/CIFAR-10``, or for one label, ``WSAM``;
                case is ignored.

        Raises:
            ValueError: No cell matches.
        """
        selected = tuple(cell for cell in self.cells if cell.matches(pattern))
        if not selected:
            raise ValueError(
                f"no cell of {self.name} is named by {pattern!r}; its first is {self.cells[0].name}"
            )
        return self.with_cells(selected)

    def with_cells(self, cells: Sequence[Cell]) -> Table:
        """Return the table with some of its cells only, and without notes about rows that are left out.

        A note is about rows if it begins with a word of their labels.
        """
        chosen = replace(self, cells=tuple(cells))
        left_out = self._label_words - chosen._label_words
        notes = (n for n in self.notes if _first_word(n) not in left_out)
        return replace(chosen, notes=tuple(notes))

    @property
    def _label_words(self) -> set[str]:
        labels = " ".join(label for row in self.rows for label in row)
        return {*re.split(r"[ ,]+", labels.lower())}

    def map(self, change: Callable[[Run], Run]) -> Table:
        """Return the table with `change` applied to every run."""

        def changed(cell: Cell) -> Cell:
            runs, reference = (tuple(map(change, given)) for given in (cell.runs, cell.reference))
            candidates = tuple(
                replace(one, run=change(one.run), trial=change(one.trial))
                for one in cell.candidates
            )
            return replace(cell, runs=runs, candidates=candidates, reference=reference)

        return replace(self, cells=tuple(map(changed, self.cells)))

    def seeded(self, seeds: Sequence[int]) -> Table:
        """Return the table for other seeds; label noise uses the same seeds.

        A cost is relative to the references with these seeds and with their own.
        """

        def changed(cell: Cell) -> Cell:
            others = (run for one in cell.reference for run in with_seeds(one, seeds))
            reference = tuple(dict.fromkeys((*cell.reference, *others)))
            return replace(cell, runs=with_seeds(cell.runs[0], seeds), reference=reference)

        return replace(self, cells=tuple(map(changed, self.cells)))


def _first_word(note: str) -> str:
    return note.lower().partition(" ")[0].rstrip(":,").removesuffix("'s")


def format_number(value: float, decimals: int) -> str:
    """Format a number; one that would round to zero keeps one significant digit.

    Example:
        >>> format_number(3.616, 2), format_number(0.003, 2), format_number(0.0, 2)
        ('3.62', '0.003', '0.00')
    """
    if 0 < abs(value) < 0.5 * 10**-decimals:
        decimals = math.ceil(-math.log10(abs(value)))
    return f"{value:.{decimals}f}"


def format_mean(mean: float, deviation: float | None, decimals: int) -> str:
    """Format ``3.62 ± 0.10``, or the mean alone if there is no deviation."""
    return format_mean_std(mean, deviation, lambda value: format_number(value, decimals))
