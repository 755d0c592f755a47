"""Tables with a target column as batches.

Numbers are standardized by the mean and standard deviation of the training rows. Texts are
categories: they are numbered from 1, and 0 is a category that the training rows do not have. An
input of the model is one vector, first the numbers, then the categories.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wsam.lab.data.feed import TensorFeed, add_label_noise, split_rows
from wsam.lab.data.tables import Table
from wsam.lab.metrics import ERROR, MSE, cross_entropy, squared_error
from wsam.lab.models import Task
from wsam.lab.run import Run
from wsam.lab.settings import TRAIN
from wsam.lab.values import join_names

_MAX_CLASSES = 20
"""Whole numbers with more different values are a quantity to predict, not classes."""
_MAX_CATEGORIES = 0.5
"""More different texts per row are not categories, but texts or names."""


def table_feed(table: Table, run: Run, device: torch.device) -> TensorFeed:
    """Return the rows of a table as batches.

    Raises:
        ValueError: The target column is missing, or is the only one.
    """
    target = run.target
    names = [*table.numbers, *table.texts]
    if target not in names:
        given = "no target column is given" if target is None else f"it has no column {target!r}"
        raise ValueError(f"{table.name}: {given}; give --target, one of {join_names(names)}")
    if len(names) == 1:
        raise ValueError(f"{table.name} has no column besides the target {target!r}")
    parts = split_rows(run, table.rows, table.test_rows)
    train = parts[TRAIN]
    inputs, categories = _encode(table, target, train)
    values: Sequence[Any] = table.numbers.get(target, table.texts.get(target, ()))
    classify = is_classification(run.task, values)
    if classify:
        classes = sorted(set(values))
        if target in table.texts:
            _check_categories(f"the target {target!r} of {table.name}", "classes", values)
        index = {value: number for number, value in enumerate(classes)}
        targets = torch.tensor([index[value] for value in values])
        outputs, units = len(classes), None
        targets[train] = add_label_noise(targets[train], outputs, run.noise, run.noise_seed)
    else:
        if target in table.texts:
            raise ValueError(f"the target {target!r} of {table.name} is a text: use classification")
        targets, mean, std = _standardize(values, train)
        outputs, units = 1, (mean, std)
    feed = TensorFeed(
        {split: (inputs[rows], targets[rows]) for split, rows in parts.items()},
        Task((inputs.shape[1],), outputs, table.name, categories=categories),
        cross_entropy if classify else squared_error,
        ERROR if classify else MSE,
        run,
        device,
        units,
    )
    feed.has_noise = classify
    return feed


def is_classification(task: str | None, values: Sequence[Any]) -> bool:
    """Return whether targets are classes: by the task, else texts, booleans or few whole numbers."""
    if task is not None:
        return task == "classification"
    if isinstance(values[0], str | bool):
        return True
    return len(set(values)) <= _MAX_CLASSES and all(value == int(value) for value in values)


def _encode(table: Table, target: str, train: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the inputs of all rows, and the number of categories of each column of texts."""
    parts = [
        _standardize(values, train)[0] for name, values in table.numbers.items() if name != target
    ]
    sizes = []
    for name, texts in table.texts.items():
        if name == target:
            continue
        _check_categories(f"column {name!r} of {table.name}", "categories", texts)
        known = sorted({texts[row] for row in train.tolist()})
        index = {text: number for number, text in enumerate(known, 1)}
        parts.append(torch.tensor([float(index.get(text, 0)) for text in texts]))
        sizes.append(len(known) + 1)
    return torch.stack(parts, 1), tuple(sizes)


def _check_categories(what: str, kind: str, texts: Sequence[str]) -> None:
    """Raise an error if texts are not categories, because most of them occur only once.

    Args:
        what: Names the column, for messages.
        kind: What the texts would be used as.
        texts: All texts of the column.
    """
    different = len(set(texts))
    if different > max(_MAX_CLASSES, _MAX_CATEGORIES * len(texts)):
        raise ValueError(
            f"{what} has {different} different texts in {len(texts)} rows, too many for {kind}: "
            "remove or group them, or use a data function of your own"
        )


def _standardize(values: Sequence[float], train: Tensor) -> tuple[Tensor, float, float]:
    """Return values with the mean and deviation of the training rows removed, and both of them."""
    column = torch.tensor(values, dtype=torch.float64)
    mean, std = float(column[train].mean()), float(column[train].std(correction=0))
    std = std or 1.0  # a constant column
    return ((column - mean) / std).float(), mean, std
