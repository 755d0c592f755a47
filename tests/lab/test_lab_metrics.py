"""Metrics: which fit a problem, and functions of one's own."""

from pathlib import Path

import own_problem
import pytest
import torch
from command import wsam_command
from recorded import recorded
from training import CPU

from wsam.lab import Data, Metric, fit, records
from wsam.lab.execution import ExecutionConfig
from wsam.lab.loaded_model import load_model
from wsam.lab.run import Run
from wsam.lab.train import train
from wsam.report.commands import commands
from wsam.report.results import gather

FILE = Path(own_problem.__file__)
SHORT = {"epochs": 2, "batch_size": 32, "execution": CPU}


@pytest.fixture
def prices(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{n},{1.5 * n}\n" for n in range(60))
    (tmp_path / "t.csv").write_text("a,price\n" + rows)
    return {"data": "table:t.csv", "target": "price"}


@pytest.mark.parametrize("metric", ["error", "accuracy", "macro-f1"])
def test_a_metric_of_classes_is_refused_for_numbers(prices, metric, tmp_path):
    with pytest.raises(ValueError, match=rf"{metric} needs classes, .*targets of 2 of float32"):
        train(Run(**prices, metric=metric), tmp_path / "out", CPU)
    assert not (tmp_path / "out").exists()


def test_a_metric_of_numbers_is_refused_for_classes(tmp_path):
    with pytest.raises(ValueError, match="mse needs one output for each number: mlp on digits"):
        train(Run(metric="mse", model="mlp"), tmp_path / "out", CPU)
    own_loss = Data(*own_problem.classes(), loss=torch.nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match=r"one output for each number: .* outputs of 2 x 3"):
        fit(own_problem.net, own_loss, metric="mse", **SHORT)
    assert not (tmp_path / "out").exists()


def test_scores_of_classes_are_needed():
    data = Data(*own_problem.classes(), loss=lambda output, target: output[:, 0].square())
    with pytest.raises(ValueError, match="macro-f1 needs classes, and one score for each"):
        fit(Vectors(), data, metric="macro-f1", **SHORT)


class Vectors(torch.nn.Linear):
    """Returns scores of another shape than the targets."""

    def __init__(self):
        super().__init__(4, 3)

    def forward(self, x):
        return super().forward(x)[:, :, None]


def largest(outputs, targets):
    """Return one value per sample."""
    return (outputs[:, 0] - targets).abs()


def test_a_plain_function_is_a_metric_to_minimize(tmp_path):
    record = fit(own_problem.line, own_problem.numbers, metric=largest, out=tmp_path, **SHORT)
    assert record["metric"] == {
        "name": "largest", "unit": "", "lower_is_better": True, "split": "test",
    }  # fmt: skip
    assert records.objective(record) == record["final"]["test_largest"] > 0
    assert record["settings"]["metric"].endswith("test_lab_metrics.py:largest")
    wrapped = Metric("near", lambda o, t: (o[:, 0] - t).abs() < 1, lower_is_better=False)
    own = fit(own_problem.line, own_problem.numbers, metric=wrapped, out=tmp_path, **SHORT)
    assert records.objective(own) == -own["final"]["test_near"]
    assert own["settings"]["metric"] == "object:Metric"
    unnamed = fit(own_problem.line, own_problem.numbers, metric=lambda o, t: 1, **SHORT)
    assert unnamed["final"]["test_metric"] == 1.0
    by_key = {result.run.key: result for result in gather(tmp_path).results}
    assert commands(by_key[record["key"]])
    assert commands(by_key[own["key"]]) == []


def test_a_function_of_a_file_as_metric(tmp_path, monkeypatch):
    monkeypatch.chdir(FILE.parent)
    words = ("--model", "own_problem.py:line", "--data", "own_problem.py:numbers", "--epochs", 1)
    where = ("--device", "cpu", "--out", tmp_path)
    wsam_command("train", *words, *where, "--metric", "own_problem.py:r2")
    (record,) = recorded(tmp_path)
    assert record["metric"]["name"] == "r2"
    assert record["metric"]["lower_is_better"] is True
    (tmp_path / "bad.py").write_text("def f(o, t):\n    return o.nothing\n")
    run = Run(data="own_problem.py:numbers", model="own_problem.py:line", epochs=1)
    with pytest.raises(ValueError, match=r"the metric f raised AttributeError.*bad\.py, line 2\)"):
        train(run.replace(metric=f"{tmp_path}/bad.py:f"), tmp_path, CPU)


def test_a_record_does_not_execute_its_metric(tmp_path):
    """Only `--metric` of a command executes the code of a metric."""
    path = tmp_path / "mine.py"
    path.write_text("from pathlib import Path\n\nPath(__file__).with_suffix('.ran').touch()\n")
    run = Run(model="mlp", data="digits", epochs=1, train_limit=64, test_limit=32)
    record = train(run, tmp_path, ExecutionConfig(device="cpu", keep_weights=True))
    named = run.replace(metric=f"{path}:f")
    other = {**record, "settings": named.to_dict(), "key": named.key}
    records.write(tmp_path, named, other)
    work = records.work_folder(tmp_path, named)
    records.work_folder(tmp_path, run).rename(work)
    loaded = load_model(records.record_path(tmp_path, named), CPU, samples=16)
    assert loaded.model is not None
    assert not path.with_suffix(".ran").exists()
