"""CIFAR from scratch: the main table, the ablation, the geometries, the minima."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from wsam.lab.run import Run
from wsam.paper.table import PAPER_SEEDS, Cell, Kind, Measure, Quoted, Table, format_mean
from wsam.sweep.grid import with_seeds
from wsam.theory import effective_weight, gamma_for_weight

DATASETS = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100"}
METHODS = {
    "SGDM": "vanilla",
    "SAM": "sam",
    "ESAM": "esam",
    "GSAM": "gsam",
    "WSAM": "wsam",
    "Coupled-WSAM": "coupled_wsam",
    "Coupled-WSAM, equal weight": "coupled_wsam",
}
RHO, ELLIPSOID_RHO = 0.2, 5.0
MOMENTUM = 0.9
EPOCHS = 200


@dataclass(frozen=True)
class Setting:
    """The paper's batch size and learning rate for a model; the weight decay is 1e-3 for all."""

    model: str
    batch_size: int
    lr: float


SETTINGS = {
    "ResNet18": Setting("resnet18", 128, 0.05),
    "WRN-28-10": Setting("wrn-28-10", 256, 0.1),
}

# The paper's hyperparameters; rho is 0.2 for all.
ALPHA = {
    ("ResNet18", "CIFAR-10"): 0.02,
    ("ResNet18", "CIFAR-100"): 0.03,
    ("WRN-28-10", "CIFAR-10"): 0.01,
    ("WRN-28-10", "CIFAR-100"): 0.2,
}
BETA_GAMMA = {
    ("ResNet18", "CIFAR-10"): (0.6, 0.6),
    ("ResNet18", "CIFAR-100"): (0.5, 0.5),
    ("WRN-28-10", "CIFAR-10"): (0.6, 0.6),
    ("WRN-28-10", "CIFAR-100"): (0.5, 0.6),
}
GAMMA = {
    ("ResNet18", "CIFAR-10"): 0.88,
    ("ResNet18", "CIFAR-100"): 0.82,
    ("WRN-28-10", "CIFAR-10"): 0.88,
    ("WRN-28-10", "CIFAR-100"): 0.94,
}

# The paper's top-1 errors on CIFAR-10 and on CIFAR-100.
ERRORS = {
    ("ResNet18", "SGDM"): (Quoted(4.32, 0.07), Quoted(20.51, 0.20)),
    ("ResNet18", "SAM"): (Quoted(3.68, 0.06), Quoted(19.97, 0.30)),
    ("ResNet18", "ESAM"): (Quoted(3.83, 0.08), Quoted(20.67, 0.24)),
    ("ResNet18", "GSAM"): (Quoted(3.71, 0.11), Quoted(19.84, 0.27)),
    ("ResNet18", "WSAM"): (Quoted(3.62, 0.10), Quoted(19.42, 0.12)),
    ("ResNet18", "Coupled-WSAM"): (Quoted(3.58, 0.12), Quoted(19.49, 0.13)),
    ("WRN-28-10", "SGDM"): (Quoted(3.73, 0.09), Quoted(19.27, 0.12)),
    ("WRN-28-10", "SAM"): (Quoted(2.94, 0.08), Quoted(16.49, 0.09)),
    ("WRN-28-10", "ESAM"): (Quoted(2.99, 0.07), Quoted(16.52, 0.21)),
    ("WRN-28-10", "GSAM"): (Quoted(2.91, 0.08), Quoted(16.36, 0.32)),
    ("WRN-28-10", "WSAM"): (Quoted(2.74, 0.07), Quoted(16.33, 0.26)),
    ("WRN-28-10", "Coupled-WSAM"): (Quoted(2.91, 0.06), Quoted(16.49, 0.09)),
}


def base_run(model: str, data: str, method: str = "SGDM", **changes: Any) -> Run:
    """Return a run with the paper's settings: SGD with momentum 0.9, cosine schedule, bf16.

    Args:
        model: ``ResNet18`` or ``WRN-28-10``.
        data: ``CIFAR-10`` or ``CIFAR-100``.
        method: One of `METHODS`. SGDM trains for twice as many epochs.
        **changes: Other settings of the run.
    """
    setting = SETTINGS[model]
    settings: dict[str, Any] = {
        "data": DATASETS[data],
        "model": setting.model,
        "method": METHODS[method],
        "base_args": {"lr": setting.lr, "momentum": MOMENTUM, "weight_decay": 1e-3},
        "epochs": 2 * EPOCHS if method == "SGDM" else EPOCHS,
        "batch_size": setting.batch_size,
        "precision": "bf16",
    }
    return Run(**(settings | changes))


