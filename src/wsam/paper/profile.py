"""Variants of a table: a smoke test, other seeds, fewer epochs, another precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from wsam._format import pluralize
from wsam.lab.run import Run
from wsam.paper.table import Kind, Table
from wsam.sweep.grid import Grid

SMOKE_EPOCHS = 2
SMOKE_IMAGES = 512
SMOKE_SEEDS = (0, 1)


@dataclass(frozen=True)
class Profile:
    """How a table's runs are changed before they are run or looked up.

    Args:
        smoke: The same runs, but of a small CNN on the embedded digits, for two epochs (four where
            the paper doubles them).
        seeds: Other seeds than the table's own.
        only: A pattern; see `Table.select`.
        epochs: Of a run that the paper gives the table's number of epochs; the others' change in
            proportion.
        precision: Instead of bf16.
        pretrained: A local folder with the weights that DeiT starts from.
    """

    smoke: bool = False
    seeds: Sequence[int] | None = None
    only: str | None = None
    epochs: int | None = None
    precision: str | None = None
    pretrained: str | None = None

    def run(self, run: Run, reference: int) -> Run:
        """Return the run as this profile has it; `reference` is its table's number of epochs."""
        if self.precision is not None:
            run = run.replace(precision=self.precision)
        if self.pretrained is not None and run.pretrained is not None:
            run = run.replace(pretrained=self.pretrained)
        if self.epochs is not None:
            run = run.replace(epochs=_scaled(run.epochs, self.epochs, reference))
        return _small(run, self.epochs or reference) if self.smoke else run

    def table(self, table: Table) -> Table:
        """Return the table as this profile has it."""
        if self.only is not None:
            table = table.select(self.only)
        seeds = self.seeds
        if seeds is None and self.smoke and table.kind is not Kind.SEARCH:
            seeds = SMOKE_SEEDS
        if seeds is not None:
            table = table.seeded(seeds)
        # Whatever the precision: the tables do not know which one the paper used.
        comparable = not self.smoke and not self._shortens(table.epochs)
        table = replace(table.map(self._change(table.epochs)), comparable=comparable)
        if label := self.label(table.epochs):
            table = replace(table, title=f"{table.title} ({label})")
        return _of_our_own(table) if self.smoke else table

    def grid(self, grid: Grid) -> Grid:
        """Return the grid as this profile has it."""
        return grid.map(self._change(grid.reference))

    def _change(self, reference: int) -> Callable[[Run], Run]:
        return partial(self.run, reference=reference)

    def label(self, reference: int) -> str:
        """Say what is different from the paper; empty where nothing is."""
        if self.smoke:
            return "smoke test: a small CNN on digits, not to be compared with the paper"
        parts = []
        if self.epochs is not None and self._shortens(reference):
            parts.append(f"{pluralize(self.epochs, 'epoch')} instead of {reference}")
        if self.precision is not None:
            parts.append(self.precision)
        return ", ".join(parts)

    def _shortens(self, reference: int) -> bool:
        """Tell whether runs get another number of epochs: the paper's own, asked for, is none."""
        return self.epochs is not None and self.epochs != reference


def _of_our_own(table: Table) -> Table:
    """Return a table without what the paper says: its figures, and how its runs are made."""
    return replace(table, notes=(), cells=tuple(replace(c, paper=None) for c in table.cells))


def _scaled(epochs: int, wanted: int, reference: int) -> int:
    return max(1, round(epochs * wanted / reference))


def _small(run: Run, reference: int) -> Run:
    return run.replace(
        data="digits",
        model="cnn",
        pretrained=None,
        precision="fp32",
        epochs=_scaled(run.epochs, SMOKE_EPOCHS, reference),
        batch_size=min(run.batch_size, 64),
        train_limit=min(run.train_limit or SMOKE_IMAGES, SMOKE_IMAGES),
    )
