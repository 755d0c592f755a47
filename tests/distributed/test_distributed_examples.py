"""The examples run unchanged, on two processes started by torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

EXAMPLES = Path(__file__).parents[2] / "examples"
WORKER = Path(__file__).parents[1] / "workers" / "example.py"
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def losses(name: str, *words: str) -> list[float]:
    """Run an example; return the losses that it prints."""
    done = subprocess.run(
        [*LAUNCH, str(WORKER), str(EXAMPLES / name), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    return [float(number) for number in re.findall(r"loss (\S+)", done.stdout)]


@pytest.mark.slow
def test_example_torchrun_ddp() -> None:
    values = losses("torchrun_ddp.py", "local")
    assert len(values) == 8
    assert values[-1] < 0.4 < 0.6 < values[0]


@pytest.mark.slow
def test_example_fsdp2(tmp_path: Path) -> None:
    values = losses("fsdp2.py", str(tmp_path))
    assert len(values) == 4
    assert values[-1] < 0.5 * values[0]
    saved = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    whole = saved["optimizer.state.0.weight.exp_avg"]
    assert isinstance(whole, TensorStorageMetadata)
    assert tuple(whole.size) == (64, 20)


@pytest.mark.parametrize("name", ["torchrun_ddp.py", "fsdp2.py"])
def test_examples_are_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < 60
