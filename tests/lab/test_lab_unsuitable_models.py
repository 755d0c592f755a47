"""Models that do not accept the data are refused before a run creates any files."""

import sys
from pathlib import Path

import pytest
import torch
from command import error_of
from torch import nn
from training import CPU, SHORT, StopAfter

from wsam.lab import models
from wsam.lab.checks import check_forward
from wsam.lab.models import Task, build_model
from wsam.lab.run import Run
from wsam.lab.train import train

DIGITS = Task((1, 8, 8), 10, "digits")
DEVICE = torch.device("cpu")


class FixedSize(nn.Module):
    """Accepts images of one size only, like some models of timm."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(1, classes)

    def forward(self, x):
        torch._assert(x.shape[-1] == 224, f"Input height ({x.shape[-1]}) doesn't match (224)")
        return self.head(x.mean((1, 2, 3))[:, None])


class FakeTimm:
    @staticmethod
    def create_model(name, pretrained, num_classes, in_chans):
        return FixedSize(num_classes)


@pytest.mark.slow
def test_images_smaller_than_a_patch(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "runs"
    words = ("--model", "deit-base", "--data", "digits", "--epochs", "1", "--device", "cpu")
    line = error_of("train", *words, "--out", out)
    assert line.startswith("wsam: deit-base does not accept the images of digits (2 x 1 x 8 x 8): ")
    assert not out.exists()


@pytest.mark.slow
def test_data_that_does_not_match_pretrained_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    few = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.DeiTConfig(**few, intermediate_size=32, image_size=32, num_labels=10)
    transformers.DeiTForImageClassification(config).save_pretrained(tmp_path)
    run = SHORT.replace(model="deit-base", pretrained=str(tmp_path))
    with pytest.raises(ValueError, match="deit-base does not accept the images of digits"):
        train(run, tmp_path / "runs", CPU)
    assert not (tmp_path / "runs").exists()
    with pytest.raises(ValueError, match="with the 7 classes of fruit"):
        build_model("deit-base", Task((3, 32, 32), 7, "fruit"), seed=0, pretrained=str(tmp_path))


def test_a_model_of_timm_that_rejects_the_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "timm", FakeTimm)
    out = tmp_path / "runs"
    line = error_of("train", "--model", "timm:strict", "--device", "cpu", "--out", out)
    assert line == (
        "wsam: timm:strict does not accept the images of digits (2 x 1 x 8 x 8): "
        "Input height (8) doesn't match (224)\n"
    )
    assert not out.exists()


def test_a_batch_too_small_for_batchnorm(tmp_path: Path) -> None:
    run = SHORT.replace(model="resnet18", batch_size=1)
    with pytest.raises(ValueError, match=r"resnet18 .* \(1 x 1 x 8 x 8\): Expected more than 1"):
        train(run, tmp_path, CPU)
    assert not list(tmp_path.iterdir())


def test_own_models_accept_the_smallest_images() -> None:
    narrow = models.WideResNet(DIGITS, depth=10, widen=1)
    for model in (narrow, *(build_model(name, DIGITS, 0) for name in ("cnn", "mlp", "resnet18"))):
        check_forward(SHORT, model, torch.zeros(2, *DIGITS.shape), DEVICE)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), KeyboardInterrupt()])
def test_other_errors_of_the_check_are_not_converted(error: BaseException) -> None:
    class Failing(nn.Module):
        def forward(self, x):
            raise error

    with pytest.raises(type(error)):
        check_forward(SHORT, Failing(), torch.zeros(2, 1, 8, 8), DEVICE)


def test_the_check_changes_neither_model_nor_generators() -> None:
    model = nn.Sequential(build_model("cnn", DIGITS, seed=0), nn.Dropout(0.5))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(3)
    check_forward(Run(), model, torch.randn(2, 1, 8, 8), DEVICE)
    drawn = torch.rand(4)
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    assert model.training
    torch.manual_seed(3)
    torch.randn(2, 1, 8, 8)
    assert torch.equal(drawn, torch.rand(4))


def test_a_batch_size_larger_than_the_data_is_logged(tmp_path: Path) -> None:
    callback = StopAfter()
    large = SHORT.replace(epochs=1, batch_size=100_000)
    assert train(large, tmp_path, CPU, [callback])["settings"]["batch_size"] == 100_000
    (message,) = callback.messages
    assert message.startswith("a step uses all 300 training samples")
    assert message.endswith("batch size 100000")
    callback = StopAfter()
    train(SHORT.replace(epochs=1, batch_size=300), tmp_path, CPU, [callback])
    assert callback.messages == []
