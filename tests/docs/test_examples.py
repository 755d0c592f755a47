"""The examples run as they stand; those for several processes are in test_distributed_examples."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
TEAMS = {"torchrun_ddp.py", "fsdp2.py"}
HERE = {path.name for path in EXAMPLES.glob("*.py")} - TEAMS


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Run an example as `python examples/NAME WORDS` does; return what it prints."""

    def run(name: str, *words: str) -> str:
        path = str(EXAMPLES / name)
        monkeypatch.setattr(sys, "argv", [path, *words])
        runpy.run_path(path, run_name="__main__")
        return capsys.readouterr().out

    return run


def numbers(text: str, word: str) -> list[float]:
    return [float(found) for found in re.findall(rf"{word} (-?[\d.]+)", text)]


def test_plain_loop(run, tmp_path: Path) -> None:
    told = run("plain_loop.py", str(tmp_path / "saved.pt"))
    errors = numbers(told, "test error")
    assert len(errors) == 20
    assert errors[-1] < 5 < 20 < errors[0]
    assert min(numbers(told, "sharpness")) > 0
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    (group,) = saved["optimizer"]["param_groups"]
    assert group["sam_step"] == 20 * 40
    assert all("momentum_buffer" in each for each in saved["optimizer"]["state"].values())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_amp(run, precision: str) -> None:
    told = run("amp.py", precision)
    losses = numbers(told, "loss")
    assert told.count(precision) == len(losses) == 4
    assert losses[-1] < 0.1 < 0.3 < losses[0]


@pytest.mark.parametrize("way", ["together", "each"])
def test_accumulation(run, way: str) -> None:
    losses = numbers(run("accumulation.py", way), "loss")
    assert len(losses) == 4
    assert losses[-1] < 0.25 < 0.5 < losses[0]


def test_accumulation_differs_by_its_way(run) -> None:
    assert run("accumulation.py", "together") != run("accumulation.py", "each")


@pytest.mark.slow
def test_finetune_transformer(run, tmp_path: Path) -> None:
    import transformers

    folder = tmp_path / "saved"
    module = runpy.run_path(str(EXAMPLES / "finetune_transformer.py"), run_name="example")
    transformers.BertForSequenceClassification(module["SMALL"]).save_pretrained(folder)
    told = run("finetune_transformer.py", str(folder))
    losses = numbers(told, "loss")
    assert losses[-1] < 0.2
    assert numbers(told, "accuracy")[0] > 90


def test_label_noise(run) -> None:
    sgd, sam, wsam = numbers(run("label_noise.py"), "test error")
    assert sam < sgd / 2
    assert wsam < sgd / 2


def test_every_example_is_run() -> None:
    mine = Path(__file__).read_text()
    assert {name for name in HERE if f'run("{name}"' in mine} == HERE


@pytest.mark.parametrize("name", sorted(HERE | TEAMS))
def test_examples_are_short_and_say_how_to_start_them(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    assert len(text.splitlines()) < 60
    assert re.search(rf"^    (python|torchrun .*) examples/{name}", text, re.MULTILINE)
