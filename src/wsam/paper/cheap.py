"""Sharpness at a lower cost: test error and training time of ResNet18 on CIFAR. Not in the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from wsam.lab.run import Run
from wsam.paper.cifar import BETA_GAMMA, DATASETS, EPOCHS, GAMMA, RHO, base_run, scratch_run
from wsam.paper.comparison import Entry, Ours
from wsam.paper.study import SEEDS, Choices, candidates, chosen_cell, vary
from wsam.paper.table import PAPER_SEEDS, Candidate, Cell, Kind, Measure, Table, format_mean
from wsam.sweep.grid import with_seeds
from wsam.theory import gamma_for_weight, sharpness_weight

MODEL = "ResNet18"
SGD, TWICE, WSAM = "SGD", "SGD, 2x epochs", "WSAM"
LATE, LATE_SGD = "WSAM, late decay", "SGD, late decay"
RISING = "WSAM reuse 8, last 3/4, rising gamma"
SHORTER = "WSAM reuse 2, 0.72x epochs"
SHORTER_SAM, SHORTER_WSAM = "SAM, 0.58x epochs", "WSAM, 0.58x epochs"
IN_BUDGET = "WSAM reuse 2, 0.76x epochs"
COST = "cost"
TRIAL_EPOCHS = 0.2
_LONG_TRIALS = (LATE, RISING)
"""Rows whose trials have as many epochs as their runs."""
BUDGET = 1.15
"""Cost up to which a method counts as about as cheap as SGD."""

_LONGER = {SGD: 1.0, "SGD, 1.15x epochs": 1.15, "SGD, 1.5x epochs": 1.5, TWICE: 2.0}
_OF_PAPER = ("SAM", "ESAM", "GSAM", WSAM)
"""Methods with the hyperparameters of the paper's main table."""


_WSAM: dict[str, Any] = {"method": "wsam", "hyper": {"rho": RHO}}


def _reuse(every: int, **options: Any) -> dict[str, Any]:
    return {**_WSAM, "options": {"reuse": True, "every": every, **options}}


_SETTINGS: Mapping[str, dict[str, Any]] = {
    "SAM": {"method": "sam"},
    WSAM: _WSAM,
    "WSAM reuse 2": _reuse(2),
    SHORTER: {**_reuse(2), "epochs": round(0.72 * EPOCHS)},
    IN_BUDGET: {**_reuse(2), "epochs": round(0.76 * EPOCHS)},
    "WSAM reuse 2, gamma 0.8, 0.76x epochs": {**_reuse(2), "epochs": round(0.76 * EPOCHS)},
    "WSAM reuse 2, last 3/4, 0.82x epochs": {
        **_reuse(2, start=0.25),
        "epochs": round(0.82 * EPOCHS),
    },
    "WSAM reuse 2, last half, 0.91x epochs": {
        **_reuse(2, start=0.5),
        "epochs": round(0.91 * EPOCHS),
    },
    SHORTER_SAM: {"method": "sam", "epochs": round(0.58 * EPOCHS)},
    SHORTER_WSAM: {**_WSAM, "epochs": round(0.58 * EPOCHS)},
    "WSAM reuse 5": _reuse(5),
    "WSAM reuse 5, averaged": _reuse(5, reuse_average=0.5),
    "WSAM reuse 10, norm-scaled": _reuse(10, reuse_scaled=True),
    "WSAM reuse 20, norm-scaled": _reuse(20, reuse_scaled=True),
    "WSAM, last eighth": {**_WSAM, "options": {"start": 0.875}},
    "WSAM reuse 2, last quarter": _reuse(2, start=0.75),
    "WSAM reuse 2, last eighth": _reuse(2, start=0.875),
    "WSAM reuse 5, last half": _reuse(5, start=0.5),
    "WSAM reuse 2, last quarter, paper's gamma": _reuse(2, start=0.75),
    "WSAM reuse 4, last half, paper's gamma": _reuse(4, start=0.5),
    RISING: _reuse(8, start=0.25, gamma_warmup=0.6),
    "WSAM reuse 8, smaller gamma": _reuse(8),
    LATE: _WSAM,
    "SAM 5": {"method": "sam", "options": {"every": 5}},
    "LookSAM 5": {"method": "looksam", "hyper": {"rho": RHO, "n": 5}},
    "ESAM, selected samples": {
        "method": "esam",
        "hyper": {"rho": RHO},
        "options": {"gather": True},
    },
    "SAM, AE-SAM threshold": {"method": "sam", "options": {"threshold": 1.0}},
    "SAM, 1/4-batch ascent, last 3/8": {
        "method": "sam",
        "options": {"ascent_share": 0.25, "start": 0.625},
    },
    "SAM-ON": {"method": "sam", "geometry": {"name": "norm-layers"}},
    "VaSSO": {"method": "vasso", "hyper": {"rho": RHO}},
    "FriendlySAM": {"method": "friendly_sam"},
    "MSAM": {"method": "msam"},
    "MSAM, rho 1": {"method": "msam"},
}
"""Settings of each row but for its candidates."""
_ROW_NAMES_NOTES = (
    "The number after a method is n: every n-th step has two passes.",
    "Last eighth, quarter, 3/8, half or 3/4: SGD before.",
    "Norm-scaled, averaged: options of `Reuse`.",
    "Selected samples: ESAM's second pass runs on them alone.",
    "SAM-ON perturbs normalization layers only.",
    "Rising gamma: from 0 over the first 60% of the steps.",
)


