"""The data of a run as batches on the training device, with its splits and label noise.

All batches of an epoch have the same size, so that one captured step fits all of them. The samples
left over after the last full batch (80 of CIFAR's 50,000 at batch size 128) differ in each epoch.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from wsam.lab.metrics import Loss, Metric
from wsam.lab.models import Task
from wsam.lab.run import Run
from wsam.lab.settings import TEST, TRAIN, VALIDATION

Batch = tuple[Any, Any]
"""What the model is called with, and the targets."""
_TEST_SHARE = 5  # one row of five


class DataFeed(ABC):
    """The data of a run, in memory or in files, with its loss and its metric.

    Args:
        run: Has the name of the data, the batch size and the seed.
        device: The training device.
        counts: Number of samples of each split.
        generator: Source of all randomness in order and augmentation. It is seeded here, and its
            state is all that a resumed run needs.
    """

    loss: Loss
    metric: Metric
    task: Task
    """Inputs and outputs, from which a named model is built."""
    verified = "own data"
    """How the files were compared with published ones."""
    units: tuple[float, float] | None = None
    """Mean and deviation that real targets were standardized by; metrics are in the original unit."""
    evaluation_batch = 500
    """Samples per batch of `evaluation`."""
    has_noise = False
    """Whether the labels have the run's noise."""
    has_loader = False
    """Whether training batches come from the user's own loader, which has a batch size of its own."""

    def __init__(
        self,
        run: Run,
        device: torch.device,
        counts: Mapping[str, int],
        generator: torch.Generator,
    ) -> None:
        self.name, self.device, self.counts = run.data, device, counts
        self.batch_size = min(run.batch_size, counts[TRAIN])
        self.steps = counts[TRAIN] // self.batch_size
        """Steps per epoch."""
        self.generator = generator.manual_seed(derive_seed(run.seed, "data"))

    @abstractmethod
    def example(self, count: int) -> Batch:
        """Return a batch of the shape of `count` samples, to check the model with."""

    @abstractmethod
    def epoch(self) -> Iterator[Batch]:
        """Yield the training batches of the next epoch."""

    @abstractmethod
    def fixed(self, split: str, count: int, size: int) -> Iterator[Batch]:
        """Yield the first `count` samples of a split without augmentation, in batches of `size`."""

    def evaluation(self, split: str) -> Iterator[Batch]:
        """Yield a whole split without augmentation, in large batches."""
        return self.fixed(split, self.counts[split], self.evaluation_batch)


class TensorFeed(DataFeed):
    """Batches of samples that are stored on the training device.

    Args:
        splits: Inputs and targets of ``train``, ``test`` and possibly ``validation``.
        task: Inputs and outputs, from which a named model is built.
        loss: Compares outputs and targets.
        metric: The default metric.
        run: As for `DataFeed`.
        device: The training device.
        units: Mean and deviation that real targets were standardized by.
    """

    def __init__(
        self,
        splits: Mapping[str, tuple[Tensor, Tensor]],
        task: Task,
        loss: Loss,
        metric: Metric,
        run: Run,
        device: torch.device,
        units: tuple[float, float] | None = None,
    ) -> None:
        counts = {split: len(targets) for split, (_, targets) in splits.items()}
        super().__init__(run, device, counts, torch.Generator(device))
        self.task, self.loss, self.metric, self.units = task, loss, metric, units
        self.splits = {name: (x.to(device), y.to(device)) for name, (x, y) in splits.items()}

    def example(self, count: int) -> Batch:
        """Return the first training samples."""
        return next(self.fixed(TRAIN, count, count))

    def epoch(self) -> Iterator[Batch]:
        """Yield the training batches of the next epoch."""
        inputs, targets = self.splits[TRAIN]
        order = torch.randperm(len(targets), generator=self.generator, device=self.device)
        for index in torch.split(order[: self.steps * self.batch_size], self.batch_size):
            yield inputs[index], targets[index]

    def fixed(self, split: str, count: int, size: int) -> Iterator[Batch]:
        """Yield the first `count` samples of a split, in batches of `size`."""
        inputs, targets = (torch.split(part[:count], size) for part in self.splits[split])
        yield from zip(inputs, targets, strict=True)


