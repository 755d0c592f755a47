"""Studies: candidates chosen on a validation split, costs, conclusions, and smoke runs."""

import dataclasses
import json
from itertools import combinations

import pytest
import torch
from command import wsam_command
from recorded import as_recorded, recorded
from torch import nn
from training import CPU

from wsam.lab import records
from wsam.lab.data import datasets
from wsam.lab.optimizers import make_optimizer
from wsam.lab.passes import passes_per_step
from wsam.lab.problem import make_data_feed
from wsam.lab.run import Run
from wsam.lab.step import Objective, Stepper
from wsam.paper import Kind, Measure, Profile, find, gather, hessian, render
from wsam.paper.cheap import conclude
from wsam.paper.hessian import (
    AUGMENTED,
    FULL,
    MEASURES,
    PLAIN,
    eigenvalue_by_batches,
    fixed_batches,
    full_eigenvalue,
)
from wsam.paper.registry import load
from wsam.paper.study import candidates, choose, chosen_cell, search_table
from wsam.paper.table import Cell, Table
from wsam.sweep.grid import with_seeds

RUN = Run(method="sam", epochs=10)
STUDIES = ("cheap", "cheap-small", "adam", "adam-small")


def write(out, run, seconds=1.0, gpu="one", status="finished", shared=False, **figures):
    rows = [
        {"epoch": n, "train_loss": 0.1, "seconds": seconds, **figures}
        for n in range(1, run.epochs + 1)
    ]
    metric = {"metric": {"split": "validation"}} if run.validation else {}
    record = as_recorded(run, *rows, status=status)
    hardware = {"gpu": gpu, "cpu": "any", "shared": shared}
    records.write(out, run, {**record, **metric, "hardware": hardware})


def small_study():
    options = candidates(RUN, [{"rho": 0.1}, {"rho": 0.2}, {"rho": 0.4}], trial_epochs=0.5)
    cells = (chosen_cell(("SAM",), "digits", options),)
    return Table("mine", "Mine", ("method",), cells, Kind.STUDY)


def test_trials_hold_out_data_and_final_runs_do_not():
    (cell,) = small_study().cells
    for one, rho in zip(cell.candidates, (0.1, 0.2, 0.4), strict=True):
        assert one.run == RUN.replace(hyper={"rho": rho})
        assert one.trial == one.run.replace(epochs=5, validation=0.1)
        assert one.text == f"rho {rho:g}"
    assert cell.runs == with_seeds(cell.candidates[0].run, (0, 1, 2))


def test_the_best_on_the_validation_split_is_chosen(tmp_path):
    study = small_study()
    (cell,) = study.cells
    assert not choose(study, tmp_path).cells[0].is_searched
    for one, error in zip(cell.candidates, (5.0, 3.0, 1.0), strict=True):
        failed = error == 1.0
        figures = {"validation_error": None if failed else error, "test_error": 9.0 - error}
        write(tmp_path, one.trial, status="failed" if failed else "finished", **figures)
    chosen = choose(study.seeded((4, 7)), tmp_path)
    assert chosen.cells[0].runs == with_seeds(cell.candidates[1].run, (4, 7)), "not by the test set"
    (table,) = (search_table(study),)
    texts = {row[1]: row[2] for row in render.body(table, gather(table, tmp_path))}
    assert texts == {"rho 0.1": "5.00 (n = 1)", "rho 0.2": "3.00 (n = 1)", "rho 0.4": "1 failed"}
    write(tmp_path, chosen.cells[0].runs[0], test_error=2.5)
    text = render.page_markdown(chosen, gather(chosen, tmp_path))
    assert "| SAM | 2.50 (n = 1) |" in text.replace("\u00a0", " ")
    summary = "<details><summary>Chosen on a validation split of the training data</summary>"
    assert f"{summary}\n\n- SAM: rho 0.2\n\n</details>" in text
    text = render.markdown(chosen, gather(chosen, tmp_path))
    assert "- Chosen on a validation split of the training data:\n  - SAM: rho 0.2\n" in text


