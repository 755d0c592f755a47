"""The grid searches that the paper describes, and one of ours over rho and gamma together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from wsam.lab.run import Run
from wsam.paper.cifar import DATA, EPOCHS, ERRORS, RHO, SETTINGS, base_run, scratch_run
from wsam.paper.imagenet import deit_run
from wsam.paper.noise import HYPER, LEVELS, noise_run
from wsam.paper.table import SEEDS, Cell, Kind, Quoted, Table
from wsam.sweep.grid import Grid, repeated

LEARNING_RATES = (0.05, 0.1)
WEIGHT_DECAYS = (1e-4, 5e-4, 1e-3)
RADII = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
ALPHAS = (0.01, 0.02, 0.03, 0.1, 0.2, 0.3)
ESAM_SHARES = (0.4, 0.5, 0.6)
GAMMAS = (0.5, 0.6, 0.7, 0.8, 0.82, 0.84, 0.86, 0.88, 0.9, 0.92, 0.94, 0.96)
# With noisy labels the paper searches each method's own hyperparameters too, level by level, but
# names no values there. These are its values of section 6.1 and, for WSAM, those that its table of
# hyperparameters for noisy labels names beside them: 0.91 and 0.93 are on no grid that it prints.
NOISY_GAMMAS = tuple(sorted({*GAMMAS, *(hyper["gamma"] for hyper in HYPER["WSAM"])}))
_HALVES = tuple(half / 2 for half in range(1, 13))
WIDE_RADII = (0.1, *_HALVES)
"""For the ellipsoids: 0.1, 0.5, 1.0, ..., 6.0."""
DEIT_RADII = (0.05, 0.1, *_HALVES)


def _percents(first: int, last: int) -> tuple[float, ...]:
    return tuple(percent / 100 for percent in range(first, last + 1, 2))


def _columns(method: str, **hyper: float) -> dict[str, Run]:
    """Return the method's base run for both models on both data sets."""
    return {
        f"{model} {data}": base_run(model, data, method, hyper=hyper)
        for model in SETTINGS
        for data in DATA
    }


def gamma_grid() -> Grid:
    """Return the search for WSAM's gamma, which is also the sensitivity figure."""
    return Grid("gamma", "WSAM's gamma", _columns("WSAM", rho=RHO), {"gamma": GAMMAS})


def _ellipsoids(method: str, **hyper: float) -> dict[str, Run]:
    ball = base_run("WRN-28-10", "CIFAR-10", method, hyper=hyper)
    return {
        "+Adaptive": ball.replace(geometry={"name": "adaptive", "eta": 0.0}),
        "+Fisher": ball.replace(geometry={"name": "fisher", "eta": 1.0}),
    }


def _deit(method: str, **hyper: float) -> dict[str, Run]:
    return {"DeiT-base ImageNet": deit_run(method, hyper=hyper)}


def _noisy(method: str) -> dict[str, Run]:
    """Return the method's base run at each level of noise, with the rho that SAM ended in there."""
    return {
        f"{level}%": noise_run(method, level, {"rho": sam["rho"]})
        for level, sam in zip(LEVELS, HYPER["SAM"], strict=True)
    }


def lr_wd_grid() -> Grid:
    """Return the joint search for SGDM's learning rate and weight decay."""
    axes = {"lr": LEARNING_RATES, "weight_decay": WEIGHT_DECAYS}
    title = "SGDM's learning rate and weight decay"
    return Grid("lr-wd", title, _columns("SGDM"), axes, epochs=EPOCHS)


def beta_gamma_grid() -> Grid:
    """Return the joint search for ESAM's two shares."""
    axes = {"beta": ESAM_SHARES, "gamma": ESAM_SHARES}
    return Grid("beta-gamma", "ESAM's beta and gamma", _columns("ESAM", rho=RHO), axes)


def _noise_grid(
    name: str, method: str, own: str, axes: dict[str, tuple[float, ...]], more: str = ""
) -> Grid:
    """Return the search for a method's own hyperparameters at each level of noise."""
    note = (
        f"The paper searches {own} at each level but names no values: these are those of CIFAR "
        f"from scratch{more}."
    )
    title = f"{method}'s {own} and share of noisy labels"
    return Grid(name, title, _noisy(method), axes, (note,))


