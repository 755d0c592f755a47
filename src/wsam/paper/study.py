"""Studies that are not in the paper: hyperparameters are chosen on a validation split.

Each method has the same number of candidates. A search runs each of them once on a part of the
training data and measures it on the rest; the study then trains the best one on all training data,
with several seeds, and reports the test set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wsam.lab import records
from wsam.lab.run import Run
from wsam.paper.table import Candidate, Cell, Kind, Measure, Table
from wsam.sweep.grid import with_seeds
from wsam.sweep.settings import in_order, with_value

Choices = Sequence[dict[str, Any]]
"""For each candidate the values of some settings, named as in a grid."""
SEEDS = (0, 1, 2)
VALIDATION = 0.1
_ON_VALIDATION = {
    Measure.TEST_ERROR: Measure.VALIDATION_ERROR,
    Measure.TEST_LOSS: Measure.VALIDATION_LOSS,
}


def vary(name: str, *values: float, **others: float) -> Choices:
    """Return a choice for each value of a setting, with the same other hyperparameters."""
    return [{**others, name: value} for value in values]


def candidates(run: Run, choices: Choices, trial_epochs: float = 1.0) -> tuple[Candidate, ...]:
    """Return the candidates of a method.

    Args:
        run: The run, without its hyperparameters.
        choices: The settings that differ between them.
        trial_epochs: Epochs of a trial as a share of those of the run.
    """
    found = []
    for choice in choices:
        one = run
        for name in in_order(choice):
            one = with_value(one, name, choice[name])
        epochs = max(1, round(trial_epochs * one.epochs))
        trial = one.replace(validation=VALIDATION, epochs=epochs)
        text = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in choice.items())
        found.append(Candidate(text or "as given", one, trial))
    return tuple(found)


def chosen_cell(
    row: tuple[str, ...],
    column: str,
    options: tuple[Candidate, ...],
    measure: Measure = Measure.TEST_ERROR,
    seeds: Sequence[int] = SEEDS,
) -> Cell:
    """Return a cell whose hyperparameters are chosen on the validation split."""
    runs = with_seeds(options[0].run, seeds)
    return Cell(row, column, runs, measure=measure, candidates=options)


def search_table(study: Table) -> Table:
    """Return the candidates of a study as a table of their validation figures."""
    cells = [
        Cell((*cell.row, one.text), cell.column, (one.trial,), measure=_ON_VALIDATION[cell.measure])
        for cell in study.cells
        if cell.has_choice and cell.measure in _ON_VALIDATION
        for one in cell.candidates
    ]
    return Table(
        f"{study.name}-search",
        f"Candidates of the study {study.name}, measured on a validation split",
        (*study.heads, "candidate"),
        tuple(cells),
        Kind.SEARCH,
        study.epochs,
    )


def choose(table: Table, results: Path) -> Table:
    """Return a table whose cells take the candidate that is best on the validation split.

    Cells without a finished trial keep their first candidate.
    """
    return replace(table, cells=tuple(_chosen(cell, results) for cell in table.cells))


def _chosen(cell: Cell, results: Path) -> Cell:
    if not cell.has_choice:
        return cell
    figures = {}
    for one in cell.candidates:
        record = records.read(results, one.trial)
        if record is not None and (figure := records.objective(record)) is not None:
            figures[one] = figure
    if not figures:
        return cell
    best = min(figures, key=lambda one: figures[one])
    seeds = [run.seed for run in cell.runs]
    return replace(cell, runs=with_seeds(best.run, seeds), chosen=best.text)
