"""Sections of the report that cover the whole folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from wsam._format import pluralize
from wsam.lab import records
from wsam.lab.environment import short_commit
from wsam.lab.records import Record
from wsam.lab.run import Run
from wsam.lab.titles import format_figure
from wsam.paper import TABLES, Kind, Profile, find, gather
from wsam.paper import render as paper_render
from wsam.paper.comparison import Entry
from wsam.paper.table import Table as PaperTable
from wsam.plots.html import render
from wsam.report.commands import OUTPUT_FOLDER, commands
from wsam.report.elements import Section, Table
from wsam.report.experiment import MISSING
from wsam.report.labels import Experiment, folder_name
from wsam.report.results import DAMAGED, FAILED, UNFINISHED, Folder, Result

_PAPER_DATA = ("cifar10", "cifar100", "imagenet")


def overview(folder: Folder) -> str:
    """Return methods, numbers of runs, problems and groups, and the name of the folder."""
    counts = [pluralize(sum(result.finished for result in folder.results), "finished run")]
    for kind in (FAILED, UNFINISHED, DAMAGED):
        if number := folder.count(kind):
            counts.append(f"{number} {kind}")
    counts.append(pluralize(len(folder.groups), "group"))
    return " · ".join([*counts, f"folder {folder_name(folder.path)}"])


# ---- comparison with the paper ----


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
    rows = {entry.cell.row for entry in entries if entry.ours.n or entry.ours.failed}
    kept = [entry for entry in entries if entry.cell.row in rows]
    return (replace(whole, cells=tuple(entry.cell for entry in kept)), kept) if rows else None


def _paper_table(table: PaperTable, entries: list[Entry]) -> dict[str, Any]:
    rows = [[text or MISSING for text in row] for row in paper_render.body(table, entries)]
    return {
        "title": table.title,
        "table": Table(paper_render.header(table, entries), rows, len(table.heads)),
        "footnotes": paper_render.footnotes(table, entries),
    }


# ---- problems, environment, commands ----


def problems_section(folder: Folder) -> Section | None:
    """Return failed, unfinished and damaged runs; None if there are none."""
    if not folder.troubles:
        return None
    rows = [(trouble.kind, trouble.what, trouble.why) for trouble in folder.troubles]
    return _table_section("Failed, unfinished, damaged", Table(["state", "what", "why"], rows, 3))


def environment_section(results: Sequence[Result]) -> Section | None:
    """Return hardware, versions and commits with their numbers of runs."""
    counts = Counter(_environment(result.record) for result in results)
    if not counts:
        return None
    rows = [(count, *facts) for facts, count in counts.items()]
    table = Table(["runs", "hardware", "versions", "commit"], rows, 4)
    return _table_section("Hardware and versions", table)


def _table_section(title: str, table: Table) -> Section:
    return Section(title, render("report/templates/table.html", table=table))


def _environment(record: Record) -> tuple[str, str, str]:
    hardware, versions = _mapping(record, "hardware"), _mapping(record, "versions")
    machine = [str(hardware[name]) for name in ("gpu", "cpu") if hardware.get(name)]
    if "threads" in hardware:
        machine.append(f"{hardware['threads']} of {hardware.get('cores')} cores")
    return (
        ", ".join(machine) or MISSING,
        ", ".join(f"{name} {value}" for name, value in versions.items() if value) or MISSING,
        short_commit(str(record.get("commit") or MISSING)),
    )


def _mapping(record: Record, name: str) -> dict[str, Any]:
    value = record.get(name)
    return value if isinstance(value, dict) else {}


def reproduce_section(experiments: Sequence[Experiment]) -> Section:
    """Return the commands that reproduce the records of every group."""
    results = [r for one in experiments for item in one.groups for r in item.group.results]
    body = render(
        "report/templates/reproduce.html",
        experiments=experiments,
        folder=OUTPUT_FOLDER,
        expectation=_expectation(results),
        commands=commands,
        outcome=_outcome,
    )
    return Section("Reproduce", body)


def _outcome(result: Result) -> str:
    figure = records.final_figure(result.record)
    if figure is None:
        return "failed"
    metric = records.metric(result.record)
    text = format_figure(figure, metric["unit"])
    return text if metric["name"] == "error" else f"test {metric['name']} {text}"


def _expectation(results: Sequence[Result]) -> str:
    """Return how closely a second run agrees, which depends on the hardware of the first."""
    same = sum(_ran_on_one_thread(result.record) for result in results)
    exact = (
        "on the same kind of processor and with the same versions, their curves are bit-identical."
    )
    rounding = (
        "are similar, not bit-identical: on a GPU or on several threads the order of "
        "summation may change."
    )
    if same == len(results):
        return f"These ran on one CPU thread: {exact}"
    if same == 0:
        return f"Results {rounding}"
    return f"{same} of {len(results)} ran on one CPU thread: {exact} For the others, results {rounding}"


def _ran_on_one_thread(record: Record) -> bool:
    execution, hardware = _mapping(record, "execution"), _mapping(record, "hardware")
    alone = execution.get("processes", 1) == 1
    return execution.get("device") == "cpu" and alone and hardware.get("threads") == 1
