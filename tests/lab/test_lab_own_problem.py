"""The user's own models and data: `wsam train --model file.py:function` and `wsam.lab.fit`."""

import json
import random
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import own_problem
import pytest
import torch
from command import error_of, wsam_command
from recorded import recorded
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from training import CPU, Stop, StopAfter, curve

from wsam.lab import Data, fit, records, user_code
from wsam.lab.callbacks import Callback
from wsam.lab.data.loader_feed import LoaderFeed
from wsam.lab.errors import RunError, UserCodeError
from wsam.lab.execution import ExecutionConfig
from wsam.lab.loaded_model import FixedBatches, LoadedModel, load_model
from wsam.lab.metrics import METRICS, cross_entropy, is_used, loss_sum
from wsam.lab.problem import Objects, make_data_feed, make_model
from wsam.lab.run import Run
from wsam.lab.train import has_started, train
from wsam.report.commands import command
from wsam.sweep.jobs import Job, Status, run_job

FILE = Path(own_problem.__file__)
KEEP = ExecutionConfig(device="cpu", keep_weights=True)
SHORT = {"epochs": 3, "batch_size": 32, "execution": CPU}


def own(model="net", data="classes", **settings):
    names = {"model": f"{FILE}:{model}", "data": f"{FILE}:{data}"}
    return Run(**names, epochs=3, batch_size=32, **settings)


def write(path, text):
    path.write_text(text)
    return path


# Names and digests ------------------------------------------------------------------------------


def test_names():
    assert user_code.is_code("a/b.py:f")
    assert user_code.is_code("/a b/c.py:Net")
    assert user_code.is_code("package.module:f")
    for other in ("cnn", "timm:x", "folder:x", "folder:a.py:b", "a.py", "a.py:", ":f", "a-b:f"):
        assert not user_code.is_code(other), other


def test_the_key_depends_on_the_file(tmp_path):
    path = write(tmp_path / "mine.py", "def net(): ...")
    run = Run(model=f"{path}:net")
    assert run == Run(model=f"{path}:net")
    assert Run.from_dict(json.loads(json.dumps(run.to_dict()))) == run
    assert run.replace(seed=1).digests == run.digests
    assert run.replace(model="cnn").key == Run().key
    write(path, "def net(): return 1")
    assert Run(model=f"{path}:net").key != run.key
    path.unlink()
    assert Run.from_dict(run.to_dict()).key == run.key  # records load without the file
    with pytest.raises(FileNotFoundError, match=r"mine\.py"):
        Run(model=f"{path}:net")


def test_describing_a_run_executes_nothing(tmp_path, monkeypatch):
    package = tmp_path / "mypackage"
    package.mkdir()
    for name in ("__init__.py", "mymodule.py"):
        write(package / name, "raise SystemExit('executed')")
    monkeypatch.chdir(tmp_path)
    run = Run(model="mypackage.mymodule:net", data="mypackage/mymodule.py:data")
    assert run.digests["model"] == run.digests["data"]
    with pytest.raises(FileNotFoundError, match=r"no module 'mypackage\.other'"):
        Run(model="mypackage.other:net")
    with pytest.raises(UserCodeError, match="SystemExit: executed"):
        train(run, tmp_path / "out", CPU)


def test_a_decorated_function_is_named_by_its_own_file(tmp_path):
    decorator = (
        "import functools\n\ndef logged(function):\n    @functools.wraps(function)\n"
        "    def wrapper():\n        return function()\n    return wrapper\n"
    )
    write(tmp_path / "decorators.py", decorator)
    mine = "from decorators import logged\n\n@logged\ndef data():\n    return 1\n"
    function = user_code.load(f"{write(tmp_path / 'mine.py', mine)}:data")
    assert user_code.spec_of(function) == f"{tmp_path / 'mine.py'}:data"


