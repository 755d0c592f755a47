"""A record as a table, and where it is kept."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from wsam.bench.problem import PIXELS, SMOKE_BATCH, default_batch
from wsam.lab.files import write_atomic

Row = dict[str, Any]
_LONGEST = 60
"""Letters of a name that say which cases were measured; a file's name has room for 255."""


def table(record: Row) -> str:
    """Return a record as the text that `wsam bench` prints."""
    return scaling_table(record) if record["kind"] == "scaling" else step_table(record)


def step_table(record: Row) -> str:
    """Return times and ratios, then memory, then traffic."""
    problem = record["problem"]
    lines = [
        f"{problem['model']}, {problem['weights']:,} weights in {problem['tensors']} tensors, "
        f"batch {problem['batch']}, {problem['precision']}",
        heading(record),
        "",
    ]
    several = len({row["form"] for row in record["cases"]}) > 1
    head = ["", "form", "ms per step", "quartiles", "of floor", "quartiles", "by best", "of base"]
    rows = [head + (["of best floor"] if several else [])]
    for row in record["cases"]:
        cells = [row["name"], row["form"], f"{row['ms']['median']:.4g}", between(row["ms"], ".4g")]
        cells += [f"{row['of_floor']['median']:.3f}", between(row["of_floor"], ".3f")]
        cells += [f"{row['best_of_floor']:.3f}", f"{row['of_base']['median']:.3f}"]
        rows.append(cells + ([f"{row['of_best_floor']['median']:.3f}"] if several else []))
    lines += [*aligned(rows), "", *memory_lines(record), "", *traffic_lines(record)]
    return "\n".join([*lines, *(f"note: {note}" for note in record["notes"])])


def heading(record: Row) -> str:
    """Return hardware, versions and how it was measured, in one line."""
    hardware, versions = record["hardware"], record["versions"]
    where = (
        hardware.get("gpu")
        or f"{hardware['cpu']}, {hardware['threads']} of {hardware['cores']} cores"
    )
    load = record["load_before"], record["load_after"]
    told = "" if None in load else f", load {load[0]:.1f} to {load[1]:.1f}"
    return (
        f"{where}; torch {versions['torch']}; {record['rounds']} interleaved rounds, "
        f"{record['clock']} clock{told}"
    )


def memory_lines(record: Row) -> list[str]:
    """Return the peaks of a step."""
    rows = [["peak memory", "form", "MB", "copies of the weights beyond the base"]]
    for row in record["memory"]:
        copies = row.get("copies_beyond_base")
        text = "" if copies is None else f"{copies:.2f}"
        rows.append([row["name"], row["form"], f"{row['peak_bytes'] / 1e6:.1f}", text])
    return [*aligned(rows), f"({record['memory_is']})"]


def traffic_lines(record: Row) -> list[str]:
    """Return what the optimizers' own parts read and write, and how fast."""
    rows = [["own part of a step", "form", "ms", "reads", "writes", "share of copy bandwidth"]]
    for row in record["cases"]:
        if "reads" in row:
            share = row["share_of_copy_bandwidth"]
            cells = [row["name"], row["form"], own_part(row["own_ms"], ".3g")]
            cells += [f"{row['reads']:g}", f"{row['writes']:g}"]
            rows.append([*cells, "too short" if share is None else f"{100 * share:.0f}%"])
    speed = record["copy_bandwidth"] / 1e9
    return [*aligned(rows), f"(tensors as large as all weights; a copy moves {speed:.1f} GB/s)"]


def scaling_table(record: Row) -> str:
    """Return the own parts of all cases, one line per point."""
    points = [point for point in record["points"] if point["cases"]]
    labels = [f"{row['name']} ({row['form']})" for row in points[0]["cases"]]
    rows = [["tensors", "weights", *labels]]
    for point in points:
        found = {f"{row['name']} ({row['form']})": row for row in point["cases"]}
        cells = [str(point["tensors"]), f"{point['weights']:,}"]
        for label in labels:
            cells.append(own_part(found[label]["own_us"], ".4g") if label in found else "-")
        rows.append(cells)
    lines = ["The optimizer's own part of a step, microseconds", heading(record), ""]
    lines += aligned([list(column) for column in zip(*rows, strict=True)])
    return "\n".join([*lines, *(f"note: {note}" for note in record["notes"])])


def own_part(spread: Row, form: str) -> str:
    """Return the time of an own part; nothing where the noise of the floor left less than none.

    Example:
        >>> own_part({"median": 0.25}, ".3g"), own_part({"median": -0.28}, ".3g")
        ('0.25', '')
    """
    return f"{spread['median']:{form}}" if spread["median"] >= 0 else ""


def between(spread: Row, form: str) -> str:
    """Return the quartiles."""
    return f"{spread['low']:{form}} to {spread['high']:{form}}"


def aligned(rows: list[list[str]]) -> list[str]:
    """Return rows as lines whose columns stand under each other; the first stands left."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([f"{first:<{widths[0]}}", *cells]).rstrip())
    return lines


def name_of(record: Row) -> str:
    """Return the name of a record's files, without an ending.

    A smoke test, a choice of cases and another batch are said in it: none of them must take the
    place of a whole measurement.

    Example:
        >>> record = {"kind": "scaling", "axis": "tensors", "hardware": {"cpu": "x"}}
        >>> name_of(record), name_of({**record, "smoke": True, "only": ["WSAM (eager"]})
        ('scaling-tensors-cpu', 'scaling-tensors-only-wsam-eager-smoke-cpu')
    """
    device = "cuda" if "gpu" in record["hardware"] else "cpu"
    smoke = "-smoke" if record.get("smoke") else ""
    only = _only(record.get("only", ()))  # the first records do not say
    if record["kind"] == "scaling":
        return f"scaling-{record['axis']}{only}{smoke}-{device}"
    problem = record["problem"]
    pixels = problem.get("pixels", PIXELS)
    size = "" if pixels == PIXELS else f"-{pixels}px"
    usual = SMOKE_BATCH if smoke else default_batch(problem["model"], torch.device(device))
    batch = "" if problem["batch"] == usual else f"-batch{problem['batch']}"
    # Eager steps alone, on a GPU, have had this name since before choices were told apart.
    alone = device == "cuda" and {row["form"] for row in record["cases"]} == {"eager"}
    cases = "-eager" if alone else only
    return f"bench-{problem['model']}{size}{batch}{cases}{smoke}-{device}"


def _only(words: Sequence[str]) -> str:
    """Return the part of a name that says which cases were chosen; nothing where all were."""
    if not words:
        return ""
    text = re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")
    return f"-only-{text if len(text) <= _LONGEST else sha256(text.encode()).hexdigest()[:12]}"


def save(record: Row, folder: Path) -> list[Path]:
    """Write a record as JSON and as a picture; without matplotlib only the former."""
    path = folder / f"{name_of(record)}.json"
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    write_atomic(path, text.encode())
    from wsam.bench import chart

    try:
        return [path, chart.draw(record, path.with_suffix(".png"))]
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        return [path]
