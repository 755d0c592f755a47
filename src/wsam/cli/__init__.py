"""The command line: one small file a verb; torch is imported only when a verb runs.

A verb raises `ValueError`, `TypeError` or `OSError` for a user's mistake; `run` prints it as one
line and exits with status 2. Anything else is a defect of ours and keeps its traceback.
"""

import sys

from wsam.cli import (  # noqa: F401 (each registers its verb)
    bench,
    bounds,
    curvature,
    directions,
    landscape,
    paper,
    sweep,
    toy,
    train,
)
from wsam.cli._app import app

__all__ = ["app", "run"]


def run() -> None:
    """Run the command line and turn a user's mistake into one clear line."""
    try:
        app()
    except (ValueError, TypeError, OSError) as error:
        print(f"wsam: {error}", file=sys.stderr)
        sys.exit(2)