def test_a_row_that_was_not_searched_says_so(tmp_path):
    study = choose(small_study(), tmp_path)
    write(tmp_path, study.cells[0].runs[0], test_error=2.5)
    assert "SAM: rho 0.1 (not searched)" in render.markdown(study, gather(study, tmp_path))


def test_notes_about_rows_that_are_not_shown_are_left_out(tmp_path):
    table = find("adam")
    for only, trials, adapters in (("ViT/*", True, False), ("ViT, *", True, True)):
        part = table.select(only)
        text = render.markdown(part, gather(part, tmp_path))
        assert ("trials of 30" in text, "LoRA of rank 8" in text) == (trials, adapters), only
        assert ("ASAM's values" in text, "GPT: " in text) == (not adapters, False), only


def test_list_counts_the_runs_of_the_chosen_candidates(tmp_path):
    cell = find("cheap-small").cell(("MSAM",), "noisy digits")
    *others, best = cell.candidates
    for one in cell.candidates:
        write(tmp_path, one.trial, validation_error=1.0 if one is best else 5.0, test_error=9.0)
    for run in with_seeds(best.run, (0, 1)):
        write(tmp_path, run, test_error=2.0)
    write(tmp_path, others[0].run, test_error=3.0)
    words = ("--results", tmp_path, "--json")
    listed = json.loads(wsam_command("paper", "list", *words).stdout)
    finished = {table["name"]: table["finished"] for table in listed}
    assert finished["cheap-small"] == 2
    assert finished["cheap-small-search"] == len(cell.candidates)
    cells = json.loads(wsam_command("paper", "table", "cheap-small", *words).stdout)
    keys = {key for cell in cells for key in cell["keys"]}
    assert keys == {run.key for run in with_seeds(best.run, (0, 1))}


def test_cost_is_relative_to_the_first_reference_on_the_same_hardware(tmp_path):
    sgd = RUN.replace(method="vanilla")
    longer = sgd.replace(epochs=20)
    cell = Cell(("SAM",), "cost", (RUN,), measure=Measure.COST, reference=(sgd, longer))
    table = Table("mine", "Mine", ("method",), (cell,))
    write(tmp_path, RUN, seconds=3.0, test_error=1.0)
    (entry,) = gather(table, tmp_path)
    assert entry.text == "1 not measured"
    write(tmp_path, sgd, seconds=9.0, gpu="another", test_error=1.0)
    write(tmp_path, longer, seconds=2.0, test_error=1.0)
    (entry,) = gather(table, tmp_path)
    assert entry.ours.values == (pytest.approx(1.5),), "10 epochs of 3 s and of 2 s"


def test_cost_leaves_out_runs_that_shared_a_gpu(tmp_path):
    sgd = RUN.replace(method="vanilla")
    runs, bases = with_seeds(RUN, (0, 1)), with_seeds(sgd, (0, 1))
    cell = Cell(("SAM",), "cost", runs, measure=Measure.COST, reference=bases)
    table = Table("mine", "Mine", ("method",), (cell,))
    for seed, shared in enumerate((False, True)):
        write(tmp_path, runs[seed], seconds=9.0 if shared else 3.0, shared=shared, test_error=1.0)
        write(tmp_path, bases[seed], seconds=7.0 if shared else 2.0, shared=shared, test_error=1.0)
    (entry,) = gather(table, tmp_path)
    assert entry.ours.values == (pytest.approx(1.5),)


def test_cost_with_other_seeds(tmp_path):
    """Relative to the base with these seeds, which `wsam paper run --seeds` trains."""
    sgd = RUN.replace(method="vanilla")
    cell = Cell(("SAM",), "cost", (RUN,), measure=Measure.COST, reference=(sgd,))
    table = Table("mine", "Mine", ("method",), (cell,)).seeded([7])
    write(tmp_path, RUN.replace(seed=7), seconds=3.0, test_error=1.0)
    write(tmp_path, sgd.replace(seed=7), seconds=2.0, test_error=1.0)
    (entry,) = gather(table, tmp_path)
    assert entry.ours.values == (pytest.approx(1.5),)


