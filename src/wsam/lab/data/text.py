"""A text file for a character model: predict each character from those before it."""

from __future__ import annotations

from pathlib import Path

import torch

from wsam.lab.data.feed import TensorFeed, split_rows
from wsam.lab.metrics import LOSS, cross_entropy
from wsam.lab.models import TOKENS, Task
from wsam.lab.run import Run

_TEST_SHARE = 10  # the last block of ten


def text_feed(path: Path, run: Run, device: torch.device) -> TensorFeed:
    """Return the blocks of a text as batches; the last tenth is the test set.

    A sample is `run.block_size` characters, and its target the same characters shifted by one.

    Raises:
        ValueError: The file is not UTF-8, or too short.
    """
    assert run.block_size is not None
    text = path.read_text(encoding="utf-8")
    characters = sorted(set(text))
    index = {character: number for number, character in enumerate(characters)}
    codes = torch.tensor([index[character] for character in text])
    count = (len(codes) - 1) // run.block_size
    if count < 2:
        raise ValueError(
            f"{path} has {len(text)} characters, too few for two samples of {run.block_size}: "
            "reduce --block-size"
        )
    used = count * run.block_size
    inputs, targets = (codes[at : at + used].view(count, run.block_size) for at in (0, 1))
    parts = split_rows(run, count, max(count // _TEST_SHARE, 1))
    return TensorFeed(
        {split: (inputs[rows], targets[rows]) for split, rows in parts.items()},
        Task((run.block_size,), len(characters), run.data, kind=TOKENS),
        cross_entropy,
        LOSS,
        run,
        device,
    )
