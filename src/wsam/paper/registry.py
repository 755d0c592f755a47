"""All tables, figures and searches by name, and the jobs that compute them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from wsam.lab.execution import ExecutionConfig
from wsam.lab.run import Run
from wsam.lab.values import check_choice
from wsam.paper import adam, cheap, cifar, grids, hessian, imagenet, minima, noise
from wsam.paper.profile import Profile
from wsam.paper.study import choose, search_table
from wsam.paper.table import Table
from wsam.sweep.grid import Grid, read_grid
from wsam.sweep.jobs import After, Job

TABLES: dict[str, Callable[[], Table]] = {
    "cifar": cifar.cifar,
    "ablation": cifar.ablation,
    "imagenet": imagenet.imagenet,
    "noise": noise.noise,
    "noise-best": noise.noise_best,
    "geometry": cifar.geometry,
    "minima": cifar.minima,
    "sensitivity": grids.sensitivity,
    "coupled": cifar.coupled,
    "hessian": hessian.hessian_table,
    "cheap": cheap.cheap,
    "cheap-search": lambda: search_table(cheap.cheap()),
    "cheap-small": cheap.cheap_small,
    "cheap-small-search": lambda: search_table(cheap.cheap_small()),
    "adam": adam.adam,
    "adam-search": lambda: search_table(adam.adam()),
    "adam-small": adam.adam_small,
    "adam-small-search": lambda: search_table(adam.adam_small()),
}
GRIDS = grids.GRIDS


def names() -> tuple[str, ...]:
    """Return the names of all tables, figures and searches."""
    return (*TABLES, *GRIDS)


def find(name: str) -> Table:
    """Return a table, figure or search by name, or a grid read from a ``.toml`` file.

    Raises:
        ValueError: Unknown name; the message lists the known ones.
    """
    if name in TABLES:
        return _table(name)
    return grids.grid_table(find_grid(name))


@cache
def _table(name: str) -> Table:
    """Return a table by name; a report needs all of them, with thousands of runs to check."""
    return TABLES[name]()


def load(name: str, profile: Profile, results: Path) -> Table:
    """Return a table as a profile changes it, with the candidates chosen by records so far."""
    return choose(profile.table(find(name)), results)


def find_grid(name: str) -> Grid:
    """Return a grid by name, or read one from a ``.toml`` file.

    Raises:
        ValueError: Unknown name, or a table that is not a grid; the message lists the grids.
    """
    if name.endswith(".toml"):
        return read_grid(Path(name))
    if name == "sensitivity":
        return grids.gamma_grid()
    if name in TABLES:
        raise ValueError(f"{name} is not a grid that can be searched; grids: {', '.join(GRIDS)}")
    check_choice("table, figure or search", name, (*names(), "FILE.toml"))
    return GRIDS[name]()


class JobFactory:
    """Creates the job of a run.

    Runs whose minima are measured, and those from which others start, keep their weights.

    Args:
        out: Folder of the results.
        execution: How runs are executed.
        profile: The profile with which the runs were made.
        name: The table that is run. The jobs of ``minima`` and ``hessian`` also measure the minima.
        plane: With ``minima``, also measure the loss in a plane through each minimum.
    """

    def __init__(
        self,
        out: Path,
        execution: ExecutionConfig,
        profile: Profile,
        name: str | None,
        plane: bool = False,
    ) -> None:
        self.out, self.execution = out.resolve(), execution
        measurements: dict[str | None, After] = {
            "minima": partial(minima.measure, plane=plane),
            "hessian": hessian.measure,
        }
        self.after = measurements.get(name)
        whole_table = replace(profile, only=None)
        self.measured = {run.key for run in whole_table.table(cifar.minima()).runs}
        self.kept = {*self.measured, adam.pretraining_run().key}

    def __call__(self, run: Run) -> Job:
        """Return the job of a run."""
        keep = run.key in self.kept
        execution = replace(self.execution, keep_weights=keep or self.execution.keep_weights)
        return Job(run, self.out, execution, self.after if run.key in self.measured else None)