def test_training_seconds_of_a_run_with_two_phases():
    def seconds(options, times):
        rows = [{"epoch": n, "train_loss": 0.1, "seconds": t} for n, t in enumerate(times)]
        return records.training_seconds(as_recorded(RUN.replace(options=options), *rows))

    assert seconds({}, [30.0, 1.0, 1.0, 9.0]) == 4.0
    late = {"start": 0.5, "every": 2}
    assert seconds(late, [30.0, 1.0, 1.0, 20.0, 2.0, 2.0]) == 9.0
    assert seconds({"threshold": 1.0}, [30.0, 1.0, 2.0, 3.0]) == 8.0


def test_cheap_states_the_share_of_the_gain(tmp_path):
    table = find("cheap").select("*/CIFAR-10*")
    rows = {"SGD": (4.4, 1.0), "WSAM": (3.6, 2.0), "VaSSO": (3.8, 1.1), "WSAM reuse 2": (3.72, 1.5)}
    rows["SGD, late decay"] = (3.7, 1.0)  # no form of SGD counts as a cheap method
    for label, (error, seconds) in rows.items():
        write(tmp_path, table.cell((label,), "CIFAR-10").runs[0], seconds, test_error=error)
    entries = gather(table, tmp_path)
    line, shares = conclude(entries)
    assert line == (
        "CIFAR-10: up to a cost of 1.15, VaSSO has the lowest mean error, 3.80 (n = 1, cost 1.10), "
        "75% of WSAM's gain over SGD."
    )
    assert shares == (
        "CIFAR-10, share of WSAM's gain, with the cost: VaSSO 75% (1.10); WSAM reuse 2 85% (1.50)."
    )
    assert f"- {line}\n- {shares}" in render.markdown(table, entries)


def rows_of(name):
    return {cell.row[0]: cell.runs[0] for cell in find(name).cells if not cell.measure.is_cost}


@pytest.mark.parametrize(
    ("label", "run"),
    [
        *rows_of("cheap").items(),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in rows_of("cheap-small").items()),
    ],
)
def test_passes_are_those_of_the_steps(label, run):
    if label == "SAM, AE-SAM threshold":
        assert passes_per_step(run) is None
        return
    torch.manual_seed(0)
    steps, batch = 160, torch.randn(20, 4)
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    passes = 0.0

    def counting(inputs):
        nonlocal passes
        passes += len(inputs) / len(batch) * (1 if torch.is_grad_enabled() else 1 / 3)
        return layers(inputs)

    optimizer = make_optimizer(run, layers, steps)
    select = getattr(optimizer, "select", torch.mean)
    objective = Objective(counting, select, "fp32", torch.device("cpu"))
    step = Stepper(optimizer, objective, False, run.options)
    for _ in range(steps):
        step(batch, torch.arange(20) % 3)
    assert passes / steps == pytest.approx(passes_per_step(run))


def test_passes_are_relative_to_the_first_reference(tmp_path):
    sgd = RUN.replace(method="vanilla")
    longer = RUN.replace(options={"every": 4}, epochs=20)
    cell = Cell(("SAM",), "cost", (longer,), measure=Measure.PASSES, reference=(sgd,))
    table = Table("mine", "Mine", ("method",), (cell,))
    assert gather(table, tmp_path)[0].text == "not run"
    write(tmp_path, longer, test_error=1.0)
    assert gather(table, tmp_path)[0].text == "2.50"


