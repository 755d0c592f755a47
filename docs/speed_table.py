"""Make the tables of a step's cost in pages anew from records of `wsam bench`.

python docs/speed_table.py README.md docs/speed.md            # write them
python docs/speed_table.py README.md docs/speed.md --check    # status 1 if one is out of date

A page marks the place: `<!-- speed table: FIRST.json, SECOND.json -->` and `<!-- end -->`. The first of
these files that is in benchmarks/results is shown, the contenders in short. Three more kinds of table
name one file: `speed details: FILE FORM`, `speed intervals: FILE` and `speed scaling: FILE`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from wsam.bench.report import heading, quartile_range
from wsam.bench.timing import paired_ratios
from wsam.bench.workload import PIXELS
from wsam.lab.pages import renew

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
MARK = "speed"
OURS = ("SAM", "WSAM")
YARDSTICK = "WSAM"
MOVES = ("reads", "writes")
PEERS = {"davda54": "davda54/sam SAM", "authors": "the paper's authors' WSAM"}


def table(record: dict[str, Any]) -> str:
    """Return the floor, the base, SAM and WSAM of ours, and all peers, in Markdown."""
    cases = shown(record["cases"])
    ours = next(case for case in cases if case["name"] == YARDSTICK)
    lines = [
        about(record),
        "",
        "| a step of | form | ms (quartiles) | of two bare passes in that form | times "
        f"wsam's {YARDSTICK}, {ours['form']} |",
        "|---|---|---|---|---|",
    ]
    for case in cases:
        name = case["name"]
        told = f"**wsam {name}**" if case["kind"] == "ours" else PEERS.get(name, name)
        ms = case["ms"]
        cells = [told, case["form"], f"{ms['median']:.1f} ({quartile_range(ms, '.1f')})"]
        cells += [spelled(case["of_floor"], exact=case["kind"] == "floor")]
        cells += [spelled(round_by_round(case, ours), exact=case is ours)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def round_by_round(case: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Return the spread of how many times as long a case took as another in the same round."""
    return paired_ratios(case["rounds_ms"], other["rounds_ms"]).as_dict()


def spelled(ratio: dict[str, float], exact: bool) -> str:
    """Return a ratio with its quartiles; where it is 1 by definition, without."""
    return f"{ratio['median']:.2f}" + ("" if exact else f" ({quartile_range(ratio, '.2f')})")


