"""`fit`: train a model on data from Python, with objects or names."""

from __future__ import annotations

import dataclasses
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from wsam.lab.callbacks import Callback
from wsam.lab.data.loader_feed import Data
from wsam.lab.execution import ExecutionConfig
from wsam.lab.metrics import Metric
from wsam.lab.problem import Objects
from wsam.lab.records import Record
from wsam.lab.run import Run, with_wsam_defaults
from wsam.lab.settings import BASES, OPTIONS, hyper_defaults
from wsam.lab.train import train
from wsam.lab.user_code import OBJECT, spec_of
from wsam.lab.values import check_choice, join_names


def fit(
    model: str | nn.Module | Callable[[], nn.Module],
    data: str | Data | tuple[Any, Any] | Callable[[], Any],
    method: str = "wsam",
    *,
    base: str = "sgd",
    metric: str | Metric | Callable[[Any, Any], Any] | None = None,
    out: str | Path | None = None,
    execution: ExecutionConfig | None = None,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> Record:
    """Train a model and return the record, as ``wsam train`` does.

    Args:
        model: A module, which is trained in place; a function that returns one; or a name as for
            ``wsam train --model``.
        data: A `Data` or a pair of training and test data; a function that returns one of them; or a
            name as for ``wsam train --data``.
        method: ``vanilla`` (the base optimizer alone), a name in `wsam.METHODS`, or a class in a file,
            ``path/file.py:Class``, as for ``wsam train --method``.
        base: Name of the base optimizer.
        metric: A name as for ``wsam train --metric``, a `Metric`, or a function of outputs and targets,
            whose value is better the lower it is. By default that of the data.
        out: The results folder. By default nothing is kept.
        execution: Device and other means of execution.
        callbacks: Called during training.
        **settings: Settings of `wsam.lab.run.Run`, and by their own names hyperparameters of the
            method, arguments of the base and options: ``epochs=5, rho=0.1, lr=0.05``.

    In a results folder, a run whose model and data are names or functions of a file has the key that
    ``wsam train`` gives it: it is not trained again, and resumed after an interruption. Other objects
    cannot be identified, so their run gets a key of its own each time.

    Raises:
        TypeError: An unknown setting.
        ValueError: Invalid settings, or the user's code raises or does not fit together.

    Example:
        >>> import torch
        >>> x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
        >>> pairs = list(zip(x, (x[:, 0] > 0).long()))
        >>> record = fit(nn.Linear(3, 2), (pairs[:40], pairs[40:]), "sam", epochs=2, rho=0.1)
        >>> record["status"], record["metric"]["name"]
        ('finished', 'error')
    """
    names: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    digests: dict[str, str] = {}
    for what, given in (("model", model), ("data", data), ("metric", metric)):
        if given is None or isinstance(given, str):
            names[what] = given
            continue
        objects[what] = given
        if callable(given) and not isinstance(given, nn.Module) and (spec := spec_of(given)):
            names[what] = spec
        else:
            names[what] = OBJECT + str(getattr(given, "__name__", type(given).__name__))
            digests[what] = uuid.uuid4().hex[:12]
    grouped = _group_settings(method, base, settings)
    run = Run(**names, method=method, base=base, digests=digests, **grouped)
    run = with_wsam_defaults(run, {*grouped.get("hyper", ()), *grouped.get("options", ())})
    if out is not None:
        return train(run, Path(out), execution, callbacks, Objects(**objects))
    with tempfile.TemporaryDirectory() as folder:
        return train(run, Path(folder), execution, callbacks, Objects(**objects))


def _group_settings(method: str, base: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings of a run, with hyperparameters, base arguments and options grouped."""
    fields = {field.name for field in dataclasses.fields(Run)} - {"digests"}
    found = {name: value for name, value in settings.items() if name in fields}
    owners = (
        ("hyper", hyper_defaults(method)),
        ("base_args", BASES[check_choice("base", base, BASES)]),
        ("options", OPTIONS),
    )
    for name in settings.keys() - fields:
        owner = next((owner for owner, known in owners if name in known), None)
        if owner is None:
            known = [*fields, *(name for _, names in owners for name in names)]
            raise TypeError(
                f"unknown setting {name!r} of {method} over {base}; known: "
                f"{join_names(sorted(set(known)))}"
            )
        found[owner] = {**found.get(owner, {}), name: settings[name]}
    return found
