"""DeiT-base, trained further on ImageNet."""

from __future__ import annotations

from typing import Any

from wsam.lab.run import Run
from wsam.paper.cifar import METHODS
from wsam.paper.table import PAPER_SEEDS, Cell, Quoted, Table
from wsam.sweep.grid import with_seeds

DEIT = "facebook/deit-base-patch16-224"


def deit_run(method: str = "SGDM", **changes: Any) -> Run:
    """Return a run that continues training DeiT-base on ImageNet with the paper's settings."""
    settings: dict[str, Any] = {
        "data": "imagenet",
        "model": "deit-base",
        "method": METHODS[method],
        "base_args": {"lr": 1e-5, "momentum": 0.9, "weight_decay": 1e-4},
        "epochs": 3,
        "batch_size": 256,
        "schedule": "constant",
        "precision": "bf16",
        "pretrained": DEIT,
    }
    return Run(**(settings | changes))


def imagenet() -> Table:
    """Top-1 error of DeiT-base after three more epochs."""
    # One step with a learning rate of 0 changes nothing: the run tests the initial model.
    no_update = {"lr": 0.0, "momentum": 0.9, "weight_decay": 0.0}
    rows = {
        "Initial": (deit_run(base_args=no_update, epochs=1, train_limit=256), Quoted(18.2)),
        "SGDM": (deit_run(), Quoted(18.17, 0.005)),
        "SAM": (deit_run("SAM", hyper={"rho": 5.5}), Quoted(18.01, 0.007)),
        "GSAM": (deit_run("GSAM", hyper={"rho": 5.5, "alpha": 0.02}), Quoted(18.01, 0.005)),
        "WSAM": (deit_run("WSAM", hyper={"rho": 5.5, "gamma": 0.94}), Quoted(18.01, 0.003)),
    }
    cells = tuple(
        Cell(
            (name,),
            "top-1 error",
            with_seeds(run, PAPER_SEEDS[:1] if name == "Initial" else PAPER_SEEDS),
            figure,
        )
        for name, (run, figure) in rows.items()
    )
    notes = (
        "The paper does not state a learning rate schedule; here the rate is constant.",
        "The initial model is tested by a run of one step with a learning rate of 0.",
    )
    title = "Top-1 error (%) of DeiT-base on ImageNet after three more epochs"
    return Table("imagenet", title, ("method",), cells, epochs=3, notes=notes)
