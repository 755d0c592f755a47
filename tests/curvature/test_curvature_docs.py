"""The examples of the curvature page run, one after the other, as a reader would type them."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "curvature.md"


def test_examples_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert "samples=128" in capsys.readouterr().out
    assert names["bridge"].losses[0] == names["bridge"].losses[2]