def shown(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each contender in its own fastest form, and captured ones beside; fastest first."""
    best: dict[tuple[str, bool], dict[str, Any]] = {}
    for case in cases:
        if case["kind"] == "ours" and case["name"] not in OURS:
            continue
        key = (case["name"], case["form"] == "captured")
        if key not in best or case["ms"]["median"] < best[key]["ms"]["median"]:
            best[key] = case
    return sorted(best.values(), key=lambda case: float(case["ms"]["median"]))


def details(record: dict[str, Any], form: str) -> str:
    """Return every case of a form with its spread, its memory and its traffic."""
    # Eager passes on a GPU peak by chance, by more than a copy of the weights.
    by_chance = form == "eager" and "gpu" in record["hardware"]
    memory = {(row["name"], row["form"]): row for row in record["memory"] if not by_chance}
    lines = [
        about(record),
        "",
        "| | ms | of floor | quartiles | reads | writes | share of bandwidth | copies beyond SGD |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in record["cases"]:
        if case["form"] != form or case["name"].startswith("WSAM every"):
            continue
        ratio = case["of_floor"]
        share = case["share_of_copy_bandwidth"] if is_clear(case) else None
        copies = memory.get((case["name"], form), {}).get("copies_beyond_base")
        cells = [case["name"], f"{case['ms']['median']:.4g}", f"{ratio['median']:.3f}"]
        cells += [
            quartile_range(ratio, ".3f"),
            *(f"{case[k]:g}" if k in case else "" for k in MOVES),
        ]
        cells += ["" if share is None else f"{100 * share:.0f}%"]
        cells += ["" if copies is None else f"{copies:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def is_clear(case: dict[str, Any]) -> bool:
    """Whether the optimizer's own part, step less floor, stands out of its spread."""
    own = case.get("own_ms")
    return "reads" in case and own is not None and own["high"] - own["low"] < own["median"]


def intervals(record: dict[str, Any]) -> str:
    """Return what a step costs on average where only every n-th is sharpness-aware."""
    best = record["cases"][-1]["form"] if "captured" not in forms(record) else "captured"
    lines = [about(record), "", f"| {best} | ms | of plain SGD | quartiles |", "|---|---|---|---|"]
    for case in record["cases"]:
        if case["form"] == best and (case["name"] in ("SGD", "WSAM") or "every" in case["name"]):
            ratio = case["of_base"]
            cells = [case["name"], f"{case['ms']['median']:.4g}", f"{ratio['median']:.2f}"]
            lines.append(f"| {' | '.join([*cells, quartile_range(ratio, '.2f')])} |")
    return "\n".join(lines)


def scaling(record: dict[str, Any]) -> str:
    """Return the optimizer's own part at each point, in milliseconds."""
    axis, points = record["axis"], record["points"]
    head = " | ".join(f"{point[axis]:,}" for point in points)
    measured_forms = forms(points[0])
    several = len(measured_forms) > 1
    unit = "milliseconds" if several else f"milliseconds, {''.join(measured_forms)}"
    lines = [f"{measured(record)}; {unit}:", "", f"| {axis} | {head} |"]
    lines.append("|---" * (len(points) + 1) + "|")
    for row in points[0]["cases"]:
        found = [next((r for r in p["cases"] if named(r) == named(row)), None) for p in points]
        values = [f"{r['own_us']['median'] / 1e3:.3g}" if r else "did not fit" for r in found]
        name = f"{row['name']}, {row['form']}" if several else row["name"]
        lines.append(f"| {name} | {' | '.join(values)} |")
    return "\n".join(lines)


def named(row: dict[str, Any]) -> tuple[str, str]:
    """Return what tells a case from the others."""
    return row["name"], row["form"]


def forms(record: dict[str, Any]) -> set[str]:
    """Return the forms that were measured, in a record or at one of its points."""
    return {case["form"] for case in record["cases"]}


def about(record: dict[str, Any]) -> str:
    """Return what was trained, where and how it was measured."""
    problem = record["problem"]
    pixels = problem.get("pixels", PIXELS)
    size = "" if pixels == PIXELS else f" of {pixels} x {pixels} pixels"
    return (
        f"{problem['model']}, {problem['weights']:,} weights, batch {problem['batch']}{size}, "
        f"{problem['precision']}; {measured(record)}:"
    )


def measured(record: dict[str, Any]) -> str:
    """Return hardware, versions and how it was measured, and at which commit."""
    commit = record.get("commit")
    return heading(record) + (f", commit {commit[:7]}" if commit else "")


def made(words: str) -> str:
    """Return the Markdown of a marked place."""
    kind, _, words = words.partition(": ")
    if kind == "table":
        found = [name for name in words.split(", ") if (RESULTS / name).exists()]
        return table(read(found[0])) if found else "Not measured yet."
    file, *more = words.split()
    if not (RESULTS / file).exists():
        return "Not measured yet."
    return {"details": details, "intervals": intervals, "scaling": scaling}[kind](read(file), *more)


def read(name: str) -> dict[str, Any]:
    """Return a record of benchmarks/results."""
    record: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing")
    given = parser.parse_args()
    try:
        old = [page for page in given.pages if renew(page, MARK, made, given.check)]
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    if given.check and old:
        sys.exit(f"out of date: {', '.join(map(str, old))}; run python docs/speed_table.py")


if __name__ == "__main__":
    main()