def test_a_record_does_not_execute_code(tmp_path):
    run = own()
    train(run, tmp_path, KEEP)
    record = records.record_path(tmp_path, run)
    with pytest.raises(ValueError, match="names code: ") as error:
        load_model(record, CPU)
    assert f"give --data {run.data} --model {run.model} to execute it" in str(error.value)
    with pytest.raises(ValueError, match=f"give --model {re.escape(run.model)} to execute it"):
        load_model(record, CPU, data=run.data)
    loaded = load_model(record, CPU, data=run.data, model=run.model, split="test")
    error = 100 * (1 - loaded.accuracy())
    assert error == pytest.approx(records.read_file(record)["final"]["test_error"], abs=1e-3)


def test_a_file_that_changed_after_the_run_was_described(tmp_path):
    path = write(tmp_path / "mine.py", "def net(): ...")
    run = Run(model=f"{path}:net")
    write(path, "def net(): return 1")
    with pytest.raises(UserCodeError, match="have changed"):
        train(run, tmp_path / "out", CPU)


# Training ---------------------------------------------------------------------------------------


def test_command_and_its_reproduction(tmp_path, monkeypatch):
    monkeypatch.chdir(FILE.parent)
    words = ("--model", "own_problem.py:net", "--data", "own_problem.py:classes", "--epochs", 3)
    out = ("--batch-size", 8, "--lr", 0.2, "--device", "cpu", "--out", tmp_path / "runs")
    done = wsam_command("train", *words, *out, "--validation", 0.2, "--metric", "macro-f1")
    assert "test macro-f1" in done.stdout
    (record,) = recorded(tmp_path / "runs")
    assert record["final"].keys() > {"test_error", "test_macro_f1", "validation_macro_f1"}
    assert record["final"]["test_error"] < 50
    assert records.objective(record) == -record["final"]["validation_macro_f1"]
    again = command(Run.from_dict(record["settings"]), device="cpu", out=str(tmp_path / "again"))
    wsam_command(*shlex.split(again)[1:])
    (repeated,) = recorded(tmp_path / "again")
    assert repeated["key"] == record["key"]
    assert curve(repeated) == curve(record)


def test_modules_of_the_current_folder(tmp_path, monkeypatch):
    write(tmp_path / "shapes_of_mine.py", FILE.read_text())
    monkeypatch.chdir(tmp_path)
    record = fit("shapes_of_mine:net", "shapes_of_mine:classes", **SHORT)
    assert record["status"] == "finished"


def test_a_function_of_a_file_has_the_key_of_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(FILE.parent)
    record = fit(own_problem.net, own_problem.classes, out=tmp_path, **SHORT)
    assert record["settings"]["model"] == "own_problem.py:net"
    assert fit(own_problem.net, own_problem.classes, out=tmp_path, **SHORT) == record
    assert curve(train(own(), tmp_path, CPU)) == curve(record)


def test_objects_are_trained_in_place_and_each_time(tmp_path):
    model = own_problem.net()
    before = model[0].weight.clone()
    first = fit(model, own_problem.classes(), "sam", rho=0.1, lr=0.1, out=tmp_path, **SHORT)
    assert not torch.equal(before, model[0].weight)
    assert first["settings"]["hyper"] == {"rho": 0.1}
    assert first["settings"]["base_args"]["lr"] == 0.1
    second = fit(model, own_problem.classes(), "sam", rho=0.1, lr=0.1, out=tmp_path, **SHORT)
    assert first["key"] != second["key"]
    assert first["title"].startswith("object:tuple object:Sequential sam")
    with pytest.raises(ValueError, match=r"was given in Python: pass it to wsam\.lab\.fit"):
        train(Run.from_dict(first["settings"]).replace(seed=5), tmp_path, CPU)


def test_a_function_that_returns_one_module_again_is_an_error(tmp_path):
    """A second run would begin with the weights of the first one, and depend on the order of runs."""
    text = "from torch import nn\n_net = nn.Linear(4, 3)\ndef net():\n    return _net\n"
    name = f"{write(tmp_path / 'mine.py', text)}:net"
    fit(name, (PAIRS, PAIRS), **SHORT)
    with pytest.raises(UserCodeError, match=r"mine\.py:net returned the same module again"):
        fit(name, (PAIRS, PAIRS), seed=1, **SHORT)


