"""The `wsam train` command."""

import json
import re

import pytest
import torch
from command import COMMANDS, error_of
from recorded import recorded
from typer.testing import CliRunner

import wsam as library
from wsam.cli import app
from wsam.cli._options import parse_pairs
from wsam.lab import callbacks, records
from wsam.lab.optimizers import make_optimizer
from wsam.lab.run import Run
from wsam.lab.settings import BASE_CLASSES
from wsam.report import gather

QUICK = "--epochs 1 --train-limit 200 --test-limit 50 --batch-size 50 --device cpu --no-tensorboard"


def wsam(*arguments, out):
    words = [word for argument in arguments for word in argument.split()]
    return CliRunner().invoke(app, ["train", *QUICK.split(), "--out", str(out), *words])


def record_of(out):
    (record,) = recorded(out)
    return record


@pytest.mark.parametrize(
    ("arguments", "hyper"),
    [
        ("--method vanilla", {}),
        ("--method sam --rho 0.2", {"rho": 0.2}),
        ("--method wsam --rho 0.2 --gamma 0.88", {"rho": 0.2, "gamma": 0.88}),
        ("--method coupled_wsam --gamma 0.6", {"rho": 0.05, "gamma": 0.6}),
        ("--method gsam --alpha 0.02 --hyper rho_min=0.01", {"alpha": 0.02, "rho_min": 0.01}),
        ("--method esam --beta 0.5 --gamma 0.5", {"beta": 0.5, "gamma": 0.5}),
        ("--method asam --eta 0.1 --hyper weights_only=true", {"eta": 0.1, "weights_only": True}),
        ("--method fisher_sam --eta 0.5", {"eta": 0.5}),
    ],
)
def test_every_method_with_its_hyperparameters(tmp_path, arguments, hyper):
    done = wsam(arguments, out=tmp_path)
    assert done.exit_code == 0, done.output
    settings = record_of(tmp_path)["settings"]
    assert hyper.items() <= settings["hyper"].items()
    assert f"wrote {tmp_path / Run.from_dict(settings).key}.json\n" in done.stdout


def test_base_and_geometry(tmp_path):
    done = wsam(
        "--method wsam --geometry adaptive --geometry-arg eta=0.5 --base adamw --lr 0.01",
        "--weight-decay 0.1 --base-arg betas=[0.8,0.9] --noise 0.2 --noise-seed 3 --seed 4",
        out=tmp_path,
    )
    assert done.exit_code == 0, done.output
    settings = record_of(tmp_path)["settings"]
    assert settings["geometry"] == {"name": "adaptive", "eta": 0.5, "weights_only": False}
    assert settings["base_args"]["betas"] == [0.8, 0.9]
    assert settings["base_args"]["weight_decay"] == 0.1
    assert (settings["noise"], settings["noise_seed"], settings["seed"]) == (0.2, 3, 4)
    assert settings["precision"] == "fp32"


@pytest.mark.parametrize(
    ("arguments", "gamma", "precondition"),
    [
        ("--base sgd", None, "auto"),
        ("--base adamw", None, "auto"),
        ("--base adamw --gamma 0.7", 0.7, "auto"),
        ("--base adamw --precondition", None, True),
        ("--base adamw --no-precondition", None, False),
        ("--base adamw --option precondition=false", None, False),
        ("--base adamax", None, "auto"),
    ],
)
@pytest.mark.filterwarnings("ignore:WSAM over")
def test_the_defaults_of_wsam_are_those_of_the_class(
    tmp_path, monkeypatch, arguments, gamma, precondition
):
    from wsam.cli import train as verb

    trained = []
    monkeypatch.setattr(verb, "_train", lambda run, *rest: trained.append(run))
    assert wsam("--method wsam", arguments, out=tmp_path).exit_code == 0
    (run,) = trained
    model = torch.nn.Linear(2, 2)
    base = getattr(torch.optim, BASE_CLASSES[run.base])(model.parameters(), **run.base_args)
    expected = library.WSAM(base, gamma=gamma, precondition=precondition)
    found = make_optimizer(run, model)
    assert found.rule == expected.rule
    assert (found.rho, found.gamma) == (expected.rho, expected.gamma)


