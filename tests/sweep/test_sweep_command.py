"""The `wsam sweep` command."""

import json

import pytest
from command import error_of, wsam_command
from recorded import recorded

from wsam.lab import records
from wsam.sweep import InProcess, read_grid

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


@pytest.fixture(autouse=True)
def _in_process(monkeypatch):
    """Execute runs in this process; tests of executors use other processes."""
    monkeypatch.setattr("wsam.sweep.Processes", lambda devices, retries: InProcess(list))


@pytest.fixture
def grid(tmp_path):
    path = tmp_path / "radius.toml"
    path.write_text(GRID)
    return path


def test_grids_that_are_too_large(tmp_path):
    path = tmp_path / "large.toml"
    values = list(range(1, 1001))
    path.write_text(f"[grid]\nrho = {values}\ngamma = {values}\nlr = {values}\n")
    line = error_of("sweep", path, "--out", tmp_path / "out")
    assert line == f"wsam: {path}: 1,000,000,000 grid points: at most 10,000 are allowed\n"


def test_a_grid_file_then_a_search(tmp_path, grid):
    out = tmp_path / "out"
    options = ("--out", out, "--device", "cpu", "--workers", "1")
    done = wsam_command("sweep", grid, *options)
    assert "2 finished; records in" in done.stdout
    assert "lowest test error: SAM ρ 0." in done.stdout
    assert "[2/2] finished" in done.stderr
    words = ("sweep", grid, *options, "--optuna", "--trials", "1", "--json")
    (best,) = json.loads(wsam_command(*words).stdout)
    errors = [records.final_error(record) for record in recorded(out)]
    assert len(errors) == 3, "the grid points were not run again"
    assert best["column"] == "digits cnn"
    assert best["test_error"] == min(errors)
    assert 0.05 <= best["best"]["rho"] <= 0.2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--grid", "rho=0.1,-1"), "rho must be in [0, inf), got -1.0"),
        (("cifer",), "unknown table, figure or search 'cifer'"),
        (("rho", "--trials", "3"), "--trials and --storage need --optuna"),
        (("rho", "--ray", "local", "--submitit", "local"), "--ray or --submitit, not both"),
        (
            ("--grid", "epochs=20,40", "--epochs", "20"),
            "--epochs and the grid both set epochs: give one of them",
        ),
        (
            ("--grid", "precision=fp32,bf16", "--precision", "fp32", "--optuna"),
            "--precision and the grid both set precision",
        ),
        (("rho", "--gpus", "1"), "--gpus needs Ray"),
        (("rho", "--submitit-arg", "a=1"), "--submitit-arg needs submitit"),
        (("rho", "--workers", "0"), "invalid value for '--workers'"),
        (("rho", "--retries", "-1"), "invalid value for '--retries'"),
        (("rho", "--optuna", "--trials", "-1"), "invalid value for '--trials'"),
        (("rho", "--ray", "local", "--gpus", "nan"), "invalid value for '--gpus'"),
        (("rho", "--checkpoint-seconds", "-1"), "checkpoint_seconds must be in [0, inf], got -1.0"),
        (("cifar", "--optuna"), "cifar is not a grid that can be searched; grids: lr-wd"),
        (
            ("rho", "--optuna", "--only", "x"),
            "--only matches none of the columns ResNet18 CIFAR-10",
        ),
    ],
)
def test_wrong_values(tmp_path, words, message):
    assert message in error_of("sweep", *words, "--out", tmp_path)


def test_a_search_skips_a_grid_point_with_a_damaged_record(tmp_path, grid):
    """No other point is trained instead."""
    out, points = tmp_path / "out", read_grid(grid)
    (column,) = points.bases
    names = [f"{points.run(column, point).key}.json" for point in points.points()]
    out.mkdir()
    (out / names[0]).write_text("{")
    words = ("sweep", grid, "--optuna", "--workers", "1", "--device", "cpu", "--out", out)
    printed = wsam_command(*words, status=1).stderr
    assert [line.split()[0] for line in printed.splitlines()] == ["error", "finished"]
    assert sorted(path.name for path in out.glob("*.json")) == sorted(names)