def test_the_seed_changes_weights_and_order_but_not_the_data():
    one, same, other = (
        fit(own_problem.net, own_problem.classes, seed=s, **SHORT) for s in (0, 0, 1)
    )
    assert curve(one) == curve(same) != curve(other)


@pytest.mark.parametrize("data", ["classes", "loaders"])
def test_an_interrupted_run_resumes_bit_for_bit(tmp_path, data):
    run = own(data=data)
    whole = train(run, tmp_path / "whole", CPU)
    with pytest.raises(Stop):
        train(run, tmp_path / "parts", CPU, [StopAfter(epochs=2)])
    record = train(run, tmp_path / "parts", CPU)
    assert record["resumed"] == 1
    assert curve(record) == curve(whole)


NOISY = """
import random
import re
import numpy as np
import torch

INPUTS = np.random.rand(60, 4)


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        draws = np.random.rand() + random.random() + torch.rand(1)
        return torch.tensor(INPUTS[index]).float() * draws, index % 2


def data():
    keep = np.random.permutation(60)[:20]
    return Noisy(), [(torch.tensor(INPUTS[n]).float(), n % 2) for n in keep]


def net():
    return torch.nn.Linear(4, 2)
"""


def test_random_numbers_of_all_libraries_are_seeded_and_resumed(tmp_path):
    """Of the import, of the functions and of the samples."""
    curves = []
    for name, stop in (("whole", None), ("parts", 2)):
        (tmp_path / name).mkdir()
        file = write(tmp_path / name / "noisy.py", NOISY)
        random.seed(name)
        np.random.seed(len(curves))
        run = Run(data=f"{file}:data", model=f"{file}:net", epochs=3, batch_size=20)
        out = tmp_path / name / "runs"
        if stop is not None:
            with pytest.raises(Stop):
                train(run, out, CPU, [StopAfter(epochs=stop)])
        curves.append(curve(train(run, out, CPU)))
    assert curves[0] == curves[1]


def test_describing_and_loading_a_file_keep_the_generators(tmp_path):
    file = write(tmp_path / "noisy.py", NOISY)
    random.seed(1)
    expected = random.random()
    random.seed(1)
    run = Run(data=f"{file}:data", model=f"{file}:net")
    make_model(run, make_data_feed(run, CPU))
    assert random.random() == expected


