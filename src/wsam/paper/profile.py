"""Variants of a table: a smoke test, other seeds, fewer epochs, another precision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from wsam import methods
from wsam._utils.text import pluralize
from wsam.lab.run import Run
from wsam.paper.table import Kind, Table
from wsam.sweep.grid import Grid

SMOKE_EPOCHS = 2
SMOKE_IMAGES = 512
SMOKE_SEEDS = (0, 1)


@dataclass(frozen=True)
class Profile:
    """Changes to apply to a table before its runs are executed or read.

    Args:
        smoke: Use a small CNN on the embedded digits, for two epochs (four where the paper doubles
            them). A ViT and a GPT become tiny ones, and the GPT reads a file of this library.
        seeds: Seeds instead of the table's own.
        only: A pattern; see `Table.select`.
        epochs: Epochs instead of the table's number; runs with another number change in proportion.
        precision: Precision instead of bf16.
        pretrained: A local folder with DeiT's initial weights.
    """

    smoke: bool = False
    seeds: Sequence[int] | None = None
    only: str | None = None
    epochs: int | None = None
    precision: str | None = None
    pretrained: str | None = None

    def run(self, run: Run, reference: int) -> Run:
        """Apply the profile to a run; `reference` is the number of epochs of its table."""
        if self.precision is not None:
            run = run.replace(precision=self.precision)
        if self.pretrained is not None and run.pretrained is not None:
            run = run.replace(pretrained=self.pretrained)
        if self.epochs is not None:
            run = run.replace(epochs=_scale_epochs(run.epochs, self.epochs, reference))
        return _smoke_run(run, self.epochs or reference) if self.smoke else run

    def table(self, table: Table) -> Table:
        """Apply the profile to a table."""
        if self.only is not None:
            table = table.select(self.only)
        self._check_varied(table.heads)
        seeds = self.seeds
        if seeds is None and self.smoke and table.kind is not Kind.SEARCH:
            seeds = SMOKE_SEEDS
        if seeds is not None:
            table = table.seeded(seeds)
        # Any precision is comparable: the paper does not state its own.
        comparable = not self.smoke and not self._changes_epochs(table.epochs)
        table = replace(table.map(partial(self.run, reference=table.epochs)), comparable=comparable)
        if label := self.label(table.epochs):
            table = replace(table, title=f"{table.title} ({label})")
        return _without_paper(table) if self.smoke else table

    def grid(self, grid: Grid) -> Grid:
        """Apply the profile to a grid."""
        self._check_varied(grid.axes)
        return grid.map(partial(self.run, reference=grid.reference))

    def label(self, reference: int) -> str:
        """Return what differs from the paper, for titles; empty if nothing does."""
        if self.smoke:
            return "smoke test: small models, not to be compared with the paper"
        parts = []
        if self.epochs is not None and self._changes_epochs(reference):
            parts.append(f"{pluralize(self.epochs, 'epoch')} instead of {reference}")
        if self.precision is not None:
            parts.append(self.precision)
        return ", ".join(parts)

    def _check_varied(self, varied: Iterable[str]) -> None:
        """Check that no option of the profile sets what a grid varies."""
        for name in ("epochs", "precision"):
            if name in varied and getattr(self, name) is not None:
                raise ValueError(f"--{name} and the grid both set {name}: give one of them")

    def _changes_epochs(self, reference: int) -> bool:
        return self.epochs is not None and self.epochs != reference


def _without_paper(table: Table) -> Table:
    """Remove the paper's figures, and replace the notes about its settings."""
    cells = tuple(replace(cell, paper=None) for cell in table.cells)
    note = f"Labels are those of the full table. Here every run trains {_smoke_models(table)}."
    return replace(table, notes=(note,), cells=cells, best_epoch=False)


_SMOKE_MODELS = {
    "cnn": "a small CNN on digits",
    "mlp": "a small MLP on digits",
    "vit": "a tiny ViT on digits",
    "gpt": "a tiny GPT on a file of this library",
}


def _smoke_models(table: Table) -> str:
    """Return what the runs of a smoke test train, in words."""
    return " or ".join(dict.fromkeys(_SMOKE_MODELS[run.model] for run in table.runs))


def _scale_epochs(epochs: int, wanted: int, reference: int) -> int:
    return max(1, round(epochs * wanted / reference))


_TINY = {"layers": 1, "width": 16, "heads": 2}


def _smoke_problem(run: Run) -> dict[str, Any]:
    """Return data and model of a smoke run, without settings of other data."""
    if run.data.startswith("text:"):
        args = _TINY | {"dropout": run.model_args.get("dropout", 0.0)}
        return {"data": f"text:{methods.__file__}", "model_args": args, "block_size": 16}
    digits = {"data": "digits", "target": None, "task": None, "image_size": None, "metric": None}
    if run.model == "vit":
        rank = min(2, cast(int, run.model_args.get("lora_rank", 0)))
        return digits | {"model_args": _TINY | {"lora_rank": rank}}
    return digits | {"model": "mlp" if run.model == "mlp" else "cnn"}


def _smoke_run(run: Run, reference: int) -> Run:
    return run.replace(
        **_smoke_problem(run),
        pretrained=None,
        precision="fp32",
        epochs=_scale_epochs(run.epochs, SMOKE_EPOCHS, reference),
        batch_size=min(run.batch_size, 64),
        train_limit=min(run.train_limit or SMOKE_IMAGES, SMOKE_IMAGES),
    )
