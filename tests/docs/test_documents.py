"""README, CONTRIBUTING and docs: Python blocks run, commands parse, the reference is complete.

The pages of docs/frameworks are tested in tests/frameworks/test_frameworks_table.py.
"""

import functools
import importlib
import json
import re
import runpy
import shlex
import statistics
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command import wsam_command
from figures.error_over_time import read_times
from figures.label_noise import read_noise
from figures.minima import PANELS
from figures.over_adamw import read_curves

import wsam
from wsam import methods
from wsam._utils.significance import holm, welch_p
from wsam.lab import markdown_tables
from wsam.lab.records import objective, read, record_path, training_seconds
from wsam.lab.run import Run
from wsam.paper import Profile, find, gather
from wsam.paper.cheap import (
    IN_BUDGET,
    LATE,
    LATE_SGD,
    RISING,
    SHORTER,
    SHORTER_SAM,
    SHORTER_WSAM,
    TWICE,
)
from wsam.paper.comparison import Ours
from wsam.paper.hessian import AUGMENTED, PLAIN
from wsam.paper.minima import READINGS
from wsam.paper.registry import load
from wsam.paper.significance import welch_tests
from wsam.paper.table import Table

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LAST_HALF = "WSAM reuse 4, last half, paper's gamma"
SMALLER_GAMMA = "WSAM reuse 2, gamma 0.8, 0.76x epochs"
THREE_QUARTERS = "WSAM on every second step, three quarters of the epochs"
BENCHMARKS = ROOT / "benchmarks" / "results"
METHOD_PAGES = sorted((DOCS / "methods").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")), *METHOD_PAGES]
ALL_PAGES = [*PAGES, *sorted(DOCS.glob("frameworks/*.md")), *sorted(DOCS.glob("api/*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
API = runpy.run_path(str(DOCS / "api_page.py"))
MEASURED = runpy.run_path(str(DOCS / "measured_tables.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read_page(path: str) -> str:
    """Return the text of a page with single spaces, so that line breaks do not matter."""
    return " ".join((ROOT / path).read_text().split())


def _slow_except(fast: tuple[str, ...]) -> list[Any]:
    quick = {page for page in PAGES if page.name in fast or page in METHOD_PAGES}
    return [
        pytest.param(page, id=page.name, marks=() if page in quick else pytest.mark.slow)
        for page in PAGES
    ]


@pytest.mark.parametrize("page", _slow_except(("README.md", "CONTRIBUTING.md", "recipes.md")))
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text()
    monkeypatch.chdir(tmp_path)
    # CONTRIBUTING.md adds a method, which must not affect other tests.
    monkeypatch.setattr(methods, "METHODS", dict(wsam.METHODS))
    monkeypatch.setattr(wsam, "METHODS", methods.METHODS)
    names: dict[str, object] = {"__name__": page.stem}
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start()) + 1
        code = "\n" * line + block.group(1)
        exec(compile(code, str(page), "exec"), names)


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the commands of a page's shell blocks, split into words."""
    for language, block in FENCE.findall(page.read_text()):
        if language not in {"console", "bash", "sh", ""}:
            continue
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words and "=" in words[0]:
                words.pop(0)  # an environment variable
            if words:
                yield words


COMMANDS = sorted({tuple(words) for page in ALL_PAGES for words in commands(page)})


def test_commands_parse() -> None:
    """Commands of wsam accept `--help`; others name files, extras and make targets, or read records."""
    assert len(COMMANDS) > 30
    for words in COMMANDS:
        try:
            _check_command(words)
        except AssertionError as error:
            raise AssertionError(f"in the documentation: {' '.join(words)}") from error


def _check_command(words: tuple[str, ...]) -> None:
    if words[0] == "wsam":
        assert "Usage: wsam" in wsam_command(*words[1:], "--help").stdout
    elif words[0] == "torchrun" and "-m" in words:
        module, *arguments = words[words.index("-m") + 1 :]
        assert module == "wsam"
        assert "Usage: wsam" in wsam_command(*arguments, "--help").stdout
    elif words[0] in {"python", "torchrun"}:
        (file,) = [word for word in words if word.endswith(".py")] or [None]
        assert (words[1:3] == ("-m", "pytest")) if file is None else (ROOT / file).is_file()
    elif words[0] == "grep":
        subprocess.run(words, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    elif words[:2] == ("pip", "install"):
        for extra in re.findall(r"\[(.*?)\]", " ".join(words)):
            assert set(extra.split(",")) <= set(PROJECT["optional-dependencies"])
    else:
        assert words[0] == "make", f"unknown program {words[0]}"
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_numbers_of_runs_of_the_studies() -> None:
    """docs/paper.md: the last column has the number of runs of each command."""
    section = (
        (DOCS / "paper.md").read_text().partition("\n## Studies that are not in the paper\n")[2]
    )
    rows = re.findall(r"^\| (.+?) \| (.*`wsam paper run .+) \| (\d.*) \|$", section, re.MULTILINE)
    assert len(rows) == 8
    for question, shown, stated in rows:
        runs = []
        for command in re.findall(r"`wsam paper run (.+?)`", shown):
            name, *words = shlex.split(command)
            given = dict(zip(words[::2], words[1::2], strict=True))
            seeds = [int(given["--seeds"])] if "--seeds" in given else None
            profile = Profile(only=given.get("--only"), seeds=seeds)
            runs.append(len(profile.table(find(name)).runs))
        assert [int(number) for number in re.findall(r"\d+", stated)] == runs, question


# Tables and figures -----------------------------------------------------------------------------


def test_readme_shows_code_early() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert lines.index("```python") < 15
    tables = [number for number, line in enumerate(lines) if re.match(r"\|.*\d\.\d", line)]
    assert tables[0] < 41, "the first measured table"


def test_both_sides_of_the_loop_in_the_readme_train() -> None:
    """The lines before and after the change, on a small problem."""
    block = re.search(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    lines = block[1].splitlines()
    for other in ("+", "-"):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        x = torch.randn(64, 2)
        values = {
            "torch": torch,
            "wsam": wsam,
            "cross_entropy": torch.nn.functional.cross_entropy,
            "model": model,
            "epochs": 20,
            "loader": list(zip(x.split(16), (x[:, 0] > 0).long().split(16), strict=True)),
        }
        exec("\n".join(line[1:] for line in lines if not line.startswith(other)), values)
        assert values["loss"] < 0.5
        assert values["base"].param_groups[0]["lr"] == 0


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", DOCS / "speed.md", DOCS / "cheap.md"], ids=lambda page: page.name
)
def test_speed_tables_equal_the_records(page: Path) -> None:
    """`python docs/speed_table.py PAGE` writes these tables."""
    program = runpy.run_path(str(DOCS / "speed_table.py"))
    assert any(
        words.startswith(("summary: ", "methods: ", "gains: "))
        for words in markdown_tables.find_markers(page.read_text(), "speed")
    )
    assert not markdown_tables.update_tables(page, program["MARK"], program["generate"], check=True)


def test_measured_tables_equal_the_records() -> None:
    """`python docs/measured_tables.py` writes the tables of methods, settings and values."""
    pages = MEASURED["pages"]()
    assert {DOCS / "methods.md", DOCS / "when.md", DOCS / "choosing.md", *METHOD_PAGES} <= {*pages}
    for page in pages:
        assert not markdown_tables.update_tables(page, "measured", MEASURED["generate"], check=True)


def test_results_of_wsam_name_the_measure_and_the_published_form() -> None:
    lines = MEASURED["results"]("wsam").splitlines()
    head, _, *rows = [line for line in lines if line.startswith("|")]
    assert "test error (%) or loss" in head
    assert "CIFAR-10 " in rows[0]
    over_adam = [row for row in rows if "AdamW" in row]
    assert over_adam
    assert all("precondition False" in row for row in over_adam)
    assert all(("loss" in row) == ("GPT" in row) for row in rows)


def test_wsam_over_adamw_next_to_sam() -> None:
    """README.md, bases.md: never better with three or more seeds. choosing.md: the chosen radii."""

    def key(group: Any) -> tuple[str, bool]:
        return group.setting, "rho_follows_lr" in group.run.options

    groups = MEASURED["read_results"]()
    sam = {key(group): group.errors for group in groups if group.name == "sam"}
    wsam = {key(group): group for group in groups if group.name == "preconditioned_wsam"}
    several = {where: group.errors for where, group in wsam.items() if len(group.errors) >= 3}
    assert len(several) == 7
    for where, errors in several.items():
        is_lower = statistics.fmean(errors) < statistics.fmean(sam[where])
        p = welch_p(sam[where], errors)
        assert p is not None
        assert not (is_lower and p < 0.05), where
    assert all(group.run.hyper["gamma"] == 0.5 for group in wsam.values())
    rho = {where: group.run.hyper["rho"] for where, group in wsam.items()}
    text = "Shakespeare, AdamW"
    assert rho == {
        ("ViT, CIFAR-10, AdamW", False): 0.02,
        ("ViT, CIFAR-100, AdamW", False): 0.02,
        ("ViT with adapters, CIFAR-10, AdamW", False): 0.02,
        (f"GPT, dropout 0.2, layers 6, {text}", False): 0.02,
        (f"GPT, layers 6, {text}", False): 0.1,
        (f"GPT, layers 2, {text}", False): 0.1,
        (f"GPT, layers 2, {text}", True): 0.1,
        ("perceptron, digits, 40% noisy labels, AdamW", False): 0.1,
        ("perceptron, digits, 40% noisy labels, AdamW", True): 0.4,
    }


def test_every_method_has_a_page() -> None:
    """With its facts, formula, example, measurement and signature; and a row in the overview."""
    options = {"wsam_reuse", "preconditioned_wsam"}
    assert {page.stem for page in METHOD_PAGES} == {*wsam.METHODS} | options
    overview = (DOCS / "methods.md").read_text()
    for page in METHOD_PAGES:
        text, name = page.read_text(), page.stem
        assert f"](methods/{name}.md)" in overview, name
        facts = dict(MEASURED["fact_rows"](text))
        assert {"take it if", "passes a step", "extra memory", "paper"} <= facts.keys(), name
        assert re.search(r"\]\(https://\S+\)|^none: ", facts["paper"]), name
        assert "w <- w - " in text, name
        assert f"<!-- measured results: {name} -->" in text, name
        assert len(BLOCK.findall(text)) > 0, name
        if name in wsam.METHODS:
            assert f"<!-- api: class wsam.{wsam.METHODS[name].__name__} -->" in text
            assert f"<!-- measured hyperparameters: {name} -->" in text


def test_memory_on_the_pages_of_methods_is_that_of_the_speed_page() -> None:
    """docs/speed.md has a table of parameter-sized buffers."""
    section = (DOCS / "speed.md").read_text().partition("\n## Memory\n")[2].partition("\n\nKept")[0]
    table = re.findall(r"^\| ([^|]+) \| (\d) \| ", section, re.MULTILINE)
    buffers = {name: int(count) for names, count in table for name in names.split(", ")}
    words = {"one copy": 1, "two copies": 2, "three copies": 3}
    titles = {name: kind.__name__ for name, kind in wsam.METHODS.items()}
    titles |= {"wsam_reuse": "WSAM with `reuse`", "preconditioned_wsam": "WSAM"}
    for page in METHOD_PAGES:
        stated = dict(MEASURED["fact_rows"](page.read_text()))["extra memory"]
        (count,) = [words[word] for word in words if stated.startswith(word)]
        assert count == buffers[titles[page.stem]], page.name


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_picture_states_how_many_runs_its_means_have(page: str) -> None:
    words = {2: "two", 3: "three", 4: "four"}
    counts = [n for one in read_times(ROOT / "results") if (n := len(one.errors)) > 1]
    fewest, most = words[min(counts)], words[max(counts)]
    assert f"full markers are means of {fewest} to {most} runs" in read_page(page).lower()


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", DOCS / "index.md"], ids=lambda page: page.name
)
def test_first_pages_answer_common_questions(page: Path) -> None:
    """How to install, the cost, AdamW, how to resume, Trainer, what was measured and what not."""
    text = page.read_text()
    first_screen = "\n".join(text.splitlines()[:12])
    assert "$ pip install " in first_screen
    assert "A training step takes about twice as long (2x)" in " ".join(first_screen.split())
    wanted = ("bases.md", "quickstart.md#save-and-resume", "frameworks/transformers.md", "cheap.md")
    for target in (*wanted, "when.md", "limitations.md", "paper.md", "methods.md", "choosing.md"):
        assert re.search(rf"\]\((?:docs/)?{re.escape(target)}", text), target


def test_when_it_helps_states_n_and_a_test() -> None:
    """docs/when.md: every row has n; a row with several runs has an interval and a p-value."""
    table = MEASURED["settings"]().replace("\N{NO-BREAK SPACE}", " ")
    rows = [row.split(" | ") for row in table.splitlines()[2:]]
    assert len(rows) == len(MEASURED["SETTINGS"]) + 1, "and the demonstration"
    for setting, _, _, ours, better, p, _ in rows:
        assert "(n = " in ours, setting
        is_tested = "(n = 1)" not in ours
        assert (" to " in better) == is_tested, setting
        assert (p != "no test") == is_tested, setting


def p_values_of_the_coupled_form() -> list[str]:
    """Of CoupledWSAM and three rows of SAM over AdamW, as docs/when.md states them."""
    entries = gather(load("adam-small", Profile(), ROOT / "results"), ROOT / "results")
    values = {entry.cell.row: entry.ours.values for entry in entries}
    pairs = (("MLP", "SAM"), ("MLP", "SAM, rho 0.37"), ("GPT", "SAM"))
    found = [welch_p(values[model, "WSAM, coupled"], values[model, sam]) for model, sam in pairs]
    return [f"{p:.2g}" for p in found if p is not None]


def test_the_coupled_form_over_adamw() -> None:
    """Its product of k and rho is the radius of the row that was added to SAM's."""
    text = read_page("docs/when.md")
    section = text.partition("**The coupled form over AdamW is SAM with another radius.**")[2]
    assert re.findall(r"p = (0\.\d+)", section)[:3] == p_values_of_the_coupled_form()
    assert f"{0.65 / (1 - 0.65) * 0.2:.2f}" == "0.37"


@functools.cache
def known_p_values() -> set[str]:
    """Return the p-values of Welch's tests of all tables, and of the demonstration."""
    known: set[str] = set()
    for name in ("cifar", "cheap", "adam", "adam-small", "cheap-small"):
        only = "ResNet18/*" if name == "cifar" else "*"
        table = load(name, Profile(only=only), ROOT / "results")
        tests = welch_tests(table, gather(table, ROOT / "results"))
        known |= {f"{test.p_last:.2g}" for test in tests}
    demo = json.loads((ROOT / "results" / "demo" / "compare.json").read_text())["methods"]
    known |= {f"{demo[name]['improvement']['p_holm']:.2g}" for name in ("sam", "wsam")}
    found = read_cheap("*/CIFAR-10")[1]
    errors = {row: ours.values for (row, _), ours in found.items()}
    pairs = [(three_quarters(found), errors[row]) for row in ("SGD", TWICE, "WSAM")]
    pairs.append((errors[SMALLER_GAMMA], three_quarters(found)))
    pairs += [(errors[SHORTER], errors[IN_BUDGET]), (three_quarters(found)[1:], errors[TWICE])]
    overlapped = [record["final"]["test_error"] for record in overlapped_records()]
    pairs += [
        (overlapped, other) for other in (three_quarters(found), errors[TWICE], errors["WSAM"])
    ]
    pairs += [(errors_on_digits(share), errors_on_digits(1.0)) for share in (0.25, 0.125)]
    pairs.append((errors_on_digits(0.25, n=4), errors_on_digits(1.0, n=4)))
    known |= {f"{welch_p(*pair):.2g}" for pair in pairs}
    return known | {*p_values_of_the_coupled_form()}


@pytest.mark.parametrize(
    "page", ["README.md", "docs/index.md", "docs/when.md", "docs/paper.md", "docs/cheap.md"]
)
def test_p_values_equal_the_records(page: str) -> None:
    """Every p-value in a sentence is that of a test."""
    text = read_page(page)
    found = re.findall(r"\bp = (0\.\d+)(?: and (0\.\d+))?", text)
    stated = {value for pair in found for value in pair if value}
    assert stated
    assert stated <= known_p_values()


@pytest.mark.parametrize("page", ["README.md", "docs/when.md"])
def test_corrected_p_value_of_the_gpt(page: str) -> None:
    table = load("adam", Profile(only="GPT, dropout *"), ROOT / "results")
    tests = welch_tests(table, gather(table, ROOT / "results"))
    p_values = {f"{test.setting}: {' and '.join(test.methods)}": test.p_last for test in tests}
    key = "GPT, dropout 0.2, Shakespeare, loss: AdamW, twice the epochs and SAM"
    corrected = f"p = {p_values[key]:.2g}; {holm(p_values)[key]:.2g} with Holm's correction"
    assert corrected in read_page(page)


@pytest.mark.parametrize(
    "page", ["README.md", "docs/when.md", "docs/bases.md", "docs/limitations.md"]
)
def test_weights_of_the_gpt(page: str) -> None:
    table = load("adam", Profile(only="GPT, dropout *"), ROOT / "results")
    found = (read(ROOT / "results", run) for run in table.runs)
    (parameters,) = {record["parameters"] for record in found if record is not None}
    assert f"{parameters / 1e6:.1f} million weights" in read_page(page)


def test_best_epochs_of_the_gpts() -> None:
    """As docs/when.md states next to the figures of the last epoch."""
    best = {}
    for name, only in (("adam", "GPT, dropout *"), ("adam-small", "GPT/*")):
        for entry in gather(load(name, Profile(only=only), ROOT / "results"), ROOT / "results"):
            paths = [record_path(ROOT / "results", run) for run in entry.cell.runs]
            curves = [json.loads(path.read_text())["curve"] for path in paths if path.exists()]
            if not curves:
                continue
            lowest = [min(row["test_loss"] for row in curve) for curve in curves]
            best[entry.cell.row] = f"{statistics.fmean(lowest):.3f}"
    twice, small = (
        "AdamW, twice the epochs",
        {m: loss for (g, m), loss in best.items() if g == "GPT"},
    )
    text = read_page("docs/when.md")
    large = {dropout: f"GPT, dropout {dropout}" for dropout in ("0.2", "0")}
    assert (
        f"AdamW with twice the epochs has a loss of {best[large['0.2'], twice]} and SAM "
        f"{best[large['0.2'], 'SAM']} with dropout 0.2; without dropout they have "
        f"{best[large['0'], twice]} and {best[large['0'], 'SAM']}."
    ) in text
    assert (
        f"AdamW has a loss of {small['AdamW']}, SAM {small['SAM']} and preconditioned WSAM "
        f"{small['WSAM, preconditioned']}"
    ) in text


def test_results_of_the_vit() -> None:
    """As docs/when.md states: the runs, and training errors of AdamW."""
    text, results = read_page("docs/when.md"), ROOT / "results"
    errors: dict[str, dict[str, float]] = {}
    train_errors = []
    for entry in gather(load("adam", Profile(only="ViT/*"), results), results):
        (error,) = entry.ours.values
        errors.setdefault(entry.cell.column, {})[entry.cell.row[1]] = error
    for entry in gather(
        load("adam-search", Profile(only="ViT/AdamW/*/CIFAR-10, *"), results), results
    ):
        (run,) = entry.cell.runs
        final = json.loads(record_path(results, run).read_text())["final"]
        train_errors.append((final["validation_error"], final["train_error"]))
    ten, hundred = errors.values()
    plain, twice, sam, asam, wsam, gsam = ten
    assert min(ten[name] for name in (sam, asam, wsam, gsam)) == ten[asam]
    assert f"twice the epochs has an error of {ten[twice]:.2f}%, the best of the other" in text
    assert f"ASAM, {ten[asam]:.2f}%. At equal epochs AdamW has {ten[plain]:.2f}%" in text
    assert f"SAM {ten[sam]:.2f}%, preconditioned WSAM {ten[wsam]:.2f}% and GSAM" in text
    assert f"GSAM {ten[gsam]:.2f}%." in text
    assert (min(hundred.values()), max(hundred.values())) == (hundred[asam], hundred[plain])
    assert f"between {hundred[asam]:.2f}% (ASAM) and {hundred[plain]:.2f}% (AdamW)" in text
    assert f"twice the epochs has {hundred[twice]:.2f}%, preconditioned WSAM" in text
    assert f"preconditioned WSAM {hundred[wsam]:.2f}%. These" in text
    (run,) = load("adam", Profile(only="ViT/AdamW/CIFAR-10, *", seeds=[0]), results).cells[0].runs
    last = json.loads(record_path(results, run).read_text())["final"]["train_error"]
    assert f"is {min(train_errors)[1]:.1f}% on CIFAR-10, after 100 epochs {last:.1f}%" in text


def test_smallest_radius_was_the_best_in_the_trials() -> None:
    """As docs/when.md states for the ViT on both data sets, with and without adapters."""
    results = ROOT / "results"
    trials: dict[tuple[str, ...], list[float]] = {}
    for entry in gather(load("adam-search", Profile(only="ViT*"), results), results):
        model, method, _ = entry.cell.row
        if not method.startswith("AdamW"):
            trials.setdefault((model, method, entry.cell.column), []).extend(entry.ours.values)
    assert [*map(len, trials.values())] == [4] * 10
    for name, found in trials.items():
        assert found == sorted(found), name


def test_results_of_adapters() -> None:
    """As docs/when.md states: Welch's tests, and the errors of AdamW."""
    text, results = read_page("docs/when.md"), ROOT / "results"
    table = load("adam", Profile(only="ViT, adapters/*/CIFAR-10, *"), results)
    plain, twice, sam, wsam = (cell.row[1] for cell in table.cells)
    tests = welch_tests(table, gather(table, results))
    p = {test.methods: f"{test.p_last:.2g}" for test in tests}
    assert f"apart from AdamW (p = {p[plain, sam]} and {p[plain, wsam]})" in text
    assert f"lower error than both (p = {p[twice, sam]} and {p[twice, wsam]}, not" in text
    (cell,) = (cell for cell in table.cells if cell.row[1] == plain)
    finals = [json.loads(record_path(results, run).read_text())["final"] for run in cell.runs]
    train, test = (
        statistics.fmean(one[f"{split}_error"] for one in finals) for split in ("train", "test")
    )
    assert f"AdamW has a training error of {train:.1f}% and a test error of {test:.1f}%." in text


def test_figure_over_adamw_equals_the_records() -> None:
    """`python docs/make_figures.py over_adamw` draws it; its title and description say who is lower."""
    figure = (DOCS / "_static" / "over_adamw.svg").read_text()
    curves = read_curves(ROOT / "results")
    assert all(key in figure for one in curves for key in one.keys)
    ends = {(one.setting, one.label): one.mean[-1] for one in curves}
    text = (DOCS / "when.md").read_text()
    alt = re.search(r"!\[([^]]*)\]\(_static/over_adamw.svg\)", text)
    assert alt is not None
    assert sorted(re.findall(r"\d\.\d\d", alt[1])) == sorted(f"{end:.2f}" for end in ends.values())
    dropout, twice = "GPT, dropout 0.2", "AdamW, twice the epochs"
    assert ends[dropout, "SAM"] < ends[dropout, twice] < ends[dropout, "WSAM, preconditioned"]


def test_minima_figure_uses_all_records() -> None:
    """`python docs/make_figures.py minima` draws it."""
    figure = (DOCS / "_static" / "minima.svg").read_text()
    records = {path.name for path in (ROOT / "results").glob("*.minimum.json")}
    assert set(re.findall(r"\w+\.minimum\.json", figure)) == records
    entries = gather(find("minima"), ROOT / "results")
    flatter = []
    for measure in PANELS:
        means = {e.cell.row[0]: e.ours.mean for e in entries if e.cell.measure is measure}
        is_flatter = {means[name] < means["SGDM"] for name in ("SAM", "WSAM")}
        assert len(is_flatter) == 1, "SAM and WSAM agree"
        flatter += is_flatter
    assert flatter == [False, True, True], "it depends on the measurement, as the title states"


def test_ways_to_measure_the_hessian_equal_the_records() -> None:
    """As docs/paper.md states the order of the optimizers and the ratios of their eigenvalues."""
    read: dict[tuple[str, ...], dict[str, float]] = {}
    for entry in gather(find("hessian"), ROOT / "results"):
        mode, images, method = entry.cell.row
        assert entry.ours.mean is not None
        assert entry.ours.n == 1
        read.setdefault((mode, images, entry.cell.column), {})[method] = entry.ours.mean
    assert len(read) == 8
    paper = {
        cell.row[0]: cell.paper.mean
        for cell in find("minima").cells
        if cell.column == "top eigenvalue" and cell.paper
    }
    text = read_page("docs/paper.md")
    assert "({SGDM}, {SAM} and {WSAM}; one seed of ours)".format(**paper) in text
    assert "In evaluation mode SAM has the largest eigenvalue in all four readings" in text
    assert {largest_first(r)[0] for way, r in read.items() if way[0] == "evaluation"} == {"SAM"}
    assert "In training mode over all batches the order is the paper's, with and without" in text
    by_images = {images: read["training", images, "all batches"] for images in (AUGMENTED, PLAIN)}
    assert {*map(largest_first, by_images.values())} == {largest_first(paper)}
    own, theirs = (
        (f"{found['SGDM'] / found['SAM']:.2g}", f"{found['WSAM'] / found['SAM']:.3g}")
        for found in (by_images[AUGMENTED], paper)
    )
    ratios = f"SGDM's is {own[0]} times as large as SAM's and WSAM's {own[1]} times"
    assert f"{ratios} (paper: {theirs[0]} and {theirs[1]})" in text
    measurements = [json.loads(p.read_text()) for p in (ROOT / "results").glob("*.minimum.json")]
    spread = [
        reading["deviation"] / reading["top_eigenvalue"]
        for measurement in measurements
        for reading in measurement.get(READINGS, {}).values()
        if "deviation" in reading
    ]
    assert len(spread) == 12
    assert f"is up to {max(spread):.1f} times their mean" in text


def largest_first(values: dict[str, float]) -> tuple[str, ...]:
    """Return the keys in the order of their values."""
    return tuple(sorted(values, key=lambda key: -values[key]))


def test_sensitivity_figure_uses_all_records() -> None:
    """`python docs/make_figures.py sensitivity` draws it."""
    figure = (DOCS / "_static" / "sensitivity.svg").read_text()
    gammas = find("sensitivity").select("*/ResNet18 CIFAR-10").runs
    runs = (*gammas, *find("cifar").select("ResNet18/S*/CIFAR-10").runs)
    records = {path.name for run in runs if (path := record_path(ROOT / "results", run)).exists()}
    assert len(records) > 6
    assert set(re.findall(r"\w+\.json", figure)) == records


def test_time_figure_equals_the_records() -> None:
    """`python docs/make_figures.py error_over_time` draws it."""
    figure = (DOCS / "_static" / "error_over_time.svg").read_text()
    results = read_times(ROOT / "results")
    assert {one.method for one in results} >= {"vanilla", "sam", "wsam", "gsam", "esam"}
    assert all(one.label in figure for one in results if not one.tried)
    assert all(key in figure for one in results for key in one.keys)
    assert all(len(one.errors) == 1 for one in results if one.tried), "'n = 1 each'"


def test_noise_figure_equals_the_records() -> None:
    """`python docs/make_figures.py label_noise` draws it."""
    figure = (DOCS / "_static" / "label_noise.svg").read_text()
    results = read_noise(ROOT / "results")
    assert {one.method for one in results} >= {"vanilla", "sam", "wsam"}
    assert all(key in figure for one in results for key in one.keys)
    assert all(f"{one.by_level[80].mean:.1f}%" in figure for one in results)
    assert "(half the time)" in figure


def read_cheap(only: str) -> tuple[Table, dict[tuple[str, str], Ours]]:
    """Read cells of the study ``cheap``: the table, and the results by row and column."""
    table = load("cheap", Profile(only=only), ROOT / "results")
    entries = gather(table, ROOT / "results")
    return table, {(entry.cell.row[0], entry.cell.column): entry.ours for entry in entries}


def three_quarters(found: dict[tuple[str, str], Ours]) -> tuple[float, ...]:
    """Return the errors of WSAM on every second step, for about three quarters of the epochs."""
    return found[SHORTER, "CIFAR-10"].values + found[IN_BUDGET, "CIFAR-10"].values


def overlapped_records(folder: str = ".") -> list[dict[str, Any]]:
    """Read the records of benchmarks/overlapped_passes.py in a folder."""
    paths = sorted((BENCHMARKS / "overlapped_passes" / folder).glob("*.json"))
    return [json.loads(path.read_text()) for path in paths]


def test_gain_at_a_lower_cost_equals_the_records() -> None:
    """The pages state the share of WSAM's gain that the recommended setting keeps, and its cost."""
    table, found = read_cheap("*/CIFAR-10*")
    means = {row: found[row, "CIFAR-10"].mean for row in ("SGD", "WSAM", LAST_HALF)}
    six = three_quarters(found)
    assert len(six) == 6, "'six runs'"

    def share(error: float) -> str:
        return f"{(means['SGD'] - error) / (means['SGD'] - means['WSAM']):.0%}"

    costs = {row: found[row, "CIFAR-10, cost"].mean for row in (SHORTER, IN_BUDGET, LAST_HALF)}
    assert {f"{costs[row]:.1f}" for row in (SHORTER, IN_BUDGET)} == {"1.1"}
    own = share(statistics.fmean(six))
    readme = read_page("README.md")
    index, cheap, when, faq, choosing = (
        read_page(f"docs/{name}.md") for name in ("index", "cheap", "when", "faq", "choosing")
    )
    for text in (readme, index):
        assert f"took 1.1x the time of SGD and kept [{own} of WSAM's improvement]" in text
    assert f"took 1.1 times the time of SGD on CIFAR-10 and kept [{own} of" in cheap
    assert f"The first setting keeps {own} of WSAM's gain at 1.1 times SGD's time" in cheap
    assert f"{statistics.fmean(six):.2f} ± {statistics.stdev(six):.2f}% in six runs" in cheap
    assert f"| 1.1x; kept {own} of WSAM's gain in [six runs]" in readme
    assert f"{own} of the gain at 1.1 times the time of SGD" in when
    assert f"[1.1x](cheap.md), which kept {own} of the gain in six runs" in faq
    assert "for three quarters of the epochs: [1.1x](cheap.md)" in choosing
    assert f"count as one setting, which keeps {own} of WSAM's gain" in read_page("docs/paper.md")
    later = statistics.fmean(six[1:])
    assert min(six) == six[0]
    for text in (readme, index):
        assert (
            f"(CIFAR-10, six runs; {share(later)} without the first one, which was the best" in text
        )
    assert f"The first run, 0.72 times the epochs, had {six[0]:.2f}%" in cheap
    assert f"ones keep {share(later)}, with a mean error of {later:.2f}%" in cheap
    assert ("this setting does not reach it" in cheap) == (int(own[:-1]) < 90)
    half = f"keeps {share(means[LAST_HALF])} of the gain at {costs[LAST_HALF]:.2f} times the time"
    assert f"{half} (n = {found[LAST_HALF, 'CIFAR-10'].n})" in cheap
    (run, *_), (longer, *_) = (table.cell((row,), "CIFAR-10").runs for row in (SHORTER, IN_BUDGET))
    assert [run.epochs, longer.epochs] == [round(0.72 * 200), round(0.76 * 200)]
    rho, gamma = run.hyper["rho"], run.hyper["gamma"]
    assert f"It has rho {rho:g} and gamma {gamma:g}" in cheap
    assert f"#what-is-known-about-the-result) with rho {rho:g}, gamma {gamma:g} |" in readme


def test_advice_by_budget_equals_the_records() -> None:
    """The first table of docs/cheap.md: time, values and share of WSAM's gain of each form."""
    table, found = read_cheap("*/CIFAR-10*")
    first = (DOCS / "cheap.md").read_text().partition("```python")[0]
    rows = [line.strip("| ").split(" | ") for line in first.splitlines() if "x |" in line]
    stated = {take: (time, share) for time, _, take, share in rows}
    sgd, full = (found[row, "CIFAR-10"].mean for row in ("SGD", "WSAM"))
    six = three_quarters(found)
    own = f"{(sgd - statistics.fmean(six)) / (sgd - full):.0%} ({len(six)} runs)"
    assert stated.pop(next(iter(stated))) == ("1.1x", own)
    for take, row in {
        "`MSAM(base, rho=0.3)`": "MSAM",
        "`WSAM(base, rho=0.2, gamma=0.88, when=Every(4) & Between(total_steps // 2), "
        "reuse=True)`": LAST_HALF,
        "`WSAM(base, rho=0.2, gamma=0.88)`; `SAM(base, rho=0.2)`": "WSAM",
        "the base optimizer": TWICE,
    }.items():
        time, share = stated.pop(take)
        error, cost = found[row, "CIFAR-10"], found[row, "CIFAR-10, cost"]
        assert abs(float(time[:-1]) - cost.mean) < 0.05, row
        runs = "1 run" if error.n == 1 else f"{error.n} runs"
        assert share.startswith(f"{(sgd - error.mean) / (sgd - full):.0%} ({runs})"), row
    assert not stated
    error, cost = found["LookSAM 5", "CIFAR-10"], found["LookSAM 5", "CIFAR-10, cost"]
    share = f"{(sgd - error.mean) / (sgd - full):.0%} of the gain at {cost.mean:.2f} times the time"
    assert f"It kept {share}." in read_page("docs/cheap.md")
    hyper = [table.cell((row,), "CIFAR-10").runs[0].hyper for row in (LAST_HALF, "WSAM", "SAM")]
    assert hyper == [{"gamma": 0.88, "rho": 0.2}, {"gamma": 0.88, "rho": 0.2}, {"rho": 0.2}]
    best = found[SHORTER, "CIFAR-10"].mean, found[IN_BUDGET, "CIFAR-10"].mean
    between = [
        row
        for (row, column), cost in found.items()
        if column == "CIFAR-10, cost" and 1.15 < (cost.mean or 0) < 1.9
    ]
    assert between
    assert "Between 1.15x and 2x [no setting of this library]" in " ".join(first.split())
    assert all(found[row, "CIFAR-10"].mean > statistics.fmean(best) for row in between)
    sam = found["SAM", "CIFAR-10"]
    assert f"100% (4 runs); {(sgd - sam.mean) / (sgd - full):.0%} ({sam.n} runs) |" in first


def test_cheap_methods_in_words_equal_the_records() -> None:
    """As docs/cheap.md, docs/index.md and docs/when.md state errors, costs and p-values."""
    table, entries = read_cheap("*/CIFAR-10*")
    errors = {row: ours.values for (row, column), ours in entries.items() if column == "CIFAR-10"}
    errors[THREE_QUARTERS] = three_quarters(entries)
    costs = {
        row: ours.mean for (row, column), ours in entries.items() if column == "CIFAR-10, cost"
    }
    readme = read_page("README.md")
    text, index, when = (read_page(f"docs/{name}.md") for name in ("cheap", "index", "when"))

    def p(row: str, other: str) -> str:
        found = welch_p(errors[row], errors[other])
        assert found is not None
        return f"p = {found:.2g}"

    assert f"lower than the error of SGD ({p(THREE_QUARTERS, 'SGD')}) and than" in text
    assert f"SGD with twice the epochs ({p(THREE_QUARTERS, TWICE)}), which takes" in text
    assert f"which takes {costs[TWICE]:.2f} times the time" in text
    assert f"and higher than that of full WSAM ({p(THREE_QUARTERS, 'WSAM')})" in text
    assert f"0.72 and 0.76 times the epochs is not significant ({p(SHORTER, IN_BUDGET)})" in text
    errors["later"] = errors[THREE_QUARTERS][1:]
    assert f"better than SGD with twice the epochs, too ({p('later', TWICE)})" in text
    assert f"too (six runs, {p(THREE_QUARTERS, TWICE)}), at 1.1 times" in index
    assert f"for 0.72 or 0.76 times the epochs (six runs, {p(THREE_QUARTERS, TWICE)})" in readme
    found = (
        f"[n = 6](cheap.md#what-is-known-about-the-result), {p(THREE_QUARTERS, 'SGD')} against SGD)"
    )
    assert found in when
    of_half = f"SGD ({p(LAST_HALF, 'SGD')}), and higher than that of full WSAM"
    assert f"{of_half} ({p(LAST_HALF, 'WSAM')})" in text
    later = statistics.fmean(errors[LAST_HALF][1:])
    assert f"two later seeds have a mean error of {later:.2f}%." in text
    (sam,), (full,) = errors[SHORTER_SAM], errors[SHORTER_WSAM]
    assert f"{costs[SHORTER_SAM]:.2f}" == f"{costs[SHORTER_WSAM]:.2f}"
    assert f"SAM and WSAM take {costs[SHORTER_SAM]:.2f} times the time" in text
    assert f"have errors of {sam:.2f}% and {full:.2f}%, in one run each" in text
    extremes = f"{min(errors[THREE_QUARTERS]):.2f}% and {max(errors[THREE_QUARTERS]):.2f}%"
    assert f"the six runs are between {extremes}" in text
    (longer,) = errors["SGD, 1.15x epochs"]
    assert (
        f"SGD for 1.15 times the epochs is worse than all of these: {longer:.2f}%, in one run"
        in text
    )
    late = "WSAM reuse 2, last quarter"
    (papers,), (chosen,) = errors[f"{late}, paper's gamma"], errors[late]
    assert f"{papers:.2f}% instead of {chosen:.2f}%, one run each" in text
    gain = statistics.fmean(errors["SGD"]) - statistics.fmean(errors["WSAM"])
    share = (statistics.fmean(errors["SGD"]) - statistics.fmean(errors["MSAM"])) / gain
    assert f"keeps {share:.0%} of the gain at {costs['MSAM']:.2f} times the time" in text
    assert f"takes {costs['SAM, 1/4-batch ascent, last 3/8']:.2f} times the time of SGD" in text
    msam, wider = (errors[row][0] for row in ("MSAM", "MSAM, rho 1"))
    assert f"has an error of {wider:.2f}%, in one run, and radius 0.3 one of {msam:.2f}%" in text
    (late,), (control,) = errors[LATE], errors[LATE_SGD]
    share = (statistics.fmean(errors["SGD"]) - late) / gain
    assert f"every second step: {share:.0%} of the gain at {costs[LATE]:.2f} times the time" in text
    assert f"SGD alone with a decay after 87% has an error of {control:.2f}%, in one run" in text
    assert f"with the same seed and the usual decay has {errors['SGD'][0]:.2f}%, too" in text
    run = table.cell((LATE,), "CIFAR-10").runs[0]
    assert (run.decay_start, run.options["every"]) == (0.7, 2), "the validation split chose 70%"
    starts = [cell for cell in table.cells if cell.runs and "start" in cell.runs[0].options]
    found = [
        (c.row[0], read(ROOT / "results", c.runs[0])) for c in starts if c.column == "CIFAR-10"
    ]
    whole = {row for row, record in found if record and not record["resumed"]}
    assert "gamma 0.7, a rising gamma and a late decay were trained from the start" in text
    assert whole == {"WSAM reuse 2, last quarter", LATE, RISING}


def test_reuse_on_every_fifth_step_in_words_equals_the_records() -> None:
    """As docs/cheap.md states its share of the gain, and the training losses."""
    table, found = read_cheap("*/CIFAR-10*")
    sgd, full, own = (found[row, "CIFAR-10"].mean for row in ("SGD", "WSAM", "WSAM reuse 5"))
    share, cost = (sgd - own) / (sgd - full), found["WSAM reuse 5", "CIFAR-10, cost"].mean
    text = read_page("docs/cheap.md")
    sentence = (
        f"keep {share:.0%} of the gain at {cost:.2f} times the time**: an error of {own:.2f}%"
    )
    assert sentence in text

    def loss(row: str) -> str:
        read_runs = (read(ROOT / "results", run) for run in table.cell((row,), "CIFAR-10").runs)
        return f"{statistics.fmean(one['final']['train_loss'] for one in read_runs if one):.3f}"

    ends = f"full WSAM ends at {loss('WSAM')} and SGD at {loss('SGD')}"
    assert f"training loss is {loss('WSAM reuse 5')}; {ends}" in text


def test_rising_gamma_in_words_equals_the_records() -> None:
    """As docs/cheap.md states its share of the gain, its trials and its training loss."""
    table, found = read_cheap("*/CIFAR-10*")
    sgd, full, own = (found[row, "CIFAR-10"].mean for row in ("SGD", "WSAM", RISING))
    share, cost = (sgd - own) / (sgd - full), found[RISING, "CIFAR-10, cost"].mean
    text = read_page("docs/cheap.md")
    sentence = f"keeps {share:.0%} of the gain at {cost:.2f} times the time: an error of {own:.2f}%"
    assert sentence in text
    candidates = table.cell((RISING,), "CIFAR-10").candidates
    trials = {one.run.hyper["rho"]: read(ROOT / "results", one.trial) for one in candidates}
    errors = {rho: f"{one['final']['validation_error']:.2f}%" for rho, one in trials.items() if one}
    others = f"instead of {errors[0.4]} with 0.4 and {errors[0.2]} with 0.2"
    assert f"rho is 0.3, which the validation split chose: {errors[0.3]}, {others}" in text

    def loss(row: str) -> float:
        run = table.cell((row,), "CIFAR-10").runs[0]
        return read(ROOT / "results", run)["final"]["train_loss"]

    assert f"training loss is {loss(RISING):.3f}, still higher than" in text
    assert loss(RISING) > loss("WSAM reuse 5")


def test_smaller_gamma_in_words_equals_the_records() -> None:
    """As docs/cheap.md states the error and the training loss with gamma 0.8, next to 0.88."""
    table, found = read_cheap("*/CIFAR-10*")
    errors, cost = found[SMALLER_GAMMA, "CIFAR-10"].values, found[SMALLER_GAMMA, "CIFAR-10, cost"]
    text = read_page("docs/cheap.md")
    mean, std = statistics.fmean(errors), statistics.stdev(errors)
    assert f"the error is {mean:.2f} ± {std:.2f}% (n = {len(errors)})" in text
    assert f"from the six runs with 0.88 (p = {welch_p(errors, three_quarters(found)):.2g})" in text

    def loss(row: str) -> str:
        read_runs = [read(ROOT / "results", run) for run in table.cell((row,), "CIFAR-10").runs]
        losses = [one["final"]["train_loss"] for one in read_runs if one]
        assert len(losses) == 3
        return f"{statistics.fmean(losses):.3f}"

    assert f"training loss is {loss(SMALLER_GAMMA)} instead of {loss(IN_BUDGET)}" in text
    assert cost.mean is None, "'the table has no time for them'"
    own, other = (table.cell((name,), "CIFAR-10").runs[0] for name in (SMALLER_GAMMA, IN_BUDGET))
    assert own.replace(hyper=other.hyper) == other, "as many passes"


def test_looksam_in_words_equals_the_records() -> None:
    """As docs/cheap.md states its error, and those of other alphas."""
    text = read_page("docs/cheap.md")
    table, results = read_cheap("LookSAM 5/CIFAR-10*")
    cell, cost = table.cell(("LookSAM 5",), "CIFAR-10"), results["LookSAM 5", "CIFAR-10, cost"]
    assert cell.runs[0].hyper["alpha"] == 0.2

    def error(run: Run) -> float:
        record = read(ROOT / "results", run)
        assert record is not None
        found = objective(record)
        assert found is not None
        return found

    published, middle, chosen = cell.candidates
    at_cost = f"{error(chosen.run):.2f}% at {cost.mean:.2f} times the time, in one run"
    assert f"every fifth step has an error of {at_cost}" in text
    assert f"did not train at all ({error(published.run):.2f}%)" in text
    trials = (
        f"0.2 had an error of {error(chosen.trial):.2f}% on the validation split and 0.4 one of"
    )
    assert f"{trials} {error(middle.trial):.2f}%" in text


def test_friendly_sam_next_to_sam() -> None:
    """As docs/methods/friendly_sam.md states: SAM has the same radius, and its seed 0 is compared."""
    table, found = read_cheap("*SAM/CIFAR-10")
    own, sam = (table.cell((row,), "CIFAR-10").runs[0] for row in ("FriendlySAM", "SAM"))
    assert (own.seed, own.hyper["rho"]) == (sam.seed, sam.hyper["rho"])
    sentence = f"SAM with the same seed and radius has {found['SAM', 'CIFAR-10'].values[0]:.2f}%"
    assert sentence in read_page("docs/methods/friendly_sam.md")


def test_removed_method_in_words_equals_its_records() -> None:
    """As docs/cheap.md states the errors of one-pass WSAM, and those of SGD and MSAM next to it."""

    def values(data: str, study: str, column: str) -> tuple[list[Any], list[float], dict[str, Any]]:
        paths = (BENCHMARKS / "one_pass_wsam").glob("*.json")
        found = [json.loads(path.read_text()) for path in paths]
        own = [r for r in found if r["settings"]["data"] == data]
        tested = [r["final"]["test_error"] for r in own if not r["settings"].get("validation")]
        table = load(study, Profile(only=f"*/{column}"), ROOT / "results")
        others = {e.cell.row[0]: e.ours for e in gather(table, ROOT / "results")}
        return [r["settings"]["hyper"] for r in own], tested, others

    (hyper,), (error,), others = values("cifar10", "cheap", "CIFAR-10")
    sgd, msam, text = others["SGD"], others["MSAM"], read_page("docs/cheap.md")
    assert hyper == {"rho": 1.0, "gamma": 0.88, "decay": 0.9}, "no smaller radius"
    assert (
        f"With rho 1 and gamma 0.88 it has an error of {error:.2f}% on CIFAR-10, in one run; with as "
        f"many passes SGD has {sgd.mean:.2f}% (n = {sgd.n}) and MSAM {msam.mean:.2f}% (n = {msam.n})."
    ) in text
    _, errors, others = values("digits", "cheap-small", "noisy digits")
    means = [statistics.fmean(found) for found in (errors, others["MSAM"].values)]
    stds = [statistics.stdev(found) for found in (errors, others["MSAM"].values)]
    assert len(errors) == others["MSAM"].n == 3
    both = f"{means[0]:.2f} ± {stds[0]:.2f}% and MSAM {means[1]:.2f} ± {stds[1]:.2f}% (n = 3 each)"
    assert f"On [noisy digits](paper.md#cheaper-methods-on-one-cpu-core) it has {both}" in text


def test_overlapped_passes_in_words_equal_their_records() -> None:
    """As docs/cheap.md states the result of benchmarks/overlapped_passes.py."""
    own = overlapped_records()
    errors = [record["final"]["test_error"] for record in own]
    table, found = read_cheap("*/CIFAR-10*")
    sgd, full, twice = (found[row, "CIFAR-10"] for row in ("SGD", "WSAM", TWICE))
    mean, std = statistics.fmean(errors), statistics.stdev(errors)
    references = table.cell(("SGD",), "CIFAR-10, cost").reference
    records = [record for run in references if (record := read(ROOT / "results", run))]
    epoch = statistics.fmean(training_seconds(one) / len(one["curve"]) for one in records)
    cost = statistics.fmean(map(training_seconds, own)) / (200 * epoch)
    text = read_page("docs/cheap.md")
    share = (sgd.mean - mean) / (sgd.mean - full.mean)
    assert (
        f"{share:.0%} of the gain at {cost:.2f} times the time**, {mean:.2f} ± {std:.2f}%" in text
    )
    assert len(errors) == 3, "'three runs'"
    against = [
        welch_p(errors, other) for other in (twice.values, full.values, three_quarters(found))
    ]
    p = [f"{value:.2g}" for value in against if value is not None]
    assert (
        f"SGD with twice the epochs (p = {p[0]}) and higher than that of full WSAM (p = {p[1]})"
        in text
    )
    assert f"the six runs above is not significant (p = {p[2]})" in text
    lengths = {len(record["curve"]) for record in own}
    assert {(one["overlapped"]["n"], one["overlapped"]["start"]) for one in own} == {(2, 0.25)}
    shorter = [read(ROOT / "results", run) for run in table.cell((IN_BUDGET,), "CIFAR-10").runs]

    def ratio(found: list[Any]) -> str:
        last_half = (one["curve"][len(one["curve"]) // 2 :] for one in found)
        seconds = [statistics.median(e["seconds"] for e in epochs) for epochs in last_half]
        return f"{statistics.fmean(seconds) / epoch:.2f}"

    stated = f"takes {ratio(own)} times as long as one of SGD instead of {ratio(shorter)} times"
    assert f"an epoch {stated}, and {lengths.pop()} epochs fit into this time" in text
    assert not lengths
    (tail,) = overlapped_records("n2-tail4")
    form, cost = tail["overlapped"], training_seconds(tail) / (200 * epoch)
    assert (form["tail"], form["start"]) == (4, 0.25), "the last four of the eight blocks"
    assert f"An epoch takes {ratio([tail])} times as long as one of SGD, so that" in text
    assert f"{len(tail['curve'])} epochs fit into {cost:.2f} times the time. The error" in text
    error = f"{tail['final']['test_error']:.2f}%, in one run with the same rho and gamma"
    assert f"The error is {error}; SGD has {sgd.mean:.2f}% (n = {sgd.n})" in text


def finals_on_digits(split: str, share: float, n: int) -> dict[float, list[dict[str, float]]]:
    """Return the last measurements with h from a share of the batch on digits, by gamma."""
    found: dict[float, list[dict[str, float]]] = {}
    for record in overlapped_records(f"digits/{split}/n{n}-share{share:g}"):
        found.setdefault(record["settings"]["hyper"]["gamma"], []).append(record["final"])
    return found


def chosen_gamma(share: float, n: int = 2) -> float:
    """Return the gamma with the lowest mean error on the validation split."""
    tried = finals_on_digits("validation", share, n)
    assert len(tried) == 4
    means = {g: statistics.fmean(one["validation_error"] for one in tried[g]) for g in tried}
    return min(means, key=means.__getitem__)


def errors_on_digits(share: float, n: int = 2) -> list[float]:
    """Return the test errors with the chosen gamma."""
    finals = finals_on_digits("test", share, n)[chosen_gamma(share, n)]
    return [one["test_error"] for one in finals]


def test_share_of_the_batch_in_words_equals_the_records() -> None:
    """As docs/cheap.md states the errors on digits, with h from a part of the batch."""
    errors = {share: errors_on_digits(share) for share in (0.25, 0.125, 1.0)}
    assert {len(own) for own in errors.values()} == {8}
    quarter, eighth, whole = map(mean_and_deviation, errors.values())
    p = [welch_p(errors[share], errors[1.0]) for share in (0.25, 0.125)]
    stated = f"{quarter} and {eighth}, and {whole} with h from the whole batch"
    text = read_page("docs/cheap.md")
    assert f"{stated} (n = 8 each, p = {p[0]:.2g} and {p[1]:.2g})" in text
    values = [f"{chosen_gamma(share):g}" for share in errors]
    assert f"the validation split chose {values[0]}, {values[1]} and {values[2]}." in text
    fourth = [errors_on_digits(share, n=4) for share in (0.25, 1.0)]
    quarter, whole = map(mean_and_deviation, fourth)
    stated = f"On every fourth step a quarter has {quarter} and the whole batch {whole}"
    assert f"{stated} (p = {welch_p(*fourth):.2g})" in text


def test_share_of_the_batch_on_cifar_in_words_equals_the_records() -> None:
    """As docs/cheap.md states costs, and validation errors of the runs that were ended."""
    folder = BENCHMARKS / "overlapped_passes" / "n3-share0.125"
    text, costs = read_page("docs/cheap.md"), (folder / "costs.txt").read_text()
    for n, share, sentence in (
        (3, 0.125, "takes {} times the time of"),
        (4, 0.5, "fourth step {})"),
    ):
        line = re.search(rf"Form\(n={n}, share={share}, start=0.25\): (\S+) of SGD's", costs)
        assert line is not None
        assert sentence.format(line[1]) in text
    ends = {}
    for path in sorted((folder / "validation").iterdir()):
        *_, last = path.read_text().splitlines()
        epoch, error = re.findall(r"epoch (\d+)/200 .* validation error (\S+)%", last)[0]
        ends[path.stem.removeprefix("gamma-")] = error
    gammas, errors = [*ends], [*ends.values()]
    stated = (
        f"gammas {gammas[0]}, {gammas[1]} and {gammas[2]} the validation errors are {errors[0]}"
    )
    assert f"{stated}, {errors[1]} and {errors[2]}% at epoch {epoch}, where" in text
    runs = find("cheap").cell(("SGD",), "CIFAR-10").runs
    sgd = [one["curve"][int(epoch) - 1] for run in runs if (one := read(ROOT / "results", run))]
    found = [one["test_error"] for one in sgd]
    assert len(found) == 3
    assert f"are between {min(found):.2f} and {max(found):.2f}% there" in text


def mean_and_deviation(values: list[float]) -> str:
    """Return the mean of errors with their standard deviation, as the pages write them."""
    return f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}%"


def test_cifar100_in_words_equals_the_records() -> None:
    """As docs/cheap.md states the errors of the recommended setting and its baselines."""
    table, found = read_cheap("*/CIFAR-100*")
    text = read_page("docs/cheap.md")
    assert table.cell((SHORTER,), "CIFAR-100").runs[0].hyper["gamma"] == 0.82
    rows = (SHORTER, "SGD", TWICE, "SAM", "WSAM")
    own, sgd, twice, sam, full = (found[row, "CIFAR-100"] for row in rows)
    share = (sgd.mean - own.mean) / (sgd.mean - full.mean)
    cost = found[SHORTER, "CIFAR-100, cost"].mean
    assert f"0.82, keeps {share:.0%} of the gain at {cost:.2f} times the time" in text
    assert (
        f"a mean error of {own.mean:.2f}% (n = {own.n}), SGD {sgd.mean:.2f}% (n = {sgd.n}), SGD with "
        f"twice the epochs {twice.mean:.2f}% (n = {twice.n}), SAM {sam.mean:.2f}% (n = {sam.n}) and "
        f"WSAM {full.mean:.2f}% (n = {full.n})."
    ) in text
    of_wsam, of_sam = (f"{welch_p(one.values, twice.values):.2g}" for one in (full, sam))
    assert (
        f"WSAM has an error of {full.mean:.2f}%, SAM {sam.mean:.2f}%, and SGD with twice the epochs "
        f"{twice.mean:.2f}% (three seeds; p = {of_wsam} and {of_sam} against SGD)"
    ) in read_page("README.md")
    paper = read_page("docs/paper.md")
    assert f"WSAM (p = {of_wsam}) and SAM (p = {of_sam}) are better than SGDM" in paper
    each_other = welch_p(full.values, sam.values)
    assert f"not told apart from each other (p = {each_other:.2g})" in paper
    assert full.n == sam.n == twice.n == 3


def test_costs_of_esam_equal_the_record() -> None:
    """As docs/cheap.md explains them."""
    record = json.loads((BENCHMARKS / "bench-resnet18-methods-cuda.json").read_text())
    found = {case["name"]: case for case in record["cases"] if case["form"] == "captured"}
    gathered, plain = found["ESAM gathered"], found["ESAM"]
    ratios = [case["of_base"]["median"] for case in (gathered, plain)]
    text = read_page("docs/cheap.md")
    assert f"(*ESAM gathered*, {ratios[0]:.2f} against {ratios[1]:.2f})" in text
    assert f"makes {gathered['passes']:.3g} passes instead of {plain['passes']:.3g}" in text
    names = ("MSAM", "WSAM reuse 10", "WSAM reuse 5", "WSAM reuse 2", "WSAM")
    msam, tenth, fifth, second, full = (f"{found[name]['of_base']['median']:.2f}" for name in names)
    assert f"takes {msam} times as long as that of SGD with MSAM, {tenth} with *reuse 10*" in text
    assert f"{fifth} with *reuse 5*, {second} with *reuse 2* and {full} with WSAM." in text


def test_captured_steps_of_other_libraries_equal_the_record() -> None:
    """As docs/speed.md compares them in sentences."""
    record = json.loads((BENCHMARKS / "bench-resnet18-methods-cuda.json").read_text())
    cases = {(case["name"], case["form"]): case for case in record["cases"]}

    def ratio(name: str, form: str = "captured") -> str:
        return f"{cases[name, form]['of_base']['median']:.2f}"

    sam, theirs, looksam = (f"pytorch_optimizer {name}" for name in ("SAM", "WSAM", "LookSAM"))
    foreach = f"{theirs} foreach"
    own = [f"{cases[name, 'captured']['own_ms']['median']:.3f}" for name in ("WSAM", foreach)]
    text = read_page("docs/speed.md")
    for sentence in (
        f"**SAM**: {ratio('SAM')} times a step of SGD; pytorch_optimizer {ratio(sam)}.",
        f"**WSAM**: {ratio('WSAM')}; pytorch_optimizer {ratio(foreach)} with foreach and "
        f"{ratio(theirs)} without, the paper's authors {ratio('authors')}.",
        f"our step takes {own[0]} ms, and the fastest other one {own[1]} ms",
        f"**LookSAM**: {ratio('LookSAM')}; pytorch_optimizer {ratio(looksam)}, because",
        f"pytorch_optimizer's WSAM falls from {ratio(theirs, 'eager')} to {ratio(theirs)}",
    ):
        assert sentence in text
    for name in ("SGD", "WSAM"):  # an eager step "takes more than twice as long" as a captured one
        eager, captured = (cases[name, form]["ms"]["median"] for form in ("eager", "captured"))
        assert 2 < eager / captured < 3
    assert cases[looksam, "captured"]["passes"] == 2
    assert set(record["not_capturable"]) == {"davda54"}


def test_ratios_to_two_passes_equal_the_records() -> None:
    """As docs/speed.md states above its tables."""
    text = read_page("docs/speed.md")
    for file, form, sentence in (
        ("resnet18-only-wsam-eager-sam-eager", "eager", "passes ({} and {} times their time), but"),
        ("resnet18", "captured", "takes {} times as long as its two passes, of SAM {}."),
    ):
        record = json.loads((BENCHMARKS / f"bench-{file}-cuda.json").read_text())
        ratios = {c["name"]: c["of_floor"]["median"] for c in record["cases"] if c["form"] == form}
        assert sentence.format(f"{ratios['WSAM']:.3f}", f"{ratios['SAM']:.3f}") in text


def test_ratios_before_and_after_the_restructuring_equal_the_record() -> None:
    """As docs/speed.md states them."""
    text = read_page("docs/speed.md")
    ratios = json.loads((BENCHMARKS / "versions-cuda.json").read_text())["ratios"]
    (_, before, _), (low, after, high) = ratios["WSAM, eager"].values()
    eager = f"{after:.2f} times as long as its two passes (quartiles {low:.2f} to {high:.2f})"
    assert f"an eager step of WSAM took {eager}, and {before:.2f} before" in text
    (_, before, _), (_, after, _) = ratios["WSAM, captured"].values()
    assert f"a captured one {after:.3f}, and {before:.3f} before" in text


def test_savings_of_acceleration_equal_the_records() -> None:
    """As docs/speed.md states them."""
    text, extra = read_page("docs/speed.md"), {}
    for device in ("cpu", "cuda"):
        record = json.loads((BENCHMARKS / f"ablation-{device}.json").read_text())
        extra |= {row["feature"]: f"{row['time_without'] - 1:.0%}" for row in record["rows"]}
    for sentence, feature in {
        "an eager step over SGD takes {} longer without them": "fused CUDA kernels in eager steps",
        "a captured preconditioned step over AdamW {} longer": "fused preconditioned step, captured",
        "a step takes {} longer without this copy": "weight swap on CPU",
        "and {} longer without the fused implementation": "fused base step on CPU",
    }.items():
        assert sentence.format(extra[feature]) in text


def test_every_figure_has_a_message_and_a_caption() -> None:
    """Alternative text is a sentence with the message, and the sentence below repeats it in italics."""
    pictures = {path.name for path in (DOCS / "_static").iterdir() if path.suffix != ".css"}
    shown = set()
    for page in ALL_PAGES:
        found = re.findall(r"!\[([^\]]*)\]\(([^)]*_static/[^)]*)\)\n(.*\n.*)", page.read_text())
        for alternative, path, below in found:
            shown.add(Path(path).name)
            assert len(alternative.split()) > 6, (page.name, path)
            assert below.lstrip().startswith("*"), (page.name, path)
    assert shown == pictures


def test_the_gallery_has_the_look_of_the_figures() -> None:
    for path in (ROOT / "examples" / "gallery").glob("*.py"):
        program = path.read_text()
        assert "plt.rcParams.update(RC_PARAMS)" in program, path.name
        assert "figsize=(5.8, " in program, path.name
        assert "ylabel=" in program, path.name
        assert "set_title(figure, " in program, f"{path.name}: the message above the figure"
        assert "color=MUTED_COLOR" in program or "**note" in program, f"{path.name}: the setting"


def test_links_point_to_existing_files() -> None:
    for page in ALL_PAGES:
        text = page.read_text()
        assert "[](" not in text, f"{page.name}: a link without text is invisible outside the site"
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" in target or target.startswith("#"):
                continue
            path = target.split("#")[0]
            is_generated = path.startswith("gallery/")
            assert is_generated or (page.parent / path).exists(), f"{page.name}: {target}"


# The site ---------------------------------------------------------------------------------------


def test_every_page_is_in_the_table_of_contents() -> None:
    toctrees = re.findall(r"```{toctree}\n(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL)
    listed = {line for tree in toctrees for line in tree.splitlines() if line[:1] not in {":", ""}}
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    assert pages <= listed
    for name in ("api", "methods"):
        parts = {path.stem for path in (DOCS / name).glob("*.md")}
        page = (DOCS / f"{name}.md").read_text()
        assert set(re.findall(rf"^{name}/(\w+)$", page, re.MULTILINE)) == parts
    assert {name for name in listed if "/" not in name} <= pages


def documented() -> set[str]:
    """Return every name that the site documents, as module.name."""
    found: set[str] = set()
    for page in API["PAGES"]:
        text = API["for_site"](page.read_text())
        found |= set(re.findall(r"\.\. auto(?:class|function|data|exception):: (\S+)", text))
        for module, options in re.findall(r"\.\. automodule:: (\S+)\n((?:   .*\n)*)", text):
            members = re.search(r":members:(.*)", options)
            assert members, module
            listed = [name.strip() for name in members.group(1).split(",") if name.strip()]
            names = listed or getattr(importlib.import_module(module), "__all__", [])
            found |= {f"{module}.{name}" for name in names}
    return found


def test_reference_is_complete() -> None:
    """All names of `wsam` and of the `__all__` of public modules are documented."""
    known = documented()
    last = {name.rsplit(".", 1)[1] for name in known}
    assert set(wsam.__all__) - {"__version__"} <= last
    for name in (
        "geometry",
        "integrations",
        "rule",
        "schedule",
        "theory",
        "toy",
        "curvature",
        "paper",
        "sweep",
        "report",
    ):
        module = importlib.import_module(f"wsam.{name}")
        assert {f"wsam.{name}.{exported}" for exported in module.__all__} <= known, name
    for method in wsam.METHODS.values():
        assert f"wsam.{method.__name__}" in known


def test_table_of_names_is_complete() -> None:
    """docs/api.md lists each name of the pages below it; `python docs/api_page.py` writes it."""
    assert not markdown_tables.update_tables(
        API["INDEX"], API["NAMES"], API["names_table"], check=True
    )
    listed = set(re.findall(r"\]\(((?:api|methods)/\w+\.md)\)", API["INDEX"].read_text()))
    assert listed == {page.relative_to(DOCS).as_posix() for page in API["PAGES"]}


def test_commands_are_listed() -> None:
    """docs/cli.md has a row for each command."""
    shown = re.findall(r"^\| `wsam (\w+)` \|", (DOCS / "cli.md").read_text(), re.MULTILINE)
    commands = wsam_command("--help").stdout.partition("Commands:")[2]
    assert shown == re.findall(r"^  (\w+)  ", commands, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("page", API["PAGES"], ids=lambda page: page.stem)
def test_reference_shows_signatures_and_docstrings(page: Path) -> None:
    """`python docs/api_page.py` writes them; the site shows autodoc's directives instead."""
    assert not markdown_tables.update_tables(page, API["MARK"], API["markdown"], check=True)
    site = API["for_site"](page.read_text())
    assert "```py\nclass wsam" not in site
    assert site.count(".. auto") == page.read_text().count("<!-- api: ")


def test_every_example_is_on_a_page() -> None:
    text = (DOCS / "examples.md").read_text() + (DOCS / "distributed.md").read_text()
    for path in (ROOT / "examples").glob("*.py"):
        assert f"```{{literalinclude}} ../examples/{path.name}\n" in text, path.name


def test_table_of_effective_weights() -> None:
    """docs/choosing.md: gamma, k and k(1 - mu)."""
    from wsam.theory import effective_weight

    rows = re.findall(
        r"^\| (0\.\d+) \| ([\d.]+)[^|]*\| ([\d.]+)",
        (DOCS / "choosing.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) == 6
    for gamma, k, weight in ([float(cell) for cell in row] for row in rows):
        assert k == pytest.approx(effective_weight(gamma, 0.0), abs=0.02)
        assert weight == pytest.approx(effective_weight(gamma, 0.9), abs=0.005)
