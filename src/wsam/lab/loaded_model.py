"""A trained model loaded from a checkpoint, with data to measure curvature and landscapes on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from wsam.lab import records
from wsam.lab.checkpoint import Checkpoints, has_manifest, load_state
from wsam.lab.data.feed import Batch, DataFeed
from wsam.lab.data.image_feed import MemoryFeed
from wsam.lab.errors import is_out_of_memory
from wsam.lab.execution import ExecutionConfig
from wsam.lab.files import read_regular
from wsam.lab.metrics import Loss, count_correct, cross_entropy, mean_loss
from wsam.lab.problem import load_kept_weights, make_problem
from wsam.lab.run import Run
from wsam.lab.tensor_files import NotTensorsError, load_tensors
from wsam.lab.user_code import is_code

State = dict[str, Tensor]
_NAME_PREFIXES = ("module.", "_orig_mod.")  # added by DistributedDataParallel and torch.compile
_STATE_DICT_KEYS = ("model", "state_dict", "model_state_dict")


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights, and batches that can be iterated repeatedly.

    Args:
        model: The model, on the device, in training mode.
        batches: Samples without augmentation, always the same.
        title: A short description.
        run: The run it was trained by, or one with the given data and model.
        split: ``train`` or ``test``.
        labels: Which labels the samples have: the run's own, including noise, if known.
    """

    model: nn.Module
    batches: FixedBatches
    title: str
    run: Run
    split: str
    labels: str

    def accuracy(self) -> float | None:
        """Return the fraction of samples that the model classifies correctly; None for other tasks."""
        if self.batches.feed.loss is not cross_entropy:
            return None
        was_training = self.model.training
        self.model.eval()
        with torch.no_grad():
            counts = [
                count_correct(self.model(inputs), targets) for inputs, targets in self.batches
            ]
        self.model.train(was_training)
        correct, predictions = (sum(map(int, part)) for part in zip(*counts, strict=True))
        return correct / predictions


