"""A folder written by `save_to_disk` of Hugging Face's datasets; loading it executes no code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wsam.lab.data.datasets import UNVERIFIED, DatasetInfo, Images, ImageSet
from wsam.lab.data.feed import TensorFeed, split_rows
from wsam.lab.data.image_folder import MEAN, STD, center_crop, image_pixels
from wsam.lab.data.table_feed import is_classification, table_feed
from wsam.lab.data.tables import make_table
from wsam.lab.metrics import ERROR, MSE, cross_entropy, squared_error
from wsam.lab.models import TOKENS, VALUES, Task
from wsam.lab.run import Run
from wsam.lab.values import join_names

_TARGET = "label"


def load_hf(path: Path, run: Run, device: torch.device) -> Images | TensorFeed:
    """Return the data of a folder: images, a table, or one column of lists of numbers.

    The test set is the split ``test``, else ``validation``, else a fifth of the only split.

    Raises:
        ModuleNotFoundError: datasets is not installed.
        ValueError: A split, the target or a label is missing, or the columns cannot be used.
    """
    train, test = _load_splits(path)
    target = run.target or _TARGET
    names = list(train.features)
    if target not in names:
        raise ValueError(
            f"{run.data} has no column {target!r}; give --target, one of {join_names(names)}"
        )
    inputs = [name for name in names if name != target]
    classes = getattr(train.features[target], "names", None)  # of a ClassLabel
    for split, rows in (("train", train), ("test", test)):
        if classes and any(label is None or label < 0 for label in rows[target]):
            raise ValueError(
                f"the {split} split of {run.data} has samples without a label: remove them. Without a "
                "test split, the validation split is used instead"
            )
    task = run.task or ("classification" if classes else None)
    if [type(train.features[name]).__name__ for name in inputs] == ["Image"]:
        return _images(run, (train, test), inputs[0], target)
    columns = {name: [*train[name], *test[name]] for name in names}
    if len(inputs) == 1 and isinstance(columns[inputs[0]][0], list):
        parts = split_rows(run, len(columns[target]), len(test))
        return _lists(run, columns[inputs[0]], columns[target], parts, task, device)
    table = make_table(columns, run.data, len(test))
    return table_feed(table, run.replace(target=target, task=task), device)


def _load_splits(path: Path) -> tuple[Any, Any]:
    from datasets import DatasetDict, load_from_disk

    found = load_from_disk(str(path))
    if not isinstance(found, DatasetDict):
        found = found.train_test_split(test_size=0.2, seed=0)
    test = next((split for split in ("test", "validation") if split in found), None)
    if "train" not in found or test is None:
        raise ValueError(f"{path} needs the splits train and test, it has {join_names(found)}")
    return found["train"], found[test]


def _images(run: Run, splits: tuple[Any, Any], column: str, target: str) -> Images:
    decoded = [[_pixels(image, run.image_size) for image in split[column]] for split in splits]
    if len({image.shape for images in decoded for image in images}) > 1:
        raise ValueError(f"the images of {run.data} differ in size; give --image-size")
    train, test = (
        ImageSet(torch.stack(images), torch.tensor([int(label) for label in split[target]]))
        for images, split in zip(decoded, splits, strict=True)
    )
    classes = int(max(train.labels.max(), test.labels.max())) + 1
    info = DatasetInfo(classes, MEAN, STD, padding=train.images.shape[1] // 8, flip=True)
    return Images(info, train, test, UNVERIFIED)


def _pixels(image: Any, size: int | None) -> Tensor:
    image = image.convert("RGB")
    return image_pixels(image if size is None else center_crop(image, size))


def _lists(
    run: Run,
    inputs: list[Any],
    targets: list[Any],
    rows: dict[str, Tensor],
    task: str | None,
    device: torch.device,
) -> TensorFeed:
    """Return a column of lists of numbers as batches; lists of whole numbers are tokens."""
    x = torch.tensor(inputs)
    if isinstance(targets[0], str):
        raise ValueError(
            f"the targets of {run.data} are texts: use class_encode_column of datasets"
        )
    classify = is_classification(task, targets)
    y = torch.tensor(targets) if classify else torch.tensor(targets, dtype=torch.float32)
    tokens = not x.is_floating_point()
    return TensorFeed(
        {split: ((x if tokens else x.float())[part], y[part]) for split, part in rows.items()},
        Task(
            tuple(x.shape[1:]),
            int(y.max()) + 1 if classify else 1,
            run.data,
            kind=TOKENS if tokens else VALUES,
        ),
        cross_entropy if classify else squared_error,
        ERROR if classify else MSE,
        run,
        device,
    )
