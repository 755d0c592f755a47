"""Rows that share their first epochs with SGD: benchmarks/common_start.py."""

from pathlib import Path

import pytest
from programs import load_program

from wsam.lab import records
from wsam.lab.execution import ExecutionConfig
from wsam.lab.run import Run
from wsam.lab.train import train

TIMES = {"seconds", "images_per_second"}


@pytest.mark.slow
def test_records_equal_those_of_whole_runs(tmp_path: Path) -> None:
    """Also of runs that start at different epochs, and of those whose learning rate is held before."""
    program = load_program("common_start")
    base = Run(model="cnn", method="vanilla", base_args={"lr": 0.05, "momentum": 0.9}, epochs=4)
    base = base.replace(train_limit=256, seed=1, augment=True)
    options = {"every": 2, "reuse": True, "start": 0.5}
    half = base.replace(method="wsam", options=options)
    quarter = base.replace(method="wsam", options={"start": 0.75})
    held = [run.replace(decay_start=run.options["start"]) for run in (half, quarter)]
    execution = ExecutionConfig(device="cpu")
    program.train([half], tmp_path / "shared", execution)
    program.train([half, quarter], tmp_path / "shared", execution)
    program.train(held, tmp_path / "shared", execution)
    for run in (half, quarter, *held):
        record = records.read(tmp_path / "shared", run)
        assert record is not None
        whole = train(run, tmp_path / "whole", execution)
        for row, other in zip(record["curve"], whole["curve"], strict=True):
            assert {k: v for k, v in row.items() if k not in TIMES} == {
                k: v for k, v in other.items() if k not in TIMES
            }
        assert record["final"] == whole["final"]
        assert record["seconds"] >= sum(row["seconds"] for row in record["curve"])
    assert not list((tmp_path / "shared").rglob("*.pt")), "checkpoints are removed"
