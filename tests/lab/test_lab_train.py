"""Training of one run: what it learns and what it records."""

import json
import os
from collections import namedtuple
from dataclasses import replace

import pytest
import torch
from recorded import recorded
from torch.nn.functional import cross_entropy
from training import CPU, SHORT, Stop, StopAfter, curve

from wsam import METHODS
from wsam.lab import optimizers, records, step
from wsam.lab.checkpoint import save_state
from wsam.lab.data import datasets
from wsam.lab.data.feed import derive_seed
from wsam.lab.distributed import DistributedContext
from wsam.lab.evaluation import evaluate
from wsam.lab.execution import ExecutionConfig
from wsam.lab.loaded_model import FixedBatches, restore
from wsam.lab.models import Task, build_model
from wsam.lab.problem import Problem, make_data_feed
from wsam.lab.run import Run
from wsam.lab.train import train
from wsam.lab.trainer import Trainer


def test_every_method_trains_and_is_recorded(tmp_path):
    run = SHORT.replace(epochs=1)
    for method in ("vanilla", *METHODS):
        record = train(run.replace(method=method), tmp_path, CPU)
        assert record["status"] == "finished", method
        row = record["curve"][0]
        assert 0 < row["train_loss"] < 4
        assert 0 <= row["test_error"] <= 100
        has_one_pass = method in ("vanilla", "msam")
        assert (row["sharpness"] is None) == has_one_pass
    assert len(recorded(tmp_path)) == len(METHODS) + 1


@pytest.mark.parametrize("geometry", ["adaptive", "fisher", "masked"])
def test_every_geometry_trains(tmp_path, geometry):
    run = SHORT.replace(epochs=1, geometry={"name": geometry}, options={"lean": True})
    assert train(run, tmp_path, CPU)["status"] == "finished"


def test_every_and_reuse(tmp_path):
    """The sharpness is the mean over the two-pass steps; the others do not measure it."""
    rows = []
    for options in ({}, {"every": 2}, {"every": 2, "reuse": True}):
        record = train(SHORT.replace(epochs=1, options=options), tmp_path, CPU)
        rows.append(record["curve"][0])
        assert record["curve"][0]["sharpness"] > 0, options
    assert len({row["train_loss"] for row in rows}) == 3


@pytest.mark.parametrize(
    "base", ["adam", "adamw", "rmsprop", "adagrad", "adadelta", "nadam", "radam"]
)
def test_every_base_trains(tmp_path, base):
    run = SHORT.replace(epochs=1, base=base, method="coupled_wsam")
    assert train(run, tmp_path, CPU)["status"] == "finished"


@pytest.mark.parametrize("precondition", [False, True])
def test_the_published_form_is_the_default(precondition):
    run = SHORT.replace(base="adamw", options={"precondition": precondition})
    model = torch.nn.Linear(2, 2)
    assert optimizers.make_optimizer(run, model).rule.precondition is precondition
    vanilla = optimizers.make_optimizer(run.replace(method="vanilla"), model)
    assert type(vanilla) is torch.optim.AdamW


def test_digits_are_learned(tmp_path):
    record = train(Run(model="mlp", method="sam", epochs=12), tmp_path, CPU)
    assert record["final"]["test_error"] < 6
    losses = [row["train_loss"] for row in record["curve"]]
    assert losses[-1] < 0.3 * losses[0]
    assert records.final_error(record) == record["curve"][-1]["test_error"]


def test_vanilla_equals_a_plain_loop(tmp_path):
    run = SHORT.replace(method="vanilla", base_args={"lr": 0.1, "nesterov": True})
    record = train(run, tmp_path, CPU)
    feed = make_data_feed(run, CPU)
    model = build_model("cnn", Task(feed.task.shape, 10), seed=0).to(
        memory_format=torch.channels_last
    )
    opt = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3
    )
    steps = run.epochs * feed.steps
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    for row in record["curve"]:
        losses, wrong = [], 0
        for x, y in feed.epoch():
            opt.zero_grad()
            logits = model(x)
            loss = cross_entropy(logits, y)
            loss.backward()
            rate = opt.param_groups[0]["lr"]
            opt.step()
            schedule.step()
            losses.append(loss.item())
            wrong += (logits.argmax(1) != y).sum().item()
        assert row["train_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
        assert row["train_error"] == pytest.approx(100 * wrong / (len(losses) * 64))
        assert row["lr"] == pytest.approx(rate)
    model.eval()
    x, y = next(feed.evaluation("test"))
    error = 100 * (model(x).argmax(1) != y).float().mean().item()
    assert record["final"]["test_error"] == pytest.approx(error, abs=1e-6)


def test_train_error_is_measured_in_the_first_pass(tmp_path):
    # With rho = gamma = 0 the method equals its base optimizer.
    vanilla = train(SHORT.replace(method="vanilla"), tmp_path, CPU)
    zero = train(SHORT.replace(hyper={"rho": 0.0, "gamma": 0.0}), tmp_path, CPU)
    for one, other in zip(curve(vanilla), curve(zero), strict=True):
        assert one.pop("sharpness") is None
        assert other.pop("sharpness") == pytest.approx(0, abs=1e-6)
        assert one["train_error"] == other["train_error"]
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-6)


