"""The command line: one module per verb. torch is imported only when a verb runs."""

from wsam.cli import (  # noqa: F401 (each module registers its verb)
    bench,
    bounds,
    compare,
    curvature,
    demo,
    directions,
    landscape,
    paper,
    report,
    sweep,
    toy,
    train,
)
from wsam.cli._app import app, run

__all__ = ["app", "run"]