def hyperparameters(model: str, data: str, method: str) -> dict[str, float]:
    """Return a method's hyperparameters: the paper's, and for Coupled-WSAM those of WSAM.

    With k = gamma / (1 - gamma), Coupled-WSAM weights sharpness by k and WSAM by k (1 - momentum).
    The row with equal weight has the smaller gamma at which both weights are the same.
    """
    beta, gamma = BETA_GAMMA[model, data]
    weight = effective_weight(GAMMA[model, data], MOMENTUM)
    by_method: dict[str, dict[str, float]] = {
        "SGDM": {},
        "SAM": {"rho": RHO},
        "ESAM": {"rho": RHO, "beta": beta, "gamma": gamma},
        "GSAM": {"rho": RHO, "alpha": ALPHA[model, data]},
        "WSAM": {"rho": RHO, "gamma": GAMMA[model, data]},
        "Coupled-WSAM": {"rho": RHO, "gamma": GAMMA[model, data]},
        "Coupled-WSAM, equal weight": {"rho": RHO, "gamma": round(gamma_for_weight(weight), 3)},
    }
    return by_method[method]


def ellipsoid_runs(ball: Run) -> dict[str, Run]:
    """Return a run with both ellipsoids instead of the ball; the paper does not state eta."""
    return {
        "+Adaptive": ball.replace(geometry={"name": "adaptive", "eta": 0.0}),
        "+Fisher": ball.replace(geometry={"name": "fisher", "eta": 1.0}),
    }


def scratch_run(model: str, data: str, method: str) -> Run:
    """Return the run of a cell in the paper's CIFAR table."""
    return base_run(model, data, method, hyper=hyperparameters(model, data, method))


def row_label(model: str, method: str) -> str:
    """Return the label of a method; that of Coupled-WSAM has its gamma on CIFAR-10 and CIFAR-100."""
    if not method.startswith("Coupled-WSAM"):
        return method
    gammas = (f"{hyperparameters(model, data, method)['gamma']:g}" for data in DATASETS)
    return f"{method}, gamma {' and '.join(dict.fromkeys(gammas))}"


def _table(name: str, title: str, methods: tuple[str, ...], notes: tuple[str, ...]) -> Table:
    cells = [
        Cell(
            (model, row_label(model, method)),
            data,
            with_seeds(scratch_run(model, data, method), PAPER_SEEDS),
            quoted,
        )
        for model in SETTINGS
        for method in methods
        for data, quoted in zip(DATASETS, ERRORS.get((model, method), (None, None)), strict=True)
    ]
    return Table(name, title, ("model", "method"), tuple(cells), notes=notes)


def cifar() -> Table:
    """Top-1 error of both models on both data sets with all methods (the paper's main table)."""
    notes = (
        "SGDM trains for twice as many epochs as the others, which make two passes a step.",
        "GSAM's rho is constant: the paper states one value of rho for all methods.",
        "The best epoch is chosen on the test images, so it is optimistic. The authors' example code "
        "reports it.",
    )
    methods = ("SGDM", "SAM", "ESAM", "GSAM", "WSAM")
    table = _table("cifar", "Top-1 error (%) on CIFAR, trained from scratch", methods, notes)
    return replace(table, best_epoch=True)


def ablation() -> Table:
    """SAM, WSAM, and WSAM with the sharpness term passed through the base optimizer."""
    notes = (
        "Coupled-WSAM uses WSAM's gamma of the same cell (ResNet18: 0.88 on CIFAR-10, 0.82 on "
        "CIFAR-100; WRN-28-10: 0.88 and 0.94), because the paper gives no gamma for it. Momentum "
        "accumulates the coupled sharpness term, so it has ten times the weight of WSAM's.",
        "Coupled-WSAM at gamma 1/2 is SAM. The paper's figure for WRN-28-10 on CIFAR-100 equals "
        "SAM's to the last digit (16.49 ± 0.09), so that cell most likely has gamma 1/2.",
        "Equal weight: the gamma at which the coupled term has WSAM's weight, 0.423 for 0.88.",
    )
    methods = ("SAM", "Coupled-WSAM", "Coupled-WSAM, equal weight", "WSAM")
    return _table("ablation", "Top-1 error (%) with and without decoupling", methods, notes)