def geometry_gamma_grid() -> Grid:
    """Return the search for WSAM's gamma in an ellipsoid."""
    bases = _ellipsoids("WSAM", rho=5.0)
    title = "WSAM's gamma in an ellipsoid"
    return Grid("geometry-gamma", title, bases, {"gamma": _percents(80, 94)})


def rho_gamma_grid() -> Grid:
    """Return a search that is ours: rho and gamma together."""
    bases = {"ResNet18 CIFAR-10": base_run("ResNet18", "CIFAR-10", "WSAM")}
    axes = {"rho": (0.05, 0.1, 0.2), "gamma": (0.8, 0.88, 0.94)}
    note = "Not in the paper, which fixes rho by SAM first: what matters for WSAM is both."
    return Grid("rho-gamma", "WSAM's rho and gamma together", bases, axes, (note,))


GRIDS: dict[str, Callable[[], Grid]] = {
    "lr-wd": lr_wd_grid,
    "rho": lambda: Grid("rho", "SAM's rho", _columns("SAM"), {"rho": RADII}),
    "alpha": lambda: Grid("alpha", "GSAM's alpha", _columns("GSAM", rho=RHO), {"alpha": ALPHAS}),
    "beta-gamma": beta_gamma_grid,
    "gamma": gamma_grid,
    "noise-rho": lambda: Grid(
        "noise-rho", "SAM's rho and share of noisy labels", _noisy("SAM"), {"rho": RADII}
    ),
    "noise-alpha": lambda: _noise_grid("noise-alpha", "GSAM", "alpha", {"alpha": ALPHAS}),
    "noise-beta-gamma": lambda: _noise_grid(
        "noise-beta-gamma",
        "ESAM",
        "beta and gamma",
        {"beta": ESAM_SHARES, "gamma": ESAM_SHARES},
    ),
    "noise-gamma": lambda: _noise_grid(
        "noise-gamma",
        "WSAM",
        "gamma",
        {"gamma": NOISY_GAMMAS},
        more=", and 0.91 and 0.93, which the paper ended in",
    ),
    "geometry-rho": lambda: Grid(
        "geometry-rho", "SAM's rho in an ellipsoid", _ellipsoids("SAM"), {"rho": WIDE_RADII}
    ),
    "geometry-gamma": geometry_gamma_grid,
    "imagenet-rho": lambda: Grid("imagenet-rho", "SAM's rho", _deit("SAM"), {"rho": DEIT_RADII}),
    "imagenet-alpha": lambda: Grid(
        "imagenet-alpha", "GSAM's alpha", _deit("GSAM", rho=5.5), {"alpha": ALPHAS}
    ),
    "imagenet-gamma": lambda: Grid(
        "imagenet-gamma", "WSAM's gamma", _deit("WSAM", rho=5.5), {"gamma": _percents(80, 98)}
    ),
    "rho-gamma": rho_gamma_grid,
}


@lru_cache
def _quoted() -> dict[str, Quoted]:
    """Return the figures of the paper's CIFAR table by their run: what its searches ended in."""
    return {
        scratch_run(model, data, method).key: figure
        for (model, method), figures in ERRORS.items()
        for data, figure in zip(DATA, figures, strict=True)
    }


def grid_table(grid: Grid, seeds: Sequence[int] = (0,)) -> Table:
    """Return a grid as a table: one row per point, one column per base run.

    Where a run is one of the paper's CIFAR table, its figure is quoted.
    """
    cells = []
    for point in grid.points():
        row = tuple(f"{v:g}" if isinstance(v, float) else str(v) for v in point.values())
        for column in grid.bases:
            run = grid.run(column, point)
            cells.append(Cell(row, column, repeated(run, seeds), _quoted().get(run.key)))
    return Table(
        grid.name,
        f"Test error (%) by {grid.title}",
        tuple(axis.replace("_", " ") for axis in grid.axes),
        tuple(cells),
        Kind.SEARCH,
        grid.reference,
        grid.notes,
    )


def sensitivity() -> Table:
    """WSAM's error over a wide range of gamma (the paper's figure)."""
    notes = (
        "The paper's figure prints no numbers; where gamma is the one of its main table, the "
        "number is from there.",
    )
    title = "Top-1 error (%) of WSAM by gamma"
    table = grid_table(gamma_grid(), SEEDS)
    return replace(table, name="sensitivity", title=title, kind=Kind.FIGURE, notes=notes)
