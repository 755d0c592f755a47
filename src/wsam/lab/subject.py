"""A trained model and the data to measure it on: what curvature and landscapes are taken of."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wsam.lab import records, tensors
from wsam.lab.batches import Batch, MemoryFeed
from wsam.lab.checkpoint import Checkpoints, has_manifest, load_state
from wsam.lab.folder import FolderFeed, Ticket
from wsam.lab.means import Means, make_feed, make_model
from wsam.lab.names import chosen
from wsam.lab.run import Run

State = dict[str, Tensor]
SPLITS = ("train", "test")
# What common ways of saving put around a model's own names.
_WRAPPERS = ("module.", "_orig_mod.")
_INSIDE = ("model", "state_dict", "model_state_dict")


@dataclass(frozen=True)
class Subject:
    """A model with its weights, and batches that can be read again and again.

    Args:
        model: On the device, in training mode or not: whoever measures decides.
        batches: Images without augmentation, always the same.
        title: What it is, in a line.
        run: The run it comes from, or the data and model it was said to be of.
        split: ``train`` or ``test``.
        labels: Which labels the images have, in words: the run's own, noise included, if known.
    """

    model: nn.Module
    batches: FixedBatches
    title: str
    run: Run
    split: str
    labels: str

    def accuracy(self) -> float:
        """Return the share of the batches' images that the model labels right."""
        right, before = 0, self.model.training
        self.model.eval()
        with torch.no_grad():
            for images, labels in self.batches:
                right += int((self.model(images).argmax(1) == labels).sum())
        self.model.train(before)
        return right / self.batches.count