class Draws(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.rand(1), 0


def test_workers_draw_other_numbers_in_each_epoch_and_for_each_seed():
    epochs = []
    for seed in (0, 0, 1):
        run = Run(batch_size=8, seed=seed)
        feed = LoaderFeed(Data(Draws(), Draws()), run, torch.device("cpu"), workers=1)
        epochs += [float(inputs.sum()) for _ in range(2) for inputs, _ in feed.epoch()]
    assert epochs[:2] == epochs[2:4]
    assert len(set(epochs)) == 4


def test_regression():
    record = fit(own_problem.line, own_problem.numbers, lr=0.1, **{**SHORT, "epochs": 20})
    assert record["metric"] == {
        "name": "mse", "unit": "", "lower_is_better": True, "split": "test",
    }  # fmt: skip
    assert "train_error" not in record["final"]
    assert record["final"]["test_mse"] == pytest.approx(record["final"]["test_loss"])
    assert record["final"]["test_mse"] < 1
    named = fit("mlp", own_problem.numbers, lr=0.01, **SHORT)
    assert named["final"]["test_mse"] < 20


@pytest.mark.parametrize(("shape", "named"), [((4,), "mlp"), ((1, 8, 8), "cnn")])
def test_the_default_model_fits_the_inputs(tmp_path, monkeypatch, shape, named):
    code = (
        "import torch\n\nfrom wsam.lab import Data\n\n\ndef data():\n"
        f"    pairs = [(torch.randn{shape}, n % 2) for n in range(40)]\n"
        "    return Data(pairs, pairs, outputs=2)\n"
    )
    write(tmp_path / "mine.py", code)
    monkeypatch.chdir(tmp_path)
    run = Run(data="mine.py:data", epochs=1)
    assert run.model == "auto"
    feed = make_data_feed(run, CPU)
    expected = make_model(run.replace(model=named), feed)
    assert str(make_model(run, feed)) == str(expected)


def test_a_metric_of_a_file(tmp_path):
    metric = f"{FILE}:R2"
    run = own("line", "numbers", metric=metric, base_args={"lr": 0.1})
    record = train(run, tmp_path, CPU)
    assert record["metric"]["lower_is_better"] is False
    assert records.objective(record) == -record["final"]["test_r2"]
    assert records.read(tmp_path, run) == record


def test_inputs_in_mappings_with_a_loss_and_metric():
    record = fit(own_problem.Net, own_problem.mappings, lr=0.5, validation=20, **SHORT)
    assert record["metric"]["name"] == "accuracy_of_signs"
    assert record["final"]["test_accuracy_of_signs"] > 0.6
    assert record["data"]["validation"] == 20


def test_limits_and_a_validation_split_of_ones_own():
    train_set, test_set = own_problem.classes()
    data = Data(train_set, test_set, validation=test_set)
    record = fit(own_problem.net, data, train_limit=40, test_limit=10, **SHORT)
    assert record["data"] == {
        "train": 40, "validation": 30, "test": 10, "steps": 1, "verified": "own data",
    }  # fmt: skip
    assert record["metric"]["split"] == "validation"


# Mistakes ---------------------------------------------------------------------------------------

X, Y = own_problem.INPUTS, own_problem.CLASSES
PAIRS = list(zip(X, Y, strict=True))
TWO_INPUTS = [((x, x), y) for x, y in PAIRS]


def uneven():
    return [(torch.zeros(3 + n % 2), 0) for n in range(40)]


class Stream(IterableDataset):
    def __len__(self):
        return len(PAIRS)

    def __iter__(self):
        return iter(PAIRS)


def fails(sample):
    raise KeyError("price")


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (lambda: nn.Linear(5, 3), (PAIRS, PAIRS), "does not accept the inputs .*2 x 4 of float32"),
        (lambda: nn.Bilinear(4, 4, 3), (TWO_INPUTS, TWO_INPUTS), "receives them as one argument"),
        (lambda: nn.Linear(4, 1), (PAIRS, PAIRS), "2 x 1 of float32, does not fit cross_entropy"),
        (lambda: nn.Linear(4, 3), (TensorDataset(X, X[:, 0]),) * 2, "one output for each .*2 x 3"),
        (nn.Flatten, (PAIRS, PAIRS), "has no parameters to train"),
        (lambda: 3, (PAIRS, PAIRS), "must return a torch.nn.Module, got int"),
        (fails, (PAIRS, PAIRS), r"fails\(\) missing 1 required positional argument"),
        (own_problem.net, fails, r"fails\(\) missing 1 required positional argument"),
        (lambda: sys.exit(3), (PAIRS, PAIRS), r"raised SystemExit: 3 .*own_problem\.py, line"),
        (own_problem.net, Data(PAIRS, PAIRS, collate=sys.exit), "raised SystemExit: "),
        (own_problem.net, (uneven(), PAIRS), r"equal size, but got \[3\] .* \[4\]"),
        (own_problem.net, (PAIRS, []), "the test split of object:tuple is empty"),
        (
            own_problem.net,
            (Stream(), PAIRS),
            "must be a dataset or a loader with a length, .*Stream",
        ),
        (own_problem.net, (PAIRS, iter(PAIRS)), "the test split of object:tuple must be a dataset"),
        (own_problem.net, ([1, 2, 3], PAIRS), "must yield pairs .*got 1 of int64"),
        (own_problem.net, 7, "must return wsam.lab.Data"),
        (own_problem.net, Data(PAIRS, PAIRS, metric="f1"), "unknown metric 'f1'"),
        (own_problem.net, Data(PAIRS, PAIRS, collate=fails), "raised KeyError: 'price'"),
        (own_problem.net, Data(PAIRS, PAIRS, loss=lambda o, t: 1.0), "got float for 2 samples"),
        ("mlp", (PAIRS, PAIRS), r"wsam.lab.Data\(..., outputs=N\) from"),
        ("resnet18", Data(PAIRS, PAIRS, outputs=3), "resnet18 does not fit the inputs"),
        ("mlp", own_problem.mappings, "named models need tensors"),
    ],
)
def test_mistakes_are_one_clear_line(tmp_path, model, data, message):
    with pytest.raises(ValueError, match=message) as raised:
        fit(model, data, out=tmp_path / "out", **SHORT)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_options_that_need_a_dataset():
    for settings in ({"validation": 0.5}, {"train_limit": 10}):
        with pytest.raises(ValueError, match=r"needs a dataset, but .*loaders has a train loader"):
            fit(own_problem.net, own_problem.loaders, **settings, **SHORT)
    train_loader, test_loader = own_problem.loaders()
    loaders = Data(train_loader, test_loader, validation=DataLoader(PAIRS[:40], 20))
    record = fit(own_problem.net, loaders, **SHORT)
    assert record["metric"]["split"] == "validation"
    assert record["data"]["validation"] == 40
    with pytest.raises(ValueError, match="--noise needs images"):
        fit(own_problem.net, own_problem.classes, noise=0.5, **SHORT)
    data = Data(PAIRS, PAIRS, validation=PAIRS)
    with pytest.raises(ValueError, match="remove --validation"):
        fit(own_problem.net, data, validation=0.5, **SHORT)
    mean = Data(PAIRS, PAIRS, loss=nn.CrossEntropyLoss())
    with pytest.raises(UserCodeError, match="by which esam selects them"):
        fit(own_problem.net, mean, "esam", **SHORT)