def test_every_method_has_the_same_search_effort():
    for name in STUDIES:
        sizes = {len(cell.candidates) for cell in find(name).cells}
        assert sizes - {0, 1} == {4 if "adam" in name else 3}, name
        for cell in find(name).cells:
            if len(cell.candidates) == 1:
                fixed = (("SGD, lr 0.05",), ("MLP", "SAM, rho 0.37"))
                assert name == "cheap" or cell.row in fixed, "settings that are not chosen"
            for one in cell.candidates:
                assert one.trial.validation == 0.1
                assert one.run.validation is None
                assert one.run.seed == one.trial.seed == 0


def test_studies_compare_what_they_state():
    adam = find("adam")
    assert {cell.runs[0].base for cell in adam.cells} == {"adamw"}
    for cell in adam.cells:
        if not cell.candidates:
            continue
        plain = adam.cell((cell.row[0], "AdamW"), cell.column)
        twice = adam.cell((cell.row[0], "AdamW, twice the epochs"), cell.column)
        assert twice.runs[0].epochs == 2 * plain.runs[0].epochs
        if cell.row[1] == "WSAM, preconditioned":
            assert cell.runs[0].options["precondition"]
        same = ("data", "model", "model_args", "batch_size", "schedule", "pretrained")
        assert all(getattr(cell.runs[0], name) == getattr(plain.runs[0], name) for name in same)
    keys = {run.key for run in adam.runs}
    pretrained = {run.pretrained for run in adam.runs} - {None}
    assert len(pretrained) == 1
    assert pretrained.pop().removeprefix("run:") in keys, "trained by the same command"
    sam = find("cifar").cell(("ResNet18", "SAM"), "CIFAR-10").runs
    assert find("coupled").cell(("0.5",), "CIFAR-10").runs == sam, "gamma 1/2 is SAM"


@pytest.mark.parametrize(
    ("name", "only", "runs"),
    [
        ("adam-small-search", "*/AdamW/weight decay 0.01/*", 2),
        ("cheap-small", "MSAM*", 1),
        pytest.param("cheap-small-search", "*/rho 0.4/*", 5, marks=pytest.mark.slow),
        pytest.param("adam-search", "*/WSAM*/gamma 0.5, rho 0.1/*", 6, marks=pytest.mark.slow),
        pytest.param("adam", "*/GSAM*/*", 2, marks=pytest.mark.slow),
        pytest.param("cheap", "*/CIFAR-10", 33, marks=pytest.mark.slow),
        pytest.param("coupled", "0.88*", 2, marks=pytest.mark.slow),
    ],
)
def test_smoke_runs_of_studies(tmp_path, monkeypatch, name, only, runs):
    monkeypatch.setattr("wsam.paper.profile.SMOKE_IMAGES", 128)
    words = (name, "--only", only, "--smoke", "--seeds", "0", "--device", "cpu", "--out", tmp_path)
    printed = wsam_command("paper", "run", *words)
    found = recorded(tmp_path)
    assert len(found) <= runs, "CIFAR-10 and CIFAR-100 are the same digits"
    assert f"{len(found)} finished; records in" in printed.stdout
    table = ("paper", "table", name, "--smoke", "--seeds", "0", "--results", tmp_path, "--json")
    cells = json.loads(wsam_command(*table, "--only", only).stdout)
    assert {cell["n"] for cell in cells} == {1}


@pytest.mark.parametrize(
    "command", [("paper", "run"), pytest.param(("sweep",), marks=pytest.mark.slow)]
)
def test_a_study_that_was_not_searched_warns(tmp_path, command):
    words = ("--seeds", "0", "--epochs", "1", "--device", "cpu", "--out", tmp_path, "--only")
    message = "1 of 1 cells were not searched and take their first candidate: run"
    study = (*command, "adam-small", *words, "MLP/SAM/*")
    assert f"{message} `wsam paper run adam-small-search` first" in wsam_command(*study).stderr
    wsam_command("paper", "run", "adam-small-search", *words, "MLP/SAM/*")
    assert "not searched" not in wsam_command(*study).stderr


