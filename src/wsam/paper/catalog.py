"""All tables, figures and searches by name, and the jobs that make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from wsam.lab.means import Means
from wsam.lab.names import chosen
from wsam.lab.run import Run
from wsam.paper import cifar, imagenet, minimum, noise, searches
from wsam.paper.profile import Profile
from wsam.paper.table import Table
from wsam.sweep.grid import Grid, read_grid
from wsam.sweep.work import Job

TABLES: dict[str, Callable[[], Table]] = {
    "cifar": cifar.cifar,
    "ablation": cifar.ablation,
    "imagenet": imagenet.imagenet,
    "noise": noise.noise,
    "noise-best": noise.noise_best,
    "geometry": cifar.geometry,
    "minima": cifar.minima,
    "sensitivity": searches.sensitivity,
}
GRIDS = searches.GRIDS


def names() -> tuple[str, ...]:
    """Return the names of all tables, figures and searches."""
    return (*TABLES, *GRIDS)


def find(name: str) -> Table:
    """Return a table, figure or search by its name, or a grid of one's own from a ``.toml`` file.

    Raises:
        ValueError: No such name; the message lists those there are.
    """
    if name in TABLES:
        return TABLES[name]()
    return searches.grid_table(find_grid(name))


def find_grid(name: str) -> Grid:
    """Return a grid by its name, or one of one's own from a ``.toml`` file.

    Raises:
        ValueError: No such grid; the message lists those there are.
    """
    if name.endswith(".toml"):
        return read_grid(Path(name))
    if name == "sensitivity":
        return searches.gamma_grid()
    if name in TABLES:
        raise ValueError(f"{name} is no grid that can be searched; those are: {', '.join(GRIDS)}")
    chosen("table, figure or search", name, (*names(), "FILE.toml"))
    return GRIDS[name]()


class Jobs:
    """Makes the job of a run: weights that the minima table needs are kept, and their minima measured.

    Args:
        out: The folder of the results.
        means: How runs are carried out.
        profile: The profile that the runs were made by.
        measure: Measure the minima of those runs, too.
        plane: Measure the loss in a plane through each minimum, too.
    """

    def __init__(
        self, out: Path, means: Means, profile: Profile, measure: bool, plane: bool = False
    ) -> None:
        self.out, self.means = out.resolve(), means
        self.after = partial(minimum.measure, plane=plane) if measure else None
        every = replace(profile, only=None)
        self.kept = {run.key for run in every.table(cifar.minima()).runs}

    def __call__(self, run: Run) -> Job:
        """Return the job of a run."""
        keep = run.key in self.kept
        means = replace(self.means, keep_weights=keep or self.means.keep_weights)
        return Job(run, self.out, means, self.after if keep else None)
