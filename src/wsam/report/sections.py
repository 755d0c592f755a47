"""Sections of the report that cover the whole folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from wsam._utils.html import render
from wsam._utils.text import pluralize
from wsam.lab import records
from wsam.lab.environment import short_commit
from wsam.lab.records import Record
from wsam.report.commands import OUTPUT_FOLDER, commands
from wsam.report.elements import Section, Table
from wsam.report.experiment import MISSING
from wsam.report.labels import Experiment, folder_name
from wsam.report.results import DAMAGED, FAILED, UNFINISHED, Folder, Result


def overview(folder: Folder) -> str:
    """Return the numbers of runs, problems and groups, and the name of the folder."""
    counts = [pluralize(sum(result.finished for result in folder.results), "finished run")]
    for kind in (FAILED, UNFINISHED, DAMAGED):
        if number := folder.count(kind):
            counts.append(f"{number} {kind}")
    counts.append(pluralize(len(folder.groups), "group"))
    return " · ".join([*counts, f"folder {folder_name(folder.path)}"])


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
    hardware, versions = record.get("hardware") or {}, record.get("versions") or {}
    machine = [str(hardware[name]) for name in ("gpu", "cpu") if hardware.get(name)]
    if "threads" in hardware:
        machine.append(f"{hardware['threads']} of {hardware.get('cores')} cores")
    return (
        ", ".join(machine) or MISSING,
        ", ".join(f"{name} {value}" for name, value in versions.items() if value) or MISSING,
        short_commit(str(record.get("commit") or MISSING)),
    )


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
    """Return the test figure of a run, with its name unless it is the error."""
    if records.final_figure(result.record) is None:
        return "failed"
    return records.final_text(result.record).removeprefix("test error ")


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
    execution, hardware = record.get("execution") or {}, record.get("hardware") or {}
    alone = execution.get("processes", 1) == 1
    return execution.get("device") == "cpu" and alone and hardware.get("threads") == 1