@pytest.fixture
def augmented_digits(monkeypatch):
    """Replace the digits by the centers of a few of them, with random crops and flips."""

    def load(source):
        digits = datasets.load_digits(source)
        info = dataclasses.replace(digits.info, padding=1, flip=True)
        train, test = (
            datasets.ImageSet(part.images[:count, 2:6, 2:6], part.labels[:count])
            for part, count in ((digits.train, 128), (digits.test, 32))
        )
        return dataclasses.replace(digits, info=info, train=train, test=test)

    monkeypatch.setitem(datasets.LOADERS, "digits", load)


@pytest.mark.slow
def test_hessian_is_read_in_eight_ways_from_kept_weights(tmp_path, monkeypatch, augmented_digits):
    monkeypatch.setattr(hessian, "STEPS", 4)
    words = ("hessian", "--only", "*/SAM/*", "--smoke", "--seeds", "0", "--device", "cpu")
    run = wsam_command("paper", "run", *words, "--out", tmp_path, "--json").stdout
    cells = json.loads(run)["cells"]
    assert len(cells) == 8
    assert {cell["n"] for cell in cells} == {1}
    (path,) = tmp_path.glob("*.minimum.json")
    before = path.read_bytes()
    measurement = json.loads(before)
    readings = {way: measurement["readings"][str(name)] for way, name in MEASURES.items()}
    values = {way: reading["top_eigenvalue"] for way, reading in readings.items()}
    assert sorted(values.values()) == sorted(cell["mean"] for cell in cells)
    for one, other in combinations(values, 2):  # much more than rounding
        assert values[one] != pytest.approx(values[other], rel=0.01), (one, other)
    for (mode, images, _), reading in readings.items():
        assert (reading["mode"], reading["augmented"]) == (mode, images == AUGMENTED)
        assert (reading["images"], reading["batch"]) == (128, 64)
    of_all_images = measurement["top_eigenvalue"]  # in evaluation mode, in another order
    assert values["eval", PLAIN, FULL] == pytest.approx(of_all_images, rel=0.01)
    wsam_command("paper", "run", *words, "--out", tmp_path)
    assert path.read_bytes() == before, "nothing is measured twice"
    profile = Profile(smoke=True, seeds=(0,), only="*/SAM/*")
    entries = gather(load("hessian", profile, tmp_path), tmp_path)
    assert {entry.cell.measure for entry in entries} == set(MEASURES.values())


@pytest.mark.parametrize("data", ["augmented", "as they are"])
def test_augmentation_keeps_the_images_of_a_hessian(data, request):
    if data == "augmented":
        request.getfixturevalue("augmented_digits")
    run = Run(data="digits", model="cnn", method="sam", batch_size=64, train_limit=128)
    feeds = [make_data_feed(run.replace(augment=on), CPU) for on in (False, True)]
    plain, augmented = (fixed_batches(feed, 64) for feed in feeds)
    for (images, labels), (others, same) in zip(plain, augmented, strict=True):
        assert labels.equal(same)
        assert images.equal(others) == (data == "as they are"), "digits define no augmentation"


def test_power_iteration_by_batches_finds_the_top_eigenvalue():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1, bias=False))
    inputs = torch.diag(torch.tensor([1.0, 2.0, 3.0]))
    batches = [(inputs, torch.zeros(3, 1))] * 2

    def loss(output, target):
        return (output - target).square().mean()

    full = full_eigenvalue(model, loss, batches, "eval")
    read = eigenvalue_by_batches(model, loss, batches, "eval")
    assert full["top_eigenvalue"] == pytest.approx(6.0, rel=1e-3)  # 2/3 of the largest square
    assert read["top_eigenvalue"] == pytest.approx(6.0, rel=1e-3)
    assert read["deviation"] == pytest.approx(0.0, abs=1e-3)
    assert read["stopped"] == pytest.approx(6.0, rel=0.1)
