"""Groups in a report: failed runs are visible, and every group has a unique name."""

import json
import math
import re
from pathlib import Path

import own_method
import pytest
from recorded import as_recorded

from wsam._utils.text import mean_and_std
from wsam.lab import records
from wsam.lab.run import Run
from wsam.paper import Profile, find, minima
from wsam.report import gather, page
from wsam.report.experiment import error_map, heat_figures, mean_slice
from wsam.report.labels import experiments, method_colors, select_best


def put(out, run, error=5.0):
    """Write the record of a run without running it; without an error the run has failed."""
    row = {"epoch": 1, "train_loss": 0.5, "test_error": error, "sharpness": 0.1}
    status = "failed" if error is None else "finished"
    records.write(out, run, as_recorded(run, row, status=status))
    return run


def put_slice(out, run, losses):
    """Write a measurement with a slice."""
    places = [-1.0 + 2 * number / (len(losses) - 1) for number in range(len(losses))]
    part = {"coordinates": [places], "losses": losses, "labels": ["d"], "info": {}}
    found = {"key": run.key, "top_eigenvalue": 2.0, minima.SLICE: part}
    minima.measurement_path(out, run).write_text(json.dumps(found))


def wsam(seed=0, **hyper):
    return Run(hyper=hyper, epochs=1, seed=seed)


# ---- infinite values ----


@pytest.mark.parametrize("values", [[math.inf, 1.0], [math.inf, -math.inf], [math.nan, 1.0]])
def test_infinite_values_have_no_deviation(values):
    mean, deviation = mean_and_std(values)
    assert not math.isfinite(mean)
    assert deviation is None


def test_a_slice_with_infinite_values_is_drawn(tmp_path):
    for seed in (0, 1):
        put_slice(tmp_path, put(tmp_path, wsam(seed)), [None, None, 1.0 + seed, 2.0 - seed, None])
    folder = gather(tmp_path)
    gap = math.inf
    assert [point.mean for point in mean_slice(folder.groups[0])] == [gap, gap, 1.5, 1.5, gap]
    charts = re.findall("<svg.*?</svg>", page(folder), re.DOTALL)
    (around_minimum,) = (c for c in charts if "along a random direction" in c)
    assert around_minimum.count("fill-opacity: 0.15") == 1
    assert not re.search(r"\b(nan|inf)\b", around_minimum)


# ---- failed runs ----


@pytest.fixture(scope="module")
def half_failed(tmp_path_factory):
    """A grid: at rho 0.4 and gamma 0.8 four of five seeds failed; the fifth has the smallest error."""
    out = tmp_path_factory.mktemp("half_failed")
    for rho in (0.1, 0.4):
        for gamma in (0.5, 0.8):
            fails = (rho, gamma) == (0.4, 0.8)
            for seed in range(5):
                error = None if fails and seed else 1.0 if fails else 10 * rho + gamma
                put(out, wsam(seed, rho=rho, gamma=gamma), error)
    return experiments(gather(out).groups)[0], page(gather(out))


def test_a_cell_with_failed_runs_has_no_color(half_failed):
    experiment, _ = half_failed
    found = error_map([item.group for item in experiment.groups], "rho", "gamma")
    assert found.cells[0.4, 0.8] == "failed 4/5", "not the error of the remaining run"
    assert sum(isinstance(value, float) for value in found.cells.values()) == 3
    (figure,) = heat_figures(experiment)
    assert ">failed</text>" in figure.svg
    assert ">4/5</text>" in figure.svg
    assert figure.table is not None


def test_failures_are_shown_with_the_group(half_failed):
    one, text = half_failed
    name = "WSAM γ 0.8, ρ 0.4"
    assert [item.label for item in one.groups if item.name == name] == [f"{name}, failed 4/5"]
    assert sum(item.label == item.name for item in one.groups) == 3
    legend = text.partition('<ul class="legend">')[2].partition("</ul>")[0]
    assert f"{name}, failed 4/5</li>" in legend
    dots = text.partition('aria-label="Test error (%): ')[2].partition("</svg>")[0]
    assert f">{name}, failed 4/5</text>" in dots
    assert "<span>1, failed 4/5</span>" in text, "in the table, with the number of finished runs"
    assert text.count("Failed runs are excluded.") >= 3


