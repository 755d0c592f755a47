"""Files of a release: the citation and the workflows."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from wsam import __version__

ROOT = Path(__file__).parents[2]
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


def test_citation() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "license", "type"} <= citation.keys()
    assert citation["version"] == __version__
    for reference in citation["references"]:
        assert {"type", "title", "authors", "year", "url"} <= reference.keys()
        assert all({"family-names", "given-names"} == set(a) for a in reference["authors"])
    assert "2305.15817" in citation["references"][0]["url"]


def test_there_are_three_workflows() -> None:
    assert [path.stem for path in WORKFLOWS] == ["docs", "release", "test"]


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