class FixedBatches:
    """Samples in a fixed order, without augmentation; can be iterated repeatedly.

    Args:
        feed: The data, made without augmentation.
        split: ``train`` or ``test``.
        samples: Number of samples; None for all. Image folders, which are sorted by class, are
            shuffled with a fixed seed.
        batch_size: Samples per batch.
    """

    def __init__(self, feed: DataFeed, split: str, samples: int | None, batch_size: int) -> None:
        if isinstance(feed, MemoryFeed) and feed.padding:
            raise ValueError("the images are padded for augmentation; use a feed without it")
        self.feed, self.split, self.batch_size = feed, split, batch_size
        self.count = min(samples or feed.counts[split], feed.counts[split])

    @property
    def loss(self) -> Loss:
        """The mean loss of a batch, given outputs and targets."""
        return mean_loss(self.feed.loss)

    def __len__(self) -> int:
        return math.ceil(self.count / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return self.feed.fixed(self.split, self.count, self.batch_size)


def load_model(
    checkpoint: Path,
    execution: ExecutionConfig,
    *,
    data: str | None = None,
    model: str | None = None,
    split: str = "train",
    samples: int | None = None,
    batch_size: int | None = None,
) -> LoadedModel:
    """Load a checkpoint into its model, with data to measure it on.

    Args:
        checkpoint: A run's record (``OUT/KEY.json``), its weights or work folder, or any file
            that contains a state dict.
        execution: Device and location of the data.
        data: Name of the data, if not the run's; required for a plain state dict.
        model: Name of the model, likewise.
        split: ``train`` (with the run's labels, including noise) or ``test``.
        samples: Use only the first samples.
        batch_size: Samples per batch; default 1,000 on CUDA, else 250.

    Raises:
        OSError: A file is missing.
        ValueError: Not a checkpoint, one of another model, or `data` and `model` are required.
    """
    state, run = read_checkpoint(checkpoint)
    described = _with_names(checkpoint, run, data, model)
    problem = f"{checkpoint} does not fit {described.model} on {described.data}"
    built, feed = build_with_weights(described, state, execution, problem)
    if batch_size is None:
        batch_size = 1000 if execution.resolve_device().type == "cuda" else 250
    batches = FixedBatches(feed, split, samples, batch_size)
    title = f"{checkpoint}: {described.model} on {described.data}"
    return LoadedModel(built, batches, title, described, split, _describe_labels(run, split))


def restore(
    run: Run, out: Path, execution: ExecutionConfig | None = None
) -> tuple[nn.Module, DataFeed]:
    """Return the trained model of a finished run, in evaluation mode, and its unaugmented data.

    Args:
        run: The run, trained with `ExecutionConfig.keep_weights`.
        out: The results folder.
        execution: Device and location of the data.

    Raises:
        FileNotFoundError: The weights were not kept.
        ValueError: The weights are damaged.
    """
    execution = execution or ExecutionConfig()
    work = records.work_folder(out, run)
    problem = f"the weights in {work} do not fit {run.title}"
    model, feed = build_with_weights(run, load_kept_weights(work), execution, problem)
    return model.eval(), feed


def build_with_weights(
    run: Run, state: Mapping[str, Tensor], execution: ExecutionConfig, problem: str
) -> tuple[nn.Module, DataFeed]:
    """Return a run's model with the given weights, and its data without augmentation.

    Args:
        run: Has the model and the data.
        state: The weights.
        execution: Device and location of the data.
        problem: Start of the error message if the weights do not fit.
    """
    # A metric of the user's own is not needed, and its code must not be executed.
    plain = run.replace(augment=False, pretrained=None, metric=None)
    found = make_problem(plain, execution)
    load_weights(found.model, state, problem)
    return found.model, found.feed


def load_weights(model: nn.Module, state: Mapping[str, Tensor], problem: str) -> None:
    """Load a state dict; on a mismatch raise ValueError with the first difference."""
    try:
        model.load_state_dict(dict(state))
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise ValueError(f"{problem}: {shorten(str(error), 200)}") from error


# Reading checkpoints ----------------------------------------------------------------------------


def read_checkpoint(path: Path) -> tuple[State, Run | None]:
    """Return the weights in a checkpoint and, if it is known, the run that trained them."""
    if path.is_dir():
        return _from_folder(path)
    if path.suffix == ".json":
        return _from_record(path)
    loaded = load_state(path) if has_manifest(path) else _load_plain(path)
    return _state_dict(loaded, path), _run_in_checkpoint(loaded) or _run_of_weights(path)


def _from_folder(path: Path) -> tuple[State, Run | None]:
    if (path / records.WEIGHTS).exists():
        return read_checkpoint(path / records.WEIGHTS)
    state = Checkpoints(records.checkpoints_folder(path)).load()
    if state is None:
        raise ValueError(f"{path} contains neither weights nor a checkpoint of a run")
    return _state_dict(state, path), _run_in_checkpoint(state)


def _from_record(path: Path) -> tuple[State, Run]:
    run = _run_of_record(path)
    return load_kept_weights(records.work_folder(path.parent, run)), run


def _load_plain(path: Path) -> Any:
    try:
        return load_tensors(read_regular(path))
    except NotTensorsError as error:
        raise ValueError(f"{path} is not a file of tensors: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path} {error}") from error


def _run_in_checkpoint(loaded: Mapping[str, Any]) -> Run | None:
    """Return the run in a checkpoint of this package; other files may use the key differently."""
    try:
        settings = records.parse_json(loaded["run"])
    except (KeyError, TypeError, ValueError):
        return None
    return Run.from_dict(settings) if isinstance(settings, dict) else None


def _run_of_weights(path: Path) -> Run | None:
    """Return the run of a file at `records.weights_path`, if its record exists."""
    work = path.absolute().parent
    record = work.parent.parent / f"{work.name}.json"
    if path.name != records.WEIGHTS or not record.exists():
        return None
    return _run_of_record(record)


def _run_of_record(path: Path) -> Run:
    try:
        settings = dict(records.read_file(path)["settings"])
    except (TypeError, ValueError) as error:  # its advice, to remove the file, is for training
        raise ValueError(f"{path} is not a record of wsam train") from error
    return Run.from_dict(settings)


def _state_dict(loaded: Any, path: Path) -> State:
    """Return the state dict within a checkpoint, with the prefixes of wrappers removed."""
    for key in _STATE_DICT_KEYS:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    named = isinstance(loaded, Mapping) and all(
        isinstance(name, str) and isinstance(value, Tensor) and not value.is_complex()
        for name, value in loaded.items()
    )
    if not named or not loaded:
        raise ValueError(f"{path} does not contain a state dict of named real tensors")
    while prefix := next((p for p in _NAME_PREFIXES if all(n.startswith(p) for n in loaded)), None):
        loaded = {name.removeprefix(prefix): value for name, value in loaded.items()}
    return dict(loaded)


def _with_names(path: Path, run: Run | None, data: str | None, model: str | None) -> Run:
    if run is None:
        if data is None or model is None:
            raise ValueError(f"the model and data of {path} are unknown: give --model and --data")
        run = Run(data=data, model=model, method="vanilla")
    given = {"data": data, "model": model}
    # A file must not decide which code is executed.
    named = {"data": run.data, "model": run.model}
    code = {what: name for what, name in named.items() if is_code(name) and given[what] is None}
    if code:
        options = " ".join(f"--{what} {name}" for what, name in code.items())
        raise ValueError(f"{path} names code: give {options} to execute it")
    return run.replace(**{name: value for name, value in given.items() if value is not None})


def _describe_labels(run: Run | None, split: str) -> str:
    """Return which labels are used: curvature depends on them."""
    if split == "train" and run is None:
        return "as in the data; the labels it was trained on are unknown"
    if split == "train" and run is not None and run.noise:
        return f"with the run's noise, {run.noise:g} of them redrawn (seed {run.noise_seed})"
    return "as in the data"
