"""Sharpness at a lower cost: test error and training time of ResNet18 on CIFAR. Not in the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wsam.lab.run import Run
from wsam.paper.cifar import DATASETS, EPOCHS, GAMMA, RHO, base_run, scratch_run
from wsam.paper.comparison import Entry
from wsam.paper.study import SEEDS, candidates, chosen_cell
from wsam.paper.table import Candidate, Cell, Kind, Measure, Table, format_mean
from wsam.sweep.grid import with_seeds

MODEL = "ResNet18"
SGD, TWICE, WSAM = "SGD", "SGD, 2x epochs", "WSAM"
COST = "cost"
TRIAL_EPOCHS = 0.2
BUDGET = 1.15
"""Cost up to which a method counts as about as cheap as SGD."""

_LONGER = {SGD: 1.0, "SGD, 1.15x epochs": 1.15, "SGD, 1.5x epochs": 1.5, TWICE: 2.0}
_OF_PAPER = ("SAM", "ESAM", "GSAM", WSAM)
"""Methods with the hyperparameters of the paper's main table."""


def _weights(data: str, *others: float) -> list[dict[str, Any]]:
    """Return WSAM's gamma of the paper, and others; by default two smaller ones."""
    return [{"gamma": value} for value in (GAMMA[MODEL, data], *(others or (0.8, 0.7)))]


def _radii(*values: float, **others: float) -> list[dict[str, Any]]:
    return [{**others, "rho": value} for value in values]


def _methods(data: str) -> Mapping[str, tuple[dict[str, Any], Sequence[dict[str, Any]]]]:
    """Return the settings and three candidates of each method."""
    wsam: dict[str, Any] = {"method": "wsam", "hyper": {"rho": RHO}}
    reuse: dict[str, Any] = {"reuse": True}
    return {
        "WSAM reuse 2": ({**wsam, "options": {**reuse, "every": 2}}, _weights(data)),
        "WSAM reuse 5": ({**wsam, "options": {**reuse, "every": 5}}, _weights(data)),
        "WSAM reuse 5, averaged": (
            {**wsam, "options": {**reuse, "every": 5, "reuse_average": 0.5}},
            _weights(data),
        ),
        "WSAM reuse 10, norm-scaled": (
            {**wsam, "options": {**reuse, "every": 10, "reuse_scaled": True}},
            _weights(data),
        ),
        "WSAM, last eighth": ({**wsam, "options": {"start": 0.875}}, _weights(data, 0.92, 0.95)),
        "WSAM reuse 2, last quarter": (
            {**wsam, "options": {**reuse, "every": 2, "start": 0.75}},
            _weights(data),
        ),
        "WSAM reuse 5, last half": (
            {**wsam, "options": {**reuse, "every": 5, "start": 0.5}},
            _weights(data),
        ),
        "SAM 5": ({"method": "sam", "options": {"every": 5}}, _radii(0.2, 0.5, 1.0)),
        "LookSAM 5": (
            {"method": "looksam", "hyper": {"rho": RHO, "n": 5}},
            [{"alpha": value} for value in (0.7, 0.5, 0.3)],
        ),
        "ESAM, selected samples": (
            {"method": "esam", "hyper": {"rho": RHO}, "options": {"gather": True}},
            [{"beta": value, "gamma": value} for value in (0.6, 0.5, 0.4)],
        ),
        "SAM, AE-SAM threshold": (
            {"method": "sam", "options": {"threshold": 1.0}},
            _radii(0.2, 0.1, 0.3),
        ),
        "SAM, 1/4-batch ascent": (
            {"method": "sam", "options": {"ascent_share": 0.25}},
            _radii(0.2, 0.1, 0.3),
        ),
        "SAM-ON": (
            {"method": "sam", "geometry": {"name": "norm-layers"}},
            _radii(0.5, 0.2, 1.0),
        ),
        "VaSSO": (
            {"method": "vasso", "hyper": {"rho": RHO}},
            [{"theta": value} for value in (0.4, 0.2, 0.9)],
        ),
        "FriendlySAM": ({"method": "friendly_sam"}, _radii(0.2, 0.1, 0.3)),
        "MSAM": ({"method": "msam"}, _radii(1.0, 0.3, 3.0)),
        "One-pass WSAM": ({"method": "one_pass_wsam"}, _radii(1.0, 0.5, 0.3, gamma=0.88)),
    }