def batch_loader(
    dataset: Any,
    samples: list[Any],
    size: int,
    workers: int,
    device: torch.device,
    generator: torch.Generator | None = None,
    **options: Any,
) -> DataLoader[Any]:
    """Return a loader of ``dataset[sample]`` for the given samples, in their order.

    The seeds of the workers depend on the state of `generator`, which is not advanced.
    """
    seeds = torch.Generator()  # not the global one, which must not advance
    if generator is not None:
        seeds.set_state(generator.get_state())
    return DataLoader(
        dataset,
        batch_sampler=[samples[at : at + size] for at in range(0, len(samples), size)],
        num_workers=workers,
        pin_memory=device.type == "cuda",
        generator=seeds,
        **options,
    )


def hold_out(run: Run, count: int) -> dict[str, Tensor]:
    """Return the indices of the training samples and, if the run has any, the validation samples.

    Args:
        run: Has size and seed of the validation split.
        count: Number of samples to divide.
    """
    if run.validation is None:
        return {TRAIN: torch.arange(count)}
    kept, held_out = split_validation(count, run.validation, run.validation_seed or 0)
    return {TRAIN: kept, VALIDATION: held_out}


def split_rows(run: Run, rows: int, test_rows: int | None) -> dict[str, Tensor]:
    """Return the rows of each split.

    Args:
        run: Has the limits and the validation split.
        rows: Number of rows.
        test_rows: How many of the last rows are the test set; None to choose a fifth at random.

    Raises:
        ValueError: A split is empty.
    """
    order = torch.arange(rows)
    if test_rows is None:
        order = fixed_order(rows)
        test_rows = rows // _TEST_SHARE
    if not 0 < test_rows < rows:
        raise ValueError(f"{run.data} has {rows} samples, too few for a training and a test set")
    train, test = order[:-test_rows][: run.train_limit], order[-test_rows:][: run.test_limit]
    parts = {split: train[index] for split, index in hold_out(run, len(train)).items()}
    return {**parts, TEST: test}


def split_validation(count: int, size: float | int, seed: int) -> tuple[Tensor, Tensor]:
    """Divide training samples at random into a training and a validation part.

    Args:
        count: Number of samples.
        size: Fraction or number of samples for validation.
        seed: Seed of the choice.

    Returns:
        The indices of the training and of the validation samples, both ascending.

    Raises:
        ValueError: One of the two parts would be empty.
    """
    chosen = round(size * count) if isinstance(size, float) else size
    if not 0 < chosen < count:
        raise ValueError(
            f"a validation split of {size:g} leaves {chosen} of {count} samples for validation "
            f"and {count - chosen} for training; both parts need at least one"
        )
    generator = torch.Generator().manual_seed(derive_seed(seed, "validation"))
    order = torch.randperm(count, generator=generator)
    return order[chosen:].sort().values, order[:chosen].sort().values


def fixed_order(count: int) -> Tensor:
    """Return a random order of samples that is the same for every run."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))


def derive_seed(seed: int, name: str) -> int:
    """Return a seed for one use of randomness, independent of the seeds of other uses."""
    digest = hashlib.sha256(f"{name}:{seed}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def add_label_noise(labels: Tensor, classes: int, fraction: float, seed: int) -> Tensor:
    """Return labels with symmetric noise.

    A random subset of the labels is redrawn uniformly over all classes. The new label may equal the
    old one, so a fraction f leaves about ``1 - f + f/classes`` of the labels correct.

    Args:
        labels: The labels, on the CPU.
        classes: Number of classes.
        fraction: Fraction of labels to redraw.
        seed: Seed of the subset and of the new labels.

    Reference:
        Arazo et al., Unsupervised label noise modeling and loss correction, ICML 2019.
    """
    count = round(fraction * len(labels))
    generator = torch.Generator().manual_seed(derive_seed(seed, "label noise"))
    chosen = torch.randperm(len(labels), generator=generator)[:count]
    changed = labels.clone()
    changed[chosen] = torch.randint(classes, (count,), generator=generator)
    return changed
