"""Generate the speed tables of the documentation from records of `wsam bench`.

python docs/speed_table.py README.md docs/speed.md            # write them
python docs/speed_table.py README.md docs/speed.md --check    # exit with 1 if one is out of date

A page marks the place of a table by `<!-- speed KIND: FILES -->` and `<!-- end -->`. Files are in
benchmarks/results. The kinds of tables:

    summary: FILE, FILE, ...    WSAM compared with SGD, two passes and other libraries, one row per
                                record and form
    details: FILE FORM          all cases of a form with memory and memory traffic
    one-pass: FILE              steps with fewer than two passes, of --all-methods
    every-method: FILE          all methods and libraries, eager and captured, of --all-methods
    methods: cheap              test errors and training times of the study `cheap` in results/
    gains: cheap                the same, with the share of WSAM's gain over SGD
    scaling: FILE               the optimizer's time over the number of tensors or weights
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from figures.error_over_time import TimedResult, read_times

import wsam
from wsam.bench.report import heading, optimizer_time, quartile_range
from wsam.bench.workload import PIXELS
from wsam.lab.markdown_tables import update_tables
from wsam.paper.cheap import SGD, WSAM
from wsam.paper.render import markdown_table, no_break

Record = dict[str, Any]

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
RUNS = Path(__file__).parents[1] / "results"
MARK = "speed"
LIBRARIES = {"davda54": "davda54/sam SAM", "authors": "the paper's authors' WSAM"}
FORMS = ("eager", "captured")


def summary(records: list[Record]) -> str:
    """Return one row per record and form: WSAM compared with SGD, two passes and others."""
    heads = ["model", "device", "form", "SGD, ms", "WSAM, ms", "WSAM, ratio to SGD"]
    heads += ["WSAM, ratio to two passes", "fastest other WSAM, ratio to two passes"]
    rows = []
    for record in records:
        for form in FORMS:
            cases = {case["name"]: case for case in record["cases"] if case["form"] == form}
            if "WSAM" not in cases:
                continue
            others = [c for c in cases.values() if c["kind"] == "peer" and is_wsam(c)]
            fastest = min((c["of_floor"]["median"] for c in others), default=None)
            ours = cases["WSAM"]
            row = [workload(record), device(record), form]
            row += [milliseconds(cases[name]) for name in ("SGD", "WSAM")]
            row += [f"{ours[key]['median']:.2f}" for key in ("of_base", "of_floor")]
            rows.append([*row, "" if fastest is None else f"{fastest:.2f}"])
    return "\n".join(markdown_table(heads, rows))


def milliseconds(case: Record) -> str:
    """Return the median time of a step with four significant digits."""
    median = case["ms"]["median"]
    return f"{median:,.0f}" if median >= 1000 else f"{median:.4g}"


def is_wsam(case: Record) -> bool:
    return "WSAM" in library_name(case)


def workload(record: Record) -> str:
    problem = record["problem"]
    pixels = problem.get("pixels", PIXELS)
    size = "" if pixels == PIXELS else f", {pixels} x {pixels} pixels"
    return f"{problem['model']}, batch {problem['batch']}{size}"


def device(record: Record) -> str:
    hardware = record["hardware"]
    return str(hardware.get("gpu") or f"{hardware['cpu']}, {hardware['threads']} cores")


def library_name(case: Record) -> str:
    name = str(case["name"])
    return f"**wsam {name}**" if case["kind"] == "ours" else LIBRARIES.get(name, name)


def ratio(case: Record, kind: str) -> str:
    """Return the ratio to the floor or to the base; without quartiles if it is 1 by definition."""
    exact = case["kind"] == kind
    return "1.00" if exact else with_quartiles(case[f"of_{kind}"], ".2f")


def with_quartiles(values: Record, spec: str) -> str:
    return no_break(f"{values['median']:{spec}} ({quartile_range(values, spec)})")


def details(record: Record, form: str) -> str:
    """Return all cases of a form with memory traffic and memory."""
    # The peak of eager passes on a GPU varies by more than a copy of the weights.
    memory_varies = form == "eager" and "gpu" in record["hardware"]
    memory = {(row["name"], row["form"]): row for row in record["memory"] if not memory_varies}
    heads = [f"{form} step", "ms", "ratio to two passes"]
    heads += ["reads", "writes", "bandwidth", "extra copies"]
    rows = []
    for case in record["cases"]:
        if case["form"] != form or case["name"].startswith("WSAM every"):
            continue
        share = case["share_of_copy_bandwidth"] if is_significant(case) else None
        copies = memory.get((case["name"], form), {}).get("copies_beyond_base")
        cells = [LIBRARIES.get(case["name"], case["name"]), milliseconds(case)]
        exact = case["kind"] == "floor"
        cells += ["1.000" if exact else with_quartiles(case["of_floor"], ".3f")]
        cells += [f"{case[key]:g}" if key in case else "" for key in ("reads", "writes")]
        cells += ["" if share is None else f"{100 * share:.0f}%"]
        rows.append([*cells, "" if copies is None else f"{copies:.2f}"])
    return "\n".join([about(record), "", *markdown_table(heads, rows)])


def is_significant(case: Record) -> bool:
    """Return whether the optimizer's time (step less floor) exceeds its interquartile range."""
    own = case.get("own_ms")
    return "reads" in case and own is not None and own["high"] - own["low"] < own["median"]


