"""The examples in docstrings run and return what they show."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
TRAINING = ("wsam.compare.runner", "wsam.report.page")
MODULES = [
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(SOURCE.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in TRAINING else name for name in MODULES],
)
def test_docstring_examples(name: str) -> None:
    assert not doctest.testmod(import_module(name)).failed
