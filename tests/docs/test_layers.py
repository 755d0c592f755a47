"""The house: imports point down only, `import wsam` needs torch alone."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import wsam
from wsam.plot_style import METHOD_STYLES

SOURCE = Path(__file__).parents[2] / "src" / "wsam"
FILES = sorted(SOURCE.rglob("*.py"))
NAMES = [str(path.relative_to(SOURCE)) for path in FILES]

FLOORS = {
    "_version": 0,
    "checks": 0,
    "_format": 0,
    "plot_style": 0,
    "foreign": 0,
    "block": 0,
    "geometry": 0,
    "rule": 0,
    "passes": 0,
    "spectral": 0,
    "switches": 0,
    "generators": 0,
    "schedule": 0,
    "theory": 0,
    "select": 0,
    "update": 0,
    "aside": 0,
    "perturb": 0,
    "micro": 0,
    "lean": 0,
    "bases": 0,
    "plan": 0,
    "tables": 0,
    "launch": 0,
    "kernels": 0,
    "_triton": 0,
    "state": 0,
    "loading": 0,
    "wrapper": 1,
    "engine": 1,
    "optimizer": 1,
    "methods": 2,
    "graph": 2,
    "standins": 2,
    "integrations": 2,
    "curvature": 2,
    "toy": 2,
    "lab": 3,
    "sweep": 4,
    "paper": 4,
    "bench": 4,
    "plots": 4,
    "report": 4,
    "demo": 4,
    "cli": 5,
    "__main__": 6,
}
PACKAGE = 3  # `from wsam import WSAM` is for the floors above the members'
OPTIONAL = [
    "accelerate", "jinja2", "lightning", "matplotlib", "optuna", "ray", "rich", "scipy", "sklearn",
    "submitit", "tensorboard", "timm", "torchvision", "transformers", "typer",
]  # fmt: skip


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """The rooms of the package that a file imports anywhere, functions included."""
    found: set[str] = set()
    package = ["wsam", *path.relative_to(SOURCE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*parts, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        for name in names:
            first, *rest = name.split(".")
            if first != "wsam":
                continue
            known = rest and (
                rest[0] in FLOORS
                or (SOURCE / f"{rest[0]}.py").exists()
                or (SOURCE / rest[0]).is_dir()
            )
            found.add(rest[0] if known else "wsam")
    return found


def test_every_room_has_a_floor() -> None:
    assert {room(path) for path in FILES} - {"__init__"} <= set(FLOORS)


@pytest.mark.parametrize("name", NAMES)
def test_imports_point_down(name: str) -> None:
    path = SOURCE / name
    if room(path) == "__init__":
        return
    floor = FLOORS[room(path)]
    for other in imported_rooms(path) - {room(path)}:
        below = PACKAGE - 1 if other == "wsam" else FLOORS[other]
        same_floor_is_fine = other != "wsam"
        assert below < floor or (below == floor and same_floor_is_fine), (
            f"{name} (floor {floor}) imports {other} (floor {below})"
        )


def test_imports_make_no_circle() -> None:
    """Rooms of one floor may import each other, but never around in a circle."""
    graph: dict[str, set[str]] = {}
    for path in FILES:
        if room(path) != "__init__":
            graph.setdefault(room(path), set()).update(imported_rooms(path) - {room(path), "wsam"})
    order: list[str] = []
    while len(order) < len(graph):
        free = [r for r in graph if r not in order and graph[r] <= set(order)]
        assert free, f"a circle among {sorted(set(graph) - set(order))}"
        order += free


@pytest.mark.parametrize("name", NAMES)
def test_optional_libraries_are_imported_lazily(name: str) -> None:
    """No file below the command line imports an optional library when it is imported itself."""
    path = SOURCE / name
    if room(path) in {"cli", "__main__"}:
        return
    for node in ast.parse(path.read_text()).body:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        assert not [n for n in names if n.split(".")[0] in OPTIONAL]


def test_a_method_looks_the_same_everywhere() -> None:
    """Its name and colours are written once; every member has them, and dashes of its own."""
    assert set(wsam.METHODS) <= set(METHOD_STYLES)
    styles = set(METHOD_STYLES.values())
    assert len({style.dashes for style in styles}) == len(styles)
    colors = {c for s in styles for c in (s.light, s.dark, s.printed) if c}
    for path in SOURCE.rglob("*"):
        if path.suffix in {".py", ".css", ".js", ".html"} and path.name != "plot_style.py":
            again = [color for color in colors if color in path.read_text().lower()]
            assert not again, f"{path} says {again} again"


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("fmean", {"_format.py"}),
        ("stdev", {"_format.py"}),
        (r"isfinite\(.*\) else None", {"_format.py"}),
    ],
)
def test_numbers_are_treated_in_one_place(code: str, allowed: set[str]) -> None:
    found = {name for name in NAMES if re.search(code, (SOURCE / name).read_text())}
    assert found == allowed


def test_import_needs_torch_alone() -> None:
    """`import wsam` brings in ourselves and the standard library, not even more of torch."""
    code = (
        "import sys, torch; before = set(sys.modules); import wsam;"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    new = {module.split(".")[0] for module in done.stdout.split()}
    assert "wsam" in new
    assert new - set(sys.stdlib_module_names) <= {"wsam", "torch"}, new
    assert "torch._dynamo" not in done.stdout.split(), "that alone takes seconds to import"


def test_import_works_without_the_optional_libraries() -> None:
    """Not even an attempt: each optional library is made to fail loudly, and numpy with them."""
    code = (
        "import sys, torch\n"
        f"for name in {[*OPTIONAL]!r}: sys.modules[name] = None\n"
        "import wsam\n"
        "w = torch.nn.Parameter(torch.ones(3))\n"
        "opt = wsam.WSAM(torch.optim.SGD([w], lr=0.1))\n"
        "def closure():\n"
        "    loss = (w ** 2).sum()\n"
        "    loss.backward()\n"
        "    return loss\n"
        "opt.step(closure)\n"
        "assert w.isfinite().all() and not (w == 1).any()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
