"""A problem: a model, its data, a loss and a metric, made from the settings of a run.

Named data and models, files and the user's own code all end here; training, evaluation and
measurements do not distinguish them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from wsam.lab import user_code
from wsam.lab.checkpoint import load_state
from wsam.lab.data import datasets
from wsam.lab.data.feed import DataFeed
from wsam.lab.data.hf_folder import load_hf
from wsam.lab.data.image_feed import ImageFeed, MemoryFeed
from wsam.lab.data.image_folder import FolderFeed, find_root
from wsam.lab.data.image_memory import load_folder
from wsam.lab.data.loader_feed import Data, LoaderFeed, as_data
from wsam.lab.data.table_feed import table_feed
from wsam.lab.data.tables import read_table
from wsam.lab.data.text import text_feed
from wsam.lab.errors import RunError, UserCodeError, explain
from wsam.lab.execution import ExecutionConfig
from wsam.lab.metrics import ACCURACY, ERROR, METRICS, Loss, Metric, cross_entropy, resolve_metric
from wsam.lab.models import TOKENS, Task, build_model, load_all_but_head
from wsam.lab.named_files import digest, text_file
from wsam.lab.records import WEIGHTS, work_root
from wsam.lab.rng import seeded
from wsam.lab.run import Run
from wsam.lab.settings import AUTO

RUN_PREFIX = "run:"
"""Prefix of a `Run.pretrained` that names another run by its key."""


@dataclass(frozen=True)
class Objects:
    """Python objects that replace the names in a run: see `wsam.lab.fit`.

    Args:
        model: A module, or a function that returns one; None to use the run's name.
        data: `Data`, a pair, or a function that returns one of them; None likewise.
        metric: A `Metric` or a function; None likewise.
    """

    model: nn.Module | Callable[[], nn.Module] | None = None
    data: Data | tuple[Any, Any] | Callable[[], Any] | None = None
    metric: Metric | Callable[[Any, Any], Any] | None = None


NO_OBJECTS = Objects()


@dataclass(frozen=True)
class Problem:
    """A model to train and the data to train it on.

    Args:
        model: The model, on the device.
        feed: Batches, their number, the loss and the task.
        metric: The figure that is recorded for each epoch.
    """

    model: nn.Module
    feed: DataFeed
    metric: Metric

    @property
    def loss(self) -> Loss:
        """Compares outputs and targets in training."""
        return self.feed.loss

    @property
    def classifies(self) -> bool:
        """Whether outputs are scores of classes, so that errors can be counted."""
        return self.loss is cross_entropy or self.metric in (ERROR, ACCURACY)


def make_problem(
    run: Run,
    execution: ExecutionConfig,
    objects: Objects = NO_OBJECTS,
    out: Path | None = None,
) -> Problem:
    """Return the problem of a run.

    Args:
        run: The run.
        execution: How to execute it.
        objects: Python objects that replace the names of model, data and metric.
        out: The results folder, with the weights of a run that `run.pretrained` names.

    Raises:
        OSError: Data or code is missing.
        ValueError: Damaged data, or the user's code does not return what it should.
    """
    _check_digests(run, objects, execution.source.folder)
    feed = make_data_feed(run, execution, objects)
    model = make_model(run, feed, objects, out)
    return Problem(model, feed, _metric(run, feed, objects))


def _metric(run: Run, feed: DataFeed, objects: Objects) -> Metric:
    """Return the metric that the run names, else that of the data."""
    if run.metric is None:
        return feed.metric
    if run.metric in METRICS:
        return METRICS[run.metric]
    return resolve_metric(_object_or_code("metric", run.metric, objects.metric))


def uses_own_code(run: Run) -> bool:
    """Return whether the model or the data of a run is the user's own code."""
    return any(map(user_code.is_code_or_object, (run.data, run.model)))


def _check_digests(run: Run, objects: Objects, folder: Path) -> None:
    """Raise an error if a file has changed after the run was described."""
    for what, expected in run.digests.items():
        name = getattr(run, what)
        given = getattr(objects, what, None)
        if given is not None or name.startswith(user_code.OBJECT):
            continue
        if (now := digest(name, folder)) != expected:
            raise UserCodeError(
                f"the files of {name} have changed: their digest is {now}, the run was described "
                f"with {expected}; describe the run again"
            )


def _object_or_code(what: str, name: str, given: Any) -> Any:
    """Return the object that was given in Python, else the function of a name."""
    if given is not None:
        return given
    if name.startswith(user_code.OBJECT):
        raise ValueError(f"the {what} {name} was given in Python: pass it to wsam.lab.fit again")
    return user_code.load(name)


