"""Every Python block of README, CONTRIBUTING and docs runs, in order, page by page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text()
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": page.stem}
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start()) + 1
        code = "\n" * line + block.group(1)
        exec(compile(code, str(page), "exec"), names)


def test_readme_shows_code_early() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert lines.index("```python") < 15