def test_sharpness_is_marked_as_incomparable_between_radii(half_failed):
    _, text = half_failed
    assert "at each method&#39;s own radius: not comparable between radii." in text


def test_groups_with_failed_runs_are_selected_last(half_failed):
    groups = half_failed[0].groups
    assert [item.name for item in select_best(groups, 3)] == [
        item.name for item in groups if not item.group.failures
    ]
    assert len(select_best(groups, 4)) == 4


def test_the_base_is_always_among_the_curves(tmp_path):
    """Even if many others have smaller errors; the best group of each base."""
    for rho in range(1, 8):
        for method in ("sam", "wsam", "gsam", "esam"):
            put(tmp_path, Run(method=method, hyper={"rho": rho / 10}, epochs=1), 1.0 + rho)
    for lr, error in ((0.1, 60.0), (0.2, 50.0), (0.3, 70.0)):
        put(tmp_path, Run(method="vanilla", base_args={"lr": lr}, epochs=1), error)
    put(tmp_path, Run(method="vanilla", base="adamw", epochs=1), 80.0)
    (one,) = experiments(gather(tmp_path).groups)
    for shown in (one.plotted, select_best(one.groups, 6)):
        names = [item.name for item in shown if item.group.run.method == "vanilla"]
        assert {"SGD lr 0.2", "AdamW lr 0.001"} <= set(names)
    assert len(select_best(one.groups, 6)) == 6


def test_groups_are_selected_by_their_validation_metric(tmp_path):
    """The test set does not decide, and higher may be better."""
    metric = {"name": "accuracy", "unit": "%", "lower_is_better": False, "split": "validation"}
    for rho, on_validation, on_test in ((0.1, 90.0, 50.0), (0.2, 80.0, 99.0)):
        run = Run(method="sam", hyper={"rho": rho}, validation=0.1, metric="accuracy")
        row = {"epoch": 1, "train_loss": 0.5, "validation_accuracy": on_validation}
        row["test_accuracy"] = on_test
        records.write(tmp_path, run, as_recorded(run, row) | {"metric": metric})
    (one,) = experiments(gather(tmp_path).groups)
    assert [item.name for item in select_best(one.groups, 1)] == ["SAM ρ 0.1"]
    text = page(gather(tmp_path))
    assert "validation accuracy (%)</th>" in text
    assert "test accuracy (%)</th>" in text
    assert "Validation accuracy (%) by epoch" in text
    assert "seed 0: test accuracy 99.00%, record" in text
    assert "rror" not in text.partition("<main>")[2]


# ---- titles ----


@pytest.mark.parametrize(
    ("runs", "title"),
    [
        ([Run()], "digits, cnn: 1 run"),
        ([Run(), Run(seed=1), Run(model="mlp")], "digits, cnn and mlp: 3 runs"),
        ([Run(noise=0.4), Run()], "digits, cnn, partly noisy labels: 2 runs"),
        (
            [Run(data=data, model="mlp") for data in ("digits", "cifar10", "cifar100", "fashion")],
            "4 data sets, mlp: 4 runs",
        ),
    ],
)
def test_the_title_tells_what_the_folder_contains(tmp_path, runs, title):
    for run in runs:
        put(tmp_path, run)
    text = page(gather(tmp_path))
    assert f"<h1>{title}</h1>" in text
    assert f"<title>{title}</title>" in text
    assert f"folder {tmp_path.name}<" in text


def test_failed_runs_are_named_by_what_differs(tmp_path):
    put(tmp_path, Run(method="sam"))
    failed = put(tmp_path, Run(method="sam", base="adamw", base_args={"lr": 9.0}), None)
    (trouble,) = gather(tmp_path).troubles
    assert trouble.what == "SAM (AdamW) ρ 0.05, lr 9"
    assert failed.key not in trouble.what


# ---- names ----


def test_failed_runs_are_listed_in_the_order_of_the_table(tmp_path):
    runs = [wsam(seed, rho=rho) for rho in (0.1, 0.2, 0.4) for seed in range(3)]
    for run in runs:
        put(tmp_path, run, None)
    expected = [f"WSAM γ 0.9, ρ {rho}, seed {seed}" for rho in (0.1, 0.2, 0.4) for seed in range(3)]
    assert [trouble.what for trouble in gather(tmp_path).troubles] == expected