def test_samples_that_fail_during_training(tmp_path):
    class Late(list):
        def __getitem__(self, index):
            return fails(index) if index == 60 else super().__getitem__(index)

    with pytest.raises(UserCodeError, match="reading a batch of object:tuple raised KeyError"):
        fit(own_problem.net, (Late(PAIRS), PAIRS), **SHORT)


@pytest.mark.filterwarnings("ignore:WSAM over")
def test_fit_has_the_defaults_of_wsam_over_adaptive_bases():
    for given, gamma, options in (
        ({}, 0.5, {"precondition": True}),
        ({"gamma": 0.7}, 0.7, {"precondition": True}),
        ({"precondition": False}, 0.9, {}),
    ):
        record = fit(own_problem.net, own_problem.classes, base="adamw", **given, **SHORT)
        settings = record["settings"]
        assert (settings["hyper"]["gamma"], settings["options"]) == (gamma, options)


def test_unknown_settings_of_fit():
    with pytest.raises(TypeError, match=r"'momentun' of wsam over sgd; known: .*momentum"):
        fit(own_problem.net, own_problem.classes, momentun=0.9)
    with pytest.raises(TypeError, match=r"unknown setting 'gamma' of sam over sgd"):
        fit(own_problem.net, own_problem.classes, "sam", gamma=0.9)


def test_errors_of_the_command_name_function_and_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mine.py", "def net():\n    return 1 / 0\n")
    words = ("train", "--device", "cpu", "--out", tmp_path / "out", "--model")
    line = error_of(*words, "mine.py:net")
    assert "mine.py:net raised ZeroDivisionError: division by zero" in line
    assert "mine.py, line 2)" in line
    assert "has no function or class 'Net'" in error_of(*words, "mine.py:Net")
    assert "there is no file" in error_of(*words, "other.py:net")
    write(tmp_path / "mine.py", "import no_such_module")
    assert "importing mine.py raised ModuleNotFoundError" in error_of(*words, "mine.py:net")


