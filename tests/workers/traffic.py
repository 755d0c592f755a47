"""Tasks that count communication, with the benchmark whose results the documentation shows."""

from typing import Any

from programs import load_program


def measure() -> dict[str, Any]:
    return load_program("communication").measure()
