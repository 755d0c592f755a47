"""Importing wsam needs torch alone, and optional libraries are imported where they are used.

The layers are checked by import-linter, see `[tool.importlinter]` in pyproject.toml.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "wsam"
OPTIONAL = [
    "accelerate", "lightning", "matplotlib", "optuna", "ray", "rich", "scipy",
    "sklearn", "submitit", "tensorboard", "timm", "torchvision", "transformers", "typer",
]  # fmt: skip


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_optional_libraries_are_imported_lazily() -> None:
    """No module below the command line imports an optional library at import time."""
    found = []
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).parts[0] in {"cli", "__main__.py"}:
            continue
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            found += [(str(path), name) for name in names if name.split(".")[0] in OPTIONAL]
    assert not found


def test_import_needs_torch_alone() -> None:
    """`import wsam` imports nothing but itself, torch and the standard library."""
    modules = run(
        "import sys, torch; before = set(sys.modules); import wsam;"
        "print(*sorted(set(sys.modules) - before))"
    ).split()
    packages = {module.split(".")[0] for module in modules}
    assert "wsam" in packages
    assert packages - set(sys.stdlib_module_names) <= {"wsam", "torch"}
    assert "torch._dynamo" not in modules, "its import takes seconds"


def test_import_works_without_optional_libraries() -> None:
    run(
        "import sys, torch\n"
        f"for name in {OPTIONAL!r}: sys.modules[name] = None\n"
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


def test_the_core_lists_its_files() -> None:
    """The docstring of `wsam._core` names each of them, in the order to read."""
    listed = ast.get_docstring(ast.parse((SOURCE / "_core" / "__init__.py").read_text())) or ""
    files = {path.stem for path in (SOURCE / "_core").glob("*.py")} - {"__init__"}
    assert files - {*re.findall(r"\w+", listed)} == set()
