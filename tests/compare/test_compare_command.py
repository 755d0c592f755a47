"""`wsam compare`: output, bad input, interruptions."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from command import error_of, wsam_command

from wsam.compare.state import final_folder, read_state, search_folder
from wsam.lab.run import Run
from wsam.sweep import InProcess

OWN = Path(__file__).parents[1] / "own_problem.py"
QUICK = "--methods base,sam --seeds 2 --trials 1 --epochs 2 --budget 5m --device cpu"
DIGITS = f"{QUICK} --model mlp --train-limit 200 --test-limit 100"


@pytest.fixture
def in_process(monkeypatch):
    """Train in this process, with short timing runs."""
    monkeypatch.setattr("wsam.cli._executors.make_executor", lambda *_, **__: InProcess())
    monkeypatch.setattr("wsam.compare.runner._TIMING_SECONDS", (0.1, 0.1))


def test_own_problem(tmp_path, in_process):
    words = f"--data {OWN}:numbers --model {OWN}:line {QUICK} --base adam --out {tmp_path}"
    output = wsam_command("compare", *words.split())
    found = json.loads((tmp_path / "compare.json").read_text())
    assert found["metric"]["name"] == "mse"
    assert found["problem"]["validation"] == 0.2
    assert found["sentence"] in output.stdout
    assert found["sentence"] in (tmp_path / "compare.html").read_text()
    for words in ("test mse", "better by", "cost", "sharpness", "Adam: lr ", "1 method compared"):
        assert words in output.stdout, words
    for words in ("an epoch of Adam takes", "plan: 2 methods, 1 trial each", "left", "final runs"):
        assert words in output.stderr, words


def test_interrupted_command_can_be_resumed(tmp_path, in_process, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("wsam.compare.runner.make_plan", interrupt)
        words = ("compare", *DIGITS.split(), "--out", tmp_path)
        printed = wsam_command(*words, status=130).stderr
    assert printed.splitlines()[-1] == "wsam: interrupted; run the same command again to resume"
    assert set(read_state(tmp_path).timing) == {"base", "sam"}


def test_failures_have_their_own_exit_status(tmp_path, in_process, monkeypatch):
    """ESAM cannot select samples of a loss that is one value; the others are compared."""
    words = f"--data {OWN}:mappings --model {OWN}:Net {QUICK} --methods esam,sam --out {tmp_path}"
    output = wsam_command("compare", *words.split(), status=1)
    assert "Failed: ESAM: left out: " in output.stdout
    assert "must return one value per sample, by which esam selects them" in output.stdout
    assert "SAM" in json.loads((tmp_path / "compare.json").read_text())["methods"]["sam"]["title"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--budget 20", "--budget must be a duration such as 90s, 20m or 2h, got '20'"),
        (
            f"--methods {OWN.parent}/own_method.py:Blend",
            "must be a subclass of wsam.SharpnessAware",
        ),
        ("--methods sam,adam", "unknown method 'adam'; known: base, sam"),
        ("--methods base", "nothing to compare: name a method besides base"),
        ("--seeds 0", "--seeds must be a number of seeds or a list"),
        ("--seeds 1,1", "seeds must be distinct"),
        ("--data missing.py:data", "there is no file"),
        ("--executor slurm --gpus 1", "--gpus needs Ray"),
        ("--base adam --momentum 0.9", "adam does not take 'momentum'"),
        ("--validation 2.5", "validation must be in (0, 1)"),
    ],
)
def test_bad_input(words, message, tmp_path):
    assert message in error_of("compare", "--device", "cpu", "--out", tmp_path, *words.split())
    assert not list(tmp_path.iterdir())


def test_data_function_that_raises(tmp_path):
    (tmp_path / "mine.py").write_text("def data():\n    raise KeyError('no column y')\n")
    out = tmp_path / "out"
    line = error_of("compare", "--data", f"{tmp_path}/mine.py:data", "--out", out)
    assert "mine.py:data raised KeyError: 'no column y'" in line
    assert "line 2" in line
    assert not out.exists()


def test_own_validation_split_is_used(tmp_path, monkeypatch):
    from wsam.compare.request import with_validation

    (tmp_path / "mine.py").write_text(
        "from wsam.lab import Data\npairs = [(float(n), n % 2) for n in range(9)]\n"
        "def data():\n    return Data(pairs, pairs, validation=pairs)\n"
        "def two():\n    return pairs, pairs\n"
    )
    own = Run(data=f"{tmp_path}/mine.py:data", method="vanilla")
    assert with_validation(own).validation is None
    assert with_validation(own.replace(data=f"{tmp_path}/mine.py:two")).validation == 0.2
    assert with_validation(Run(method="vanilla", validation=9)).validation == 9
    with pytest.raises(ValueError, match=r"loaders has a training loader: .*validation="):
        with_validation(own.replace(data=f"{OWN}:loaders"))


@pytest.mark.slow
def test_killed_comparison_continues(tmp_path):
    """kill -9 in the search and in the final runs; then the same command trains the rest."""
    out = tmp_path / "out"
    words = [*DIGITS.split(), "--trials", "3", "--workers", "1", "--out", str(out)]
    for folder in (search_folder(out), final_folder(out)):
        process = subprocess.Popen(
            [sys.executable, "-m", "wsam", "compare", *words],
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        while not list(folder.glob("*.json")):
            assert process.poll() is None, "ended before it was killed"
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/*.json")}
    found = json.loads(wsam_command("compare", *words, "--json").stdout)
    assert [len(row["values"]) for row in found["methods"].values()] == [2, 2]
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())


@pytest.mark.parametrize(
    ("words", "parallel"), [("--gpus 1", 3), ("", 40), ("--workers 2", 2), ("--workers 99", 40)]
)
def test_a_comparison_on_ray_plans_with_the_cluster(tmp_path, monkeypatch, words, parallel):
    """It runs as many jobs at a time as the cluster does, and connects to it once."""
    connections = []
    ray = SimpleNamespace(
        is_initialized=lambda: bool(connections),
        init=lambda **_: connections.append("open"),
        shutdown=lambda: connections.append("closed"),
        cluster_resources=lambda: {"CPU": 40.0, "GPU": 3.0},
    )

    def stop(request, out, executor, *_):
        assert executor.keeps_workers == (not executor.gpus)
        raise ValueError(f"{executor.parallel} jobs at a time")

    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr("wsam.compare.Comparison", stop)
    words = f"--executor ray --address auto --device cpu {words}".split()
    line = error_of("compare", *words, "--out", tmp_path)
    assert line == f"wsam: {parallel} jobs at a time\n"
    assert connections == ["open", "closed"]


@pytest.mark.slow
def test_ray(tmp_path):
    pytest.importorskip("ray")
    words = [*DIGITS.split(), "--executor", "ray", "--workers", "2", "--out", str(tmp_path)]
    found = json.loads(wsam_command("compare", *words, "--json").stdout)
    assert [len(row["values"]) for row in found["methods"].values()] == [2, 2]
