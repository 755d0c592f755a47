"""Generate tables of defaults, measured costs and results from the code and the records.

python docs/measured_tables.py            # write them
python docs/measured_tables.py --check    # exit with 1 if one is out of date

A page marks the place of a table by `<!-- measured KIND: WORDS -->` and `<!-- end -->`. The kinds:

    overview: all               all methods with passes, cost and use, from their pages and the records
    hyperparameters: METHOD     names, defaults and descriptions, from the code
    results: METHOD             cost of a step and test errors
    settings: all               what SAM and WSAM gain over SGD in each setting of results/
    values: all                 rho and gamma of these runs

METHOD is a name of `wsam.METHODS`, `wsam_reuse` (WSAM with reused sharpness) or `preconditioned_wsam`
(WSAM over an adaptive base).
"""

import argparse
import inspect
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import wsam
from wsam._utils.plot_style import variant_name
from wsam._utils.significance import welch_interval, welch_p
from wsam._utils.text import format_mean_std, mean_and_std
from wsam.lab import records
from wsam.lab.markdown_tables import find_markers, update_tables
from wsam.lab.run import Run, with_seed
from wsam.paper import Entry, Profile, find, gather
from wsam.paper.render import markdown_table, no_break
from wsam.paper.table import Measure

Record = dict[str, Any]

DOCS = Path(__file__).parent
BENCHMARKS = DOCS.parent / "benchmarks" / "results"
RESULTS = DOCS.parent / "results"
MARK = "measured"
NOT_MEASURED, NO_TEST = no_break("not measured"), no_break("no test")
GPU = "bench-resnet18-methods-cuda.json", "captured", "ResNet18, batch 128, H200, CUDA graph"
MEMORY = {GPU[0]: "bench-resnet18-cuda.json"}
"""Records to read the memory from: the one of all methods has other values for captured steps."""
CPU = (
    "bench-mlp10m-cpu.json",
    "eager",
    "perceptron with 10 million weights, batch 32, two CPU cores",
)
TITLES = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "resnet18": "ResNet18",
    "wrn-28-10": "WRN-28-10",
    "mlp": "perceptron",
    "gpt": "GPT",
    "vit": "ViT",
    "cnn": "small CNN",
    "text:shakespeare.txt": "Shakespeare",
    "adamw": "AdamW",
}


def pages() -> list[Path]:
    """Return the pages with tables of this program."""
    found = sorted([*DOCS.glob("*.md"), *DOCS.glob("methods/*.md")])
    return [page for page in found if find_markers(page.read_text(), MARK)]


def generate(words: str) -> str:
    """Return the Markdown for a mark, given the words after `measured`."""
    kind, _, name = words.partition(": ")
    if name == "all":
        return {"overview": overview, "settings": settings, "values": values}[kind]()
    return {"hyperparameters": hyperparameters, "results": results}[kind](name)


# Methods ----------------------------------------------------------------------------------------


def hyperparameters(method: str) -> str:
    """Return the arguments that `SharpnessAware` does not have, and rho."""
    kind = wsam.METHODS[method]
    shared = {*inspect.signature(wsam.SharpnessAware).parameters} - {"rho"}
    described = arguments(inspect.getdoc(kind) or "")
    rows = []
    for name, parameter in inspect.signature(kind).parameters.items():
        if name not in shared:
            default = str(parameter.default).replace("'", '"')
            default = f'"{default}"' if isinstance(parameter.default, str) else default
            rows.append([f"`{name}`", f"`{default}`", described[name]])
    return "\n".join(markdown_table(["argument", "default", "meaning"], rows))


