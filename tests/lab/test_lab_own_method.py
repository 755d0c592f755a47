"""A method of the user's own: `wsam train --method file.py:Class`."""

import json
import os
import re
import shlex
import sys
from functools import partial
from pathlib import Path

import own_method
import pytest
import torch
from command import error_of, wsam_command
from recorded import recorded
from torch.nn.functional import cross_entropy
from training import CPU, Stop, StopAfter, curve

import wsam
from wsam.lab import fit, records
from wsam.lab.checkpoint import load_state
from wsam.lab.errors import UserCodeError
from wsam.lab.execution import ExecutionConfig
from wsam.lab.optimizers import can_capture, make_optimizer
from wsam.lab.passes import passes_per_step
from wsam.lab.problem import make_problem
from wsam.lab.run import Run
from wsam.lab.titles import group_names
from wsam.lab.train import train
from wsam.report.commands import command
from wsam.sweep.grid import make_grid
from wsam.sweep.settings import with_value

FILE = Path(own_method.__file__)
NAME = f"{FILE}:BlendSAM"
SMALL = {"model": "mlp", "epochs": 3, "train_limit": 128, "test_limit": 64, "batch_size": 32}
LAB_PAGE = Path(__file__).parents[2] / "docs" / "lab.md"


@pytest.fixture
def marked(tmp_path):
    """A file that leaves a mark if it is executed, and its run."""
    file = tmp_path / "mine.py"
    file.write_text(FILE.read_text())
    run = Run(**SMALL, method=f"{file}:BlendSAM")
    mark = tmp_path / "executed"
    file.write_text(f"from pathlib import Path\n\nPath({str(mark)!r}).touch()\n")
    return run, mark


# Training ---------------------------------------------------------------------------------------


def test_a_run_equals_the_class_used_by_hand(tmp_path):
    hyper = {"rho": 0.2, "share": 0.7}
    run = Run(**SMALL, method=NAME, hyper=hyper, schedule="constant")
    train(run, tmp_path, ExecutionConfig(device="cpu", keep_weights=True))
    problem = make_problem(run, CPU)
    model, feed = problem.model, problem.feed
    base = torch.optim.SGD(model.parameters(), **run.base_args)
    optimizer = own_method.BlendSAM(base, **hyper, model=model)

    def closure(inputs, targets):
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    model.train()
    for _ in range(run.epochs):
        for batch in feed.epoch():
            optimizer.step(partial(closure, *batch))
    kept = load_state(records.weights_path(tmp_path, run))
    assert all(torch.equal(kept[name], value) for name, value in model.state_dict().items())


def test_a_method_selects_samples_of_a_pass(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from wsam import SAM\n"
        "class LastSAM(SAM):\n"
        "    def __init__(self, base, *, rho=0.05, model=None):\n"
        "        super().__init__(base, rho=rho, model=model)\n"
        "    def select(self, losses):\n"
        "        return losses.mean() if self.second_pass else losses[-8:].mean()\n"
    )
    run = Run(**SMALL, method=f"{file}:LastSAM", hyper={"rho": 0.2}, schedule="constant")
    train(run, tmp_path, ExecutionConfig(device="cpu", keep_weights=True))
    problem = make_problem(run, CPU)
    model, feed = problem.model, problem.feed
    optimizer = wsam.SAM(torch.optim.SGD(model.parameters(), **run.base_args), rho=0.2, model=model)

    def loss_fn(inputs, targets):
        used = slice(None) if optimizer.second_pass else slice(-8, None)
        return cross_entropy(model(inputs), targets, reduction="none")[used].mean()

    model.train()
    step = wsam.train_step(optimizer, loss_fn)
    for _ in range(run.epochs):
        for batch in feed.epoch():
            step(*batch)
    kept = load_state(records.weights_path(tmp_path, run))
    assert all(torch.equal(kept[name], tensor) for name, tensor in model.state_dict().items())