def test_names_of_an_experiment_are_unique(tmp_path):
    ellipsoid = {"name": "adaptive", "eta": 0.01}
    runs = [
        Run(epochs=5),
        Run(epochs=10),
        Run(method="vanilla", epochs=5),
        Run(method="vanilla", epochs=10),
        Run(method="vanilla", epochs=5, base="adam"),
        Run(method="vanilla", epochs=5, base="adam", base_args={"lr": 0.1}),
        Run(epochs=5, base_args={"lr": 0.01}),
        Run(epochs=5, base_args={"lr": 0.010000001}),
        Run(epochs=5, geometry=ellipsoid),
        Run(epochs=5, geometry=ellipsoid | {"eta": 0.1}),
        Run(epochs=5, geometry=ellipsoid | {"weights_only": True}),
        Run(epochs=5, geometry={"name": "fisher"}),
        Run(epochs=5, options={"max_norm": 1.0}),
        Run(epochs=5, options={"max_norm": 2.0}),
        Run(epochs=5, options={"lean": True}),
        Run(epochs=5, batch_size=64),
        Run(epochs=5, train_limit=100),
    ]
    for run in runs:
        put(tmp_path, run)
    (one,) = experiments(gather(tmp_path).groups)
    names = [item.name for item in one.groups]
    assert len(names) == len(set(names)) == len(runs), sorted(names)


def test_epochs_are_named_where_they_vary(tmp_path):
    for run in (
        Run(method="vanilla", epochs=10),
        Run(epochs=5),
        Run(epochs=10),
        Run(method="sam", epochs=7),
    ):
        put(tmp_path, run)
    (one,) = experiments(gather(tmp_path).groups)
    named = {item.group.run.method for item in one.groups if "epochs" in item.name}
    assert named == {"wsam"}


def test_only_varying_settings_are_named(tmp_path):
    """The base has twice the epochs of the others, as in the paper: no name includes them."""
    put(tmp_path, Run(method="vanilla", epochs=10))
    put(tmp_path, Run(epochs=5, options={"max_norm": 1.0}, geometry={"name": "fisher"}))
    (one,) = experiments(gather(tmp_path).groups)
    assert [item.name for item in one.groups] == ["SGD", "WSAM fisher, γ 0.9, ρ 0.05, max norm 1"]


def test_a_method_of_ones_own(tmp_path):
    """It has its class's name and a style that is not the base's, and its code is not executed."""
    file = tmp_path / "mine.py"
    file.write_text(Path(own_method.__file__).read_text())
    put(tmp_path, Run(method="vanilla", epochs=1))
    for rho in (0.1, 0.2, 0.4):
        for share in (0.5, 0.7):
            hyper = {"rho": rho, "share": share}
            put(tmp_path, Run(method=f"{file}:BlendSAM", hyper=hyper, epochs=1))
    file.write_text("raise SystemExit('executed')")
    folder = gather(tmp_path)
    assert not folder.troubles
    (one,) = experiments(folder.groups)
    base, *own = one.groups
    assert [item.name for item in own][:2] == [
        "BlendSAM ρ 0.1, share 0.5",
        "BlendSAM ρ 0.1, share 0.7",
    ]
    assert {item.style.color for item in own} == {"friendly_sam"}
    assert base.style.color == "vanilla"
    text = page(folder)
    assert "BlendSAM ρ 0.4, share 0.7" in text
    assert "Test error (%) of BlendSAM by rho and share" in text
    assert f"--method {file}:BlendSAM --rho 0.4 --hyper share=0.7" in text


def test_a_method_of_ones_own_whose_arguments_have_changed(tmp_path):
    """Its older records lack an argument, or have one that was removed."""
    method, old, new = "mine.py:Mine", {"method": "0" * 12}, {"method": "1" * 12}
    put(tmp_path, Run(method=method, hyper={"rho": 0.1, "share": 0.5}, digests=old, epochs=1))
    for rho in (0.2, 0.3, 0.4):
        put(tmp_path, Run(method=method, hyper={"rho": rho}, digests=new, epochs=1))
    assert "Mine ρ 0.4" in page(gather(tmp_path))


