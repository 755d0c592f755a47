"""The package: wheel, sdist, types and extras; the wheel works with torch alone."""

import importlib.metadata as metadata
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import wsam
from wsam import __version__

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ABSENT = {"numpy", "typer", "rich", "matplotlib", "scipy", "sklearn"}  # not needed, so not there


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of this checkout, and the wheel that is made of that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


def sources() -> set[str]:
    files = (path for path in (ROOT / "src").rglob("*") if path.is_file())
    return {str(p.relative_to(ROOT / "src")) for p in files if "__pycache__" not in p.parts}


def test_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    names = set(zipfile.ZipFile(wheel(built)).namelist())
    information = {name for name in names if ".dist-info/" in name}
    assert names - information == sources()
    assert "wsam/py.typed" in names, "type information ships"
    assert "wsam/report/templates/page.html" in names, "pages are written from templates"
    assert not [name for name in names if name.startswith(("tests", "results", "docs"))]
    assert any(name.endswith("licenses/LICENSE") for name in information)


def test_sdist_can_be_tested(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {f"src/{name}" for name in sources()} <= names
    wanted = {"README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt"}
    assert wanted | {"tests/docs/test_packaging.py", "docs/quickstart.md"} <= names
    tops = {name.split("/")[0] for name in names}
    folders = {"src", "tests", "docs", "examples", "benchmarks", "results", ".github"}
    assert tops - folders <= {path.name for path in ROOT.iterdir() if path.is_file()} | {"PKG-INFO"}
    assert not [name for name in names if re.search(r"\.venv|__pycache__|_build|\.cache", name)]


def requirements(extra: str) -> set[str]:
    """Return the requirements of an extra, and of the extras that it includes."""
    found = set()
    for line in PROJECT["optional-dependencies"][extra]:
        wanted = Requirement(line)
        found |= {line} if wanted.name != "wsam" else set().union(*map(requirements, wanted.extras))
    return found


def test_metadata(built: Path) -> None:
    """Version, requirements and every extra are those of pyproject.toml."""
    with zipfile.ZipFile(wheel(built)) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("/METADATA")]
        text = archive.read(name).decode()
    assert f"\nVersion: {__version__}\n" in text
    needed = re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE)
    assert [line for line in needed if "extra ==" not in line] == PROJECT["dependencies"]
    for extra in PROJECT["optional-dependencies"]:
        assert f"\nProvides-Extra: {extra}\n" in text
        listed = {line.split(";")[0] for line in needed if line.endswith(f"extra == '{extra}'")}
        assert listed == requirements(extra), extra
    assert "License-Expression: Apache-2.0" in text
    assert "# wsam" in text, "README is the page people see"


def test_extras_hold_what_the_code_imports() -> None:
    extras = PROJECT["optional-dependencies"]
    users = {
        "lab",
        "plots",
        "lightning",
        "transformers",
        "accelerate",
        "ray",
        "slurm",
        "optuna",
        "data",
    }
    assert users | {"all", "docs", "dev"} == set(extras)
    (everything,) = extras["all"]
    assert set(Requirement(everything).extras) == users
    for name in users:
        for line in extras[name]:
            metadata.version(Requirement(line).name)  # exists, and under that name


# --- an empty environment with torch alone --------------------------------------------------------


def with_requirements(name: str, found: dict[str, metadata.Distribution] | None = None):
    """Return a distribution and all it requires here, by name."""
    found = {} if found is None else found
    distribution = metadata.distribution(name)
    if distribution.name in found:
        return found
    found[distribution.name] = distribution
    for line in distribution.requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            with_requirements(requirement.name, found)
    return found


@pytest.fixture(scope="module")
def bare(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment: links to torch and what torch itself requires, then the wheel by pip."""
    home = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    (site,) = home.glob("lib/python*/site-packages")
    for distribution in with_requirements("torch").values():
        tops = {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}
        for top in tops - {"__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index"]
    done = subprocess.run(
        [*install, "--disable-pip-version-check", str(wheel(built))],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return home


def run(home: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program of the environment, far from this checkout and without its variables."""
    command = [str(home / "bin" / words[0]), *words[1:]]
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=240, cwd=cwd, env=environment
    )


def test_the_environment_is_bare(bare: Path, tmp_path: Path) -> None:
    look = "import importlib.util as i, sys; print(*(n for n in sys.argv[1:] if i.find_spec(n)))"
    done = run(bare, "python", "-c", look, "torch", "wsam", *sorted(ABSENT), cwd=tmp_path)
    assert done.stdout.split() == ["torch", "wsam"]
    where = run(bare, "python", "-c", "import wsam; print(wsam.__file__)", cwd=tmp_path)
    assert where.stdout.startswith(str(bare))


@pytest.mark.parametrize("page", ["docs/quickstart.md", "README.md"])
def test_first_steps_need_torch_alone(bare: Path, tmp_path: Path, page: str) -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL
    )
    (tmp_path / "first.py").write_text("\n".join(blocks))
    done = run(bare, "python", "first.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d\.\d", done.stdout), "it prints what it found"


def test_submodules_need_no_import_of_their_own(bare: Path, tmp_path: Path) -> None:
    look = "import wsam; print(*(getattr(wsam, name).__name__ for name in wsam._SUBMODULES))"
    done = run(bare, "python", "-c", look, cwd=tmp_path)
    assert done.stdout.split() == [f"wsam.{name}" for name in wsam._SUBMODULES], done.stderr
    assert set(wsam._SUBMODULES) <= set(dir(wsam))


@pytest.mark.parametrize("command", ["wsam", "python -m wsam"])
def test_the_command_names_the_missing_library(bare: Path, tmp_path: Path, command: str) -> None:
    done = run(bare, *command.split(), "--help", cwd=tmp_path)
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr == "wsam: the command line needs typer: pip install 'wsam[lab,plots]'\n"


# --- what is run elsewhere ------------------------------------------------------------------------


def test_continuous_integration_runs_the_documented_commands() -> None:
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    assert "run: make test\n" in workflow
    assert "run: make test-all\n" in workflow
    pythons = re.search(r"python: \[(.*)\]", workflow)
    assert pythons
    listed = [c.split(" :: ")[-1] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert pythons.group(1).replace('"', "").split(", ") == listed


def test_pre_commit_runs_what_make_runs() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for tool in ("ruff check", "ruff format", "mypy"):
        assert f"entry: .venv/bin/{tool}" in hooks
        assert f"$(BIN)/{tool}" in makefile
