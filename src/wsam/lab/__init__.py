"""Reproducible training runs.

`fit` trains a model on data from Python. `run.Run` describes what to train,
`execution.ExecutionConfig` how to execute it, `train.train` trains it and `records` reads and writes
the results.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wsam.lab.data.loader_feed import Data
    from wsam.lab.fitting import fit
    from wsam.lab.metrics import Metric

_EXPORTS = {"Data": "data.loader_feed", "Metric": "metrics", "fit": "fitting"}
__all__ = ["Data", "Metric", "fit"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