class FixedBatches:
    """Images in their order, without augmentation, as often as they are asked for.

    Args:
        feed: Where they come from; one made without augmentation.
        split: ``train`` or ``test``.
        samples: How many; None for all. Folders, which go class by class, give a fixed shuffle.
        batch_size: Images per batch.
    """

    def __init__(
        self, feed: MemoryFeed | FolderFeed, split: str, samples: int | None, batch_size: int
    ) -> None:
        chosen("split", split, SPLITS)
        if batch_size < 1 or (samples is not None and samples < 1):
            raise ValueError(
                f"batch size and samples must be at least 1, got {batch_size} and {samples}"
            )
        if isinstance(feed, MemoryFeed) and feed.padding:
            raise ValueError("images with the border of augmentation are not as they are")
        self.feed, self.split, self.batch_size = feed, split, batch_size
        available = feed.train_count if split == "train" else feed.test_count
        self.count = available if samples is None else min(samples, available)
        self._order: Tensor | None = None
        if isinstance(feed, FolderFeed):
            generator = torch.Generator().manual_seed(0)
            self._order = torch.randperm(available, generator=generator)[: self.count]

    def __len__(self) -> int:
        return math.ceil(self.count / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        if isinstance(self.feed, MemoryFeed):
            return self._from_memory(self.feed)
        return self._from_files(self.feed)

    def _from_memory(self, feed: MemoryFeed) -> Iterator[Batch]:
        train = self.split == "train"
        images = feed.train_images if train else feed.test_images
        labels = feed.train_labels if train else feed.test_labels
        for at in range(0, self.count, self.batch_size):
            part = slice(at, min(at + self.batch_size, self.count))
            yield feed.normalise(images[part]), labels[part]

    def _from_files(self, feed: FolderFeed) -> Iterator[Batch]:
        assert self._order is not None
        images = feed.train_set if self.split == "train" else feed.test_set
        tickets: list[Ticket] = [(number, None) for number in self._order.tolist()]
        return feed.batches(images, tickets, self.batch_size)


def open_subject(
    checkpoint: Path,
    means: Means,
    *,
    data: str | None = None,
    model: str | None = None,
    split: str = "train",
    samples: int | None = None,
    batch_size: int | None = None,
) -> Subject:
    """Load a checkpoint into its model, with the data to measure it on.

    Args:
        checkpoint: A run's record (``OUT/KEY.json``), its weights or work folder, or any file
            that holds a state dict.
        means: Device and place of the data.
        data: Of another data set than the run's; needed for a plain state dict.
        model: Likewise.
        split: ``train`` (the run's own labels, noise included) or ``test``.
        samples: Use the first so many images.
        batch_size: Images per batch; default 1,000 on CUDA and 250 elsewhere.

    Raises:
        OSError: A file is missing.
        ValueError: No checkpoint, one of another model, or not enough said about it.
    """
    state, known = read_checkpoint(checkpoint)
    run = _described(checkpoint, known, data, model)
    problem = f"{checkpoint} does not fit {run.model} on {run.data}"
    built, feed = fitted(run, state, means, problem)
    size = (1000 if feed.device.type == "cuda" else 250) if batch_size is None else batch_size
    batches = FixedBatches(feed, split, samples, size)
    title = f"{checkpoint}: {run.model} on {run.data}"
    return Subject(built, batches, title, run, split, _labels(known, split))


def fitted(
    run: Run, state: Mapping[str, Tensor], means: Means, problem: str
) -> tuple[nn.Module, MemoryFeed | FolderFeed]:
    """Return a run's model with the given weights, and its data without augmentation.

    Args:
        run: Says the model and the data.
        state: The weights.
        means: Device and place of the data.
        problem: What to say of weights of another model.
    """
    # Every image as it is, for measurements need the same loss at every reading; and no pretrained
    # weights, for these take their place.
    plain, device = run.replace(augment=False, pretrained=None), means.place()
    feed = make_feed(plain, means, device)
    assert isinstance(feed, MemoryFeed | FolderFeed)
    model = make_model(plain, feed, device)
    fill(model, state, problem)
    return model, feed


def fill(model: nn.Module, state: Mapping[str, Tensor], problem: str) -> None:
    """Load a state dict; on a mismatch raise ValueError with one sentence that names a tensor."""
    own = model.state_dict()
    for name, tensor in state.items():
        if name in own and own[name].shape != tensor.shape:
            shapes = f"{tuple(tensor.shape)} instead of {tuple(own[name].shape)}"
            raise ValueError(f"{problem}: {name!r} is of shape {shapes}")
    if missing := own.keys() - state.keys():
        raise ValueError(f"{problem}: it has no {min(missing)!r}")
    if unknown := state.keys() - own.keys():
        raise ValueError(f"{problem}: the model has no {min(unknown)!r}")
    model.load_state_dict(dict(state))


def read_checkpoint(path: Path) -> tuple[State, Run | None]:
    """Return the weights in a checkpoint and the run it belongs to, where that is known."""
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    if path.is_dir():
        return _from_folder(path)
    if path.suffix == ".json":
        return _from_record(path)
    loaded = load_state(path) if has_manifest(path) else _plain_load(path)
    return _tensors(loaded, path), _run_within(loaded) or _run_of_weights(path)


def _labels(run: Run | None, split: str) -> str:
    """Say which labels are measured on: with others, curvature is that of another loss."""
    if split == "train" and run is None:
        return "as in the data; the file does not say whether it was trained on others"
    if split == "train" and run is not None and run.noise:
        return f"with the run's noise, {run.noise:g} of them drawn anew (seed {run.noise_seed})"
    return "as in the data"


def _run_within(loaded: Mapping[str, Any]) -> Run | None:
    """Return the run that a checkpoint of ours holds; others may call something else a run."""
    try:
        settings = json.loads(loaded["run"])
    except (KeyError, TypeError, ValueError):
        return None
    return Run.from_dict(settings) if isinstance(settings, dict) else None


def _run_of_weights(path: Path) -> Run | None:
    """Return the run whose record lies where `records.weights_path` says, if there is one."""
    work = path.absolute().parent
    record = work.parent.parent / f"{work.name}.json"
    if path.name != records.WEIGHTS or not record.exists():
        return None
    return _run_of_record(record)


def _run_of_record(path: Path) -> Run:
    try:
        settings = dict(records.read_file(path)["settings"])
    except (TypeError, ValueError) as error:  # its advice, to remove the file, is for who trains
        raise ValueError(f"{path} is no record of wsam train") from error
    return Run.from_dict(settings)


def _from_record(path: Path) -> tuple[State, Run]:
    run = _run_of_record(path)
    weights = records.weights_path(path.parent, run)
    if not weights.exists():
        raise ValueError(
            f"{path} kept no weights: remove it and train again with --keep-checkpoint"
        )
    return _tensors(load_state(weights), weights), run


def _from_folder(path: Path) -> tuple[State, Run | None]:
    if (path / records.WEIGHTS).exists():
        return read_checkpoint(path / records.WEIGHTS)
    state = Checkpoints(records.checkpoints_folder(path)).load()
    if state is None:
        raise ValueError(f"{path} holds neither weights nor a checkpoint of a run")
    return _tensors(state["model"], path), Run.from_dict(json.loads(state["run"]))


def _plain_load(path: Path) -> dict[str, Any]:
    try:
        loaded = tensors.load(path)
    except tensors.NotTensorsError as error:
        raise ValueError(f"{path} is not a file of tensors: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} holds {type(loaded).__name__}, not a state dict")
    return loaded


def _tensors(loaded: Mapping[str, Any], path: Path) -> State:
    """Return the state dict itself: unpacked, and without what wrappers add to names."""
    for key in _INSIDE:
        if isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    named = all(isinstance(n, str) and isinstance(v, Tensor) for n, v in loaded.items())
    if not loaded or not named:
        raise ValueError(f"{path} does not hold a state dict: names with their tensors")
    for name, tensor in loaded.items():
        if (kind := tensors.unusual(tensor)) is not None:
            raise ValueError(f"{path} cannot be measured: its {name!r} is a {kind} tensor")
    while prefix := next((w for w in _WRAPPERS if all(n.startswith(w) for n in loaded)), None):
        loaded = {name.removeprefix(prefix): value for name, value in loaded.items()}
    return dict(loaded)


def _described(path: Path, run: Run | None, data: str | None, model: str | None) -> Run:
    if run is None:
        if data is None or model is None:
            raise ValueError(f"{path} does not say what it is of: give both --model and --data")
        run = Run(data=data, model=model, method="vanilla")
    given = {"data": data, "model": model}
    return run.replace(**{name: value for name, value in given.items() if value is not None})