def arguments(doc: str) -> dict[str, str]:
    """Return the descriptions in the section "Args" of a docstring."""
    section = doc.partition("\nArgs:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\S[^:]*): (.*(?:\n     .*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def overview() -> str:
    """Return one row per page of docs/methods, in the order of the table of contents."""
    rows = []
    for name in re.findall(r"^methods/(\w+)$", (DOCS / "methods.md").read_text(), re.MULTILINE):
        text = (DOCS / "methods" / f"{name}.md").read_text()
        title, facts = text.splitlines()[0].removeprefix("# "), dict(fact_rows(text))
        use = re.sub(r"\]\((?=\w+\.md)", "](methods/", facts["take it if"])
        link = f"[{title}](methods/{name}.md)"
        over_adam = name == "preconditioned_wsam"
        shown = format_costs([*epoch_costs(name).values()]) if over_adam else cost(name, *GPU[:2])
        rows.append([link, facts["passes a step"], shown, use])
    return "\n".join(markdown_table(["method", "passes a step", "cost", "take it if"], rows))


def fact_rows(text: str) -> Iterator[tuple[str, str]]:
    """Yield the rows of the first table of a page."""
    yield from re.findall(r"^\| ([a-z ]+) \| (.*) \|$", text, re.MULTILINE)


def cases(method: str, file: str, form: str) -> list[Record]:
    """Return the cases of a method in a record of `wsam bench`."""
    found = {case["name"]: case for case in read(file)["cases"] if case["form"] == form}
    if method == "wsam_reuse":
        return [found[name] for name in found if name.startswith("WSAM reuse ")] or [
            found[name] for name in found if name.startswith("WSAM every ")
        ]
    if method == "esam" and "ESAM gathered" in found:
        return [found["ESAM"], found["ESAM gathered"]]
    kind = wsam.METHODS.get(method)
    return [found[kind.__name__]] if kind and kind.__name__ in found else []


def cost(method: str, file: str, form: str) -> str:
    """Return the time of a step relative to SGD, or that it was not measured."""
    return format_costs([case["of_base"]["median"] for case in cases(method, file, form)])


def format_costs(costs: Sequence[float]) -> str:
    """Return the range of relative times."""
    if not costs:
        return NOT_MEASURED
    low, high = f"{min(costs):.2f}x", f"{max(costs):.2f}x"
    return low if low == high else no_break(f"{low} to {high}")


def epoch_costs(method: str) -> dict[str, float]:
    """Return the time of an epoch relative to AdamW in each setting, of runs that had a GPU alone."""
    return {
        group.setting: fmean(group.epoch_seconds) / fmean(group.base.epoch_seconds)
        for group in read_results()
        if group.name == method and group.run.base == "adamw" and group.base is not None
        if group.epoch_seconds and group.base.epoch_seconds
    }


def epoch_cost_sentence(method: str) -> str:
    """Return the time of an epoch over AdamW, next to that of SAM."""
    ours, sam = epoch_costs(method), epoch_costs("sam")
    shown = [f"{setting}: {value:.2f} (SAM {sam[setting]:.2f})" for setting, value in ours.items()]
    return f"- Training time of an epoch relative to the base alone, H200. {'; '.join(shown)}."


def results(method: str) -> str:
    """Return the cost of a step, and the test error of each group of runs next to the base's."""
    lines = []
    if method == "preconditioned_wsam":
        lines.append(epoch_cost_sentence(method))
    else:
        for file, form, title in (GPU, CPU):
            lines.append(f"- Cost of a step, {title}: {cost_sentence(method, file, form)}.")
    groups = [g for g in read_results() if g.name == method]
    if not groups:
        return "\n".join([*lines, f"- Test error: {NOT_MEASURED}."])
    has_losses = any(group.metric != "error" for group in groups)
    heads = [
        "setting",
        "hyperparameters",
        "epochs",
        "test error (%) or loss" if has_losses else "test error (%)",
        "base alone: epochs, result" if has_losses else "base alone: epochs, error",
        "p",
    ]
    rows = []
    for group in groups:
        base = group.base
        against = f"{base.run.epochs}: {base.text}" if base else NOT_MEASURED
        p = p_text(base.errors, group.errors) if base else NO_TEST
        rows.append([group.setting, group.hyper, str(group.run.epochs), group.text, against, p])
    note = "p: Welch's t-test against the base alone, two-sided. With one run there is no test."
    return "\n".join([*lines, "", *markdown_table(heads, rows), "", note])


def cost_sentence(method: str, file: str, form: str) -> str:
    """Return the cost with the extra memory, and what was measured in place of the method."""
    found = cases(method, file, form)
    if not found:
        return NOT_MEASURED
    names = [case["name"] for case in found]
    sentence = f"{cost(method, file, form).replace('x', '')} times that of SGD"
    if method == "esam" and len(found) > 1:
        whole, gathered = (case["of_base"]["median"] for case in found)
        return f"{whole:.2f} times that of SGD with a closure, {gathered:.2f} with `train_step`"
    rows = read(MEMORY.get(file, file))["memory"]
    memory = {row["name"]: row for row in rows if row["form"] == form}
    if len(names) == 1 and names[0] in memory:
        copies = memory[names[0]]["copies_beyond_base"]
        sentence += f"; memory beyond SGD's: {copies:.1f} copies of the weights"
    if method == "wsam_reuse":
        values = ", ".join(name.split()[-1] for name in reversed(names))
        remark = "" if "reuse" in names[0] else "; measured without reuse"
        sentence += f" (n = {values}{remark})"
    if method == "esam" and names == ["ESAM"]:
        sentence += "; with a closure, which computes all losses again"
    return sentence


@dataclass(frozen=True)
class Group:
    """Finished runs that differ in their seeds alone."""

    run: Run
    errors: tuple[float, ...]
    metric: str
    epoch_seconds: tuple[float, ...]
    """Training time of an epoch, of the runs that had a GPU alone."""

    @property
    def name(self) -> str:
        """The name of the page of docs/methods that shows these runs."""
        is_preconditioned = self.run.method == "wsam" and self.run.options.get("precondition")
        return (
            "preconditioned_wsam"
            if is_preconditioned
            else variant_name(self.run.method, self.run.options)
        )

    @property
    def setting(self) -> str:
        run = self.run
        noise = f", {run.noise:.0%} noisy labels" if run.noise else ""
        base = "" if run.base == "sgd" else f", {TITLES.get(run.base, run.base)}"
        data = TITLES.get(run.data, run.data)
        size = "".join(
            f", {key} {value}"
            for key, value in run.model_args.items()
            if key in ("layers", "dropout")
        )
        size += " with adapters" * ("lora_rank" in run.model_args)
        return f"{TITLES.get(run.model, run.model)}{size}, {data}{noise}{base}"

    @property
    def hyper(self) -> str:
        named = {**self.run.hyper, **self.run.options, "decay_start": self.run.decay_start}
        if self.run.method == "wsam" and self.run.base != "sgd":
            named.setdefault("precondition", False)  # the default of runs, not that of `WSAM`
        return ", ".join(
            f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in named.items()
            if value is not None and (key, value) != ("lr_min", 0.0)
        )

    @property
    def text(self) -> str:
        if self.metric == "error":
            return error_text(self.errors)
        return no_break(f"{self.metric} {error_text(self.errors, 3)}")

    @property
    def base(self) -> "Group | None":
        """The base alone in the same setting.

        Where its own arguments were searched, the base with those, for as many epochs. Else for at
        least twice as many epochs, or for as many.
        """
        wanted = self.run.replace(method="vanilla", hyper={}, options={}, geometry=None)
        for other in read_results():
            if other.run == wanted or other.run.base != wanted.base:
                continue
            if other.run.replace(base_args=wanted.base_args) == wanted:
                return other
        found = [g for g in read_results() if g.run.replace(epochs=wanted.epochs) == wanted]
        longer = [g for g in found if g.run.epochs >= 2 * wanted.epochs]
        same = [g for g in found if g.run.epochs == wanted.epochs]
        return min(longer or same, key=lambda g: g.run.epochs, default=None)


def error_text(errors: Sequence[float], decimals: int = 2) -> str:
    mean, deviation = mean_and_std(errors)
    assert mean is not None
    text = format_mean_std(mean, deviation, f"{{:.{decimals}f}}".format)
    return no_break(f"{text} (n = {len(errors)})")


@cache
def read_results() -> list[Group]:
    """Read the test figures of the finished runs in results/, CIFAR first."""
    groups: dict[tuple[Run, str], list[float]] = {}
    seconds: dict[tuple[Run, str], list[float]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        if not records.is_named_by_key(path):
            continue
        record = records.read_named(path)
        run = Run.from_dict(record["settings"])
        is_trial = run.validation is not None  # of a search
        if records.is_finished(record) and not is_trial:
            key = with_seed(run, 0), records.metric(record)["name"]
            figure = records.final_figure(record)
            assert figure is not None
            groups.setdefault(key, []).append(figure)
            times = seconds.setdefault(key, [])
            if "gpu" in (record.get("hardware") or {}) and records.has_own_device(record):
                times.append(records.training_seconds(record) / run.epochs)
    found = [
        Group(run, tuple(errors), metric, tuple(seconds[run, metric]))
        for (run, metric), errors in groups.items()
    ]

    def order(group: Group) -> tuple[bool, str, int, float, int, str]:
        run = group.run
        is_small = not run.data.startswith("cifar")
        return is_small, run.model, len(run.data), run.noise, -run.epochs, group.hyper

    return sorted(found, key=order)


@cache
def read(name: str) -> Record:
    """Read a record of benchmarks/results."""
    record: Record = json.loads((BENCHMARKS / name).read_text(encoding="utf-8"))
    return record


# Settings ---------------------------------------------------------------------------------------

SETTINGS = [
    ("ResNet18, CIFAR-10", "cifar", "ResNet18/*/CIFAR-10", None),
    ("ResNet18, CIFAR-100", "cifar", "ResNet18/*/CIFAR-100", None),
    ("ResNet18, CIFAR-10, 40% noisy labels", "noise", "*/40%", None),
    ("the same, best epoch", "noise-best", "*/40%", None),
    ("ResNet18, CIFAR-10, 80% noisy labels", "noise", "*/80%", None),
    ("the same, best epoch", "noise-best", "*/80%", None),
    ("WRN-28-10, CIFAR-10, 40 epochs", "cifar", "WRN-28-10/*/CIFAR-10", 40),
]


def settings() -> str:
    """Return a table of the errors of SGD, SAM and WSAM in each setting, and what WSAM gains."""
    heads = ["setting", "SGD", "SAM", "WSAM", "WSAM lower by", "p", "time"]
    rows = []
    for title, table, only, epochs in SETTINGS:
        entries = gather(Profile(only=only, epochs=epochs).table(find(table)), RESULTS)
        errors = {entry.cell.row[-1]: error_values(entry) for entry in entries}
        base, ours = errors["SGDM"], errors["WSAM"]
        shown = (errors[name] for name in ("SGDM", "SAM", "WSAM"))
        row = [title, *(error_text(one) if one else no_break("not run") for one in shown)]
        rows.append([*row, gain(base, ours), p_text(base, ours), relative_time(entries)])
    rows.append(digits())
    return "\n".join(markdown_table(heads, rows))


def digits() -> list[str]:
    """Return the row of the demonstration: tuned methods at equal passes, compared seed by seed."""
    record = json.loads((RESULTS / "demo" / "compare.json").read_text(encoding="utf-8"))
    base, sam, ours = (record["methods"][name] for name in ("base", "sam", "wsam"))
    errors = [error_text([*one["values"].values()]) for one in (base, sam, ours)]
    better, time = ours["improvement"], ours["training_seconds"] / base["training_seconds"]
    mean, half = better["mean"], better["interval"]
    lower = no_break(f"{mean:.2f} ({mean - half:.2f} to {mean + half:.2f})")
    row = ["perceptron, digits, 40% noisy labels", *errors, lower]
    return [*row, f"{better['p_holm']:.2g}", f"{time:.1f}x"]


def values() -> str:
    """Return rho and gamma of the runs in each setting, with the error at the last epoch."""
    rows = []
    for title, table, only, epochs in SETTINGS:
        if table == "noise-best":
            continue
        for entry in gather(Profile(only=only, epochs=epochs).table(find(table)), RESULTS):
            name, hyper = entry.cell.row[-1], dict[str, Any](entry.cell.runs[0].hyper)
            if not entry.ours.n or name not in ("SAM", "WSAM"):
                continue
            gamma = hyper.get("gamma")
            product = "" if gamma is None else f"{hyper['rho'] * gamma / (1 - gamma):.2f}"
            row = [title, name, f"{hyper['rho']:g}", "" if gamma is None else f"{gamma:g}", product]
            rows.append([*row, error_text(error_values(entry))])
    heads = ["setting", "method", "rho", "gamma", "k rho", "test error (%)"]
    return "\n".join(markdown_table(heads, rows))


def error_values(entry: Entry) -> tuple[float, ...]:
    values = entry.ours.values
    is_error = entry.cell.measure in (Measure.TEST_ERROR, Measure.BEST_ERROR)
    return values if is_error else tuple(100 - value for value in values)


def gain(base: Sequence[float], ours: Sequence[float]) -> str:
    """Return the mean difference, with a 95% confidence interval (Welch) if there are several runs."""
    if not base or not ours:
        return ""
    difference = sum(base) / len(base) - sum(ours) / len(ours)
    interval = welch_interval(ours, base)
    if interval is None:
        return no_break(f"{difference:.2f}")
    low, high = interval
    return no_break(f"{difference:.2f} ({low:.2f} to {high:.2f})")


def p_text(base: Sequence[float], ours: Sequence[float]) -> str:
    p = welch_p(base, ours)
    return NO_TEST if p is None else f"{p:.2g}"


def relative_time(entries: Sequence[Entry]) -> str:
    """Return the training time of WSAM relative to that of SGD."""
    minutes = {}
    for entry in entries:
        found = [p for run in entry.cell.runs if (p := records.record_path(RESULTS, run)).exists()]
        timed = [r for r in map(records.read_named, found) if records.has_own_device(r)]
        times = [*map(records.training_seconds, timed)]
        if times:
            minutes[entry.cell.row[-1]] = sum(times) / len(times)
    if not {"SGDM", "WSAM"} <= minutes.keys():
        return ""
    return f"{minutes['WSAM'] / minutes['SGDM']:.1f}x"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    given = parser.parse_args()
    old = [page for page in pages() if update_tables(page, MARK, generate, given.check)]
    if given.check and old:
        sys.exit(f"out of date: {', '.join(map(str, old))}; run python docs/measured_tables.py")


if __name__ == "__main__":
    main()
