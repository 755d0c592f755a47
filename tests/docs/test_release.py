"""Files of a release: the version, requirements, the citation, the changelog and the workflows."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from wsam import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DEVELOPMENT = {"all", "dev", "docs"}
PACKAGES = {"PIL": "pillow", "sklearn": "scikit-learn"}
IF_INSTALLED = {
    "pytorch_optimizer": "another library, which `wsam bench` compares",
    "timm": "models of the lab",
    "triton": "installed with torch where there are GPUs",
}
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
REFERENCE = re.compile(r"\$\{\{ *(\w+)\.([\w.]+) *\}\}")


def read(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text())
    return {"on" if key is True else key: value for key, value in content.items()}  # YAML 1.1


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    return read(path)["jobs"]


def workflow(name: str) -> Path:
    return ROOT / ".github" / "workflows" / f"{name}.yml"


def actions(job: dict[str, Any]) -> set[str]:
    return {step["uses"].split("@")[0] for step in job["steps"] if "uses" in step}


def run_tool(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def check_schema(schema: str, *paths: Path) -> None:
    command = (sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}")
    run_tool(*command, *map(str, paths))


# Version and changelog ----------------------------------------------------------------------------


def test_one_file_names_the_version() -> None:
    assert read(ROOT / "CITATION.cff")["version"] == __version__
    assert "version" in PROJECT["dynamic"]
    versions = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == __version__
    assert len(versions) == len(set(versions))


def is_name(path: str) -> bool:
    try:
        resolve_name(path)
    except (AttributeError, ImportError):
        return False
    return True


def test_renamed_names() -> None:
    """The old names are gone, and those to use instead exist."""
    table = (
        (ROOT / "CHANGELOG.md").read_text().split("<!-- renamed -->")[1].split("<!-- end -->")[0]
    )
    rows = table.strip().splitlines()[2:]
    assert len(rows) > 20
    for row in rows:
        old, new = (re.findall(r"`(wsam[\w.]*)[(`]", cell) for cell in row.split("|")[1:-1])
        assert old, row
        assert new, row
        assert all(map(is_name, new)), new
        assert not [name for name in old if is_name(name) and name not in new], old


# Requirements -------------------------------------------------------------------------------------


def imported() -> dict[str, set[str]]:
    """Return the modules of other packages that the library imports, with the files that do."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                found.setdefault(name.split(".")[0], set()).add(path.name)
    own = {*sys.stdlib_module_names, "wsam"}
    return {name: files for name, files in found.items() if name not in own}


def requirements(*extras: str) -> set[str]:
    lines = [line for extra in extras for line in EXTRAS[extra]] + PROJECT["dependencies"]
    return {canonicalize_name(Requirement(line).name) for line in lines}


def test_every_import_belongs_to_an_extra() -> None:
    offered = requirements(*(EXTRAS.keys() - DEVELOPMENT))
    found = imported()
    assert {"PIL", "numpy", "torch", "typer"} <= found.keys()
    for name, files in found.items():
        package = canonicalize_name(PACKAGES.get(name, name))
        assert package in offered or name in IF_INSTALLED, f"{name}, imported by {files}"


def test_every_requirement_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}
    assert len(pins) == len(lines)
    assert all(str(pin.specifier).startswith("==") for pin in pins.values())
    for line in [line for extra in EXTRAS.values() for line in extra] + PROJECT["dependencies"]:
        wanted = Requirement(line)
        if wanted.name != "wsam":
            (pin,) = pins[canonicalize_name(wanted.name)].specifier
            assert pin.version in wanted.specifier, line


def test_oldest_torch_is_tested_and_documented() -> None:
    (torch,) = [Requirement(line) for line in PROJECT["dependencies"]]
    (oldest,) = [limit.version for limit in torch.specifier]
    steps = jobs(workflow("test"))["oldest-torch"]["steps"]
    assert any(f'"torch=={oldest}.*"' in step.get("run", "") for step in steps)
    for page in ("README.md", "docs/quickstart.md"):
        assert f"torch {oldest}" in (ROOT / page).read_text(), page


# Citation and workflows ---------------------------------------------------------------------------


def test_citation() -> None:
    check_schema("citation-file-format", ROOT / "CITATION.cff")
    citation = read(ROOT / "CITATION.cff")
    assert {"license", "type", "version"} <= citation.keys()
    for reference in citation["references"]:
        assert {"type", "title", "authors", "year", "url"} <= reference.keys()
        assert all({"family-names", "given-names"} == set(a) for a in reference["authors"])
    assert "2305.15817" in citation["references"][0]["url"]


def test_there_are_three_workflows() -> None:
    assert [path.stem for path in WORKFLOWS] == ["docs", "release", "test"]


def test_workflows_follow_the_schema_and_are_secure() -> None:
    check_schema("github-workflows", *WORKFLOWS)
    zizmor = Path(sys.executable).with_name("zizmor")
    run_tool(str(zizmor), "--offline", "--quiet", str(ROOT / ".github"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_is_complete(path: Path) -> None:
    content = read(path)
    assert content.keys() <= {"name", "on", "permissions", "concurrency", "jobs"}
    assert content["name"] == path.stem
    assert content["permissions"] == {"contents": "read"}, "jobs ask for what else they need"
    makefile = (ROOT / "Makefile").read_text()
    for job in content["jobs"].values():
        assert job["runs-on"] == "ubuntu-latest"
        assert "needs" not in job or job["needs"] in content["jobs"]
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step.get("uses", "a/b@v1"))
            for target in re.findall(r"^make (\S+)$", step.get("run", ""), re.MULTILINE):
                assert re.search(rf"^{target}:", makefile, re.MULTILINE)
        known = {"matrix": job.get("strategy", {}).get("matrix", {}).keys()}
        known["steps"] = {step["id"] for step in job["steps"] if "id" in step}
        for context, name in REFERENCE.findall(str(job)):
            assert name.split(".")[0] in known[context]


def test_documentation_is_published_from_the_main_branch() -> None:
    build, publish = jobs(workflow("docs")).values()
    assert read(workflow("docs"))["on"]["push"]["branches"] == ["main"]
    assert "actions/upload-pages-artifact" in actions(build)
    assert publish["if"] == "github.event_name == 'push'"
    assert publish["permissions"] == {"pages": "write", "id-token": "write"}
    assert actions(publish) == {"actions/deploy-pages"}
    path = next(s["with"]["path"] for s in build["steps"] if "pages-artifact" in s.get("uses", ""))
    assert f"docs {path}\n" in (ROOT / "Makefile").read_text()


def test_a_tag_publishes_the_package_without_a_password() -> None:
    assert read(workflow("release"))["on"] == {"push": {"tags": ["v*"]}}
    build, publish = jobs(workflow("release")).values()
    assert "id-token" not in build.get("permissions", {})
    assert publish["needs"] == "build"
    assert publish["environment"] == "pypi"
    assert publish["permissions"] == {"id-token": "write"}
    assert actions(publish) == {"actions/download-artifact", "pypa/gh-action-pypi-publish"}
    assert "secrets." not in workflow("release").read_text()
