"""`torchrun -m wsam train`: several processes train one run and write one record."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ARGUMENTS = shlex.split(
    "train --data digits --model mlp --method wsam --rho 0.1 --gamma 0.8 --lr 0.05 --epochs 2 "
    "--batch-size 50 --train-limit 400 --device cpu --no-tensorboard"
)


def launch(*words: str, processes: int) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    launcher = torchrun if processes > 1 else []  # standalone: uses a free port
    line = [sys.executable, *launcher, *words]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=240)


def command(out: Path, *extra: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    return launch("-m", "wsam", *ARGUMENTS, "--out", str(out), *extra, processes=processes)


def record(out: Path) -> dict[str, object]:
    (path,) = out.glob("*.json")
    return json.loads(path.read_text())


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert command(alone).returncode == 0
    done = command(together, processes=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test error") == 1  # only rank 0 prints
    one, two = record(alone), record(together)
    assert one["key"] == two["key"]
    assert two["execution"]["processes"] == 2
    for a, b in zip(one["curve"], two["curve"], strict=True):
        assert b["train_loss"] == pytest.approx(a["train_loss"], rel=1e-5)
        assert b["sharpness"] == pytest.approx(a["sharpness"], rel=1e-4)
        assert b["test_error"] == a["test_error"]
    again = command(together, processes=2)
    assert "already finished" in again.stdout


@pytest.mark.slow
def test_a_batch_that_cannot_be_split(tmp_path: Path) -> None:
    done = command(tmp_path, "--batch-size", "51", processes=2)
    assert done.returncode != 0
    assert "a batch size that they can divide, not 51" in done.stderr
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.slow
def test_interrupted_processes_end_with_the_same_record(tmp_path: Path) -> None:
    """Each process restores its own generator, which dropout draws from."""
    worker = str(Path(__file__).parents[1] / "workers" / "lab_processes.py")
    for words in (("uninterrupted",), ("resumed", "stop"), ("resumed",)):
        assert not list((tmp_path / words[0]).glob("*.json"))
        done = launch(worker, str(tmp_path / words[0]), *words[1:], processes=2)
        assert done.returncode == 0, done.stderr
    uninterrupted, resumed = record(tmp_path / "uninterrupted"), record(tmp_path / "resumed")
    assert (uninterrupted["resumed"], resumed["resumed"]) == (0, 1)
    assert resumed["execution"]["processes"] == 2
    for one, other in zip(uninterrupted["curve"], resumed["curve"], strict=True):
        assert other | {"seconds": 0} == one | {"seconds": 0}
