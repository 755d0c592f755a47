"""Validation splits: which samples, which figures, and when the test set is read."""

import math

import pytest
import torch
from command import error_of, wsam_command
from training import CPU, SHORT, Stop, StopAfter, curve

from wsam.lab import records
from wsam.lab.data.feed import split_validation
from wsam.lab.problem import make_data_feed
from wsam.lab.train import train

HELD_OUT = SHORT.replace(validation=0.2)


def images(feed, split):
    return torch.cat([x for x, _ in feed.evaluation(split)]).flatten(1)


def test_the_split_is_a_partition_fixed_by_its_seed():
    train_part, held_out = split_validation(100, 0.25, seed=3)
    assert len(held_out) == 25
    assert sorted([*train_part.tolist(), *held_out.tolist()]) == list(range(100))
    assert torch.equal(held_out, split_validation(100, 25, seed=3)[1])
    assert not torch.equal(held_out, split_validation(100, 25, seed=4)[1])


@pytest.mark.parametrize("size", [0.001, 100, 0.999])
def test_both_parts_need_a_sample(size):
    with pytest.raises(ValueError, match="of 100 samples for validation"):
        split_validation(100, size, seed=0)


def test_held_out_images_are_not_trained_on_and_have_clean_labels():
    whole = make_data_feed(SHORT, CPU)
    feed = make_data_feed(HELD_OUT.replace(noise=1.0), CPU)
    assert feed.counts == {"train": 240, "validation": 60, "test": 100}
    kept, held_out = split_validation(300, 0.2, 0)
    assert torch.equal(feed.splits["validation"].labels, whole.splits["train"].labels[held_out])
    assert torch.equal(feed.splits["validation"].images, whole.splits["train"].images[held_out])
    assert torch.equal(feed.splits["train"].images, whole.splits["train"].images[kept])
    assert not torch.equal(feed.splits["train"].labels, whole.splits["train"].labels[kept])
    # The run's seed changes the order and the weights, not the split.
    other = make_data_feed(HELD_OUT.replace(seed=1), CPU)
    assert torch.equal(other.splits["validation"].images, feed.splits["validation"].images)


def test_the_test_set_is_read_once_at_the_end(tmp_path, monkeypatch):
    from wsam.lab.data.image_feed import MemoryFeed

    reads, evaluation = [], MemoryFeed.evaluation
    monkeypatch.setattr(
        MemoryFeed, "evaluation", lambda feed, split: reads.append(split) or evaluation(feed, split)
    )
    record = train(HELD_OUT, tmp_path, CPU)
    assert reads == ["validation"] * 3 + ["test"]
    first, *_, last = record["curve"]
    assert first["validation_error"] is not None
    assert "test_error" not in first
    assert last["test_error"] == record["final"]["test_error"]
    assert record["metric"]["split"] == "validation"
    assert record["data"]["validation"] == 60
    assert records.read(tmp_path, HELD_OUT) == record
    assert records.objective(record) == last["validation_error"]
    assert records.objective_name(record) == "validation error"


def test_without_a_split_the_objective_is_the_test_error(tmp_path):
    record = train(SHORT, tmp_path, CPU)
    assert records.objective(record) == record["curve"][-1]["test_error"]
    assert list(record["final"]) == [
        *("epoch", "train_loss", "train_error", "sharpness", "test_loss", "test_error")
    ]
    old = {name: value for name, value in record.items() if name != "metric"}
    assert records.objective(old) == records.objective(record)
    assert records.objective_name(old) == "test error"


def test_a_run_with_a_split_resumes(tmp_path):
    whole = train(HELD_OUT, tmp_path / "whole", CPU)
    with pytest.raises(Stop):
        train(HELD_OUT, tmp_path / "parts", CPU, [StopAfter(epochs=3)])
    assert curve(train(HELD_OUT, tmp_path / "parts", CPU)) == curve(whole)


def test_the_objective_of_a_failed_run_is_none(tmp_path):
    record = train(HELD_OUT.replace(base_args={"lr": 1e30}), tmp_path, CPU)
    assert record["status"] == "failed"
    assert records.objective(record) is None


def test_settings():
    assert "validation" not in SHORT.canonical
    assert SHORT.replace(validation_seed=7).key == SHORT.key
    assert HELD_OUT.validation_seed == 0
    assert HELD_OUT.replace(validation_seed=1).key != HELD_OUT.key
    assert SHORT.replace(validation=60).key != HELD_OUT.key
    for wrong in (0, 1.5, -3, math.nan):
        with pytest.raises(ValueError, match="validation must be"):
            SHORT.replace(validation=wrong)
    with pytest.raises(TypeError, match="validation must be"):
        SHORT.replace(validation="0.1")


def test_command(tmp_path):
    words = ("train", "--epochs", 1, "--train-limit", 200, "--device", "cpu", "--out", tmp_path)
    done = wsam_command(*words, "--validation", "0.25", "--validation-seed", 3)
    assert "validation error" in done.stderr
    assert "test error" not in done.stderr
    assert "test error" in done.stdout
    (path,) = tmp_path.glob("*.json")
    settings = records.read_file(path)["settings"]
    assert (settings["validation"], settings["validation_seed"]) == (0.25, 3)
    assert "invalid value for '--validation'" in error_of(*words, "--validation", "half")
    assert "validation must be in (0, 1)" in error_of(*words, "--validation", "1.0")
