"""Models: sizes, reproducible weights, optional libraries."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from wsam.lab import models
from wsam.lab.models import Task, build_model

CIFAR = Task((3, 32, 32), 10)
DIGITS = Task((1, 8, 8), 10)


@pytest.mark.parametrize(
    ("name", "task", "count"),
    [
        ("resnet18", CIFAR, 11_173_962),
        ("resnet18", Task((3, 32, 32), 100), 11_220_132),
        ("wrn-28-10", CIFAR, 36_479_194),
        ("wrn-28-10", Task((3, 32, 32), 100), 36_536_884),
        ("cnn", DIGITS, 24_058),
        ("mlp", DIGITS, 8_970),
    ],
)
def test_parameter_counts(name, task, count):
    with torch.device("meta"):
        model = models._BUILDERS[name](task)
    assert models.parameter_count(model) == count


@pytest.mark.parametrize("name", ["resnet18", "cnn", "mlp"])
@pytest.mark.parametrize("task", [DIGITS, CIFAR])
def test_forward_and_backward(name, task):
    model = build_model(name, task, seed=0)
    loss = model(torch.randn(2, *task.shape)).square().mean()
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None for p in model.parameters())


def test_a_small_wide_resnet():
    model = models.WideResNet(CIFAR, depth=10, widen=1)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert len(list(model.blocks)) == 3
    assert model.blocks[1].conv1.stride == (2, 2)


def test_resnet_for_cifar_does_not_downsample_before_its_blocks():
    model = build_model("resnet18", CIFAR, seed=0)
    assert model.stem.kernel_size == (3, 3)
    assert model.stem(torch.zeros(1, 3, 32, 32)).shape == (1, 64, 32, 32)
    assert model.blocks(torch.zeros(1, 64, 32, 32)).shape == (1, 512, 4, 4)


def test_weights_depend_on_the_seed_and_leave_the_global_generator_unchanged():
    torch.manual_seed(7)
    one = build_model("cnn", DIGITS, seed=3).state_dict()
    after = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(after, torch.rand(1))
    same, other = (
        build_model("cnn", DIGITS, seed=3).state_dict(),
        build_model("cnn", DIGITS, seed=4).state_dict(),
    )
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["0.weight"], other["0.weight"])


def test_he_initialization():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Conv2d(64, 128, 3), nn.Linear(100, 10))
        models.he_init(layers)
    assert layers[0].weight.std().item() == pytest.approx((2 / (128 * 9)) ** 0.5, rel=0.02)
    assert layers[1].bias.abs().max() == 0


def test_models_without_pretrained_weights():
    with pytest.raises(ValueError, match="cnn has no pretrained weights"):
        build_model("cnn", DIGITS, seed=0, pretrained="somewhere")


def test_missing_timm(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match=r"timm cannot create 'resnet50': .*timm"):
        build_model("timm:resnet50", CIFAR, seed=0)


def test_timm_models_match_the_task(monkeypatch):
    class Timm:
        @staticmethod
        def create_model(name, pretrained, num_classes, in_chans):
            if name != "tiny":
                raise RuntimeError(f"Unknown model ({name})")
            assert (pretrained, in_chans) == (False, 3)
            return nn.Linear(4, num_classes)

    monkeypatch.setitem(sys.modules, "timm", Timm)
    assert build_model("timm:tiny", CIFAR, seed=0).out_features == 10
    with pytest.raises(ValueError, match="timm cannot create 'huge'"):
        build_model("timm:huge", CIFAR, seed=0)


@pytest.mark.slow
def test_deit_from_a_local_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.DeiTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=32,
        num_labels=10,
    )
    saved = transformers.DeiTForImageClassification(config)
    saved.save_pretrained(tmp_path)
    model = build_model("deit-base", CIFAR, seed=0, pretrained=str(tmp_path)).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model(x), saved.eval()(x).logits)


@pytest.mark.slow
def test_deit_base_has_86_million_parameters():
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = models.DeiT(Task((3, 224, 224), 1000))
    assert models.parameter_count(model) == pytest.approx(86.6e6, rel=0.01)


def test_the_lab_imports_no_optional_library():
    optional = ["transformers", "timm", "sklearn", "PIL", "tensorboard", "rich", "torchvision"]
    code = f"import sys, wsam.lab.train; print([m for m in {optional} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
