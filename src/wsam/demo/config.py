"""The runs of the demonstration and the grids on which their hyperparameters were tuned.

The seeds that are shown (`SEEDS`) were not used for tuning (`TUNING_SEEDS`). A test checks that the
hyperparameters are the best ones of the grids; see `tuning`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wsam.lab.run import Run
from wsam.plot_style import method_title
from wsam.sweep.grid import Grid, with_seeds

SEEDS = (0, 1, 2)
TUNING_SEEDS = (100, 101)
EPOCHS = 30
NOISE = 0.4
LR = 0.05

GAMMAS = (0.8, 0.88, 0.92, 0.94, 0.96, 0.98)
RHOS = (0.05, 0.1, 0.2, 0.4, 0.8)
SAM_RHOS = (*RHOS, 1.6)
LEARNING_RATES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1)


def demo_run(method: str = "vanilla", lr: float = LR, **hyper: float) -> Run:
    """Return a run on the noisy digits. The base alone gets twice the epochs, as in the paper."""
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
        name: The displayed name.
        run: Its settings, with any seed.
    """

    name: str
    run: Run

    def runs(self, seeds: Sequence[int]) -> tuple[Run, ...]:
        """Return its runs, one per seed. Each seed draws its own noisy labels."""
        return with_seeds(self.run, seeds)


BASE, SAM, WSAM = map(method_title, ("sgd", "sam", "wsam"))
TUNED = f"{BASE}, own lr"


def contenders() -> dict[str, Contender]:
    """Return the rows: the base, the base at its own best learning rate, SAM and WSAM."""
    rows = (
        Contender(BASE, demo_run()),
        Contender(TUNED, demo_run(lr=0.005)),
        Contender(SAM, demo_run("sam", rho=0.4)),
        Contender(WSAM, demo_run("wsam", rho=0.2, gamma=0.96)),
    )
    return {row.name: row for row in rows}


def tuning_grids() -> dict[str, Grid]:
    """Return the grid of hyperparameters of each tuned row."""
    return {
        TUNED: Grid("lr", "SGD's lr", {TUNED: demo_run()}, {"lr": LEARNING_RATES}),
        SAM: Grid("rho", "SAM's rho", {SAM: demo_run("sam")}, {"rho": SAM_RHOS}),
        WSAM: Grid(
            "map",
            "WSAM's gamma and rho",
            {WSAM: demo_run("wsam")},
            {"gamma": GAMMAS, "rho": RHOS},
        ),
    }