def test_loaders_keep_their_batch_size():
    record = fit(own_problem.net, own_problem.loaders, **SHORT)
    assert record["data"]["steps"] == 3
    generator = torch.Generator()
    train_set, test_set = own_problem.classes()
    loader = DataLoader(train_set, 30, shuffle=True, generator=generator)
    one, two = (fit(own_problem.net, (loader, DataLoader(test_set, 30)), **SHORT) for _ in "ab")
    assert curve(one) == curve(two)  # its own generator is seeded by the run


class Messages(Callback):
    """Collects the messages of a run."""

    def __init__(self):
        self.texts = []

    def on_message(self, message):
        self.texts.append(message)


def test_the_batch_size_of_a_loader_is_reported():
    for size, expected in (
        (30, ["has batches of 30 samples: the batch size 32 is not used"]),
        (32, []),
    ):
        messages = Messages()
        loaders = (DataLoader(PAIRS, size), DataLoader(PAIRS, size))
        fit(own_problem.net, loaders, callbacks=[messages], **SHORT)
        assert [text.partition("object:tuple ")[2] for text in messages.texts] == expected


@pytest.mark.parametrize("where", ["inputs", "targets"])
def test_data_that_is_not_finite_is_named(where):
    inputs, numbers = X.clone(), own_problem.NUMBERS.clone()
    (inputs if where == "inputs" else numbers)[40] = torch.nan
    data = TensorDataset(inputs, numbers)
    record = fit(own_problem.line, (data, data), **SHORT)
    assert record["status"] == "failed"
    assert record["failure"] == (
        f"the training loss became nan in epoch 1: the train {where} of object:tuple contain values "
        "that are not finite, such as nan in sample 41"
    )
    assert records.failure_advice(record) == "correct the data"
    clean = TensorDataset(X, own_problem.NUMBERS)
    tested = fit(own_problem.line, (clean, data), **SHORT)
    assert f"the test {where} of object:tuple contain values" in tested["failure"]
    diverged = fit(own_problem.line, (clean, clean), lr=1e30, **SHORT)
    assert records.failure_advice(diverged).startswith("reduce rho, gamma")


def test_errors_during_training_and_evaluation_name_their_line():
    class Fragile(nn.Linear):
        def forward(self, x):
            assert len(x) < 30 or not self.training, "too many"
            return super().forward(x)

    line = r"own_problem\.py, line \d+\)"
    with pytest.raises(
        UserCodeError, match=rf"^training .* raised AssertionError: too many .*{line}"
    ):
        fit(Fragile(4, 3), (PAIRS, PAIRS), **SHORT)

    class OnlyTrains(nn.Linear):
        def forward(self, x):
            return super().forward(x) if self.training else x.no_such_attribute

    with pytest.raises(UserCodeError, match=rf"^training .* raised AttributeError: .*{line}"):
        fit(OnlyTrains(4, 3), (PAIRS, PAIRS), **SHORT)


def test_exceptions_of_a_loss_and_a_model_name_their_line(tmp_path):
    text = (
        "import torch\nfrom torch import nn\n\n\n"
        "def loss(o, t):\n    raise KeyError('weights')\n\n\n"
        "class Net(nn.Linear):\n    def forward(self, x):\n        return x @ torch.ones(9)\n"
    )
    path = write(tmp_path / "mine.py", text)
    loss = user_code.load(f"{path}:loss")
    with pytest.raises(UserCodeError, match=r"^loss raised KeyError: 'weights' .*mine\.py, line 6"):
        fit(own_problem.net, Data(PAIRS, PAIRS, loss=loss), **SHORT)
    model = user_code.load(f"{path}:Net")(4, 3)
    with pytest.raises(
        UserCodeError, match=r"does not accept .*: RuntimeError: .*mine\.py, line 11\)"
    ):
        fit(model, (PAIRS, PAIRS), **SHORT)


def test_labels_without_an_output():
    pairs = [(x, 7 if n == 50 else 0) for n, (x, _) in enumerate(PAIRS)]
    with pytest.raises(UserCodeError, match="has the label 7, but the model has 3 outputs"):
        fit(own_problem.net, (pairs, PAIRS), **SHORT)