def test_the_record_states_the_form_of_wsam(tmp_path):
    assert wsam("--method wsam --base adamw --model mlp", out=tmp_path).exit_code == 0
    settings = record_of(tmp_path)["settings"]
    assert settings["options"] == {"precondition": True}
    assert settings["hyper"] == {"gamma": 0.5, "rho": 0.05}


def test_only_json_on_stdout_and_a_finished_run_is_skipped(tmp_path):
    first = json.loads(wsam("--json", out=tmp_path).stdout)
    second = json.loads(wsam("--json", out=tmp_path).stdout)
    assert (first["skipped"], second["skipped"]) == (False, True)
    assert first["curve"] == second["curve"]
    third = wsam(out=tmp_path)
    assert "already finished" in third.stdout
    assert f"record: {first['record']}" in third.stdout, "nothing was written"
    assert "% after 1 epoch in " in third.stdout


def test_log_lines_and_kept_weights(tmp_path):
    done = wsam("--keep-checkpoint", out=tmp_path)
    assert " seed=0, SGD lr=0.05: 1 epoch, 0 done, key " in done.stderr
    assert re.search(r"test loss [\d.]+  test error [\d.]+%  sharpness", done.stderr)
    assert "epoch 1/1" in done.stderr
    assert "samples/s" in done.stderr
    assert "sharpness" in done.stderr
    run = Run.from_dict(record_of(tmp_path)["settings"])
    assert records.weights_path(tmp_path, run).exists()


def test_missing_weights_of_a_finished_run_are_reported(tmp_path):
    wsam(out=tmp_path)
    done = wsam("--keep-checkpoint", out=tmp_path)
    assert done.exit_code == 0
    assert "the weights of this run were not kept; remove" in done.stderr


def test_a_failed_run_exits_with_1(tmp_path):
    done = wsam("--method vanilla --lr 1e30 --epochs 3", out=tmp_path)
    assert done.exit_code == 1
    assert "failed: the" in done.stdout
    assert record_of(tmp_path)["status"] == "failed"
    assert "--retry" not in done.stdout


def test_a_run_that_failed_before_is_skipped_until_a_retry(tmp_path):
    fails = "--method vanilla --lr 1e30 --epochs 3"
    first = json.loads(wsam(fails, "--json", out=tmp_path).stdout)
    again = json.loads(wsam(fails, "--json", out=tmp_path).stdout)
    retried = json.loads(wsam(fails, "--json --retry", out=tmp_path).stdout)
    assert [done["skipped"] for done in (first, again, retried)] == [False, True, False]
    skipped = wsam(fails, out=tmp_path)
    assert skipped.exit_code == 1
    assert "failed before: the" in skipped.stdout
    assert "--retry" in skipped.stdout
    assert "failed before" not in wsam(fails, "--retry", out=tmp_path).stdout


def test_a_damaged_record_is_named_as_in_a_report(tmp_path):
    first = json.loads(wsam("--json", out=tmp_path).stdout)
    (path,) = tmp_path.glob("*.json")
    record = record_of(tmp_path)
    for damage in (
        {"final": None},
        {"final": "x"},
        {"seconds": None},
        {"settings": None},
        {"format": 99},
        {"curve": [{"epoch": 1, "train_loss": 1.0, "test_error": float("nan")}]},
        {"hardware": {"cores": float("inf")}},
    ):
        path.write_text(json.dumps({**record, **damage}))
        done = wsam("--json", out=tmp_path)
        assert isinstance(done.exception, ValueError), damage
        assert str(done.exception).startswith(f"{first['record']} ")
        (trouble,) = gather(tmp_path).troubles
        assert (trouble.what, trouble.kind) == (path.name, "damaged")
        assert trouble.why == str(done.exception)


