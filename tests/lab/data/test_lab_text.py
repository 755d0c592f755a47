"""Texts for a character model."""

import pytest
import torch
from command import error_of
from training import CPU, Stop, StopAfter, curve

from wsam.lab.models import TOKENS, Task, build_model
from wsam.lab.problem import make_data_feed
from wsam.lab.run import Run
from wsam.lab.train import train


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "rhyme.txt"
    path.write_text("the cat sat on the mat; " * 40)
    return path


def text_run(path, **settings):
    return Run(data=f"text:{path}", block_size=16, batch_size=32, **settings)


def test_targets_are_the_next_characters(path):
    run = text_run(path, validation=0.1)
    assert run.model == "gpt"
    feed = make_data_feed(run, CPU)
    assert feed.task.outputs == len(set(path.read_text()))
    assert feed.counts == {"train": 49, "validation": 5, "test": 5}
    x, y = feed.splits["train"]
    assert x.shape == y.shape == (49, 16)
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_a_small_gpt_learns_a_rhyme(path, tmp_path):
    run = text_run(path, method="sam", base="adamw", epochs=2, base_args={"lr": 3e-3})
    record = train(run, tmp_path / "runs", CPU)
    first, last = record["curve"][0], record["final"]
    assert record["metric"]["name"] == "loss"
    assert last["test_loss"] < first["test_loss"] < 3
    assert 0 < last["test_error"] < 90
    with pytest.raises(Stop):
        train(run, tmp_path / "parts", CPU, [StopAfter(epochs=2)])
    assert curve(train(run, tmp_path / "parts", CPU)) == curve(record)


def test_a_prediction_does_not_depend_on_later_characters():
    model = build_model("gpt", Task((8,), 5, kind=TOKENS), seed=0).eval()
    x = torch.randint(5, (2, 8), generator=torch.Generator().manual_seed(0))
    changed = torch.cat((x[:, :5], (x[:, 5:] + 1) % 5), 1)
    assert model(x).shape == (2, 5, 8)
    torch.testing.assert_close(model(x)[:, :, :5], model(changed)[:, :, :5])
    assert not torch.allclose(model(x)[:, :, 5:], model(changed)[:, :, 5:])


def test_mistakes(path, tmp_path):
    words = ("train", "--device", "cpu", "--out", tmp_path / "out", "--data")
    for size in (2000, 200_000):
        line = error_of(*words, f"text:{path}", "--block-size", size)
        assert f"too few for two samples of {size}: reduce --block-size" in line
    (tmp_path / "empty.txt").touch()
    assert "empty.txt has 0 characters" in error_of(*words, f"text:{tmp_path / 'empty.txt'}")
    assert "there is no file" in error_of(*words, f"text:{tmp_path / 'none.txt'}")
    with pytest.raises(ValueError, match="--noise needs images"):
        make_data_feed(text_run(path, noise=0.2), CPU)
    line = error_of(*words, f"text:{path}", "--model", "mlp")
    assert "mlp does not fit the inputs of text:" in line
    assert "gpt needs a text" in error_of(*words, "digits", "--model", "gpt")
    path.write_bytes(b"\xff\xfe\x00" * 100)
    assert f"wsam: text:{path}: 'utf-8' codec can't decode" in error_of(*words, f"text:{path}")
