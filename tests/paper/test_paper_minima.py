"""Measurements at a minimum: eigenvalues, slice and plane; and their plots."""

import json
import math
from pathlib import Path

import pytest
import torch
from command import wsam_command
from torch.nn.functional import cross_entropy

from wsam.lab import records
from wsam.lab.execution import ExecutionConfig
from wsam.lab.loaded_model import restore
from wsam.lab.run import Run
from wsam.lab.train import train
from wsam.paper import find, gather, minima, plot_slices
from wsam.paper.plot import draw

RUN = Run(data="digits", model="mlp", method="sam", epochs=1, train_limit=200)
MEANS = ExecutionConfig(device="cpu", keep_weights=True)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    train(RUN, folder, MEANS)
    minima.measure(RUN, folder, MEANS, plane=True)
    return folder


def measured(out: Path) -> dict:
    return json.loads(minima.measurement_path(out, RUN).read_text())


def rewrite(out: Path, **changes: object) -> Path:
    """Rewrite the measurement with some parts changed, or removed where None."""
    found = {**measured(out), **changes}
    kept = {name: part for name, part in found.items() if part is not None}
    minima.measurement_path(out, RUN).write_text(json.dumps(kept))
    return out


def test_measurement_records_its_environment(out):
    found = measured(out)
    record = records.read(out, RUN)
    for part in (found, found["slice"], found["plane"]):
        for name in ("hardware", "versions", "commit"):
            assert part[name] == record[name]
        assert part["seconds"] > 0
    assert (found["mode"], found["dtype"], found["tf32"]) == ("eval", "float32", False)
    assert found["slice"]["info"]["samples"] == found["images"] == 200
    assert found["slice"]["info"]["mode"] == "eval"


def test_slices_are_losses_along_directions(out):
    from wsam.curvature import random_direction

    found = measured(out)
    model, feed = restore(RUN, out, MEANS)
    line, plane = (minima.read_slice(found, part) for part in (minima.SLICE, minima.PLANE))
    assert line.coordinates[0] == pytest.approx([number / 10 - 1 for number in range(21)])
    assert line.losses[10] == pytest.approx(found["loss"], rel=1e-5)
    assert [len(row) for row in plane.losses] == [11] * 11
    assert plane.losses[5][5] == pytest.approx(found["loss"], rel=1e-5)
    assert plane.losses[7][5] == pytest.approx(line.losses[14], rel=1e-5), "0.4 of the first"
    first, second = (random_direction(model, seed=seed) for seed in (0, 1))
    with torch.no_grad():
        for name, weights in model.named_parameters():
            weights.add_(0.4 * first[name] - 0.2 * second[name])
        images = feed.normalize(feed.splits["train"].images)
        moved = float(cross_entropy(model(images), feed.splits["train"].labels))
    assert plane.losses[7][4] == pytest.approx(moved, rel=1e-4)


def test_complete_measurement_is_kept(out, monkeypatch):
    before = minima.measurement_path(out, RUN).read_bytes()
    monkeypatch.setattr(minima, "restore", lambda *_: pytest.fail("measured again"))
    minima.measure(RUN, out, MEANS)
    minima.measure(RUN, out, MEANS, plane=True)
    assert minima.measurement_path(out, RUN).read_bytes() == before


def test_incomplete_measurement_is_completed(out):
    whole = measured(out)
    try:
        rewrite(out, slice=None, plane=None, top_eigenvalue=62.5, commit="older")
        found = minima.measure(RUN, out, MEANS)
        assert (found["top_eigenvalue"], found["commit"]) == (62.5, "older")
        assert found["slice"]["commit"] != "older"
        assert "plane" not in found
        assert minima.read_measurement(out, RUN) == found
        assert "plane" in minima.measure(RUN, out, MEANS, plane=True)
    finally:
        rewrite(out, **whole)  # shared with other tests


def test_measurement_without_weights_is_kept(tmp_path):
    train(RUN, tmp_path, ExecutionConfig(device="cpu"))
    path = minima.measurement_path(tmp_path, RUN)
    path.write_text(json.dumps({"key": RUN.key, "top_eigenvalue": 62.5}))
    before = path.read_bytes()
    found = minima.measure(RUN, tmp_path, MEANS)
    assert path.read_bytes() == before
    assert minima.read_slice(found, minima.SLICE) is None
    path.unlink()
    with pytest.raises(FileNotFoundError, match="its weights were not kept; remove"):
        minima.measure(RUN, tmp_path, MEANS)


