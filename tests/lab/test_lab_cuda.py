"""The lab on a GPU: captured, compiled and eager runs agree; a captured run resumes."""

import pytest
import torch

from wsam import METHODS
from wsam.lab.callbacks import Callback
from wsam.lab.execution import ExecutionConfig
from wsam.lab.run import Run
from wsam.lab.train import train

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHORT = Run(method="wsam", epochs=3, train_limit=600, batch_size=64)
EAGER = ExecutionConfig(device="cuda", compile=False, capture=False)
CAPTURED = ExecutionConfig(device="cuda", compile=False, capture=True, checkpoint_seconds=0)


def assert_close(one, other, relative):
    for a, b in zip(one["curve"], other["curve"], strict=True):
        for name in ("train_loss", "test_loss", "sharpness"):
            assert a[name] == pytest.approx(b[name], rel=relative, abs=relative), name
        assert a["train_error"] == pytest.approx(b["train_error"], abs=2)
        assert a["lr"] == b["lr"]


@pytest.mark.parametrize("method", ["vanilla", *METHODS])
def test_captured_equals_eager(tmp_path, method):
    run = SHORT.replace(method=method)
    eager = train(run, tmp_path / "eager", EAGER)
    captured = train(run, tmp_path / "captured", CAPTURED)
    assert captured["execution"]["captured"]
    assert_close(eager, captured, 0.02)


def test_compiled_and_captured_in_bf16(tmp_path):
    run = SHORT.replace(precision="bf16")
    eager = train(run, tmp_path / "eager", EAGER)
    fast = train(run, tmp_path / "fast", ExecutionConfig(device="cuda"))
    assert fast["execution"] == {
        "device": "cuda",
        "compiled": True,
        "captured": True,
        "processes": 1,
    }
    assert_close(eager, fast, 0.1)


class Stop(Callback):
    remaining = 12

    def on_step_end(self, metrics):
        self.remaining -= 1
        if self.remaining == 0:
            raise KeyboardInterrupt


def test_a_captured_run_resumes(tmp_path):
    uninterrupted = train(SHORT, tmp_path / "uninterrupted", CAPTURED)
    with pytest.raises(KeyboardInterrupt):
        train(SHORT, tmp_path / "resumed", CAPTURED, [Stop()])
    resumed = train(SHORT, tmp_path / "resumed", CAPTURED)
    assert resumed["resumed"] == 1
    assert_close(uninterrupted, resumed, 0.02)
