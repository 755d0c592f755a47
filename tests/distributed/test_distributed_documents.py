"""docs/distributed.md shows the recorded communication, existing tests and the examples."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from programs import load_program
from workers import traffic
from workers.process_group import process_group

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "distributed.md").read_text()


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / "communication.json").read_text())


def calls(record: dict[str, Any], case: str) -> int:
    (row,) = [row for row in record["ddp"] if row["case"] == case]
    return row["gradients"]["calls"]


@pytest.mark.parametrize("style", ["ddp", "fsdp2"])
def test_page_shows_the_record(record: dict[str, Any], style: str) -> None:
    assert "\n".join(load_program("communication").table(record, style)) in PAGE


@pytest.mark.slow
def test_record_is_up_to_date(record: dict[str, Any]) -> None:
    assert process_group().run(traffic.measure) == [record, record]


def test_reductions_of_gradients(record: dict[str, Any]) -> None:
    assert calls(record, "plain base") == 1
    assert calls(record, "SAM, ESAM, ASAM, Fisher SAM") == 2
    assert calls(record, "SAM, ESAM, ASAM, Fisher SAM, local") == 1
    assert calls(record, "WSAM, Coupled-WSAM, GSAM, local") == 2, "one coalesced reduction"


def test_page_names_tests_that_exist() -> None:
    """Every row of the tables of supported features names an existing test."""
    files = [*(ROOT / "tests" / "distributed").glob("test_*.py")]
    written = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}
    claims = [line for line in PAGE.splitlines() if re.match(r"\| .*\| (works|refused)", line)]
    assert len(claims) > 15
    for line in claims:
        names = re.findall(r"`(test_\w+)`", line)
        assert names, f"no test in: {line}"
        assert set(names) <= written, f"no such test: {line}"


@pytest.mark.parametrize("name", ["torchrun_ddp.py", "fsdp2.py"])
def test_page_includes_the_examples(name: str) -> None:
    assert f"```{{literalinclude}} ../examples/{name}\n" in PAGE
