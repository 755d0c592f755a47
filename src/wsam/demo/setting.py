"""What the demonstration trains, and how its hyperparameters were chosen: all of it as data.

The seeds that are shown (`SEEDS`) had no part in the choice, which was made on others
(`LOOK_SEEDS`) by the mean test error of each look; see `choice`, and a test that holds both to each
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wsam.lab.run import Run
from wsam.plot_style import METHOD_STYLES
from wsam.sweep.grid import Grid, with_seeds

SEEDS = (0, 1, 2)
LOOK_SEEDS = (100, 101)
EPOCHS = 30
NOISE = 0.4
LR = 0.05

GAMMAS = (0.8, 0.88, 0.92, 0.94, 0.96, 0.98)
RADII = (0.05, 0.1, 0.2, 0.4, 0.8)
WIDE_RADII = (*RADII, 1.6)
LEARNING_RATES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1)


def base_run(method: str = "vanilla", lr: float = LR, **hyper: float) -> Run:
    """Return a run on the noisy digits; the base alone gets twice the epochs, as in the paper."""
    return Run(
        data="digits",
        model="cnn",
        method=method,
        hyper=hyper,
        base_args={"lr": lr, "momentum": 0.9, "weight_decay": 1e-3},
        epochs=2 * EPOCHS if method == "vanilla" else EPOCHS,
        batch_size=64,
        noise=NOISE,
    )


@dataclass(frozen=True)
class Contender:
    """One row of the demonstration.

    Args:
        name: What people read.
        run: Its settings; the seed is any.
    """

    name: str
    run: Run

    def runs(self, seeds: Sequence[int]) -> tuple[Run, ...]:
        """Return its runs, one per seed; each draws its noisy labels anew."""
        return with_seeds(self.run, seeds)


BASE, SAM, WSAM = (METHOD_STYLES[method].title for method in ("sgd", "sam", "wsam"))
TUNED = f"{BASE}, own lr"


def contenders() -> dict[str, Contender]:
    """Return the rows: the base, the base at its own best learning rate, SAM and WSAM."""
    rows = (
        Contender(BASE, base_run()),
        Contender(TUNED, base_run(lr=0.005)),
        Contender(SAM, base_run("sam", rho=0.4)),
        Contender(WSAM, base_run("wsam", rho=0.2, gamma=0.96)),
    )
    return {row.name: row for row in rows}


def looks() -> dict[str, Grid]:
    """Return the looks that the choice was made by: one grid for each thing that is chosen."""
    return {
        TUNED: Grid("lr", "SGD's lr", {TUNED: base_run()}, {"lr": LEARNING_RATES}),
        SAM: Grid("rho", "SAM's rho", {SAM: base_run("sam")}, {"rho": WIDE_RADII}),
        WSAM: Grid(
            "map",
            "WSAM's gamma and rho",
            {WSAM: base_run("wsam")},
            {"gamma": GAMMAS, "rho": RADII},
        ),
    }