def _late(every: int, start: float, **hyper: float) -> dict[str, Any]:
    """Return a candidate whose learning rate decays when its sharpness-aware steps begin."""
    reuse = {"every": every, "reuse": True} if every > 1 else {}
    return {**reuse, "start": start, "decay_start": start, **hyper}


def _choices(data: str) -> Mapping[str, Choices]:
    """Return the candidates of each method: one with known hyperparameters, or three."""
    gamma = GAMMA[MODEL, data]
    paper = vary("gamma", gamma)
    smaller = gamma_for_weight(sharpness_weight(gamma) / 8**0.5)
    beta, share = BETA_GAMMA[MODEL, data]
    return {
        "WSAM reuse 2": paper,
        SHORTER: paper,
        IN_BUDGET: paper,
        "WSAM reuse 2, gamma 0.8, 0.76x epochs": vary("gamma", 0.8),
        "WSAM reuse 2, last 3/4, 0.82x epochs": paper,
        "WSAM reuse 2, last half, 0.91x epochs": paper,
        SHORTER_SAM: vary("rho", RHO),
        SHORTER_WSAM: paper,
        "WSAM reuse 5": paper,
        "WSAM reuse 10, norm-scaled": paper,
        "WSAM, last eighth": [*paper, *vary("gamma", 0.92, 0.95)],
        "WSAM reuse 2, last quarter": [*paper, *vary("gamma", 0.8, 0.7)],
        "WSAM reuse 2, last quarter, paper's gamma": paper,
        "WSAM reuse 4, last half, paper's gamma": paper,
        RISING: vary("rho", 0.4, 0.3, 0.2, gamma=gamma),
        "WSAM reuse 8, smaller gamma": vary("gamma", round(smaller, 2)),
        LATE: [_late(*one, gamma=gamma) for one in ((4, 0.5), (2, 0.7), (1, 0.87))],
        "LookSAM 5": vary("alpha", 0.7, 0.4, 0.2),
        "ESAM, selected samples": [{"beta": beta, "gamma": share}],
        "SAM, AE-SAM threshold": vary("rho", RHO),
        "SAM, 1/4-batch ascent, last 3/8": vary("rho", RHO),
        "SAM-ON": vary("rho", 0.5),
        "VaSSO": vary("theta", 0.4),
        "FriendlySAM": vary("rho", RHO),
        "MSAM": vary("rho", 1.0, 0.3, 3.0),
        "MSAM, rho 1": vary("rho", 1.0),
    }


def _sgd_runs(run: Run) -> dict[str, Run]:
    """Return the runs of SGD by row: with as many epochs as the methods, and with more."""
    return {
        label: run.replace(epochs=round(factor * run.epochs)) for label, factor in _LONGER.items()
    }


