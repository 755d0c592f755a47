"""The command `wsam sweep`."""

import json

import pytest
from command import wsam_command
from recorded import recorded

from wsam.lab import records
from wsam.sweep import read_grid

GRID = """
title = "the radius"
[run]
method = "sam"
epochs = 1
train_limit = 128
test_limit = 64
[grid]
rho = [0.05, 0.2]
"""


@pytest.fixture
def grid(tmp_path):
    path = tmp_path / "radius.toml"
    path.write_text(GRID)
    return path


@pytest.mark.slow
def test_a_grid_file_and_a_search(tmp_path, grid):
    out = tmp_path / "out"
    options = ("--out", out, "--device", "cpu", "--workers", "1")
    done = wsam_command("sweep", grid, *options)
    assert "2 finished; records in" in done.stdout
    assert "Test error (%) by the radius" in done.stdout
    assert "[2/2] finished" in done.stderr
    words = ("sweep", grid, *options, "--optuna", "--trials", "1", "--json")
    (best,) = json.loads(wsam_command(*words).stdout)
    errors = [records.final_error(record) for record in recorded(out)]
    assert len(errors) == 3, "points of the grid are not run again"
    assert best["column"] == "digits cnn"
    assert best["test_error"] == min(errors)
    assert 0.05 <= best["best"]["rho"] <= 0.2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("cifer",), "unknown table, figure or search 'cifer'"),
        (("rho", "--trials", "3"), "--trials and --storage need --optuna"),
        (("rho", "--ray", "local", "--submitit", "local"), "--ray or --submitit, not both"),
        (("rho", "--gpus", "1"), "--gpus needs --ray"),
        (("rho", "--submitit-arg", "a=1"), "--submitit-arg needs --submitit"),
        (("rho", "--workers", "0"), "workers must be at least 1, got 0"),
        (("rho", "--retries", "-1"), "--retries must be at least 0, got -1"),
        (("rho", "--optuna", "--trials", "-1"), "--trials must be at least 0, got -1"),
        (("rho", "--ray", "local", "--gpus", "nan"), "--gpus must be at least 0, got nan"),
        (("rho", "--checkpoint-seconds", "-1"), "checkpoint_seconds must be in [0, inf], got -1.0"),
        (("cifar", "--optuna"), "cifar is no grid that can be searched; those are: lr-wd"),
        (("rho", "--optuna", "--only", "x"), "--only names none of the columns: ResNet18 CIFAR-10"),
    ],
)
def test_usage_errors_are_one_line(tmp_path, words, message):
    stderr = wsam_command("sweep", *words, "--out", tmp_path, status=2).stderr
    assert message in stderr
    assert stderr.startswith("wsam: ")
    assert stderr.count("\n") == 1


def test_help_has_an_example():
    shown = wsam_command("sweep", "--help").stdout
    assert "wsam sweep rho-gamma --optuna --trials 20" in " ".join(shown.split())


@pytest.mark.slow
def test_a_search_skips_a_point_with_a_damaged_record(tmp_path, grid):
    out, points = tmp_path / "out", read_grid(grid)
    (column,) = points.bases
    names = [f"{points.run(column, point).key}.json" for point in points.points()]
    out.mkdir()
    (out / names[0]).write_text("{")
    words = ("sweep", grid, "--optuna", "--workers", "1", "--device", "cpu", "--out", out)
    stderr = wsam_command(*words, status=1).stderr
    assert [line.split()[0] for line in stderr.splitlines()] == ["error", "finished"]
    assert sorted(path.name for path in out.glob("*.json")) == sorted(names)