def test_the_optimizer_is_that_class():
    model = torch.nn.Linear(3, 1)
    optimizer = make_optimizer(Run(method=NAME, options={"every": 3}), model)
    assert type(optimizer).__name__ == "BlendSAM"
    assert optimizer.rho == 0.1
    assert optimizer.rule.share == 0.5
    assert optimizer.when == wsam.schedule.Every(3)


def test_command_and_its_reproduction(tmp_path, monkeypatch):
    monkeypatch.chdir(FILE.parent)
    words = (
        "--method",
        "own_method.py:BlendSAM",
        "--rho",
        0.3,
        "--hyper",
        "share=1",
        "--epochs",
        1,
    )
    size = ("--model", "mlp", "--train-limit", 128, "--test-limit", 64, "--device", "cpu")
    wsam_command("train", *words, *size, "--out", tmp_path / "runs")
    (record,) = recorded(tmp_path / "runs")
    assert record["settings"]["hyper"] == {"rho": 0.3, "share": 1.0}
    again = command(Run.from_dict(record["settings"]), device="cpu", out=str(tmp_path / "again"))
    wsam_command(*shlex.split(again)[1:])
    (repeated,) = recorded(tmp_path / "again")
    assert repeated["key"] == record["key"]
    assert curve(repeated) == curve(record)


def test_an_interrupted_run_resumes_bit_for_bit(tmp_path):
    run = Run(**SMALL, method=NAME)
    whole = train(run, tmp_path / "whole", CPU)
    with pytest.raises(Stop):
        train(run, tmp_path / "parts", CPU, [StopAfter(epochs=2)])
    record = train(run, tmp_path / "parts", CPU)
    assert record["resumed"] == 1
    assert curve(record) == curve(whole)


def test_fit():
    record = fit("mlp", "digits", NAME, share=0.9, epochs=1, train_limit=128, execution=CPU)
    assert record["settings"]["hyper"] == {"rho": 0.1, "share": 0.9}
    with pytest.raises(TypeError, match=r"unknown setting 'gamma' of .*BlendSAM over sgd"):
        fit("mlp", "digits", NAME, gamma=0.9)


def test_the_example_of_the_page(tmp_path, monkeypatch):
    section = LAB_PAGE.read_text().partition("## Your own method\n")[2]
    (tmp_path / "my.py").write_text(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1])
    monkeypatch.chdir(tmp_path)
    words = shlex.split(re.search(r"\$ (wsam train .*)", section)[1])[1:]
    wsam_command(*words, "--epochs", 1, "--train-limit", 128, "--device", "cpu", "--out", "out")
    (record,) = recorded(tmp_path / "out")
    assert record["status"] == "finished"
    assert record["settings"]["hyper"] == {"rho": 0.1, "share": 0.7}


# Key and settings -------------------------------------------------------------------------------


def test_the_key_depends_on_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "mine.py"
    file.write_text(FILE.read_text())
    name = f"{file}:BlendSAM"
    run = Run(method=name)
    assert run == Run(method=name, hyper={"rho": 0.1, "share": 0.5})
    assert run.replace(method="sam").key == Run(method="sam").key
    written = file.stat()
    file.write_text(FILE.read_text().replace("share=0.5", "share=0.6"))
    os.utime(file, ns=(written.st_atime_ns, written.st_mtime_ns))  # of the same time and size
    changed = Run(method=name)
    assert changed.hyper["share"] == 0.6
    assert changed.key != run.key
    assert changed.replace(hyper={"share": 0.5}).key != run.key
    with pytest.raises(UserCodeError, match="have changed"):
        train(run, tmp_path / "out", CPU)
    assert "version of method 1" in group_names([run, changed])[0]


def test_a_whole_number_as_default_of_rho(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FILE.read_text().replace("rho=0.1, share=0.5", "rho=1, share=1"))
    run = Run(method=f"{file}:BlendSAM", hyper={"rho": 0.5})
    assert run.hyper["rho"] == 0.5
    with pytest.raises(TypeError, match=r"share of .* must be a whole number"):
        run.replace(hyper={"share": 0.5})