def test_a_failed_run_without_a_reason(tmp_path):
    wsam(out=tmp_path)
    (path,) = tmp_path.glob("*.json")
    failed = {**record_of(tmp_path), "status": "failed"}
    del failed["failure"]
    path.write_text(json.dumps(failed))
    assert "failed before: no reason was recorded; " in wsam(out=tmp_path).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--method swam", ["swam", "known: vanilla, sam, wsam"]),
        ("--data mnist", ["mnist", "digits, cifar10"]),
        ("--model vgg", ["vgg", "resnet18"]),
        ("--method sam --gamma 0.9", ["sam does not take 'gamma'", "rho"]),
        ("--base sgd --base-arg betas=1", ["sgd does not take 'betas'"]),
        ("--hyper rho", ["expected name=value, got 'rho'"]),
        ("--geometry-arg eta=1", ["--geometry-arg needs --geometry"]),
        ("--geometry adaptive --geometry-arg name=fisher", ["takes no name itself"]),
        ("--base adamw --lean", ["only WSAM with precondition=False supports it"]),
        ("--rho -1", ["rho", "-1"]),
        ("--rho nan", ["rho of wsam must be in (-inf, inf), got nan"]),
        ("--data cifar10 --no-download --data-dir /nonexistent", ["cifar-10-binary.tar.gz is not"]),
        ("--rho 0.2 --hyper rho=0.1", ["rho is given twice, by --rho and by --hyper"]),
        ("--lr 0.1 --base-arg lr=0.2", ["lr is given twice, by --lr and by --base-arg"]),
        ("--weight-decay 0 --base-arg weight_decay=1", ["by --weight-decay and by --base-arg"]),
        ("--hyper rho=1 --hyper rho=2", ["'rho' is given twice, the second time by 'rho=2'"]),
        ("--checkpoint-seconds -1", ["checkpoint_seconds must be in [0, inf], got -1"]),
        ("--checkpoint-seconds nan", ["checkpoint_seconds must be in [0, inf], got nan"]),
        (f"--seed {2**63}", [f"seed must be less than 2**63, got {2**63}"]),
        (f"--noise-seed {10**23}", ["noise_seed must be less than 2**63, got 1000"]),
        ("--device cuda:99", ["device 'cuda:99' cannot be used"]),
        ("--device tpu", ["device 'tpu' cannot be used: Expected one of cpu, cuda"]),
    ],
)
def test_wrong_values(tmp_path, arguments, words):
    done = wsam(arguments, out=tmp_path)
    assert isinstance(done.exception, ValueError | OSError)
    for word in words:
        assert word in str(done.exception)
    assert not list(tmp_path.iterdir()), "an error leaves no files"


def test_help_names_every_method():
    (option,) = (each for each in COMMANDS["train"].params if each.name == "method")
    for name in library.METHODS:
        assert name in re.findall(r"\w+", option.help)


def test_pairs_are_json_or_strings():
    assert parse_pairs(["e=.5", "f=True"]) == {"e": 0.5, "f": True}
    assert parse_pairs(["a=1", "b=x y", "c=null", "d=[1, 2]"]) == {
        "a": 1,
        "b": "x y",
        "c": None,
        "d": [1, 2],
    }


def test_messages_cannot_control_the_terminal(tmp_path):
    line = error_of("report", tmp_path / "\x1b[2Jmissing")
    assert r"\x1b[2Jmissing" in line
    assert "\x1b" not in line


def test_tensorboard_events(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    done = wsam("--tensorboard", out=tmp_path)
    assert done.exit_code == 0, done.output
    (folder,) = tmp_path.glob("work/*/events")
    read = events.EventAccumulator(str(folder)).Reload()
    scalar = read.Scalars("test_error")[0]
    assert scalar.step == 1
    assert scalar.value == pytest.approx(record_of(tmp_path)["final"]["test_error"])


def test_the_progress_bar_shows_every_value(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.setenv("FORCE_COLOR", "1")
    bar = callbacks.ProgressBar()
    bar.on_message("before the start")
    bar.on_train_start(Run(method="sam", epochs=2), steps=3, done=0, batch_size=50)
    metrics = {"train_loss": 0.5, "train_error": 12.0, "sharpness": 0.125}
    for _ in range(3):
        bar.on_step_end(metrics)
    bar.on_message("a message")
    bar.on_epoch_end(metrics | {"epoch": 1, "test_error": 9.5, "seconds": 0.1})
    bar.on_train_end()
    printed = capsys.readouterr().err
    for words in ("loss 0.5000", "error 12.00%", "test error 9.50%", "sharpness 0.1250"):
        assert words in printed
    for words in ("samples/s", "epoch 1/2", "a message", "before the start"):
        assert words in printed