def test_contents_of_a_record(tmp_path):
    run = SHORT.replace(noise=0.4, noise_seed=1)
    returned = train(run, tmp_path, CPU)
    record = json.loads((tmp_path / f"{run.key}.json").read_text())
    assert record == returned
    assert Run.from_dict(record["settings"]) == run
    assert [row["epoch"] for row in record["curve"]] == [1, 2, 3]
    names = [
        "epoch",
        "train_loss",
        "train_error",
        "test_loss",
        "test_error",
        "sharpness",
        "lr",
        "seconds",
    ]
    assert set(record["curve"][0]) == set(names)
    assert record["final"]["test_error"] == record["curve"][-1]["test_error"]
    assert record["seconds"] >= sum(row["seconds"] for row in record["curve"])
    assert record["versions"]["torch"] == torch.__version__
    assert record["hardware"]["cores"] == os.cpu_count()
    assert record["parameters"] == 24_058
    assert record["execution"] == {
        "device": "cpu",
        "compiled": False,
        "captured": False,
        "processes": 1,
    }
    assert record["data"] == {
        **{"train": 300, "test": 100, "steps": 4},
        "verified": "embedded in scikit-learn",
    }
    assert {"commit", "finished", "resumed", "failure", "images_per_second"} <= set(record)
    assert not list(tmp_path.glob("work/*/checkpoints"))


def test_the_commit_can_be_set_by_a_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("WSAM_COMMIT", "abc123")
    assert train(SHORT.replace(epochs=1), tmp_path, CPU)["commit"] == "abc123"


def test_a_finished_run_is_skipped(tmp_path):
    first = train(SHORT, tmp_path, CPU)
    callback = StopAfter(steps=1)
    assert train(SHORT, tmp_path, CPU, [callback]) == first
    with pytest.raises(Stop):
        train(SHORT.replace(seed=1), tmp_path, CPU, [callback])
    assert callback.ended


def test_a_loss_that_is_not_finite_makes_a_failed_record(tmp_path):
    run = SHORT.replace(base_args={"lr": 1e30}, epochs=5, schedule="constant")
    record = train(run, tmp_path, replace(CPU, keep_weights=True))
    assert record["status"] == "failed"
    assert not records.weights_path(tmp_path, run).exists()
    assert "loss became nan in epoch" in record["failure"]
    assert len(record["curve"]) < 5
    assert record["curve"][-1]["train_loss"] is None
    assert records.final_error(record) is None
    callback = StopAfter(steps=1)
    assert train(run, tmp_path, CPU, [callback]) == record  # not trained again without retry
    with pytest.raises(Stop):
        train(run, tmp_path, ExecutionConfig(device="cpu", retry=True), [callback])


def test_weights_are_kept_on_request(tmp_path):
    run = SHORT.replace(epochs=1)
    record = train(run, tmp_path, ExecutionConfig(device="cpu", keep_weights=True))
    model, feed = restore(run, tmp_path, CPU)
    assert not model.training
    problem = Problem(model, feed, feed.metric)
    figures = evaluate(problem, feed.evaluation("test"), "fp32", torch.device("cpu"))
    assert figures["error"] == record["final"]["test_error"]
    assert not records.weights_path(tmp_path, run.replace(seed=1)).exists()
    with pytest.raises(FileNotFoundError, match=r"there are no weights in .*--keep-checkpoint"):
        restore(run.replace(seed=1), tmp_path, CPU)
    path = records.weights_path(tmp_path, run)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is damaged"):
        restore(run, tmp_path, CPU)


def test_restore_needs_neither_pretrained_weights_nor_augmentation(tmp_path, monkeypatch):
    info = replace(datasets._DIGITS, padding=2, flip=True)
    digits = datasets.load("digits", CPU.source)
    padded = replace(digits, info=info)
    monkeypatch.setitem(datasets.LOADERS, "digits", lambda _source: padded)
    run = SHORT.replace(pretrained="nowhere/to/be/found")
    built = build_model("cnn", Task((1, 8, 8), 10), seed=7)
    save_state(records.weights_path(tmp_path, run), built.state_dict())
    model, feed = restore(run, tmp_path, CPU)
    assert torch.equal(model.state_dict()["0.weight"], built.state_dict()["0.weight"])
    images, labels = next(iter(FixedBatches(feed, "train", 300, 300)))
    assert torch.equal(images, feed.normalize(digits.train.images[:300]))
    assert torch.equal(labels, digits.train.labels[:300])
    augmented = make_data_feed(SHORT, CPU)
    with pytest.raises(ValueError, match="padded for augmentation"):
        FixedBatches(augmented, "train", 300, 300)