def test_infinite_losses_are_read_back(out):
    part = measured(out)["slice"]
    line = minima.read_slice(
        {"slice": {**part, "losses": [None, *part["losses"][1:]]}}, minima.SLICE
    )
    assert line.losses[0] == math.inf
    assert line.as_dict()["losses"][0] is None


@pytest.mark.parametrize(
    "damage",
    [
        {"losses": [1.0]},
        {"losses": None},
        {"coordinates": [[0.0], [0.0]]},
        {"labels": []},
        {"info": 3},
        {"losses": ["x"] * 21},
    ],
)
def test_damaged_slice(out, damage):
    part = measured(out)["slice"]
    rewrite(out, slice={**part, **damage})
    try:
        with pytest.raises(ValueError, match=r"minimum\.json is damaged; remove it"):
            minima.read_measurement(out, RUN)
    finally:
        rewrite(out, slice=part)


@pytest.mark.parametrize(
    "damage",
    [
        {"by_batches": {"top_eigenvalue": "x"}},
        {"on_test": 3},
        {"readings": ["x"]},
        {"readings": {"x": {}}},
    ],
)
def test_damaged_eigenvalue(out, damage):
    before = measured(out)
    rewrite(out, **damage)
    try:
        with pytest.raises(ValueError, match=r"minimum\.json is damaged; remove it"):
            minima.read_measurement(out, RUN)
    finally:
        rewrite(out, **{"readings": None, **before})


def minima_of(out: Path, folder: Path, **parts: bool) -> tuple:
    """Return a minima table whose first run has the measurement of `RUN`."""
    table = find("minima")
    run = table.runs[0]
    kept = {**measured(out), "key": run.key}
    for name, wanted in parts.items():
        kept = kept if wanted else {k: v for k, v in kept.items() if k != name}
    minima.measurement_path(folder, run).write_text(json.dumps(kept))
    return table, gather(table, folder), plot_slices.read_slices(table, folder)


def titles(drawn) -> list[str]:
    return [axes.get_title(loc="left") for axes in drawn.axes]


def test_slices_are_drawn(out, tmp_path):
    table, entries, slices = minima_of(out, tmp_path)
    drawn = draw(table, entries, slices)
    columns = [*table.columns, "loss around the minimum"]
    assert titles(drawn)[: len(columns) + 1] == [*columns, "SGDM: loss in a plane"]
    (curve,) = drawn.axes[len(table.columns)].lines
    assert curve.get_ydata() == pytest.approx(measured(out)["slice"]["losses"])
    assert curve.get_label() == "SGDM"
    drawn = draw(*minima_of(out, tmp_path, plane=False))
    assert titles(drawn) == columns
    drawn = draw(*minima_of(out, tmp_path, plane=False, slice=False))
    assert titles(drawn) == columns
    assert [text.get_text() for text in drawn.axes[len(table.columns)].texts] == ["not measured"]
    assert plot_slices.read_slices(find("cifar"), tmp_path) is None


@pytest.mark.slow
def test_command_measures_and_draws(tmp_path, monkeypatch):
    monkeypatch.setattr("wsam.paper.profile.SMOKE_IMAGES", 128)
    monkeypatch.setattr(minima, "_IMAGES", 128)
    how = ("--smoke", "--seeds", "0", "--only", "SAM")
    where = ("--out", tmp_path / "r", "--device", "cpu")
    wsam_command("paper", "run", "minima", *how, *where, "--plane")
    (path,) = (tmp_path / "r").glob("*.minimum.json")
    assert {"slice", "plane"} <= json.loads(path.read_text()).keys()
    picture = tmp_path / "minima.svg"
    wsam_command("paper", "table", "minima", *how, "--results", tmp_path / "r", "--plot", picture)
    for words in ("loss around the minimum", "SAM: loss in a plane"):
        assert words in picture.read_text()
    refused = wsam_command("paper", "run", "cifar", *how, *where, "--plane", status=2)
    assert "--plane applies to minima only" in refused.stderr