def _rows(plain: Run, data: str) -> dict[str, tuple[Candidate, ...]]:
    """Return the candidates of each row; only one where nothing is chosen."""
    found = {label: candidates(run, [{}]) for label, run in _sgd_runs(plain).items()}
    found[LATE_SGD] = candidates(plain.replace(decay_start=0.87), [{}])
    for label in _OF_PAPER:
        found[label] = candidates(scratch_run(MODEL, data, label), [{}])
    for label, choices in _choices(data).items():
        epochs = 1.0 if label in _LONG_TRIALS else TRIAL_EPOCHS
        found[label] = candidates(plain.replace(**_SETTINGS[label]), choices, epochs)
    return found


def _error_and_cost(
    label: str,
    column: str,
    options: tuple[Candidate, ...],
    cost: Measure,
    reference: tuple[Run, ...],
    seeds: Sequence[int] = SEEDS,
) -> list[Cell]:
    """Return the two cells of a row for one data set."""
    error = chosen_cell((label,), column, options, seeds=seeds)
    return [error, replace(error, column=f"{column}, {COST}", measure=cost, reference=reference)]


def cheap() -> Table:
    """Test error and training time relative to SGD of the methods that lower the cost."""
    plain = {data: base_run(MODEL, data, epochs=EPOCHS) for data in DATASETS}
    rows = {data: _rows(run, data) for data, run in plain.items()}
    # The first reference has the number of epochs that costs 1.
    reference = {
        data: tuple(seeded for one in _sgd_runs(run).values() for seeded in with_seeds(one, SEEDS))
        for data, run in plain.items()
    }
    cells = [
        cell
        for label in rows["CIFAR-10"]
        for data in DATASETS
        for cell in _error_and_cost(
            label,
            data,
            rows[data][label],
            Measure.COST,
            reference[data],
            PAPER_SEEDS if label in (*_OF_PAPER, TWICE) else SEEDS,  # the cells of the main table
        )
    ]
    notes = (
        "Cost: the training time, relative to 200 epochs of SGD on the same hardware.",
        *_ROW_NAMES_NOTES,
        "1/4-batch ascent: the perturbation is computed from a quarter of the batch.",
        "Hyperparameters are fixed in advance: the paper's rho and gamma, and usual values of the "
        "others. Rows with a choice compare three candidates, each in one run of 40 epochs on 45,000 "
        "of the training images, measured on the other 5,000.",
        "Late decay: the learning rate is constant before the sharpness-aware steps begin, and decays "
        "from there. Its three candidates begin after 50, 70 or 87% of the steps, in runs of 200 "
        "epochs; SGD's row decays after 87%.",
        "Rising gamma: trials of 200 epochs.",
        "Smaller gamma: gamma / (1 - gamma) is that of the paper divided by the square root of n.",
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


SMALL_EPOCHS = 20
_LEARNING_RATES = vary("lr", 0.005, 0.01, 0.02)
_SMALL_WEIGHTS = vary("gamma", 0.889, 0.941, 0.96)
_SMALL_CHOICES: Mapping[str, Choices] = {
    "SAM": vary("rho", 0.2, 0.4, 0.8),
    WSAM: _SMALL_WEIGHTS,
    "WSAM reuse 2": _SMALL_WEIGHTS,
    "WSAM reuse 5": _SMALL_WEIGHTS,
    "WSAM reuse 5, averaged": _SMALL_WEIGHTS,
    "WSAM reuse 10, norm-scaled": _SMALL_WEIGHTS,
    "WSAM reuse 20, norm-scaled": _SMALL_WEIGHTS,
    "WSAM reuse 2, last quarter": _SMALL_WEIGHTS,
    "WSAM reuse 2, last eighth": _SMALL_WEIGHTS,
    "WSAM reuse 5, last half": _SMALL_WEIGHTS,
    RISING: vary("rho", 0.2, 0.4, 0.8, gamma=0.941),
    "SAM 5": vary("rho", 0.4, 1.0, 2.0),
    "LookSAM 5": vary("rho", 0.2, 0.4, 0.8, alpha=0.7),
    "ESAM, selected samples": vary("rho", 0.2, 0.4, 0.8),
    "SAM-ON": vary("rho", 0.5, 1.0, 2.0),
    "VaSSO": vary("rho", 0.2, 0.4, 0.8, theta=0.4),
    "FriendlySAM": vary("rho", 0.2, 0.4, 0.8),
    "MSAM": vary("rho", 1.0, 2.0, 3.0),
}


def cheap_small() -> Table:
    """The same question in minutes on one core: a small CNN on noisy digits."""
    plain = Run(
        data="digits",
        model="cnn",
        method="vanilla",
        base_args={"lr": 0.05, "momentum": 0.9},
        batch_size=64,
        epochs=SMALL_EPOCHS,
        noise=0.4,
        augment=False,
    )
    rows = {label: candidates(run, _LEARNING_RATES) for label, run in _sgd_runs(plain).items()}
    rows["SGD, lr 0.05"] = candidates(plain, [{}])
    for label, choices in _SMALL_CHOICES.items():
        rows[label] = candidates(plain.replace(**_SETTINGS[label]), choices)
    cells = [
        cell
        for label, options in rows.items()
        for cell in _error_and_cost(label, "noisy digits", options, Measure.PASSES, (plain,))
    ]
    notes = (
        f"A CNN with BatchNorm, {SMALL_EPOCHS} epochs, momentum 0.9, batch size 64.",
        "Cost: passes over the training data relative to SGD, counted from the settings. A forward "
        "pass is a third of a pass.",
        *_ROW_NAMES_NOTES,
        "Three candidates for each method, one run each; the validation split is 120 images with "
        "correct labels. SGD's are learning rates (0.005, 0.01, 0.02); the others have 0.05, and so "
        "has one row of SGD.",
    )
    return Table(
        "cheap-small",
        "Test error (%) and cost of a small CNN on noisy digits",
        ("method",),
        tuple(cells),
        Kind.STUDY,
        SMALL_EPOCHS,
        notes,
        baselines=(SGD, WSAM),
        conclude=conclude,
    )


def conclude(entries: Sequence[Entry]) -> list[str]:
    """Return for each data set the best cheap method, and the shares of the gain of all."""
    found: dict[str, dict[str, Ours]] = {}
    means: dict[str, dict[str, float]] = {}
    for entry in entries:
        if entry.ours.mean is not None:
            row, column = entry.cell.row[0], entry.cell.column
            found.setdefault(column, {})[row] = entry.ours
            means.setdefault(column, {})[row] = entry.ours.mean
    lines = []
    for data in (column for column in means if not column.endswith(COST)):
        errors = means[data]
        costs = {r: c for r, c in means.get(f"{data}, {COST}", {}).items() if r in errors}
        cheap_rows = [row for row, cost in costs.items() if cost <= BUDGET and not _is_sgd(row)]
        if not cheap_rows:
            continue
        shares = _gain_shares(errors)
        best = min(cheap_rows, key=errors.__getitem__)
        ours = found[data][best]
        error = format_mean(errors[best], ours.deviation, 2)
        line = (
            f"{data}: up to a cost of {BUDGET}, {best} has the lowest mean error, {error} "
            f"(n = {ours.n}, cost {costs[best]:.2f})"
        )
        if shares:
            line += f", {shares[best]:.0%} of WSAM's gain over SGD"
        lines.append(f"{line}.")
        others = sorted(
            (cost, row) for row, cost in costs.items() if row != WSAM and not _is_sgd(row)
        )
        if shares and len(others) > 1:
            texts = (f"{row} {shares[row]:.0%} ({cost:.2f})" for cost, row in others)
            lines.append(f"{data}, share of WSAM's gain, with the cost: {'; '.join(texts)}.")
    return lines


def _is_sgd(row: str) -> bool:
    return row.startswith(SGD)


def _gain_shares(errors: Mapping[str, float]) -> dict[str, float]:
    """Return each row's share of the gain of WSAM over SGD with as many epochs; empty without one."""
    if SGD not in errors or WSAM not in errors or errors[SGD] <= errors[WSAM]:
        return {}
    gain = errors[SGD] - errors[WSAM]
    return {row: (errors[SGD] - error) / gain for row, error in errors.items()}