@pytest.mark.parametrize("metric", ["error", "macro-f1"])
def test_ignored_targets_are_no_predictions(metric):
    """Padding of sequences, marked by -100 as for torch's cross-entropy."""

    class First(nn.Module):
        """Always predicts class 0."""

        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.tensor([9.0, 0.0]))

        def forward(self, x):
            return self.bias[None, :, None].expand(len(x), 2, 3)

    pairs = [(torch.zeros(1), torch.tensor([0, 0, -100]))] * 40
    final = fit(First(), (pairs, pairs), metric=metric, **SHORT)["final"]
    assert (final["train_error"], final["test_error"]) == (0.0, 0.0)
    assert final.get("test_macro_f1", 100.0) == 100.0
    feed = LoaderFeed(Data(pairs, pairs), Run(), torch.device("cpu"))
    batches = FixedBatches(feed, "test", samples=None, batch_size=10)
    loaded = LoadedModel(First(), batches, "title", Run(), "test", "as in the data")
    assert loaded.accuracy() == 1.0
    assert is_used(torch.tensor([156], dtype=torch.uint8)), "the byte of -100"


def test_a_model_without_parameters_to_train():
    frozen = own_problem.net().requires_grad_(False)
    with pytest.raises(UserCodeError, match="object:Sequential has no parameters to train"):
        fit(frozen, own_problem.classes, **SHORT)


def test_running_out_of_memory_is_one_line_and_keeps_the_checkpoint(tmp_path):
    class Hungry(nn.Linear):
        calls = 0

        def forward(self, x):
            Hungry.calls += 1
            if Hungry.calls == 9:
                torch.empty(1 << 50)
            return super().forward(x)

    run = own()
    with pytest.raises(RunError, match="ran out of memory at batch size 32: use a smaller batch"):
        train(run, tmp_path, CPU, objects=Objects(model=Hungry(4, 3)))
    assert has_started(run, tmp_path)


def test_a_sweep_goes_on_after_a_run_that_cannot_be_trained(tmp_path):
    path = write(tmp_path / "mine.py", FILE.read_text() + "\n\ndef broken():\n    return {}['a']\n")
    jobs = [
        Job(own(name).replace(model=f"{path}:{name}"), tmp_path, CPU) for name in ("net", "broken")
    ]
    outcomes = [run_job(job) for job in jobs]
    assert [outcome.status for outcome in outcomes] == [Status.FINISHED, Status.ERROR]
    assert "broken raised KeyError: 'a'" in outcomes[1].detail


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_losses_of_a_batch_and_of_samples_have_the_same_sum(reduction):
    """The loss of a split is a mean over its samples, whatever the user's function returns."""
    scores, true = torch.randn(6, 4), torch.arange(6) % 4
    expected = nn.functional.cross_entropy(scores, true, reduction="sum")
    own_loss = nn.CrossEntropyLoss(reduction=reduction)
    assert torch.allclose(loss_sum(own_loss, scores, true, 6), expected)
    assert torch.allclose(loss_sum(cross_entropy, scores, true, 6), expected)


def test_metrics_equal_those_of_sklearn():
    sklearn = pytest.importorskip("sklearn.metrics")
    scores = torch.randn(200, 5, generator=torch.Generator().manual_seed(1))
    true = torch.arange(200) % 4
    predicted = scores.argmax(1)
    expected = 100 * sklearn.f1_score(true, predicted, average="macro")
    assert float(METRICS["macro-f1"](scores, true)) == pytest.approx(expected, rel=1e-5)
    record = fit(own_problem.net, own_problem.classes, metric="accuracy", **SHORT)
    final = record["final"]
    assert final["test_accuracy"] == pytest.approx(100 - final["test_error"])
    assert records.objective(record) == -final["test_accuracy"]
    assert records.objective_name(record) == "negative test accuracy"
    named = fit("mlp", "digits", metric="macro-f1", epochs=1, train_limit=200, execution=CPU)
    assert 0 < named["final"]["test_macro_f1"] < 100
