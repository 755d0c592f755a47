"""Settings of a run that studies need: models with arguments, adapters, late and rarer steps."""

import io
import math
import warnings

import pytest
import torch

from wsam.accel.cuda_graph import prepare_base
from wsam.geometry import Only
from wsam.lab.callbacks import LogLines
from wsam.lab.data.datasets import DataSource
from wsam.lab.execution import ExecutionConfig
from wsam.lab.models import TOKENS, Task, build_model, load_all_but_head, parameter_count
from wsam.lab.optimizers import can_capture, learning_rate, make_optimizer
from wsam.lab.passes import passes_per_step
from wsam.lab.run import Run
from wsam.lab.settings import BASES, MODEL_ARGS
from wsam.lab.train import train
from wsam.report.commands import command
from wsam.rule import Reuse
from wsam.schedule import Every, FollowLR, NormAbove, Warmup

IMAGES = Task((3, 32, 32), 10)
TINY = {"layers": 1, "width": 16, "heads": 2}
CPU = ExecutionConfig(device="cpu")


def test_sizes_of_transformers():
    """The sizes that the documentation states."""
    text = Task((256,), 65, kind=TOKENS)
    gpt = build_model("gpt", text, 0, None, {"layers": 6, "width": 384, "heads": 6})
    assert parameter_count(gpt) == pytest.approx(10.7e6, rel=0.01)
    vit = build_model("vit", IMAGES, seed=0)
    assert parameter_count(vit) == pytest.approx(6.35e6, rel=0.01)
    assert len(vit.blocks) == 8
    with pytest.raises(ValueError, match="a patch of 5 does not divide images of 32 x 32"):
        build_model("vit", IMAGES, 0, None, {"patch": 5})
    with pytest.raises(ValueError, match="3 heads do not divide a width of 256"):
        build_model("vit", IMAGES, 0, None, {"heads": 3})
    wide = build_model("mlp", IMAGES, 0, None, {"width": 256})
    assert wide[1].out_features == wide[3].out_features == 256


def test_dropout_in_training_mode_only():
    model = build_model("gpt", Task((8,), 5, kind=TOKENS), 0, None, TINY | {"dropout": 0.5})
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_model_arguments_are_part_of_the_key():
    run = Run(model="vit", model_args={"layers": 2})
    assert run.key != Run(model="vit").key
    assert Run(model="vit", model_args=MODEL_ARGS["vit"]) == Run(model="vit"), "defaults are not"
    assert Run.from_dict(run.to_dict()) == run
    assert run.replace(model="cnn").model_args == {}
    assert run.replace(seed=1).model_args == {"layers": 2}
    with pytest.raises(ValueError, match=r"model cnn does not take 'layers'"):
        Run(model="cnn", model_args={"layers": 2})


def test_adapters_train_alone_and_start_as_the_pretrained_model(tmp_path):
    before = Run(model="vit", model_args=TINY, method="vanilla", epochs=1, train_limit=64)
    keep = ExecutionConfig(device="cpu", keep_weights=True)
    adapted = before.replace(
        model_args=TINY | {"lora_rank": 2}, pretrained=f"run:{before.key}", method="sam"
    )
    with pytest.raises(FileNotFoundError, match=f"no weights in .*{before.key}"):
        train(adapted, tmp_path, CPU)
    train(before, tmp_path, keep)
    record = train(adapted, tmp_path, keep)
    assert record["status"] == "finished"
    old, new = (torch.load(tmp_path / "work" / run.key / "weights.pt") for run in (before, adapted))
    changed = {name for name in new if name not in old or not torch.equal(old[name], new[name])}
    assert changed == {
        *("head.weight", "head.bias", "blocks.0.attention.a", "blocks.0.attention.b"),
        *("blocks.0.project.a", "blocks.0.project.b"),
    }
    task = Task((1, 8, 8), 10)
    plain, model = (build_model("vit", task, 1, None, r.model_args) for r in (before, adapted))
    plain.load_state_dict(old)
    load_all_but_head(model, old)
    model.head.load_state_dict(plain.head.state_dict())
    images = torch.rand(2, 1, 8, 8)
    torch.testing.assert_close(model(images), plain(images))
    with pytest.raises(ValueError, match=r"do not fit the model: 'places'"):
        load_all_but_head(model, {"places": torch.zeros(1)})


