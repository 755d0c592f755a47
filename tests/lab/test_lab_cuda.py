"""The lab on a GPU: captured, compiled and eager runs agree, and a resumed one goes on."""

import pytest
import torch

from wsam import METHODS
from wsam.lab.means import Means
from wsam.lab.run import Run
from wsam.lab.train import train
from wsam.lab.watch import Watcher

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHORT = Run(method="wsam", epochs=3, train_limit=600, batch_size=64)
EAGER = Means(device="cuda", compile=False, capture=False)
CAPTURED = Means(device="cuda", compile=False, capture=True, checkpoint_seconds=0)


def assert_alike(one, other, relative):
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
    assert_alike(eager, captured, 0.02)


def test_compiled_and_captured_in_bf16(tmp_path):
    run = SHORT.replace(precision="bf16")
    eager = train(run, tmp_path / "eager", EAGER)
    fast = train(run, tmp_path / "fast", Means(device="cuda"))
    assert fast["execution"] == {
        "device": "cuda",
        "compiled": True,
        "captured": True,
        "processes": 1,
    }
    assert_alike(eager, fast, 0.1)


class Stop(Watcher):
    def step(self, row):
        self.left = getattr(self, "left", 12) - 1
        if self.left == 0:
            raise KeyboardInterrupt


def test_a_captured_run_resumes(tmp_path):
    whole = train(SHORT, tmp_path / "whole", CAPTURED)
    with pytest.raises(KeyboardInterrupt):
        train(SHORT, tmp_path / "broken", CAPTURED, [Stop()])
    resumed = train(SHORT, tmp_path / "broken", CAPTURED)
    assert resumed["resumed"] == 1
    assert_alike(whole, resumed, 0.02)
