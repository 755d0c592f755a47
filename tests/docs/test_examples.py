"""The examples run unchanged. Those for several processes are in tests/distributed."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
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


def numbers(text: str, word: str) -> list[float]:
    return [float(found) for found in re.findall(rf"{word} (-?[\d.]+)", text)]


@pytest.mark.slow
def test_plain_loop(run, tmp_path: Path) -> None:
    output = run("plain_loop.py", str(tmp_path / "saved.pt"))
    errors = numbers(output, "test error")
    assert len(errors) == 20
    assert errors[-1] < 5 < 20 < errors[0]
    assert min(numbers(output, "sharpness")) > 0
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    (group,) = saved["optimizer"]["param_groups"]
    assert group["sam_step"] == 20 * 40
    assert all("momentum_buffer" in each for each in saved["optimizer"]["state"].values())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_amp(run, precision: str) -> None:
    output = run("amp.py", precision)
    losses = numbers(output, "loss")
    assert output.count(precision) == len(losses) == 4
    assert losses[-1] < 0.1 < 0.3 < losses[0]


def test_accumulation(run) -> None:
    modes = [numbers(run("accumulation.py", mode), "loss") for mode in ("together", "each")]
    for losses in modes:
        assert len(losses) == 4
        assert losses[-1] < 0.25 < 0.5 < losses[0]
    assert modes[0] != modes[1]


@pytest.mark.slow
def test_finetune_transformer(run, tmp_path: Path) -> None:
    import transformers

    folder = tmp_path / "saved"
    module = runpy.run_path(str(EXAMPLES / "finetune_transformer.py"), run_name="example")
    transformers.BertForSequenceClassification(module["SMALL"]).save_pretrained(folder)
    output = run("finetune_transformer.py", str(folder))
    losses = numbers(output, "loss")
    assert losses[-1] < 0.2
    assert numbers(output, "accuracy")[0] > 90


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
        assert len(text.splitlines()) < 60, name
        assert re.search(rf"^    (python|torchrun .*) examples/{name}", text, re.MULTILINE), name
