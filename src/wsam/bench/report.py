"""Text tables, file names and storage of benchmark records."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from wsam._utils.text import align_columns
from wsam.bench.workload import PIXELS, SMOKE_BATCH, default_batch_size
from wsam.lab.files import write_atomic

Row = dict[str, Any]
_MAX_SELECTION = 60
"""Maximum length of the selected cases in a file name; a file system allows 255 in all."""


def table(record: Row) -> str:
    """Return the table of a record, as `wsam bench` prints it."""
    return scaling_table(record) if record["kind"] == "scaling" else step_table(record)


def step_table(record: Row) -> str:
    """Return times and ratios, peak memory, and memory traffic."""
    problem = record["problem"]
    lines = [
        f"{problem['model']}, {problem['weights']:,} weights in {problem['tensors']} tensors, "
        f"batch {problem['batch']}, {problem['precision']}",
        heading(record),
        "",
    ]
    several_forms = len({row["form"] for row in record["cases"]}) > 1
    head = ["", "form", "ms per step", "quartiles", "of floor", "quartiles", "by best", "of base"]
    rows = [head + (["of best floor"] if several_forms else [])]
    for row in record["cases"]:
        cells = [
            row["name"],
            row["form"],
            f"{row['ms']['median']:.4g}",
            quartile_range(row["ms"], ".4g"),
        ]
        cells += [f"{row['of_floor']['median']:.3f}", quartile_range(row["of_floor"], ".3f")]
        cells += [f"{row['best_of_floor']:.3f}", f"{row['of_base']['median']:.3f}"]
        rows.append(cells + ([f"{row['of_best_floor']['median']:.3f}"] if several_forms else []))
    lines += [*align_columns(rows), "", *memory_lines(record), "", *traffic_lines(record)]
    reasons = record.get("not_capturable", {})  # old records lack the key
    lines += [f"not capturable: {name}: {reason}" for name, reason in reasons.items()]
    return "\n".join([*lines, *(f"note: {note}" for note in record["notes"])])


def heading(record: Row) -> str:
    """Return hardware, version, rounds, clock and load in one line."""
    hardware, versions = record["hardware"], record["versions"]
    machine = (
        hardware.get("gpu")
        or f"{hardware['cpu']}, {hardware['threads']} of {hardware['cores']} cores"
    )
    load = record["load_before"], record["load_after"]
    load_text = "" if None in load else f", load {load[0]:.1f} to {load[1]:.1f}"
    return (
        f"{machine}; torch {versions['torch']}; {record['rounds']} interleaved rounds, "
        f"{record['clock']} clock{load_text}"
    )


def memory_lines(record: Row) -> list[str]:
    """Return the peak memory of each case."""
    rows = [["peak memory", "form", "MB", "copies of the weights beyond the base"]]
    for row in record["memory"]:
        copies = row.get("copies_beyond_base")
        text = "" if copies is None else f"{copies:.2f}"
        rows.append([row["name"], row["form"], f"{row['peak_bytes'] / 1e6:.1f}", text])
    return [*align_columns(rows), f"({record['memory_is']})"]


def traffic_lines(record: Row) -> list[str]:
    """Return time, reads, writes and bandwidth of the optimizer alone."""
    rows = [["optimizer alone", "form", "ms", "reads", "writes", "share of copy bandwidth"]]
    for row in record["cases"]:
        if "reads" in row:
            share = row["share_of_copy_bandwidth"]
            cells = [row["name"], row["form"], optimizer_time(row["own_ms"], ".3g")]
            cells += [f"{row['reads']:g}", f"{row['writes']:g}"]
            rows.append([*cells, "too short" if share is None else f"{100 * share:.0f}%"])
    speed = record["copy_bandwidth"] / 1e9
    return [
        *align_columns(rows),
        f"(tensors as large as all weights; a copy moves {speed:.1f} GB/s)",
    ]


def scaling_table(record: Row) -> str:
    """Return the optimizer's time for each case, one column per point."""
    points = [point for point in record["points"] if point["cases"]]
    labels = [f"{row['name']} ({row['form']})" for row in points[0]["cases"]]
    rows = [["tensors", "weights", *labels]]
    for point in points:
        found = {f"{row['name']} ({row['form']})": row for row in point["cases"]}
        cells = [str(point["tensors"]), f"{point['weights']:,}"]
        for label in labels:
            cells.append(optimizer_time(found[label]["own_us"], ".4g") if label in found else "-")
        rows.append(cells)
    lines = ["Time of the optimizer alone, microseconds per step", heading(record), ""]
    lines += align_columns([list(column) for column in zip(*rows, strict=True)])
    return "\n".join([*lines, *(f"note: {note}" for note in record["notes"])])


def optimizer_time(quartiles: Row, spec: str) -> str:
    """Format the optimizer's time; empty if it is negative because of noise in the floor.

    Example:
        >>> optimizer_time({"median": 0.25}, ".3g"), optimizer_time({"median": -0.28}, ".3g")
        ('0.25', '')
    """
    return f"{quartiles['median']:{spec}}" if quartiles["median"] >= 0 else ""


def quartile_range(quartiles: Row, spec: str) -> str:
    """Format the lower and upper quartile."""
    return f"{quartiles['low']:{spec}} to {quartiles['high']:{spec}}"


def record_name(record: Row) -> str:
    """Return the file name of a record, without a suffix.

    It includes a smoke test, a selection of cases and another batch size, so that such a record does
    not overwrite a complete one.

    Example:
        >>> record = {"kind": "scaling", "axis": "tensors", "hardware": {"cpu": "x"}}
        >>> record_name(record), record_name({**record, "smoke": True, "only": ["WSAM (eager"]})
        ('scaling-tensors-cpu', 'scaling-tensors-only-wsam-eager-smoke-cpu')
    """
    device = "cuda" if "gpu" in record["hardware"] else "cpu"
    smoke = "-smoke" if record.get("smoke") else ""
    only = _selection(record.get("only", ()))  # old records lack the key
    if record["kind"] == "scaling":
        return f"scaling-{record['axis']}{only}{smoke}-{device}"
    problem = record["problem"]
    pixels = problem.get("pixels", PIXELS)
    size = "" if pixels == PIXELS else f"-{pixels}px"
    default = SMOKE_BATCH if smoke else default_batch_size(problem["model"], torch.device(device))
    batch = "" if problem["batch"] == default else f"-batch{problem['batch']}"
    methods = "-methods" if record.get("all_methods") else ""
    return f"bench-{problem['model']}{size}{batch}{methods}{only}{smoke}-{device}"


def _selection(words: Sequence[str]) -> str:
    """Return the part of a file name for the selected cases; empty if all were measured."""
    if not words:
        return ""
    text = re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")
    return (
        f"-only-{text if len(text) <= _MAX_SELECTION else sha256(text.encode()).hexdigest()[:12]}"
    )


def save(record: Row, folder: Path) -> list[Path]:
    """Write a record as JSON and, if matplotlib is installed, as a chart; return the files."""
    path = folder / f"{record_name(record)}.json"
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    write_atomic(path, text.encode())
    from wsam.bench import chart

    try:
        return [path, chart.draw(record, path.with_suffix(".png"))]
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        return [path]