def optimizer_of(method="wsam", steps=100, model=None, **settings):
    run = Run(model="mlp", method=method, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make_optimizer(run, model or torch.nn.Linear(2, 2), steps)


@pytest.mark.parametrize("base", BASES)
def test_steps_are_captured_by_default_over_bases_that_can_be(base):
    optimizer = make_optimizer(Run(method="vanilla", base=base), torch.nn.Linear(2, 2))
    try:
        prepare_base(optimizer)
    except ValueError:
        assert not can_capture(Run(base=base))
    else:
        assert can_capture(Run(base=base))


def test_options_choose_steps_and_schedules():
    assert optimizer_of(options={"every": 2, "start": 0.75}).when == Every(2, 75)
    assert optimizer_of(options={"start": 0.5}).when == Every(1, 50)
    assert optimizer_of("looksam", options={"start": 0.5}).when == Every(5, 50)
    assert optimizer_of().when is None
    when = optimizer_of("sam", options={"threshold": 1.0}).when
    assert (when.factor, when.final, when.steps) == (1.0, -1.0, 100)
    assert isinstance(when, NormAbove)
    assert not can_capture(Run(method="sam", options={"threshold": 1.0}))
    reuse = {"every": 5, "reuse": True, "reuse_scaled": True, "reuse_average": 0.5}
    assert optimizer_of(options=reuse).rule.reuse == Reuse(scale_by_norm=True, average=0.5)
    warm = optimizer_of("coupled_wsam", hyper={"gamma": 0.88}, options={"gamma_warmup": 0.25})
    assert warm._values.schedules[0]["gamma"] == Warmup(0.88, 25)
    late = optimizer_of("sam", options={"rho_warmup": 0.1})
    assert late._values.schedules[0]["rho"] == Warmup(0.05, 10)
    follow = optimizer_of("gsam", options={"rho_follows_lr": True}, base_args={"lr": 0.2})
    assert follow._values.schedules[0]["rho"] == FollowLR(0.05, 0.0, lr_high=0.2)
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    only = optimizer_of("sam", geometry={"name": "norm-layers"}, model=layers)
    assert only.geometry == Only(("1.weight", "1.bias"))


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("wsam", {"reuse_scaled": True}, "reuse_scaled needs reuse"),
        ("sam", {"threshold": 1.0, "every": 2}, "threshold chooses the two-pass steps"),
        ("looksam", {"every": 2}, "looksam makes two passes on every n-th step: set n, not every"),
        ("sam", {"gather": True}, "gather applies to esam"),
        ("sam", {"gamma_warmup": 0.5}, "gamma_warmup needs gamma"),
        ("sam", {"start": 1.5}, "start must be"),
        ("sam", {"rho_warmup": 0.1, "rho_follows_lr": True}, "exclude each other"),
    ],
)
def test_options_that_do_not_fit(method, options, message):
    with pytest.raises(ValueError, match=message):
        Run(method=method, options=options)


def test_learning_rate_with_warmup():
    run = Run(schedule="warmup-cosine", base_args={"lr": 1.0})
    rates = [learning_rate(run, step, 100) for step in range(100)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5] == 1.0
    assert rates[5 + 47] == pytest.approx((1 + math.cos(math.pi * 47 / 95)) / 2)
    assert rates[-1] < 1e-3


def test_learning_rate_that_is_held_before_the_decay():
    run = Run(base_args={"lr": 1.0}, decay_start=0.6)
    rates = [learning_rate(run, step, 100) for step in range(100)]
    assert rates[:61] == [1.0] * 61
    assert rates[80] == pytest.approx(0.5)
    assert rates[-1] < 1e-2
    warm = run.replace(schedule="warmup-cosine")
    assert learning_rate(warm, 0, 100) == pytest.approx(0.2)
    assert [learning_rate(warm, step, 100) for step in range(5, 100)] == rates[5:]
    assert run.replace(decay_start=None).key == Run(base_args={"lr": 1.0}).key
    with pytest.raises(ValueError, match="decay_start needs a schedule that decays"):
        run.replace(schedule="constant")
    with pytest.raises(ValueError, match="decay_start must be in"):
        run.replace(decay_start=1.0)


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "esam", "options": {"gather": True}},
        {"method": "sam", "options": {"ascent_share": 0.25}},
        {"method": "sam", "options": {"threshold": 1.0}},
        {"method": "wsam", "options": {"every": 2, "reuse": True, "start": 0.5}},
        {"method": "sam", "geometry": {"name": "norm-layers"}},
    ],
    ids=["gather", "ascent_share", "threshold", "late", "norm-layers"],
)
def test_runs_with_options_train(settings, tmp_path):
    run = Run(epochs=2, train_limit=256, batch_size=64, **settings)
    record = train(run, tmp_path, CPU)
    assert record["status"] == "finished"
    assert record["final"]["train_error"] < 90
    sharpness = [row["sharpness"] for row in record["curve"]]
    assert (sharpness[0] is None) == ("start" in run.options), "no second pass before the start"
    assert sharpness[1] is not None


