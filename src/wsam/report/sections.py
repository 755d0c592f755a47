"""The sections of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from wsam._format import mean_and_std, pluralize
from wsam.lab.environment import short_commit
from wsam.lab.records import Record
from wsam.lab.run import Run
from wsam.paper import TABLES, Profile, find, gather, render
from wsam.paper.comparison import Entry
from wsam.paper.table import Table
from wsam.report import charts, svg
from wsam.report.commands import AGAIN, commands
from wsam.report.gather import Folder, Result
from wsam.report.html import Cell, Section, cell, escape, paragraph, table
from wsam.report.labels import Experiment, Line
from wsam.report.slices import slices

_PAPER_DATA = ("cifar10", "cifar100", "imagenet")
_NUMBER = ".2f"


def experiment(one: Experiment, with_table: bool = True) -> Section:
    """Return everything about one experiment: its table, errors, curves, map and slices."""
    body = charts.errors(one) + charts.curves(one, slices(one))
    return Section(one.title, summary(one) + body if with_table else body)


def summary(one: Experiment) -> str:
    """Return the table of an experiment, one row per group."""
    columns: dict[str, list[str]] = {
        "test error (%)": [_told(line, "test_error", _NUMBER) for line in one.lines],
        "train loss": [_told(line, "train_loss", ".4f") for line in one.lines],
        "sharpness": [_told(line, "sharpness", ".3f") for line in one.lines],
        "top eigenvalue": [charts.told(line.group.eigenvalues, ".1f") for line in one.lines],
        "epochs": [str(line.group.run.epochs) for line in one.lines],
        "runs": [_count(line) for line in one.lines],
        "seconds a run": [_seconds(line) for line in one.lines],
    }
    kept = {head: texts for head, texts in columns.items() if set(texts) != {"–"}}
    rows = [
        [cell(line.name, svg.swatch(line.look)), *(texts[i] for texts in kept.values())]
        for i, line in enumerate(one.lines)
    ]
    note = (
        "Mean ± sample deviation over the finished runs, of the last epoch, not the best. "
        "Sharpness is that of training, at each method's own radius."
    )
    return table(["method", *kept], rows) + paragraph(note, "note")


def _told(line: Line, name: str, form: str) -> str:
    return charts.told(line.group.values(name), form)


def _seconds(line: Line) -> str:
    mean, _ = mean_and_std(line.group.seconds)
    return charts.NO_FIGURE if mean is None else f"{mean:.1f}"


def _count(line: Line) -> str:
    told = (str(len(line.group.finished)), line.group.failures)
    return ", ".join(part for part in told if part)


# Beside the paper ------------------------------------------------------------------------------


def beside_paper(folder: Folder) -> Section | None:
    """Return the paper's tables that the folder has figures for; None where there are none."""
    body = []
    for profile in _profiles(folder):
        for whole in map(find, TABLES):
            if profile.epochs == whole.epochs:
                continue  # the paper's own number: shown by the profile that names none
            made = _filled(profile.table(whole), folder)
            if made is not None:
                body.append(_paper_table(*made))
    return Section("Beside the paper", "".join(body)) if body else None


def _profiles(folder: Folder) -> list[Profile]:
    """Return the variants of the tables that some run of the folder may belong to."""
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
    """Return the numbers of epochs that `wsam paper run --epochs` may have been given."""
    paper = (run for run in runs if run.data in _PAPER_DATA and run.method != "vanilla")
    return sorted({run.epochs for run in paper})


class _Known:
    """The records as the folder was read: what is damaged is told of there, and absent here."""

    def __init__(self, folder: Folder) -> None:
        self.by_key = {result.run.key: result for result in folder.results}

    def record(self, run: Run) -> Record | None:
        found = self.by_key.get(run.key)
        return None if found is None else found.record

    def minimum(self, run: Run) -> Mapping[str, Any] | None:
        found = self.by_key.get(run.key)
        return None if found is None else found.minimum


def _filled(whole: Table, folder: Folder) -> tuple[Table, list[Entry]] | None:
    """Return the rows of a table that the folder has anything for."""
    entries = gather(whole, _Known(folder))
    made = {entry.cell.row for entry in entries if entry.ours.n or entry.ours.failed}
    kept = [entry for entry in entries if entry.cell.row in made]
    return (replace(whole, cells=tuple(entry.cell for entry in kept)), kept) if made else None


def _paper_table(made: Table, entries: list[Entry]) -> str:
    heads = render.header(made, entries)
    rows = [[text or "–" for text in row] for row in render.body(made, entries)]
    words = len(made.heads)
    cells = [[*row[:words], *map(_figure, row[words:])] for row in rows]
    remarks = "".join(map(_footnote, render.footnotes(made, entries)))
    listed = f'<ul class="note">{remarks}</ul>' if remarks else ""
    return f"<h3>{escape(made.title)}</h3>{table(heads, cells, words)}{listed}"


