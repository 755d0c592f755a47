"""Tasks that count communication, with the benchmark whose results the documentation shows."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "communication.py"


def program() -> ModuleType:
    """Load the benchmark script as a module."""
    spec = importlib.util.spec_from_file_location("communication", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure() -> dict[str, Any]:
    return program().measure()
