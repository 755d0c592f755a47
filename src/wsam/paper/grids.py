"""The paper's grid searches, and one of our own over rho and gamma jointly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from wsam.lab.run import Run
from wsam.lab.settings import DATA
from wsam.lab.values import Value
from wsam.paper.cifar import (
    DATASETS,
    ELLIPSOID_RHO,
    EPOCHS,
    ERRORS,
    RHO,
    SETTINGS,
    base_run,
    ellipsoid_runs,
    scratch_run,
)
from wsam.paper.imagenet import deit_run
from wsam.paper.noise import HYPER, LEVELS, noise_run
from wsam.paper.table import ABSENT, PAPER_SEEDS, Cell, Kind, Measure, Quoted, Table
from wsam.sweep.grid import Grid, with_seeds

LEARNING_RATES = (0.05, 0.1)
WEIGHT_DECAYS = (1e-4, 5e-4, 1e-3)
RADII = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
ALPHAS = (0.01, 0.02, 0.03, 0.1, 0.2, 0.3)
ESAM_FRACTIONS = (0.4, 0.5, 0.6)
GAMMAS = (0.5, 0.6, 0.7, 0.8, 0.82, 0.84, 0.86, 0.88, 0.9, 0.92, 0.94, 0.96)
# With noisy labels the paper searches each method's hyperparameters at each noise level, but does
# not list the values. These are the values of its section 6.1 and, for WSAM, the selected values 0.91
# and 0.93, which are on no grid in the paper.
NOISY_GAMMAS = tuple(sorted({*GAMMAS, *(hyper["gamma"] for hyper in HYPER["WSAM"])}))
_HALVES = tuple(half / 2 for half in range(1, 13))
ELLIPSOID_RADII = (0.1, *_HALVES)
"""0.1, 0.5, 1.0, ..., 6.0."""
DEIT_RADII = (0.05, 0.1, *_HALVES)


def _even_percents(first: int, last: int) -> tuple[float, ...]:
    return tuple(percent / 100 for percent in range(first, last + 1, 2))


def _cifar_runs(method: str, **hyper: float) -> dict[str, Run]:
    """Return a method's run for both models on both data sets."""
    return {
        f"{model} {data}": base_run(model, data, method, hyper=hyper)
        for model in SETTINGS
        for data in DATASETS
    }


def gamma_grid() -> Grid:
    """Search for WSAM's gamma; its runs also make the sensitivity figure."""
    return Grid("gamma", "WSAM's gamma", _cifar_runs("WSAM", rho=RHO), {"gamma": GAMMAS})


def _ellipsoid_runs(method: str, **hyper: float) -> dict[str, Run]:
    return ellipsoid_runs(base_run("WRN-28-10", "CIFAR-10", method, hyper=hyper))


def _deit_runs(method: str, **hyper: float) -> dict[str, Run]:
    return {"DeiT-base ImageNet": deit_run(method, hyper=hyper)}


def _noise_runs(method: str) -> dict[str, Run]:
    """Return a method's run at each noise level, with the rho selected for SAM at that level."""
    return {
        f"{level}%": noise_run(method, level, {"rho": sam["rho"]})
        for level, sam in zip(LEVELS, HYPER["SAM"], strict=True)
    }


def lr_wd_grid() -> Grid:
    """Joint search for SGDM's learning rate and weight decay."""
    axes = {"lr": LEARNING_RATES, "weight_decay": WEIGHT_DECAYS}
    title = "SGDM's learning rate and weight decay"
    return Grid("lr-wd", title, _cifar_runs("SGDM"), axes, epochs=EPOCHS)


def beta_gamma_grid() -> Grid:
    """Joint search for ESAM's beta and gamma."""
    axes = {"beta": ESAM_FRACTIONS, "gamma": ESAM_FRACTIONS}
    return Grid("beta-gamma", "ESAM's beta and gamma", _cifar_runs("ESAM", rho=RHO), axes)


def _noise_grid(
    name: str, method: str, own: str, axes: dict[str, tuple[float, ...]], more: str = ""
) -> Grid:
    """Search for a method's own hyperparameters at each noise level."""
    note = (
        f"The paper searches {own} at each level but names no values; these are those of CIFAR "
        f"from scratch{more}."
    )
    title = f"{method}'s {own} and share of noisy labels"
    return Grid(name, title, _noise_runs(method), axes, (note,))


def geometry_gamma_grid() -> Grid:
    """Search for WSAM's gamma with an ellipsoid."""
    bases = _ellipsoid_runs("WSAM", rho=ELLIPSOID_RHO)
    title = "WSAM's gamma in an ellipsoid"
    return Grid("geometry-gamma", title, bases, {"gamma": _even_percents(80, 94)})


