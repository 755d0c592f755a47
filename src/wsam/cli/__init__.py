"""The command line: one small file per verb; torch is imported only when a verb runs.

A verb raises `ValueError`, `TypeError` or `OSError` for a user's mistake; `run` prints it as one
line and exits with status 2. Anything else is a defect of ours and keeps its traceback.
"""

from wsam.cli import (  # noqa: F401 (each registers its verb)
    bench,
    bounds,
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
from wsam.cli._app import app
from wsam.cli._errors import carry_out

__all__ = ["app", "run"]


def run() -> None:
    """Run the command line; a user's mistake becomes one clear line."""
    carry_out(app)
