"""The optimizer agrees with the reference if the package `wsam.accel` is deleted."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import wsam

ROOT = Path(__file__).parents[2]
RUN = """
import importlib.util, pathlib, random, sys
import pytest, wsam

class Sample:
    "Selects one case of each test, or two of many."
    def pytest_collection_modifyitems(self, items):
        cases = {}
        for item in items:
            cases.setdefault(item.originalname, []).append(item)
        draw = random.Random(0)
        items[:] = [x for each in cases.values() for x in draw.sample(each, 1 + (len(each) > 20))]

assert pathlib.Path(wsam.__file__).is_relative_to(sys.argv[1]), wsam.__file__
assert importlib.util.find_spec("wsam.accel") is None
sys.exit(pytest.main(sys.argv[2:], plugins=[Sample()]))
"""


def test_reference_agreement_without_accel(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("accel", "__pycache__")
    shutil.copytree(Path(wsam.__file__).parent, tmp_path / "wsam", ignore=ignored)
    tests = "tests/core/test_reference_agreement.py"
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path), tests, "-q", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) >= 6, done.stdout