def _figure(text: str) -> Cell:
    """Return a figure that may go on in the next line before what it is taken over: (n = 2)."""
    first, bracket, rest = text.partition(" (")
    if not bracket:
        return cell(text)
    return Cell(f'<span class="parts"><i>{escape(first)}</i> <i>({escape(rest)}</i></span>')


def _footnote(note: render.Footnote) -> str:
    parts = "".join(f"<li>{escape(part)}</li>" for part in note.items)
    return f"<li>{escape(note.text)}{f'<ul>{parts}</ul>' if parts else ''}</li>"


# What went wrong, where it ran, how to do it again ---------------------------------------------


def troubles(folder: Folder) -> Section | None:
    """Return what failed, is unfinished or is damaged; None where all is well."""
    if not folder.troubles:
        return None
    rows = [(cell(t.kind), cell(t.what), cell(t.why)) for t in folder.troubles]
    return Section("Failed, unfinished, damaged", table(["state", "what", "why"], rows, 3))


def environments(results: Sequence[Result]) -> Section | None:
    """Return which runs were made on which hardware, with which versions."""
    by_facts: dict[tuple[str, str, str], int] = {}
    for result in results:
        facts = _facts(result.record)
        by_facts[facts] = by_facts.get(facts, 0) + 1
    if not by_facts:
        return None
    rows = [(count, *facts) for facts, count in by_facts.items()]
    body = table(["runs", "hardware", "versions", "commit"], rows, 4)
    return Section("Hardware and versions", body)


def _facts(record: dict[str, Any]) -> tuple[str, str, str]:
    hardware, versions = _mapping(record, "hardware"), _mapping(record, "versions")
    machine = [str(hardware[name]) for name in ("gpu", "cpu") if hardware.get(name)]
    threads = (
        [f"{hardware['threads']} of {hardware.get('cores')} cores"] if "threads" in hardware else []
    )
    told = [f"{name} {value}" for name, value in versions.items() if value]
    return (
        ", ".join([*machine, *threads]) or "–",
        ", ".join(told) or "–",
        short_commit(str(record.get("commit") or "–")),
    )


def _mapping(record: dict[str, Any], name: str) -> dict[str, Any]:
    value = record.get(name)
    return value if isinstance(value, dict) else {}


def reproduce(experiments: Sequence[Experiment]) -> Section:
    """Return, for every group, the commands that make its records again."""
    results = [r for one in experiments for line in one.lines for r in line.group.results]
    parts = [
        paragraph(
            f"Each command trains one run and writes its record to {AGAIN}/KEY.json, under the KEY "
            "it has here: into a folder of its own, for where a run has its record already it is "
            f"not trained again. {_agreement(results)}"
        )
    ]
    for one in experiments:
        parts.append(f"<h3>{escape(one.title)}</h3>")
        parts += [_group_commands(line) for line in one.lines]
    return Section("Reproduce", "".join(parts))


def _agreement(results: Sequence[Result]) -> str:
    """Say how near a second run comes to the first: that depends on where these ran."""
    same = sum(_on_one_thread(result.record) for result in results)
    exact = "on such a processor, with the same versions, their curves are the same bit for bit."
    rounding = "on a GPU or on several threads sums may be made in another order, and"
    if same == len(results):
        return f"These ran on one CPU thread: {exact}"
    if same == 0:
        return f"Expect like figures, not the same bits: {rounding} curves drift apart."
    return (
        f"{same} of {len(results)} ran on one CPU thread: {exact} "
        f"Of the others expect like figures, not the same bits: {rounding} curves drift apart."
    )


def _on_one_thread(record: Record) -> bool:
    execution, hardware = _mapping(record, "execution"), _mapping(record, "hardware")
    alone = execution.get("processes", 1) == 1
    return execution.get("device") == "cpu" and alone and hardware.get("threads") == 1


def _group_commands(line: Line) -> str:
    rows = []
    for result in line.group.results:
        text = "\n".join(commands(result))
        error = result.final("test_error") if result.finished else None
        what = f"{error:.2f}%" if error is not None else "failed"
        head = f"seed {result.run.seed}: {what}, {result.run.key}"
        rows.append(f"<h4>{escape(head)}</h4><pre>{escape(text)}</pre>")
    swatch = svg.swatch(line.look)
    return f"<details><summary>{swatch}{escape(line.name)}</summary>{''.join(rows)}</details>"


def overview(folder: Folder) -> str:
    """Return a line of counts below the title."""
    finished = sum(result.finished for result in folder.results)
    counts = [pluralize(finished, "finished run")]
    counts += [
        f"{n} {kind}" for kind in ("failed", "unfinished", "damaged") if (n := folder.count(kind))
    ]
    return paragraph(" · ".join([*counts, pluralize(len(folder.groups), "group")]), "lead")


__all__ = [
    "Cell",
    "beside_paper",
    "environments",
    "experiment",
    "overview",
    "reproduce",
    "summary",
    "troubles",
]