@pytest.mark.parametrize("settings", [{"hyper": {"rho": 0.0}}, {"options": {"rho_warmup": 1.0}}])
def test_a_step_without_a_perturbation_uses_the_whole_batch(settings, tmp_path):
    """Its training error counts all samples, although the perturbation would use a share of them."""
    options = {"ascent_share": 0.25, **settings.get("options", {})}
    run = Run(model="mlp", method="sam", epochs=2, train_limit=16, batch_size=16)
    plain = train(run.replace(method="vanilla"), tmp_path, CPU)["curve"][0]
    shared = train(run.replace(**{**settings, "options": options}), tmp_path, CPU)["curve"][0]
    assert shared["train_error"] == plain["train_error"]


def test_epochs_before_a_late_start_have_no_sharpness(tmp_path):
    lines = io.StringIO()
    run = Run(model="mlp", epochs=2, train_limit=64, options={"start": 0.5})
    train(run, tmp_path, CPU, [LogLines(lines)])
    first, second = lines.getvalue().splitlines()[-2:]
    assert "sharpness" not in first
    assert "sharpness" in second


def test_passes_without_a_perturbation_and_after_a_late_start():
    assert passes_per_step(Run(method="sam", hyper={"rho": 0.0})) == 1
    assert passes_per_step(Run(method="looksam", options={"start": 0.5})) == pytest.approx(1.1)


def test_norm_layers_need_one_that_is_trained():
    message = "norm-layers perturbs normalization layers, and mlp trains none"
    for layer in (torch.nn.ReLU(), torch.nn.LayerNorm(2).requires_grad_(False)):
        model = torch.nn.Sequential(layer, torch.nn.Linear(2, 2))
        with pytest.raises(ValueError, match=message):
            optimizer_of("sam", geometry={"name": "norm-layers"}, model=model)


def test_gathering_selects_the_same_samples(tmp_path):
    """Without BatchNorm, the selected samples alone give the same gradients."""
    settings = {"model": "mlp", "method": "esam", "hyper": {"rho": 0.1}, "train_limit": 128}
    runs = [Run(epochs=2, options=options, **settings) for options in ({}, {"gather": True})]
    losses = [train(run, tmp_path, CPU)["final"]["train_loss"] for run in runs]
    assert runs[0].key != runs[1].key
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_text_may_be_in_the_data_folder(tmp_path):
    (tmp_path / "letters.txt").write_text("abcd efgh " * 100)
    here = Run(data=f"text:{tmp_path / 'letters.txt'}", block_size=8)
    digest = here.digests["data"]
    changes = {"data": "text:letters.txt", "digests": {"data": digest}}
    run = here.replace(**changes, model_args=TINY, epochs=1, method="vanilla")
    execution = ExecutionConfig(device="cpu", source=DataSource(tmp_path))
    assert train(run, tmp_path / "out", execution)["settings"]["data"] == "text:letters.txt"
    wrong = run.replace(digests={"data": "0" * 12})
    with pytest.raises(ValueError, match=f"their digest is {digest}"):
        train(wrong, tmp_path / "out", execution)


def test_commands_contain_the_new_settings():
    run = Run(
        model="vit",
        model_args={"layers": 2},
        options={"every": 2, "reuse": True, "reuse_scaled": True, "start": 0.5},
    )
    text = command(run)
    assert "--model vit --model-arg layers=2 --base sgd" in text
    assert "--every 2 --reuse --option reuse_scaled=true --option start=0.5" in text