def coupled() -> Table:
    """Coupled-WSAM's error over gamma: which gamma may the paper have used?"""
    ours = base_run("ResNet18", "CIFAR-10", "Coupled-WSAM")
    equal = hyperparameters("ResNet18", "CIFAR-10", "Coupled-WSAM, equal weight")["gamma"]
    runs = {
        f"{gamma:g}": ours.replace(hyper={"rho": RHO, "gamma": gamma})
        for gamma in (equal, 0.6, 0.7, 0.8, 0.88)
    }
    # At gamma 1/2 the update is SAM's, bit for bit.
    runs["0.5"] = scratch_run("ResNet18", "CIFAR-10", "SAM")
    runs = dict(sorted(runs.items()))
    runs["0.88, warm-up"] = runs["0.88"].replace(options={"gamma_warmup": 0.25})
    quoted = Quoted(3.58, 0.12)
    cells = [
        Cell((label,), "CIFAR-10", with_seeds(run, PAPER_SEEDS)) for label, run in runs.items()
    ]
    notes = (
        "The paper states no gamma for its Coupled-WSAM, whose error is "
        f"{format_mean(quoted.mean, quoted.deviation, 2)}.",
        f"0.5 is SAM. {equal:g} has the weight of sharpness that WSAM has at 0.88.",
        "Warm-up: gamma rises linearly from 0 over the first quarter of training.",
    )
    title = "Top-1 error (%) of Coupled-WSAM with ResNet18 by gamma"
    return Table("coupled", title, ("gamma",), tuple(cells), Kind.STUDY, notes=notes)


def geometry() -> Table:
    """SAM and WSAM with three neighborhoods: a ball, an adaptive and a Fisher ellipsoid."""
    quoted = {
        "SAM": (Quoted(2.94, 0.08), Quoted(2.84, 0.04), Quoted(3.00, 0.13)),
        "WSAM": (Quoted(2.74, 0.07), Quoted(2.90, 0.08), Quoted(3.45, 0.35)),
    }
    cells = []
    for model in ("WRN-28-10", "ResNet18"):
        for method, figures in quoted.items():
            ball = scratch_run(model, "CIFAR-10", method)
            larger = ball.replace(hyper={**ball.hyper, "rho": ELLIPSOID_RHO})
            runs = {"Vanilla": ball, **ellipsoid_runs(larger)}
            for (column, run), figure in zip(runs.items(), figures, strict=True):
                paper = figure if model == "WRN-28-10" else None
                cells.append(Cell((model, method), column, with_seeds(run, PAPER_SEEDS), paper))
    notes = (
        "rho is 0.2 in the ball and 5.0 in both ellipsoids; gamma is 0.88 in all three. The paper has "
        "no ResNet18 here.",
        "The paper does not state eta. Here it is 0 in the adaptive ellipsoid, applied to all "
        "tensors, and 1 in the Fisher ellipsoid.",
    )
    title = "Top-1 error (%) on CIFAR-10 by the shape of the neighborhood"
    return Table("geometry", title, ("model", "method"), tuple(cells), notes=notes)


def minima() -> Table:
    """Loss, accuracy and sharpness at the minima of ResNet18 on CIFAR-10."""
    columns = {
        "loss": Measure.TRAIN_LOSS,
        "accuracy": Measure.ACCURACY,
        "top eigenvalue": Measure.TOP_EIGENVALUE,
        "by batches": Measure.EIGENVALUE_BY_BATCHES,
        "test images": Measure.EIGENVALUE_ON_TEST,
    }
    quoted = {
        "SGDM": (0.0026, 0.9575, 62.58, None, None),
        "SAM": (0.0339, 0.9622, 22.67, None, None),
        "WSAM": (0.0089, 0.9654, 23.97, None, None),
    }
    cells = [
        Cell(
            (method,),
            column,
            with_seeds(scratch_run("ResNet18", "CIFAR-10", method), PAPER_SEEDS),
            None if figure is None else Quoted(figure),
            measure,
        )
        for method, figures in quoted.items()
        for (column, measure), figure in zip(columns.items(), figures, strict=True)
    ]
    notes = (
        "The loss is the mean training loss of the last epoch; the accuracy is on the test set.",
        "The eigenvalue is that of the loss over the first 10,000 training images without "
        "augmentation, BatchNorm in evaluation mode; the paper does not state how it computes it. "
        "By batches: the same images, also without augmentation, in batches of the training batch "
        "size, BatchNorm in training mode. Test images: 10,000 test images, evaluation mode.",
    )
    title = "Minima of ResNet18 on CIFAR-10"
    return Table("minima", title, ("optimizer",), tuple(cells), notes=notes)