def rho_gamma_grid() -> Grid:
    """Joint search for WSAM's rho and gamma (not in the paper)."""
    bases = {"ResNet18 CIFAR-10": base_run("ResNet18", "CIFAR-10", "WSAM")}
    axes = {"rho": (0.05, 0.1, 0.2), "gamma": (0.8, 0.88, 0.94)}
    note = "Not in the paper, which uses the rho selected for SAM."
    return Grid("rho-gamma", "WSAM's rho and gamma together", bases, axes, (note,))


GRIDS: dict[str, Callable[[], Grid]] = {
    "lr-wd": lr_wd_grid,
    "rho": lambda: Grid("rho", "SAM's rho", _cifar_runs("SAM"), {"rho": RADII}),
    "alpha": lambda: Grid("alpha", "GSAM's alpha", _cifar_runs("GSAM", rho=RHO), {"alpha": ALPHAS}),
    "beta-gamma": beta_gamma_grid,
    "gamma": gamma_grid,
    "noise-rho": lambda: Grid(
        "noise-rho", "SAM's rho and share of noisy labels", _noise_runs("SAM"), {"rho": RADII}
    ),
    "noise-alpha": lambda: _noise_grid("noise-alpha", "GSAM", "alpha", {"alpha": ALPHAS}),
    "noise-beta-gamma": lambda: _noise_grid(
        "noise-beta-gamma",
        "ESAM",
        "beta and gamma",
        {"beta": ESAM_FRACTIONS, "gamma": ESAM_FRACTIONS},
    ),
    "noise-gamma": lambda: _noise_grid(
        "noise-gamma",
        "WSAM",
        "gamma",
        {"gamma": NOISY_GAMMAS},
        more=", and 0.91 and 0.93, which the paper selected",
    ),
    "geometry-rho": lambda: Grid(
        "geometry-rho",
        "SAM's rho in an ellipsoid",
        _ellipsoid_runs("SAM"),
        {"rho": ELLIPSOID_RADII},
    ),
    "geometry-gamma": geometry_gamma_grid,
    "imagenet-rho": lambda: Grid(
        "imagenet-rho", "SAM's rho", _deit_runs("SAM"), {"rho": DEIT_RADII}
    ),
    "imagenet-alpha": lambda: Grid(
        "imagenet-alpha", "GSAM's alpha", _deit_runs("GSAM", rho=5.5), {"alpha": ALPHAS}
    ),
    "imagenet-gamma": lambda: Grid(
        "imagenet-gamma",
        "WSAM's gamma",
        _deit_runs("WSAM", rho=5.5),
        {"gamma": _even_percents(80, 98)},
    ),
    "rho-gamma": rho_gamma_grid,
}


@lru_cache
def _quoted() -> dict[str, Quoted]:
    """Return the figures of the paper's CIFAR table by the key of their first run."""
    return {
        scratch_run(model, data, method).key: figure
        for (model, method), figures in ERRORS.items()
        for data, figure in zip(DATASETS, figures, strict=True)
    }


def grid_table(grid: Grid, seeds: Sequence[int] = (0,)) -> Table:
    """Return a grid as a table: one row per point, one column per base run.

    Cells whose run is also in the paper's CIFAR table quote its figure.
    """
    cells = []
    has_error = all(map(_has_error, grid.bases.values()))
    measure = Measure.TEST_ERROR if has_error else Measure.TEST_METRIC
    for point in grid.points():
        row = tuple(_text(point[axis]) if axis in point else ABSENT for axis in grid.axes)
        for column in grid.bases:
            run = grid.run(column, point)
            runs = with_seeds(run, seeds)
            cells.append(Cell(row, column, runs, _quoted().get(run.key), measure))
    return Table(
        grid.name,
        f"{measure.capitalize()} by {grid.title}",
        tuple(axis.replace("_", " ") for axis in grid.axes),
        tuple(cells),
        Kind.SEARCH,
        grid.reference,
        grid.notes,
    )


def _has_error(run: Run) -> bool:
    """Return whether the metric of a run is the error. Other data decides it when it is read."""
    if run.metric is None:
        return run.data in DATA or run.data.startswith("folder:")
    return run.metric == "error"


def _text(value: Value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def sensitivity() -> Table:
    """WSAM's error over gamma (the paper's figure)."""
    notes = (
        "The paper's figure has no numbers; where gamma is that of its main table, the number is "
        "from that table.",
    )
    title = "Top-1 error (%) of WSAM by gamma"
    table = grid_table(gamma_grid(), PAPER_SEEDS)
    return replace(table, name="sensitivity", title=title, kind=Kind.FIGURE, notes=notes)
