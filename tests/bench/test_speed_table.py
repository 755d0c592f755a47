"""docs/speed_table.py: the table of all methods."""

import runpy
from pathlib import Path
from typing import Any

PROGRAM = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "speed_table.py"))


def case(name: str, form: str, kind: str, ms: float, **more: Any) -> dict[str, Any]:
    quartiles = {"median": ms, "low": ms, "high": ms}
    row = {"name": name, "form": form, "kind": kind, "passes": 1.0, "ms": quartiles}
    return {**row, "of_base": {key: value / 2 for key, value in quartiles.items()}, **more}


def test_every_method_has_both_forms_in_one_row() -> None:
    own = {"own_ms": {"median": 0.125}}
    record = {
        "problem": {"model": "cnn", "batch": 4, "weights": 10, "precision": "fp32"},
        "hardware": {"gpu": "x"},
        "versions": {"torch": "2"},
        "rounds": 3,
        "clock": "wall",
        "load_before": None,
        "load_after": None,
        "not_capturable": {"davda54": "it waits"},
        "cases": [
            case("SGD", "eager", "base", 2.0),
            case("davda54", "eager", "peer", 5.0),
            case("MSAM", "eager", "ours", 3.0, **own),
            case("SGD", "captured", "base", 2.0),
            case("MSAM", "captured", "ours", 2.5),
        ],
    }
    lines = PROGRAM["every_method"](record).splitlines()
    rows = [line.replace("\xa0", " ").strip("|").split("|") for line in lines[4:]]
    rows = [[cell.strip() for cell in row] for row in rows]
    assert rows == [
        ["SGD", "1", "2", "1.00", "", "2", "1.00", ""],
        ["**wsam MSAM**", "1", "3", "1.50 (1.50 to 1.50)", "0.125", "2.5", "1.25 (1.25 to 1.25)", ""],
        ["davda54/sam SAM", "1", "5", "2.50 (2.50 to 2.50)", "", "not capturable", "", ""],
    ]  # fmt: skip