def every_method(record: Record) -> str:
    """Return all cases with both forms next to each other, those of other libraries last."""
    found = {(case["name"], case["form"]): case for case in record["cases"]}
    reasons = record["not_capturable"]
    columns = [form for form in FORMS if form in forms(record)]
    heads = ["step", "passes"]
    for form in columns:
        heads += [f"{form}, ms", "ratio to SGD", "without passes, ms"]
    names = dict.fromkeys((c["name"], c["kind"]) for c in record["cases"])
    rows = []
    for name, kind in sorted(names, key=lambda one: one[1] == "peer"):
        passes = next(c["passes"] for c in record["cases"] if c["name"] == name)
        row = [library_name({"name": name, "kind": kind}), f"{passes:.3g}"]
        for form in columns:
            case = found.get((name, form))
            if case is None:
                row += ["not capturable" if name in reasons else "", "", ""]
                continue
            row += [milliseconds(case), ratio(case, "base")]
            row += [optimizer_time(case["own_ms"], ".3f") if "own_ms" in case else ""]
        rows.append(row)
    return "\n".join([about(record), "", *markdown_table(heads, rows)])


def methods() -> str:
    """Return the error of each method on CIFAR-10 and its training time relative to SGD."""
    rows = [
        [result.title, no_break(f"{result.error}%"), cost_text(result), str(len(result.errors))]
        for result in sorted(read_times(RUNS), key=lambda one: one.mean_error)
    ]
    return "\n".join(markdown_table(["method", "test error", "training time", "runs"], rows))


def cost_text(result: TimedResult) -> str:
    """Return the training time relative to 200 epochs of SGD.

    The unit is the mean of all runs of SGD, so that the figure of one run may differ from 1.
    """
    return "1x" if result.title == SGD else f"{result.cost:.2f}x"


def gains() -> str:
    """Return the share of WSAM's gain over SGD that each method has, in the order of their time."""
    results = read_times(RUNS)
    errors = {one.title: one.mean_error for one in results}
    rows = []
    for one in sorted(results, key=lambda one: one.cost or 0.0):
        share = (errors[SGD] - one.mean_error) / (errors[SGD] - errors[WSAM])
        runs = str(len(one.errors))
        rows.append([one.title, cost_text(one), f"{one.mean_error:.2f}%", f"{share:.0%}", runs])
    heads = ["method", "training time", "test error", "share of WSAM's gain", "runs"]
    return "\n".join(markdown_table(heads, rows))


def one_pass(record: Record) -> str:
    """Return the captured steps with fewer than two passes, next to SGD, WSAM and ESAM."""
    shown = [
        case
        for case in record["cases"]
        if case["form"] == "captured"
        and (
            case["name"] in ("SGD", "WSAM", "ESAM")
            or (case["kind"] == "ours" and case["passes"] < 2)
        )
    ]
    rows = [
        [c["name"], f"{c['passes']:.3g}", milliseconds(c), ratio(c, "base")]
        for c in sorted(shown, key=lambda c: float(c["ms"]["median"]))
    ]
    heads = ["captured step", "passes", "ms", "ratio to SGD"]
    return "\n".join([about(record), "", *markdown_table(heads, rows)])


def scaling(record: Record) -> str:
    """Return the optimizer's time at each point, in milliseconds."""
    axis, points = record["axis"], record["points"]
    several_forms = len(forms(points[0])) > 1
    unit = "milliseconds" if several_forms else f"milliseconds, {''.join(forms(points[0]))}"
    rows = []
    for row in points[0]["cases"]:
        key = (row["name"], row["form"])
        found = [
            next((case for case in point["cases"] if (case["name"], case["form"]) == key), None)
            for point in points
        ]
        values = [f"{c['own_us']['median'] / 1e3:.3g}" if c else "did not fit" for c in found]
        name = LIBRARIES.get(row["name"], row["name"])
        rows.append([f"{name}, {row['form']}" if several_forms else name, *values])
    heads = [axis, *(f"{point[axis]:,}" for point in points)]
    return "\n".join([f"{measured(record)}; {unit}:", "", *markdown_table(heads, rows)])


def forms(record: Record) -> set[str]:
    """Return the forms that were measured, in a record or at one of its points."""
    return {case["form"] for case in record["cases"]}


def about(record: Record) -> str:
    """Return the workload, the hardware and the conditions of a measurement."""
    problem = record["problem"]
    return (
        f"{workload(record)}, {problem['weights']:,} weights, {problem['precision']}; "
        f"{measured(record)}:"
    )


def measured(record: Record) -> str:
    """Return hardware, versions, rounds, load and commit."""
    commit = record.get("commit")
    return heading(record) + (f", commit {commit[:7]}" if commit else "")


def generate(words: str) -> str:
    """Return the Markdown for a mark, given the words after `speed`."""
    kind, _, words = words.partition(": ")
    if words == "cheap":
        return {"methods": methods, "gains": gains}[kind]()
    if kind == "summary":
        return summary([read(name) for name in words.split(", ")])
    file, *more = words.split()
    kinds: dict[str, Callable[..., str]] = {
        "details": details,
        "one-pass": one_pass,
        "every-method": every_method,
        "scaling": scaling,
    }
    return kinds[kind](read(file), *more)


def read(name: str) -> Record:
    """Read a record of benchmarks/results, without steps of methods that were removed since."""
    record: Record = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    if "cases" in record:
        record["cases"] = [case for case in record["cases"] if is_known(case)]
    return record


def is_known(case: Record) -> bool:
    """Return whether the library has the method of a case: "WSAM reuse 5" is one of WSAM."""
    return case["kind"] != "ours" or hasattr(wsam, case["name"].split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing")
    given = parser.parse_args()
    try:
        old = [page for page in given.pages if update_tables(page, MARK, generate, given.check)]
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    if given.check and old:
        sys.exit(f"out of date: {', '.join(map(str, old))}; run python docs/speed_table.py")


if __name__ == "__main__":
    main()
