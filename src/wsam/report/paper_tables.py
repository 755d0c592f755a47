"""The section that compares the results of a folder with the paper's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from wsam._utils.html import render
from wsam.lab.records import Record
from wsam.lab.run import Run
from wsam.paper import TABLES, Kind, Profile, find, gather
from wsam.paper import Table as PaperTable
from wsam.paper import render as paper_render
from wsam.paper.comparison import Entry
from wsam.report.elements import Section, Table
from wsam.report.experiment import MISSING
from wsam.report.results import Folder

_PAPER_DATA = ("cifar10", "cifar100", "imagenet")


def paper_section(folder: Folder) -> Section | None:
    """Return the paper's tables for which the folder has results; None if there are none."""
    profiles = _profiles(folder)
    tables_of_paper = (find(name) for name in (TABLES if profiles else ()))
    known = [table for table in tables_of_paper if table.kind in (Kind.TABLE, Kind.FIGURE)]
    tables = []
    for profile in profiles:
        for whole in known:
            if profile.epochs == whole.epochs:
                continue  # the paper's own number: covered by the profile without one
            found = _with_results(profile.table(whole), folder)
            if found is not None:
                tables.append(_paper_table(*found))
    if not tables:
        return None
    body = render("report/templates/paper.html", tables=tables)
    return Section("Comparison with the paper", body)


def _profiles(folder: Folder) -> list[Profile]:
    """Return the variants of the tables that a run of the folder may belong to."""
    runs = [result.run for result in folder.results]
    seeds = tuple(sorted({run.seed for run in runs}))
    profiles = []
    if any(run.data in _PAPER_DATA for run in runs):
        pretrained = next((run.pretrained for run in runs if run.pretrained), None)
        for precision in sorted({run.precision for run in runs}):
            given = None if precision == "bf16" else precision
            whole = Profile(seeds=seeds, precision=given, pretrained=pretrained)
            profiles += [whole, *(replace(whole, epochs=epochs) for epochs in _epochs(runs))]
    if any(run.data == "digits" and run.model == "cnn" and run.train_limit for run in runs):
        profiles.append(Profile(smoke=True, seeds=seeds))
    return profiles


def _epochs(runs: Sequence[Run]) -> list[int]:
    """Return the possible values of `wsam paper run --epochs`."""
    paper = (run for run in runs if run.data in _PAPER_DATA and run.method != "vanilla")
    return sorted({run.epochs for run in paper})


class _FolderResults:
    """The records of a folder for `wsam.paper.gather`. Damaged ones are missing."""

    def __init__(self, folder: Folder) -> None:
        self.by_key = {result.run.key: result for result in folder.results}

    def record(self, run: Run) -> Record | None:
        found = self.by_key.get(run.key)
        return None if found is None else found.record

    def minimum(self, run: Run) -> Mapping[str, Any] | None:
        found = self.by_key.get(run.key)
        return None if found is None else found.minimum


def _with_results(whole: PaperTable, folder: Folder) -> tuple[PaperTable, list[Entry]] | None:
    """Return the rows of a table for which the folder has results."""
    entries = gather(whole, _FolderResults(folder))
    rows = {entry.cell.row for entry in entries if paper_render.was_run(entry)}
    kept = [entry for entry in entries if entry.cell.row in rows]
    return (whole.with_cells([entry.cell for entry in kept]), kept) if rows else None


def _paper_table(table: PaperTable, entries: list[Entry]) -> dict[str, Any]:
    rows = [[text or MISSING for text in row] for row in paper_render.body(table, entries)]
    return {
        "title": table.title,
        "table": Table(paper_render.header(table, entries), rows, len(table.heads)),
        "footnotes": paper_render.footnotes(table, entries),
    }