def test_changed_hyperparameters_have_the_type_of_the_others():
    run = Run(method=NAME)
    assert run.replace(hyper={"rho": 1}) == with_value(run, "rho", 1.0)
    with pytest.raises(ValueError, match="does not take 'gamma'; it takes: rho, share"):
        run.replace(hyper={"gamma": 0.5})
    grid = make_grid("mine", {"method": ["sam", NAME], "share": [0.2, 0.4]}, {"epochs": 1})
    found = [grid.run(column, point) for column in grid.bases for point in grid.points()]
    assert [dict(one.hyper) for one in found if one.method == NAME] == [
        {"rho": 0.1, "share": 0.2},
        {"rho": 0.1, "share": 0.4},
    ]


def test_titles(tmp_path):
    other = tmp_path / "other.py"
    other.write_text(FILE.read_text())
    run = Run(method=NAME)
    assert group_names([run]) == ["BlendSAM ρ 0.1, share 0.5"]
    first, second = group_names([run, Run(method=f"{other}:BlendSAM")])
    assert first == f"BlendSAM ρ 0.1, share 0.5, file {FILE}"
    assert second == f"BlendSAM ρ 0.1, share 0.5, file {other}"
    assert passes_per_step(run) is None


def test_steps_are_not_captured_by_default():
    assert can_capture(Run(method="sam"))
    assert not can_capture(Run(method=NAME))


# Safety -----------------------------------------------------------------------------------------


def test_a_record_does_not_execute_its_method(marked):
    run, mark = marked
    settings = json.loads(json.dumps(run.to_dict()))
    assert Run.from_dict(settings) == run
    assert run.replace(seed=1, hyper={"rho": 0.2}).hyper["rho"] == 0.2
    assert group_names([run])
    del settings["digests"]
    with pytest.raises(ValueError, match=r"the digest of the method .* is missing"):
        Run.from_dict(settings)
    assert not mark.exists()
    with pytest.raises(UserCodeError):
        Run(method=run.method)
    assert mark.exists()  # this test can fail


# Mistakes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("function", "must be a subclass of wsam.SharpnessAware, got <function function"),
        ("Blend", "must be a subclass of wsam.SharpnessAware, got <class 'own_method"),
        ("nothing", "has no function or class 'nothing'"),
        ("WithoutDefault", "the argument share needs a default that is a number"),
        ("Unusual", "the argument share needs a default that is a number"),
    ],
)
def test_not_a_method(name, message):
    with pytest.raises(UserCodeError, match=re.escape(message)):
        Run(method=f"{FILE}:{name}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "WithoutModel"}, "WithoutModel.* unexpected keyword argument 'model'"),
        ({"method": "BlendSAM", "options": {"lean": True}}, "BlendSAM.* keyword argument 'lean'"),
        ({"method": "BlendSAM", "hyper": {"rho": -1}}, r"BlendSAM raised ValueError: .*rho"),
        ({"method": "BrokenSAM"}, r"raised KeyError: 'nothing' \(.*own_method\.py, line \d+\)"),
    ],
)
def test_mistakes_of_a_run_are_one_line(tmp_path, settings, message):
    run = Run(**SMALL, **{**settings, "method": f"{FILE}:{settings['method']}"})
    with pytest.raises(UserCodeError, match=message) as error:
        train(run, tmp_path, CPU)
    assert "\n" not in str(error.value)


def test_mistakes_of_a_command_are_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(FILE.parent)
    where = ("--device", "cpu", "--out", tmp_path)
    line = error_of("train", "--method", "own_method.py:function", *where)
    assert "must be a subclass of wsam.SharpnessAware" in line
    assert "there is no file" in error_of("train", "--method", "none.py:X", *where)
    words = ("--method", "own_method.py:BlendSAM", "--hyper", "gamma=1")
    assert "does not take 'gamma'; it takes: rho, share" in error_of("train", *words, *where)
