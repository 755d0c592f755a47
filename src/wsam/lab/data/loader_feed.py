"""The user's own data: datasets or loaders, which a `DataLoader` reads during training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate

from wsam._utils.batches import count_samples, move_batch
from wsam.lab.data.feed import Batch, DataFeed, batch_loader, hold_out
from wsam.lab.errors import UserCodeError, explain
from wsam.lab.metrics import (
    ERROR,
    IGNORED,
    LOSS,
    MSE,
    Loss,
    Metric,
    cross_entropy,
    format_shape,
    resolve_metric,
    squared_error,
)
from wsam.lab.models import Task
from wsam.lab.rng import seeded
from wsam.lab.run import Run
from wsam.lab.settings import SPLITS, TEST, TRAIN, VALIDATION


@dataclass(frozen=True)
class Data:
    """Your own data for `wsam.lab.fit` and ``wsam train --data my.py:function``.

    Datasets are shuffled, batched and limited by the run. A loader is used as it is; its batch size
    takes precedence. Either yields pairs: what the model is called with, and the target.

    Args:
        train: A dataset with a length (a list of pairs is one), or a loader.
        test: Likewise.
        validation: Likewise, or None. ``--validation`` takes it from the training dataset instead.
        collate: Makes a batch of a list of samples; default torch's `default_collate`.
        loss: Called with the model's output and the targets; returns one value per sample, or their
            mean. Default: cross-entropy if targets are integers, mean squared error if they are real.
        metric: A name (error, accuracy, loss, mse, macro-f1), a `Metric`, or a function of all
            outputs and targets of a split, whose value searches minimize. Default: error for
            cross-entropy, mse for the mean squared error, else loss.
        outputs: Number of outputs of the model; only named models, such as ``mlp``, need it.

    Example:
        >>> pairs = [(torch.randn(3), n % 2) for n in range(40)]
        >>> data = Data(train=pairs[:30], test=pairs[30:], outputs=2)
    """

    train: Any
    test: Any
    validation: Any = None
    collate: Callable[[list[Any]], Any] | None = None
    loss: Loss | None = None
    metric: str | Metric | Callable[[Any, Any], Any] | None = None
    outputs: int | None = None


def as_data(value: object, name: str) -> Data:
    """Return what a data function returned as `Data`.

    Raises:
        UserCodeError: It is neither `Data` nor a pair.
    """
    if isinstance(value, Data):
        return value
    if isinstance(value, tuple) and len(value) == 2:
        return Data(*value)
    raise UserCodeError(
        f"{name} must return wsam.lab.Data(train=..., test=...) or a tuple (train, test), "
        f"got {format_shape(value)}"
    )


class LoaderFeed(DataFeed):
    """Batches of the user's own data.

    Args:
        data: The data.
        run: Has limits, validation split, batch size and seed.
        device: The training device.
        workers: Processes that read samples; None for none.

    Attributes:
        classes: Number of classes that the model has outputs for; None for other tasks.
    """

    def __init__(
        self, data: Data, run: Run, device: torch.device, workers: int | None = None
    ) -> None:
        self.name, self.device, self.workers = run.data, device, workers or 0
        self.classes: int | None = None
        self.collate = data.collate or default_collate
        splits = {TRAIN: data.train, VALIDATION: data.validation, TEST: data.test}
        self.splits = {split: part for split, part in splits.items() if part is not None}
        self._limit(run)
        if run.validation is not None:
            self._split_validation(run)
        for split, part in self.splits.items():
            if isinstance(part, IterableDataset) or not hasattr(part, "__len__"):
                raise UserCodeError(
                    f"the {split} split of {self.name} must be a dataset or a loader with a length, "
                    f"got {type(part).__name__}"
                )
            if not len(part):
                raise UserCodeError(f"the {split} split of {self.name} is empty")
        counts = {split: self._count(split) for split in SPLITS if split in self.splits}
        first = self.example(1)  # may draw from the loader's generator, which is seeded after that
        generator = getattr(self.splits[TRAIN], "generator", None)
        if not isinstance(generator, torch.Generator):
            generator = torch.Generator()
        super().__init__(run, device, counts, generator)
        self.evaluation_batch = run.batch_size
        self.has_loader = not self.is_dataset(TRAIN)
        if self.has_loader:
            self.batch_size = count_samples(first)
            self.steps = len(self.splits[TRAIN])
        self.loss, self.metric = self._loss_and_metric(data, first[1])
        self.outputs = data.outputs

    # What the splits are ------------------------------------------------------------------------

    def is_dataset(self, split: str) -> bool:
        """Return whether a split is a dataset, as opposed to a loader."""
        part = self.splits[split]
        return hasattr(part, "__getitem__") and not isinstance(part, DataLoader | IterableDataset)

    def _dataset(self, split: str, option: str) -> Any:
        if not self.is_dataset(split):
            raise ValueError(f"{option} needs a dataset, but {self.name} has a {split} loader")
        return self.splits[split]

    def _limit(self, run: Run) -> None:
        for split, limit in ((TRAIN, run.train_limit), (TEST, run.test_limit)):
            if limit is not None:
                part = self._dataset(split, f"--{split}-limit")
                self.splits[split] = Subset(part, range(min(limit, len(part))))

    def _split_validation(self, run: Run) -> None:
        if VALIDATION in self.splits:
            raise ValueError(f"{self.name} has a validation split: remove --validation")
        part = self._dataset(TRAIN, "--validation")
        for split, index in hold_out(run, len(part)).items():
            self.splits[split] = Subset(part, index.tolist())

    def _count(self, split: str) -> int:
        part = self.splits[split]
        samples: Any = part.dataset if isinstance(part, DataLoader) else part
        return len(samples)

    def example(self, count: int) -> Batch:
        """Return the first samples of a dataset, or the first batch of a loader."""
        with seeded(0):  # their augmentation must not advance generators
            return next(self.fixed(TRAIN, count, count))

    # The task -----------------------------------------------------------------------------------

    def _loss_and_metric(self, data: Data, target: Any) -> tuple[Loss, Metric]:
        """Return the user's loss and metric, or those that fit the type of the targets."""
        loss: Loss
        if data.loss is not None:
            loss, metric = data.loss, LOSS
        elif not isinstance(target, Tensor):
            raise UserCodeError(
                f"{self.name} has targets of {format_shape(target)}: give its loss as "
                "Data(..., loss=...)"
            )
        elif target.is_floating_point():
            loss, metric = squared_error, MSE
        else:
            loss, metric = cross_entropy, ERROR
        return loss, metric if data.metric is None else resolve_metric(data.metric)

    @property
    def task(self) -> Task:  # type: ignore[override]
        """Inputs and outputs, from which a named model is built.

        Raises:
            ValueError: The inputs are not tensors, or the number of outputs is unknown.
        """
        inputs, target = self.example(1)
        outputs = self.outputs
        if outputs is None and self.loss is squared_error:
            outputs = target[0].numel()
        if outputs is None or not isinstance(inputs, Tensor):
            raise ValueError(
                f"named models need tensors as inputs, and wsam.lab.Data(..., outputs=N) from "
                f"{self.name}; or use a model of your own"
            )
        return Task(tuple(inputs.shape[1:]), outputs, self.name)

    # Batches ------------------------------------------------------------------------------------

    def epoch(self) -> Iterator[Batch]:
        """Yield the training batches of the next epoch."""
        if self.has_loader:
            yield from self._batches(self.splits[TRAIN])
            return
        order = torch.randperm(self.counts[TRAIN], generator=self.generator).tolist()
        used = order[: self.steps * self.batch_size]
        # Workers draw other random numbers in each epoch: the generator has advanced.
        yield from self._batches(self._loader(TRAIN, used, self.batch_size, self.generator))

    def fixed(self, split: str, count: int, size: int) -> Iterator[Batch]:
        """Yield the first `count` samples of a split; a loader keeps its own batches and order."""
        if self.is_dataset(split):
            indices = list(range(min(count, self._count(split))))
            yield from self._batches(self._loader(split, indices, size))
            return
        for batch in self._batches(self.splits[split]):
            if count <= 0:
                return
            yield batch
            count -= count_samples(batch)

    def evaluation(self, split: str) -> Iterator[Batch]:
        """Yield a whole split; of some loaders only the number of batches is known."""
        return self.fixed(split, 1 << 62, self.evaluation_batch)

    def _loader(
        self, split: str, indices: list[int], size: int, generator: torch.Generator | None = None
    ) -> DataLoader[Any]:
        arguments = (self.workers, self.device, generator)
        return batch_loader(self.splits[split], indices, size, *arguments, collate_fn=self.collate)

    def _batches(self, loader: Iterable[Any]) -> Iterator[Batch]:
        with explain(f"reading a batch of {self.name}"):
            for batch in loader:
                yield self._pair(batch)

    def _check_classes(self, targets: Any) -> None:
        """Raise an error for a label without an output; CUDA would abort the process."""
        if self.classes is None or not isinstance(targets, Tensor):
            return
        wrong = targets[((targets < 0) & (targets != IGNORED)) | (targets >= self.classes)]
        if len(wrong):
            raise UserCodeError(
                f"{self.name} has the label {int(wrong[0])}, but the model has {self.classes} outputs"
            )

    def _pair(self, batch: Any) -> Batch:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise UserCodeError(
                f"{self.name} must yield pairs (inputs, targets), got {format_shape(batch)}"
            )
        self._check_classes(batch[1])
        # Numbers of Python and numpy are float64, weights are float32.
        inputs, targets = move_batch(tuple(batch), self.device, torch.float32)
        return inputs, targets