def test_weights_of_another_model_are_refused(tmp_path):
    built = build_model("cnn", Task((1, 8, 8), 7), seed=0)
    save_state(records.weights_path(tmp_path, SHORT), built.state_dict())
    with pytest.raises(ValueError, match=r"do not fit digits cnn wsam .*: size mismatch for"):
        restore(SHORT, tmp_path, CPU)


def test_bf16_trains_on_a_cpu(tmp_path):
    record = train(SHORT.replace(model="mlp", precision="bf16", epochs=2), tmp_path, CPU)
    assert record["curve"][1]["train_loss"] < record["curve"][0]["train_loss"]


def test_outputs_are_float32_and_keep_their_type():
    Output = namedtuple("Output", "scores classes")
    layer = torch.nn.Linear(3, 2)
    computed = []

    def model(x):
        computed.append(layer(x))
        return Output(computed[0], computed[0].argmax(1))

    output = step.forward(model, torch.ones(4, 3), "bf16", torch.device("cpu"))
    assert computed[0].dtype is torch.bfloat16
    assert (output.scores.dtype, output.classes.dtype) == (torch.float32, torch.int64)
    assert torch.equal(output.scores, computed[0].float())
    exact = step.forward(layer, torch.ones(4, 3), "fp32", torch.device("cpu"))
    assert torch.equal(exact, layer(torch.ones(4, 3)))


def test_label_noise_affects_training_labels_only():
    clean = make_data_feed(SHORT, CPU)
    noised = make_data_feed(SHORT.replace(noise=0.8), CPU)
    changed = (clean.splits["train"].labels != noised.splits["train"].labels).float().mean().item()
    assert changed == pytest.approx(0.72, abs=0.08)
    assert torch.equal(clean.splits["test"].labels, noised.splits["test"].labels)
    other = make_data_feed(SHORT.replace(noise=0.8, noise_seed=1), CPU)
    assert not torch.equal(noised.splits["train"].labels, other.splits["train"].labels)


def test_a_captured_step_is_counted_like_an_eager_one(tmp_path, monkeypatch):
    """Nor does the objective work on the host, which a graph would not repeat."""

    class Graph:
        is_last_eager_call = True

        def __init__(self, opt, make_step):
            self.make_step = make_step

        def run(self, leaves, structure):
            return self.make_step(*leaves)

    eager = train(SHORT, tmp_path / "eager", CPU)
    monkeypatch.setattr("wsam.lab.trainer._choose_acceleration", lambda *_: (False, True))
    monkeypatch.setattr("wsam.training_step.TrainStep._is_on_cuda", lambda _: True)
    monkeypatch.setattr("wsam.accel.step_capture.GraphedStep", Graph)
    captured = train(SHORT, tmp_path / "captured", CPU)
    assert captured["execution"]["captured"]
    assert curve(captured) == curve(eager)


def test_cudnn_settings_hold_during_training_on_cuda_only():
    def found():
        return torch.backends.cudnn.benchmark, torch.backends.cuda.cudnn_sdp_enabled()

    before = found()
    with step.cudnn_settings(torch.device("cpu")):
        assert found() == before
    with step.cudnn_settings(torch.device("cuda")):
        assert found() == (True, False)
    assert found() == before == (False, True)


def test_learning_rate():
    run = Run(base_args={"lr": 0.4})
    assert optimizers.learning_rate(run, 0, 100) == 0.4
    assert optimizers.learning_rate(run, 50, 100) == pytest.approx(0.2)
    assert optimizers.learning_rate(run, 99, 100) == pytest.approx(0.4 * 2.467e-4, rel=1e-3)
    assert optimizers.learning_rate(run.replace(schedule="constant"), 99, 100) == 0.4


def test_a_tensor_learning_rate_is_set_in_place():
    rate = torch.tensor(0.1)
    opt = torch.optim.Adam(
        [torch.zeros(2, requires_grad=True)], lr=rate, capturable=False, foreach=False
    )
    optimizers.set_learning_rate(opt, 0.05)
    assert opt.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.05)


def test_hyperparameters_out_of_range_are_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match="gamma"):
        train(SHORT.replace(hyper={"gamma": 1.5}), tmp_path, CPU)


def test_unavailable_devices(tmp_path):
    with pytest.raises(ValueError, match="device 'tpu'"):
        train(SHORT, tmp_path, ExecutionConfig(device="tpu"))
    with pytest.raises(ValueError, match="CUDA only"):
        train(SHORT, tmp_path, ExecutionConfig(device="cpu", capture=True))


def test_masked_geometry_uses_the_seed_of_the_run(tmp_path):
    trainer = Trainer(SHORT.replace(method="esam", seed=5), tmp_path, CPU, [], DistributedContext())
    assert trainer.optimizer.geometry.seed == 5
    assert derive_seed(5, "data") != derive_seed(6, "data")