def _runs(data: str) -> dict[str, tuple[Candidate, ...]]:
    """Return the candidates of each row; only one where nothing is chosen."""
    plain = base_run(MODEL, data).replace(epochs=EPOCHS)
    found = {
        label: candidates(plain.replace(epochs=round(factor * EPOCHS)), [{}])
        for label, factor in _LONGER.items()
    }
    for label in _OF_PAPER:
        found[label] = candidates(scratch_run(MODEL, data, label), [{}])
    for label, (settings, choices) in _methods(data).items():
        found[label] = candidates(plain.replace(**settings), choices, TRIAL_EPOCHS)
    return found


def _reference(data: str) -> tuple[Run, ...]:
    """Return the runs of SGD; the first has the number of epochs that costs 1."""
    plain = base_run(MODEL, data)
    longer = (plain.replace(epochs=round(factor * EPOCHS)) for factor in _LONGER.values())
    return tuple(run for one in longer for run in with_seeds(one, SEEDS))


def cheap() -> Table:
    """Test error and training time relative to SGD of the methods that lower the cost."""
    cells: list[Cell] = []
    by_data = {data: _runs(data) for data in DATASETS}
    for label in by_data["CIFAR-10"]:
        for data, rows in by_data.items():
            options = rows[label]
            cells.append(chosen_cell((label,), data, options))
            cells.append(
                Cell(
                    (label,),
                    f"{data}, {COST}",
                    with_seeds(options[0].run, SEEDS),
                    measure=Measure.COST,
                    candidates=options,
                    reference=_reference(data),
                )
            )
    notes = (
        "Cost: the training time, relative to 200 epochs of SGD on the same hardware.",
        "The number after a method is n: every n-th step has two passes. Last eighth, quarter or "
        "half: SGD before. Norm-scaled, averaged: options of `Reuse`. Selected samples: ESAM's second pass "
        "runs on them alone. 1/4-batch ascent: the perturbation is computed from a quarter of the "
        "batch. SAM-ON perturbs normalization layers only.",
        "SAM, ESAM, GSAM and WSAM have the paper's hyperparameters. Each other method has three "
        "candidates, and a trial is one run of 40 epochs on 45,000 of the training images, measured on "
        "the other 5,000.",
        "AE-SAM's threshold reads gradient norms on the host, so its steps are not captured, and its "
        "cost is that of eager steps.",
    )
    return Table(
        "cheap",
        f"Top-1 error (%) and cost of {MODEL} on CIFAR",
        ("method",),
        tuple(cells),
        Kind.STUDY,
        EPOCHS,
        notes,
        baselines=(SGD, TWICE, WSAM),
        conclude=conclude,
    )


def conclude(entries: Sequence[Entry]) -> list[str]:
    """Return for each data set which cheap method has the lowest error, and its share of the gain.

    The gain is that of WSAM over SGD with the same number of epochs.
    """
    found = {(entry.cell.row[0], entry.cell.column): entry for entry in entries}
    lines = []
    for data in DATASETS:
        known = {row: entry for (row, column), entry in found.items() if column == data}
        timed = {row: found.get((row, f"{data}, {COST}")) for row in known}
        costs = {row: None if entry is None else entry.ours.mean for row, entry in timed.items()}
        cheap_rows = [
            row
            for row, entry in known.items()
            if row not in _LONGER
            and entry.ours.n
            and (cost := costs[row]) is not None
            and cost <= BUDGET
        ]
        if not cheap_rows:
            continue
        best = min(cheap_rows, key=lambda row: known[row].ours.mean or 0.0)
        ours, cost = known[best].ours, costs[best]
        assert ours.mean is not None
        error = format_mean(ours.mean, ours.deviation, 2)
        line = (
            f"{data}: up to a cost of {BUDGET}, {best} has the lowest mean error, {error} "
            f"(n = {ours.n}, cost {cost:.2f})"
        )
        sgd, wsam = (known[row].ours.mean if row in known else None for row in (SGD, WSAM))
        if sgd is not None and wsam is not None and sgd > wsam:
            line += f", {100 * (sgd - ours.mean) / (sgd - wsam):.0f}% of WSAM's gain over SGD"
        lines.append(f"{line}.")
    return lines
