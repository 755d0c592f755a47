"""The examples run unchanged. Those for several processes are in tests/distributed."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from helpers import same

EXAMPLES = Path(__file__).parents[2] / "examples"
WHOLE_PROGRAMS = {"finetune_lora.py", "nanogpt.py"}
"""Examples with a model and options of their own."""
MULTI_PROCESS = {"torchrun_ddp.py", "fsdp2.py"}
SINGLE_PROCESS = {path.name for path in EXAMPLES.glob("*.py")} - MULTI_PROCESS


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Run an example as `python examples/NAME ARGUMENTS` does; return its output."""

    def run(name: str, *arguments: str) -> str:
        path = str(EXAMPLES / name)
        monkeypatch.setattr(sys, "argv", [path, *arguments])
        runpy.run_path(path, run_name="__main__")
        return capsys.readouterr().out

    return run


def interrupt(run, saves: int, *command: str) -> None:
    """Run an example that is interrupted after it has saved a checkpoint so many times."""
    save, count = torch.save, 0

    def save_and_count(state: object, path: object) -> None:
        nonlocal count
        save(state, path)
        count += 1
        if count == saves:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", save_and_count)
        with pytest.raises(KeyboardInterrupt):
            run(*command)


def numbers(text: str, word: str) -> list[float]:
    return [float(found) for found in re.findall(rf"{word} (-?[\d.]+)", text)]


@pytest.mark.slow
def test_plain_loop(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted run is continued and ends as one that was not."""
    whole, interrupted = str(tmp_path / "whole.pt"), str(tmp_path / "interrupted.pt")
    output = run("plain_loop.py", whole)
    errors = numbers(output, "test error")
    assert len(errors) == 8
    assert errors[-1] < 10 < 20 < errors[0]

    def stop(text: str) -> None:
        if text.startswith("epoch 3"):
            raise KeyboardInterrupt

    monkeypatch.setattr("builtins.print", stop)
    with pytest.raises(KeyboardInterrupt):
        run("plain_loop.py", interrupted)
    monkeypatch.undo()
    assert numbers(run("plain_loop.py", interrupted), "test error") == errors[3:]
    saved, resumed = (torch.load(path, weights_only=True) for path in (whole, interrupted))
    assert saved["optimizer"]["param_groups"][0]["sam_step"] == 8 * 32
    assert same(resumed, saved)


@pytest.mark.slow
def test_finetune_transformer(run, tmp_path: Path) -> None:
    import transformers

    folder = tmp_path / "saved"
    module = runpy.run_path(str(EXAMPLES / "finetune_transformer.py"), run_name="example")
    transformers.BertForSequenceClassification(module["SMALL"]).save_pretrained(folder)
    output = run("finetune_transformer.py", str(folder), "eager")  # without a compiler
    losses = numbers(output, "loss")
    assert losses[-1] < 0.2
    assert numbers(output, "accuracy")[0] > 90


@pytest.mark.slow
def test_finetune_lora(run, tmp_path: Path) -> None:
    """The pretrained weights are reused, and an interrupted run ends as one that was not."""
    pretrained = ("--pretrained", str(tmp_path / "vit.pt"), "--pretrain-epochs", "8")
    whole, part = str(tmp_path / "whole.pt"), str(tmp_path / "part.pt")
    output = run("finetune_lora.py", *pretrained, "--checkpoint", whole, "--epochs", "8")
    assert numbers(output, "loss")[-1] < 0.8
    assert numbers(output, "test accuracy")[-1] > 60
    assert 5 < float(re.search(r"trained, ([\d.]+)%", output)[1]) < 15
    frozen = torch.load(tmp_path / "vit.pt", weights_only=True)

    interrupt(run, 3, "finetune_lora.py", *pretrained, "--checkpoint", part, "--epochs", "8")
    assert torch.load(part, weights_only=True)["scheduler"]["last_epoch"] == 3
    run("finetune_lora.py", *pretrained, "--checkpoint", part, "--epochs", "8")
    saved, resumed = (torch.load(path, weights_only=True) for path in (whole, part))
    assert same(resumed, saved)
    assert not {*saved["adapters"]} & {*frozen} - {"head.weight", "head.bias"}


TINY_GPT = ["--layers=1", "--heads=2", "--width=32", "--block=16", "--batch=8"]
TINY_GPT += ["--lr=0.02", "--warmup=5", "--write=20"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [[], ["--bfloat16", "--micro-batches", "2", "--compile", "eager"]]
)
def test_nanogpt(options: list[str], run, tmp_path: Path) -> None:
    """An interrupted run is continued and ends as one that was not."""
    text, whole, part = (tmp_path / name for name in ("text.txt", "whole.pt", "part.pt"))
    text.write_text("".join(f"{n} and {n + 1} are {2 * n + 1}.\n" for n in range(300)))
    command = (str(text), *TINY_GPT, *options, "--steps", "60", "--evaluate-every", "20")
    output = run("nanogpt.py", *command, "--checkpoint", str(whole))
    losses = numbers(output, "validation loss")
    assert len(losses) == 3
    assert losses[-1] < 1.4 < 1.5 < losses[0]
    assert len(output.split("validation loss")[-1]) > 20

    interrupt(run, 1, "nanogpt.py", *command, "--checkpoint", str(part))
    resumed = run("nanogpt.py", *command, "--checkpoint", str(part))
    assert numbers(resumed, "validation loss") == losses[1:]
    assert same(*(torch.load(path, weights_only=True) for path in (whole, part)))


@pytest.mark.slow
def test_lightning_trainer(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output = run("lightning_trainer.py")
    assert numbers(output, "steps") == [128]
    assert numbers(output, "loss")[-1] < 0.4


@pytest.mark.slow
def test_hugging_face_trainer(run, tmp_path: Path) -> None:
    output = run("hugging_face_trainer.py", str(tmp_path))
    assert numbers(output, "steps")[-1] == 192
    assert numbers(output, "loss")[-1] < 0.5


@pytest.mark.slow
def test_gan(run) -> None:
    radii = numbers(run("gan.py"), "mean radius")
    assert len(radii) == 4
    assert abs(radii[-1] - 2) < 0.5


@pytest.mark.slow
def test_label_noise(run) -> None:
    sgd, sam, wsam = numbers(run("label_noise.py"), "test error")
    assert sam < sgd / 2
    assert wsam < sgd / 2


def test_every_example_is_run() -> None:
    tests = Path(__file__).read_text()
    assert {name for name in SINGLE_PROCESS if f'run("{name}"' in tests} == SINGLE_PROCESS


def test_examples_are_short_and_state_their_command() -> None:
    for name in SINGLE_PROCESS | MULTI_PROCESS:
        text = (EXAMPLES / name).read_text()
        assert len(text.splitlines()) < (160 if name in WHOLE_PROGRAMS else 60), name
        assert re.search(rf"^    (python|torchrun .*) examples/{name}", text, re.MULTILINE), name
