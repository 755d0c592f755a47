"""Sharpness over AdamW: transformers on text and images, and adapters. Not in the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wsam.lab.run import Run
from wsam.paper.study import SEEDS, Choices, candidates, chosen_cell, vary
from wsam.paper.table import Cell, Kind, Measure, Table

TEXT = "text:shakespeare.txt"
TEXT_DIGEST = "86c4e6aa9db7"
"""Start of the SHA-256 of the text: the works of Shakespeare in one file of 1,115,394 bytes."""

ADAMW, TWICE = "AdamW", "AdamW, twice the epochs"
SAM, ASAM, GSAM = "SAM", "ASAM", "GSAM, rho following lr"
WSAM, PUBLISHED, COUPLED = "WSAM, preconditioned", "WSAM, as published", "WSAM, coupled"
LARGER = "SAM, rho 0.37"
SAM_LR, WSAM_LR = "SAM, rho following lr", "WSAM, preconditioned, rho following lr"
WEIGHT_DECAYS = vary("weight_decay", 0.01, 0.1, 0.3, 1.0)
METHODS: Mapping[str, tuple[dict[str, Any], Choices]] = {
    ADAMW: ({"method": "vanilla"}, WEIGHT_DECAYS),
    TWICE: ({"method": "vanilla"}, WEIGHT_DECAYS),
    SAM: ({"method": "sam"}, vary("rho", 0.02, 0.05, 0.1, 0.2)),
    ASAM: ({"method": "asam"}, vary("rho", 0.1, 0.2, 0.5, 1.0)),
    WSAM: (
        {"method": "wsam", "options": {"precondition": True}},
        vary("rho", 0.02, 0.05, 0.1, 0.2, gamma=0.5),
    ),
    PUBLISHED: (
        {"method": "wsam"},
        vary("rho", 0.02, 0.05, 0.1, 0.2, gamma=0.9),
    ),
    COUPLED: (
        {"method": "coupled_wsam"},
        vary("rho", 0.02, 0.05, 0.1, 0.2, gamma=0.65),
    ),
    LARGER: ({"method": "sam"}, vary("rho", 0.37)),
    SAM_LR: (
        {"method": "sam", "options": {"rho_follows_lr": True}},
        vary("rho", 0.05, 0.1, 0.2, 0.4),
    ),
    WSAM_LR: (
        {"method": "wsam", "options": {"precondition": True, "rho_follows_lr": True}},
        vary("rho", 0.05, 0.1, 0.2, 0.4, gamma=0.5),
    ),
    GSAM: (
        {"method": "gsam", "options": {"rho_follows_lr": True}},
        vary("rho", 0.02, 0.05, 0.1, 0.2, alpha=0.1),
    ),
}
"""Settings of each method and its candidates: four for each; `LARGER` has the k rho of `COUPLED`."""


def _cells(
    row: str,
    column: str,
    run: Run,
    methods: Sequence[str],
    measure: Measure = Measure.TEST_ERROR,
    trial_epochs: float = 1.0,
    seeds: Sequence[int] = SEEDS,
) -> list[Cell]:
    """Return the cells of one problem, a row for each method."""
    cells = []
    for method in methods:
        settings, choices = METHODS[method]
        one = run.replace(**settings)
        if method == TWICE:
            one = one.replace(epochs=2 * run.epochs)
        options = candidates(one, choices, trial_epochs)
        cells.append(chosen_cell((row, method), column, options, measure, seeds))
    return cells


def text_run(**changes: Any) -> Run:
    """Return a run of AdamW on the text, with a GPT of 10.8 million weights."""
    settings: dict[str, Any] = {
        "data": TEXT,
        "digests": {"data": TEXT_DIGEST},
        "model": "gpt",
        "model_args": {"layers": 6, "width": 384, "heads": 6},
        "block_size": 256,
        "method": "vanilla",
        "base": "adamw",
        "base_args": {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1},
        "schedule": "warmup-cosine",
        "batch_size": 64,
        "epochs": 40,
        "precision": "bf16",
    }
    return Run(**(settings | changes))


def image_run(data: str, **changes: Any) -> Run:
    """Return a run of AdamW on images, with a ViT of 6.4 million weights."""
    settings: dict[str, Any] = {
        "data": data,
        "model": "vit",
        "method": "vanilla",
        "base": "adamw",
        "base_args": {"lr": 1e-3, "weight_decay": 0.1},
        "schedule": "warmup-cosine",
        "batch_size": 512,
        "epochs": 100,
        "precision": "bf16",
    }
    return Run(**(settings | changes))


def pretraining_run() -> Run:
    """Return the run whose weights the adapters start from: a ViT on CIFAR-100."""
    return image_run("cifar100")


def adam() -> Table:
    """AdamW against sharpness-aware methods over AdamW: a GPT, a ViT, and adapters."""
    cells: list[Cell] = []
    methods: tuple[str, ...]
    for dropout in (0.0, 0.2):
        run = text_run(model_args={"layers": 6, "width": 384, "heads": 6, "dropout": dropout})
        row = f"GPT, dropout {dropout:g}"
        methods = (ADAMW, TWICE, SAM, WSAM, SAM_LR, WSAM_LR)
        cells += _cells(row, "Shakespeare, loss", run, methods, Measure.TEST_LOSS)
    for name, data in (("CIFAR-10", "cifar10"), ("CIFAR-100", "cifar100")):
        methods = (ADAMW, TWICE, SAM, ASAM, WSAM, GSAM)
        cells += _cells("ViT", f"{name}, error (%)", image_run(data), methods, trial_epochs=0.3)
    adapters = image_run(
        "cifar10",
        model_args={"lora_rank": 8},
        pretrained=f"run:{pretraining_run().key}",
        epochs=20,
    )
    first = ("ViT, adapters", "pretraining by AdamW")
    cells.append(Cell(first, "CIFAR-100, error (%)", (pretraining_run(),)))
    methods = (ADAMW, TWICE, SAM, WSAM)
    cells += _cells("ViT, adapters", "CIFAR-10, error (%)", adapters, methods)
    notes = (
        "AdamW with twice the epochs takes about the time of the methods with two passes a step.",
        "Four candidates for each method: AdamW's weight decay (0.01, 0.1, 0.3, 1), or rho of the "
        "others (0.02, 0.05, 0.1, 0.2) at weight decay 0.1. A trial is one run on 90% of the training "
        "data.",
        "GPT: 6 layers of width 384, blocks of 256 characters, batch size 64, 40 epochs, learning rate "
        "1e-3.",
        "ViT: 8 layers of width 256, patches of 4 x 4, batch size 512, learning rate 1e-3; 100 epochs "
        "and trials of 30, with adapters 20 and 20.",
        "ASAM's values of rho are 0.1, 0.2, 0.5 and 1.",
        "Adapters: LoRA of rank 8 in the attention, and the head, are trained on a frozen ViT that "
        "AdamW trained on CIFAR-100.",
    )
    title = "Transformers over AdamW"
    return _study("adam", title, cells, notes, epochs=100)


def adam_small() -> Table:
    """The same question in minutes on one core: a small GPT, and a perceptron on noisy digits."""
    gpt = text_run(
        model_args={"layers": 2, "width": 64, "heads": 4},
        block_size=64,
        batch_size=4,
        train_limit=60,
        test_limit=60,
        epochs=20,
        precision="fp32",
        base_args={"lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 0.1},
    )
    digits = Run(
        data="digits",
        model="mlp",
        model_args={"width": 256},
        method="vanilla",
        base="adamw",
        base_args={"lr": 2e-3, "betas": (0.9, 0.99), "weight_decay": 0.1},
        batch_size=64,
        epochs=30,
        noise=0.4,
        augment=False,
    )
    methods = (ADAMW, TWICE, SAM, WSAM, PUBLISHED, COUPLED, SAM_LR, WSAM_LR)
    seeds = range(8)
    cells = _cells("GPT", "text, loss", gpt, methods, Measure.TEST_LOSS, seeds=seeds)
    cells += _cells("MLP", "noisy digits, error (%)", digits, (*methods, LARGER), seeds=seeds)
    notes = (
        "GPT: 2 layers of width 64, trained on 60 blocks of 64 characters, 20 epochs.",
        "MLP: two layers of width 256, scikit-learn's digits with 40% of the training labels redrawn, "
        "30 epochs. The validation split is 120 images with correct labels. SAM with rho 0.37, the k "
        "rho of coupled WSAM, was added afterwards and not searched.",
        "Four candidates for each method: AdamW's weight decay (0.01, 0.1, 0.3, 1), or rho of the "
        "others (0.02, 0.05, 0.1, 0.2) at weight decay 0.1; 0.05, 0.1, 0.2 or 0.4 at most if rho "
        "follows the learning rate. gamma is 0.5 for preconditioned WSAM, 0.9 as published and 0.65 "
        "coupled.",
    )
    title = "Small models over AdamW"
    return _study("adam-small", title, cells, notes, epochs=30)


def _study(
    name: str, title: str, cells: Sequence[Cell], notes: tuple[str, ...], epochs: int
) -> Table:
    return Table(
        name,
        title,
        ("model", "method"),
        tuple(cells),
        Kind.STUDY,
        epochs,
        notes,
        baselines=(ADAMW, TWICE),
    )
