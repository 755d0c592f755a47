"""What is measured at a minimum: the eigenvalue, the slice, the plane; and how they are drawn."""

import json
import math
from pathlib import Path

import pytest
import torch
from command import wsam_command
from torch.nn.functional import cross_entropy

from wsam.lab import records
from wsam.lab.means import Means
from wsam.lab.run import Run
from wsam.lab.train import restore, train
from wsam.paper import around, find, gather, minimum, plot_around
from wsam.paper.plot import draw

RUN = Run(data="digits", model="mlp", method="sam", epochs=1, train_limit=200)
MEANS = Means(device="cpu", keep_weights=True)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    train(RUN, folder, MEANS)
    minimum.measure(RUN, folder, MEANS, plane=True)
    return folder


def measured(out: Path) -> dict:
    return json.loads(minimum.path_of(out, RUN).read_text())


def rewrite(out: Path, **changes: object) -> Path:
    """Write the measurement anew with some of its parts changed, or left out where None."""
    found = {**measured(out), **changes}
    kept = {name: part for name, part in found.items() if part is not None}
    minimum.path_of(out, RUN).write_text(json.dumps(kept))
    return out


def test_a_measurement_says_what_it_was_made_with(out):
    found = measured(out)
    record = records.read(out, RUN)
    for part in (found, found["slice"], found["plane"]):
        for name in ("hardware", "versions", "commit"):
            assert part[name] == record[name]
        assert part["seconds"] > 0
    assert (found["mode"], found["dtype"], found["tf32"]) == ("eval", "float32", False)
    assert found["slice"]["info"]["samples"] == found["images"] == 200
    assert found["slice"]["info"]["mode"] == "eval"


def test_slices_hold_the_losses_of_moved_weights(out):
    from wsam.curvature import random_direction

    found = measured(out)
    model, feed = restore(RUN, out, MEANS)
    line, plane = (around.read(found, part) for part in (around.SLICE, around.PLANE))
    assert line.coordinates[0] == pytest.approx([number / 10 - 1 for number in range(21)])
    assert line.losses[10] == pytest.approx(found["loss"], rel=1e-5)
    assert [len(row) for row in plane.losses] == [11] * 11
    assert plane.losses[5][5] == pytest.approx(found["loss"], rel=1e-5)
    assert plane.losses[7][5] == pytest.approx(line.losses[14], rel=1e-5), "0.4 of the first"
    first, second = (random_direction(model, seed=seed) for seed in (0, 1))
    with torch.no_grad():
        for name, weights in model.named_parameters():
            weights.add_(0.4 * first[name] - 0.2 * second[name])
        images = feed.normalise(feed.train_images)
        moved = float(cross_entropy(model(images), feed.train_labels))
    assert plane.losses[7][4] == pytest.approx(moved, rel=1e-4)


def test_what_was_measured_is_not_measured_again(out, monkeypatch):
    before = minimum.path_of(out, RUN).read_bytes()
    monkeypatch.setattr(minimum, "restore", lambda *_: pytest.fail("measured again"))
    minimum.measure(RUN, out, MEANS)
    minimum.measure(RUN, out, MEANS, plane=True)
    assert minimum.path_of(out, RUN).read_bytes() == before


def test_older_measurements_get_their_slice_and_keep_their_eigenvalue(out):
    whole = measured(out)
    try:
        rewrite(out, slice=None, plane=None, top_eigenvalue=62.5, commit="older")
        found = minimum.measure(RUN, out, MEANS)
        assert (found["top_eigenvalue"], found["commit"]) == (62.5, "older")
        assert found["slice"]["commit"] != "older"
        assert "plane" not in found
        assert minimum.read(out, RUN) == found
        assert "plane" in minimum.measure(RUN, out, MEANS, plane=True)
    finally:
        rewrite(out, **whole)  # other tests look at it, whichever comes first


def test_older_measurements_without_weights_stay_as_they_are(tmp_path):
    train(RUN, tmp_path, Means(device="cpu"))
    path = minimum.path_of(tmp_path, RUN)
    path.write_text(json.dumps({"key": RUN.key, "top_eigenvalue": 62.5}))
    before = path.read_bytes()
    found = minimum.measure(RUN, tmp_path, MEANS)
    assert path.read_bytes() == before
    assert around.read(found, around.SLICE) is None
    path.unlink()
    with pytest.raises(FileNotFoundError, match="its weights were not kept; remove"):
        minimum.measure(RUN, tmp_path, MEANS)


def test_losses_that_are_not_finite_are_read_back(out):
    part = measured(out)["slice"]
    line = around.read({"slice": {**part, "losses": [None, *part["losses"][1:]]}}, around.SLICE)
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
def test_a_damaged_slice_is_named(out, damage):
    part = measured(out)["slice"]
    rewrite(out, slice={**part, **damage})
    try:
        with pytest.raises(ValueError, match=r"minimum\.json is damaged; remove it"):
            minimum.read(out, RUN)
    finally:
        rewrite(out, slice=part)


def minima_of(out: Path, folder: Path, **parts: bool) -> tuple:
    """A minima table whose first run has been measured as `RUN` was."""
    table = find("minima")
    run = table.runs[0]
    kept = {**measured(out), "key": run.key}
    for name, wanted in parts.items():
        kept = kept if wanted else {k: v for k, v in kept.items() if k != name}
    minimum.path_of(folder, run).write_text(json.dumps(kept))
    return table, gather(table, folder), plot_around.gather(table, folder)


def titles(drawn) -> list[str]:
    return [axes.get_title(loc="left") for axes in drawn.axes]


def test_slices_are_drawn_beside_the_table(out, tmp_path):
    table, entries, seen = minima_of(out, tmp_path)
    drawn = draw(table, entries, seen)
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
    assert plot_around.gather(find("cifar"), tmp_path) is None


def test_the_command_measures_and_draws(tmp_path):
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
    assert "--plane looks around minima" in refused.stderr