# Data -------------------------------------------------------------------------------------------


def make_data_feed(run: Run, execution: ExecutionConfig, objects: Objects = NO_OBJECTS) -> DataFeed:
    """Return the run's data, with its label noise, limits and splits, as batches on the device.

    Raises:
        ValueError: Damaged data, or label noise of data that has no classes.
    """
    device = execution.resolve_device()
    try:
        feed = _make_feed(run, execution, objects, device)
    except ValueError as error:  # that of a library may not name the data
        if isinstance(error, RunError) or run.data.rpartition(":")[2] in str(error):
            raise
        raise ValueError(f"{run.data}: {error}") from error
    if run.noise and not feed.has_noise:
        raise ValueError(f"--noise needs images or a table with classes, not {run.data}")
    return feed


def _make_feed(
    run: Run, execution: ExecutionConfig, objects: Objects, device: torch.device
) -> DataFeed:
    if user_code.is_code_or_object(run.data):
        return LoaderFeed(_own_data(run, objects), run, device, execution.workers)
    kind, _, path = run.data.partition(":")
    if kind == "table":
        return table_feed(read_table(Path(path), run.data), run, device)
    if kind == "text":
        return text_feed(text_file(Path(path), execution.source.folder), run, device)
    if kind == "hf":
        found = load_hf(Path(path), run, device)
        return found if isinstance(found, DataFeed) else MemoryFeed(found, run, device)
    return _image_feed(run, execution, device)


def _image_feed(run: Run, execution: ExecutionConfig, device: torch.device) -> ImageFeed:
    """Return the images of a named data set or a folder."""
    if run.data in datasets.LOADERS:
        return MemoryFeed(datasets.load(run.data, execution.source), run, device)
    root = find_root(execution.source.folder, run.data.removeprefix("folder:"))
    if run.data.startswith("folder:") and run.image_size is None:
        return MemoryFeed(load_folder(root, run.data), run, device)
    return FolderFeed(root, run, device, execution.workers)


def _own_data(run: Run, objects: Objects) -> Data:
    given = _object_or_code("data", run.data, objects.data)
    if callable(given):
        with seeded(0), explain(run.data):  # the same samples for every seed of the run
            given = given()
    return as_data(given, run.data)


# Models -----------------------------------------------------------------------------------------


def make_model(
    run: Run, feed: DataFeed, objects: Objects = NO_OBJECTS, out: Path | None = None
) -> nn.Module:
    """Return the run's initial model on the device; named models are channels last in memory."""
    if user_code.is_code_or_object(run.model):
        return _own_model(run, objects).to(feed.device)
    source = run.pretrained or ""
    pretrained = None if source.startswith(RUN_PREFIX) else run.pretrained
    name = _fitting_model(feed.task) if run.model == AUTO else run.model
    model = build_model(name, feed.task, run.seed, pretrained, run.model_args)
    if source.startswith(RUN_PREFIX):
        work = work_root(out or Path("results")) / source.removeprefix(RUN_PREFIX)
        load_all_but_head(model, load_kept_weights(work))
    placed: nn.Module = model.to(feed.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return placed


def _fitting_model(task: Task) -> str:
    """Return the named model for a kind of inputs."""
    if task.kind == TOKENS:
        return "gpt"
    return "cnn" if len(task.shape) == 3 else "mlp"


def load_kept_weights(work_folder: Path) -> dict[str, Tensor]:
    """Return the final weights in the work folder of a run.

    Raises:
        FileNotFoundError: They were not kept.
        ValueError: They are damaged.
    """
    if not (work_folder / WEIGHTS).exists():
        raise FileNotFoundError(
            f"there are no weights in {work_folder}: train the run with --keep-checkpoint"
        )
    return load_state(work_folder / WEIGHTS)


_returned: WeakSet[nn.Module] = WeakSet()
"""The user's own models that this process has made and still holds."""


def _own_model(run: Run, objects: Objects) -> nn.Module:
    if run.pretrained is not None:
        raise ValueError(f"--pretrained has no effect on {run.model}: load the weights in it")
    given = _object_or_code("model", run.model, objects.model)
    if isinstance(given, nn.Module):  # an object of fit is trained itself, one of a file is copied
        model = given if objects.model is given else copy.deepcopy(given)
    else:
        with seeded(run.seed), explain(run.model):
            model = given()
        if model in _returned:  # it may be trained already, by another run of this process
            raise UserCodeError(
                f"{run.model} returned the same module again: it must build a new one"
            )
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise UserCodeError(f"{run.model} must return a torch.nn.Module, got {kind}")
    _returned.add(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserCodeError(f"the model of {run.model} has no parameters to train")
    return model
