"""Groups in a report: none that failed looks best, each has a name of its own, none is lost."""

import json
import math
import re

import pytest
from recorded import as_recorded

from wsam._format import mean_and_std
from wsam.lab import records
from wsam.lab.run import Run
from wsam.paper import Profile, find, minima
from wsam.report import gather, page
from wsam.report.charts import maps
from wsam.report.labels import best, experiments
from wsam.report.slices import mean_slice


def put(out, run, error=5.0):
    """Write what a run would have left, without running it; no error for one that failed."""
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


# What is not finite ----------------------------------------------------------------------------


@pytest.mark.parametrize("values", [[math.inf, 1.0], [math.inf, -math.inf], [math.nan, 1.0]])
def test_what_is_not_finite_has_no_deviation(values):
    mean, deviation = mean_and_std(values)
    assert not math.isfinite(mean)
    assert deviation is None


def test_a_slice_that_is_not_finite_stops_no_report(tmp_path):
    for seed in (0, 1):
        put_slice(tmp_path, put(tmp_path, wsam(seed)), [None, None, 1.0 + seed, 2.0 - seed, None])
    folder = gather(tmp_path)
    gap = math.inf
    assert [point[1] for point in mean_slice(folder.groups[0])] == [gap, gap, 1.5, 1.5, gap]
    charts = re.findall("<svg.*?</svg>", page(folder), re.DOTALL)
    (around_minimum,) = (c for c in charts if "along a random direction" in c)
    assert around_minimum.count("<polygon") == 1
    assert not re.search("nan|inf", around_minimum)


# Failed runs -----------------------------------------------------------------------------------


@pytest.fixture
def half_failed(tmp_path):
    """A grid: at rho 0.4 and gamma 0.8 four of five seeds failed, and the fifth errs least."""
    for rho in (0.1, 0.4):
        for gamma in (0.5, 0.8):
            fails = (rho, gamma) == (0.4, 0.8)
            for seed in range(5):
                error = None if fails and seed else 1.0 if fails else 10 * rho + gamma
                put(tmp_path, wsam(seed, rho=rho, gamma=gamma), error)
    return experiments(gather(tmp_path).groups)[0], page(gather(tmp_path))


def test_a_place_where_runs_failed_has_no_colour_on_a_map(half_failed):
    made = maps(half_failed[0])
    assert made.count('class="gone"') == 1
    assert ">failed</text>" in made
    assert ">4/5</text>" in made
    assert ">1</text>" not in made, "the survivor's error"
    assert made.count("fill=") == 3


def test_failed_runs_are_told_of_wherever_the_group_is_shown(half_failed):
    one, text = half_failed
    name = "WSAM γ 0.8, ρ 0.4"
    assert [line.told for line in one.lines if line.name == name] == [f"{name}, failed 4/5"]
    assert sum(line.told == line.name for line in one.lines) == 3
    legend = text.partition('<ul class="legend">')[2].partition("</ul>")[0]
    assert f"{name}, failed 4/5</li>" in legend
    bars = text.partition('aria-label="Test error (%): ')[2].partition("</svg>")[0]
    assert f">{name}, failed 4/5</text>" in bars
    assert ">1, failed 4/5<" in text, "in the table, beside how many finished"
    assert text.count("Failed runs are left out.") >= 3


def test_sharpness_at_different_radii_is_not_for_comparison(half_failed):
    _, text = half_failed
    assert "of each epoch, each at its own radius: not to be compared between radii." in text


def test_groups_with_failed_runs_are_not_the_best(half_failed):
    lines = half_failed[0].lines
    assert [line.name for line in best(lines, 3)] == [
        line.name for line in lines if not line.group.failures
    ]
    assert len(best(lines, 4)) == 4


# Names -----------------------------------------------------------------------------------------


def test_all_names_of_an_experiment_differ(tmp_path):
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
        Run(method="sam", epochs=5, options={"lean": True}),
        Run(epochs=5, batch_size=64),
        Run(epochs=5, train_limit=100),
    ]
    for run in runs:
        put(tmp_path, run)
    (one,) = experiments(gather(tmp_path).groups)
    names = [line.name for line in one.lines]
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
    named = {line.group.run.method for line in one.lines if "epochs" in line.name}
    assert named == {"wsam"}


def test_only_what_varies_is_named(tmp_path):
    """The base alone has twice the epochs of the others, as in the paper: no name needs them."""
    put(tmp_path, Run(method="vanilla", epochs=10))
    put(tmp_path, Run(epochs=5, options={"max_norm": 1.0}, geometry={"name": "fisher"}))
    (one,) = experiments(gather(tmp_path).groups)
    assert [line.name for line in one.lines] == ["SGD", "WSAM fisher, γ 0.9, ρ 0.05, max norm 1"]


# Beside the paper ------------------------------------------------------------------------------


def test_a_tables_own_epochs_are_not_those_of_another(tmp_path):
    """Three is the paper's number for ImageNet alone, and 200 for all but that."""
    for epochs in (3, 200):
        only = "ResNet18/WSAM/CIFAR-10"
        table = Profile(seeds=(0,), only=only, epochs=epochs).table(find("cifar"))
        put(tmp_path, table.runs[0], 9.0)
    text = page(gather(tmp_path))
    assert "trained from scratch (3 epochs instead of 200)</h3>" in text
    assert text.count("trained from scratch</h3>") == 1
    assert "instead of 3" not in text
    assert text.count("9.00</i> <i>(n = 1) †") == 4, "three tables and one best epoch"