def test_methods_of_ones_own_are_counted_separately(tmp_path):
    """The limit of lines is one for each method."""
    for name in "ABCDEF":
        run = Run(method=f"mine.py:{name}", hyper={"rho": 0.1}, digests={"method": "0" * 12})
        put(tmp_path, run)
    (one,) = experiments(gather(tmp_path).groups)
    assert len(select_best(one.groups, 12)) == 6
    assert len({item.style.dashes for item in one.plotted}) == 6
    assert len({item.style.color for item in one.plotted}) == 6


def test_a_method_of_ones_own_has_one_color_on_a_page(tmp_path):
    """It is not the color of a method that the page shows, in whichever experiment."""
    digests = {"method": "0" * 12}
    put(tmp_path, Run(method="friendly_sam", model="mlp", epochs=1))
    for model, names in (("mlp", "AB"), ("cnn", "B")):
        for name in names:
            put(tmp_path, Run(method=f"mine.py:{name}", model=model, digests=digests, epochs=1))
    groups = [item for one in experiments(gather(tmp_path).groups) for item in one.groups]
    colors = {(item.group.run.method, item.style.color) for item in groups}
    assert len(colors) == len({color for _, color in colors}) == 3


def test_more_methods_than_colors():
    """The last ones get the color of text."""
    found = method_colors(["sam", *(f"mine.py:{letter}" for letter in "ABCDEFGHIJK")])
    assert found["sam"] == "sam"
    assert list(found.values()).count("ink") == 2


# ---- experiments ----


def test_runs_with_a_validation_split_are_not_compared_with_others(tmp_path):
    """They are trained on less data, and their curves show another split."""
    split = {"split": "validation"}
    for rho in (0.1, 0.2):
        trial = Run(method="sam", hyper={"rho": rho}, validation=0.1, epochs=1)
        row = {"epoch": 1, "train_loss": 0.5, "validation_error": 1.0, "test_error": 6.0}
        records.write(tmp_path, trial, as_recorded(trial, row) | {"metric": split})
    put(tmp_path, Run(method="sam", hyper={"rho": 0.2}, epochs=1))
    found = experiments(gather(tmp_path).groups)
    assert [(one.title, len(one.groups)) for one in found] == [
        ("digits, cnn, validation error", 2),
        ("digits, cnn, test error", 1),
    ]
    text = page(gather(tmp_path))
    assert "Validation error after each epoch." in text
    assert "Test error after each epoch." in text


# ---- heat maps ----


def test_a_heat_map_of_losses_shows_their_differences(tmp_path):
    metric = {"name": "loss", "unit": "", "lower_is_better": True, "split": "test"}
    for rho in (0.1, 0.2):
        for gamma in (0.5, 0.8):
            run, loss = wsam(rho=rho, gamma=gamma), 1.4 + rho / 10 + gamma / 1000
            row = {"epoch": 1, "train_loss": 0.5, "test_loss": loss}
            records.write(tmp_path, run, as_recorded(run, row) | {"metric": metric})
    (one,) = experiments(gather(tmp_path).groups)
    (figure,) = heat_figures(one)
    for text in ("1.411", "1.421"):
        assert f">{text}</text>" in figure.svg


@pytest.mark.parametrize(("radii", "columns"), [(6, "ρ"), (7, "γ")])
def test_a_heat_map_has_few_columns(tmp_path, radii, columns):
    """The values of more would overlap in the width of a phone."""
    for number in range(radii):
        for gamma in (0.5, 0.8):
            put(tmp_path, wsam(rho=0.1 + number, gamma=gamma))
    (one,) = experiments(gather(tmp_path).groups)
    (figure,) = heat_figures(one)
    assert figure.table.heads[0].endswith(f" {columns} →")


# ---- comparison with the paper ----


def test_the_papers_epochs_differ_between_tables(tmp_path):
    """Three for ImageNet, 200 for the others."""
    for epochs in (3, 200):
        only = "ResNet18/WSAM/CIFAR-10"
        table = Profile(seeds=(0,), only=only, epochs=epochs).table(find("cifar"))
        put(tmp_path, table.runs[0], 9.0)
    text = page(gather(tmp_path))
    assert "trained from scratch (3 epochs instead of 200)</h3>" in text
    assert text.count("trained from scratch</h3>") == 1
    assert "instead of 3" not in text
    assert text.count("9.00</span> <span>(n = 1) †") == 4, "three tables and one best epoch"
