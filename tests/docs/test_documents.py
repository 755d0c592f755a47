"""What README, CONTRIBUTING and docs say: their Python runs, their commands parse, nothing is left out.

The pages of docs/frameworks have a test of their own, test_frameworks_table.
"""

import importlib
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import wsam_command

import wsam
from wsam import methods
from wsam.lab import markdown_tables
from wsam.lab.records import record_path
from wsam.paper import find

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
ALL_PAGES = [*PAGES, *sorted((DOCS / "frameworks").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text()
    monkeypatch.chdir(tmp_path)
    # CONTRIBUTING adds a method, which no other test must see.
    monkeypatch.setattr(methods, "METHODS", dict(wsam.METHODS))
    monkeypatch.setattr(wsam, "METHODS", methods.METHODS)
    names: dict[str, object] = {"__name__": page.stem}
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start()) + 1
        code = "\n" * line + block.group(1)
        exec(compile(code, str(page), "exec"), names)


def commands(page: Path) -> Iterator[list[str]]:
    """The commands of a page's shell blocks, as words."""
    for language, block in FENCE.findall(page.read_text()):
        if language not in {"console", "bash", "sh", ""}:
            continue
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words and "=" in words[0]:
                words.pop(0)  # a variable of the environment
            if words:
                yield words


COMMANDS = sorted({tuple(words) for page in ALL_PAGES for words in commands(page)})


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_parse(words: tuple[str, ...]) -> None:
    """A command of ours is asked for its help, other programs for what they name."""
    if words[0] == "wsam":
        assert "Usage: wsam" in wsam_command(*words[1:], "--help").stdout
    elif words[0] == "torchrun" and "-m" in words:
        of_wsam = words[words.index("-m") + 1 :]
        assert of_wsam[0] == "wsam"
        assert "Usage: wsam" in wsam_command(*of_wsam[1:], "--help").stdout
    elif words[0] in {"python", "torchrun"}:
        (file,) = [word for word in words if word.endswith(".py")] or [None]
        assert (words[1:3] == ("-m", "pytest")) if file is None else (ROOT / file).is_file()
    elif words[:2] == ("pip", "install"):
        for extra in re.findall(r"\[(.*?)\]", " ".join(words)):
            assert set(extra.split(",")) <= set(PROJECT["optional-dependencies"])
    else:
        assert words[0] == "make", f"what is {words[0]}?"
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_commands_are_found() -> None:
    assert len(COMMANDS) > 30


# --- README --------------------------------------------------------------------------------------


def test_readme_shows_code_early() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert lines.index("```python") < 15
    tables = [number for number, line in enumerate(lines) if re.match(r"\|.*\d\.\d", line)]
    assert tables[0] < 41, "the first measured table"


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", DOCS / "speed.md"], ids=lambda page: page.name
)
def test_pages_state_the_records_of_speed(page: Path) -> None:
    """Their tables are those of the records; `python docs/speed_table.py PAGE` makes them anew."""
    program = runpy.run_path(str(DOCS / "speed_table.py"))
    assert any(
        words.startswith("table: ")
        for words in markdown_tables.find_markers(page.read_text(), "speed")
    )
    assert not markdown_tables.update_tables(page, program["MARK"], program["generate"], check=True)


def test_the_picture_of_minima_is_made_of_all_records() -> None:
    """`python docs/make_figures.py minima` draws it anew."""
    picture = (DOCS / "_static" / "minima.svg").read_text()
    records = {path.name for path in (ROOT / "results").glob("*.minimum.json")}
    assert set(re.findall(r"\w+\.minimum\.json", picture)) == records


def test_the_picture_of_gammas_is_made_of_all_records() -> None:
    """`python docs/make_figures.py sensitivity` draws it anew."""
    picture = (DOCS / "_static" / "sensitivity.svg").read_text()
    gammas = find("sensitivity").select("*/ResNet18 CIFAR-10").runs
    runs = (*gammas, *find("cifar").select("ResNet18/S*/CIFAR-10").runs)
    records = {path.name for run in runs if (path := record_path(ROOT / "results", run)).exists()}
    assert len(records) > 6
    assert set(re.findall(r"\w+\.json", picture)) == records


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert "[](" not in page.read_text(), "without a text a link shows nothing outside the site"
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target or target.startswith("#"):
            continue
        path = target.split("#")[0]
        built_with_the_site = path.startswith("gallery/")
        assert built_with_the_site or (page.parent / path).exists(), f"{page.name}: {target}"


# --- the site ------------------------------------------------------------------------------------


def test_every_page_is_in_the_table_of_contents() -> None:
    toctrees = re.findall(r"```{toctree}\n(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL)
    listed = {line for tree in toctrees for line in tree.splitlines() if line[:1] not in {":", ""}}
    markdown_tables = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    assert markdown_tables <= listed
    assert {name for name in listed if "/" not in name} <= markdown_tables


def documented() -> set[str]:
    """Every name with a description in the site, as module.name."""
    found: set[str] = set()
    for page in (DOCS / "api.md", DOCS / "methods.md", DOCS / "curvature.md"):
        text = page.read_text()
        found |= set(re.findall(r"\.\. auto(?:class|function|data|exception):: (\S+)", text))
        for module, options in re.findall(r"\.\. automodule:: (\S+)\n((?:   .*\n)*)", text):
            members = re.search(r":members:(.*)", options)
            assert members, module
            listed = [name.strip() for name in members.group(1).split(",") if name.strip()]
            names = listed or getattr(importlib.import_module(module), "__all__", [])
            found |= {f"{module}.{name}" for name in names}
    return found


def test_reference_is_complete() -> None:
    """All that `import wsam` offers, and all that the public modules list, is described."""
    known = documented()
    last = {name.rsplit(".", 1)[1] for name in known}
    assert set(wsam.__all__) - {"__version__"} <= last
    for room in (
        "geometry",
        "rule",
        "schedule",
        "theory",
        "toy",
        "curvature",
        "paper",
        "sweep",
        "report",
    ):
        module = importlib.import_module(f"wsam.{room}")
        assert {f"wsam.{room}.{name}" for name in module.__all__} <= known, room
    for member in wsam.METHODS.values():
        assert f"wsam.{member.__name__}" in known


def test_every_example_is_on_a_page() -> None:
    text = (DOCS / "examples.md").read_text() + (DOCS / "distributed.md").read_text()
    for path in (ROOT / "examples").glob("*.py"):
        assert f"```{{literalinclude}} ../examples/{path.name}\n" in text, path.name


def test_table_of_weights_is_what_the_formula_says() -> None:
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
