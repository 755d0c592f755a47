"""CIFAR-10 with noisy training labels."""

from __future__ import annotations

from wsam.lab.run import Run
from wsam.paper.cifar import EPOCHS, base_run
from wsam.paper.table import PAPER_SEEDS, Cell, Measure, Quoted, Table
from wsam.sweep.grid import with_seeds

LEVELS = (20, 40, 60, 80)
# The paper's hyperparameters for each noise level; all methods use SAM's rho.
HYPER: dict[str, tuple[dict[str, float], ...]] = {
    "SGDM": ({}, {}, {}, {}),
    "SAM": ({"rho": 0.2}, {"rho": 0.2}, {"rho": 0.1}, {"rho": 0.05}),
    "ESAM": (
        {"rho": 0.2, "beta": 0.5, "gamma": 0.6},
        {"rho": 0.2, "beta": 0.5, "gamma": 0.6},
        {"rho": 0.1, "beta": 0.6, "gamma": 0.6},
        {"rho": 0.05, "beta": 0.5, "gamma": 0.5},
    ),
    "GSAM": (
        {"rho": 0.2, "alpha": 0.01},
        {"rho": 0.2, "alpha": 0.02},
        {"rho": 0.1, "alpha": 0.3},
        {"rho": 0.05, "alpha": 0.3},
    ),
    "WSAM": (
        {"rho": 0.2, "gamma": 0.91},
        {"rho": 0.2, "gamma": 0.91},
        {"rho": 0.1, "gamma": 0.93},
        {"rho": 0.05, "gamma": 0.92},
    ),
}
_ACCURACY = {
    "SGDM": ((88.06, 0.48), (84.11, 0.39), (79.15, 0.43), (69.07, 0.95)),
    "SAM": ((94.99, 0.09), (93.28, 0.16), (88.32, 0.28), (77.57, 0.51)),
    "ESAM": ((94.93, 0.18), (92.69, 0.48), (86.42, 0.30), (32.29, 4.67)),
    "GSAM": ((95.11, 0.11), (93.25, 0.12), (89.90, 0.18), (79.09, 0.91)),
    "WSAM": ((95.18, 0.12), (93.33, 0.11), (89.95, 0.12), (78.30, 0.92)),
}


def noise_run(method: str, level: int, hyper: dict[str, float]) -> Run:
    """Return a run with `level` percent of the training labels drawn at random."""
    changes = {"hyper": hyper, "noise": level / 100, "epochs": EPOCHS}
    return base_run("ResNet18", "CIFAR-10", method, **changes)


def _cells(measure: Measure) -> tuple[Cell, ...]:
    return tuple(
        Cell(
            (method,),
            f"{level}%",
            with_seeds(noise_run(method, level, HYPER[method][number]), PAPER_SEEDS),
            Quoted(*_ACCURACY[method][number]),
            measure,
        )
        for method in HYPER
        for number, level in enumerate(LEVELS)
    )


_TITLE = "Test accuracy (%) of ResNet18 on CIFAR-10 by share of noisy labels"


def noise() -> Table:
    """Test accuracy of ResNet18 on CIFAR-10 with noisy training labels."""
    notes = (
        "SGDM trains for as many epochs as the others: for this table the paper states one number.",
        "Each seed draws its own noisy labels.",
    )
    return Table("noise", _TITLE, ("method",), _cells(Measure.TEST_ACCURACY), notes=notes)


def noise_best() -> Table:
    """The same runs at their best epoch; the paper's figures seem to be of this kind."""
    notes = ("The best epoch is chosen on the test images, so it is optimistic.",)
    title = f"{_TITLE}, at each run's best epoch"
    return Table("noise-best", title, ("method",), _cells(Measure.BEST_ACCURACY), notes=notes)
