"""Pictures, pages and numbers of landscapes and densities: how they look and where they go."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from wsam.curvature import (
    Density,
    Landscape,
    density,
    hessian,
    landscape,
    save_density,
    save_landscape,
)
from wsam.plot_style import MUTED_COLOR

LINE = Landscape([[-1.0, 0.0, 1.0]], [2.0, 1.0, 2.0], ["north"])
GAP = Landscape([[-1.0, 0.0, 1.0]], [math.nan, 1.0, 2.0], ["north"], note="1 point is lost")
PLANE = Landscape([[0.0, 1.0, 2.0]] * 2, [[1.0, 2.0, 3.0]] * 2 + [[3.0, 4.0, math.inf]], ["a", "b"])


@pytest.fixture(scope="module")
def spectrum() -> Density:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    data = [(torch.randn(20, 6), torch.arange(20) % 3)]
    return density(hessian(model, F.cross_entropy, data), steps=8, max_probes=3)


def words(path: Path) -> list[str]:
    """The text of a picture: it stays text in SVG."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def test_a_line_has_the_houses_look_a_title_and_a_legend(tmp_path):
    shown = words(LINE.save(tmp_path / "line.svg"))
    assert {"Loss along north", "north", "loss", "origin"} <= set(shown)
    assert "no finite loss" not in shown
    assert MUTED_COLOR in (tmp_path / "line.svg").read_text()  # of labels, not matplotlib's black
    gap = words(GAP.save(tmp_path / "gap.svg"))
    assert {"no finite loss", "1 point is lost"} <= set(gap)


def test_a_surface_explains_its_marks(tmp_path):
    shown = words(PLANE.save(tmp_path / "plane.svg"))
    assert {"Loss along a and b", "a", "b", "origin", "no finite loss"} <= set(shown)


def test_a_density_explains_its_band_and_its_marks(spectrum, tmp_path):
    shown = words(spectrum.save(tmp_path / "density.svg", marks=[0.5, 0.25]))
    assert "Density of the eigenvalues of the Hessian" in shown
    assert {"within two standard errors", "eigenvalues 0.5, 0.25"} <= set(shown)
    one = words(spectrum.save(tmp_path / "one.svg", marks=torch.tensor([0.5])))
    assert "eigenvalue 0.5" in one
    many = words(spectrum.save(tmp_path / "many.svg", marks=[5.0, 4.0, 3.0, 2.0, 1.0]))
    assert "5 eigenvalues from 1 to 5" in many
    page = spectrum.save(tmp_path / "density.html", marks=[0.5]).read_text()
    assert "Band: within two standard errors. Dotted: eigenvalue 0.5." in page


def test_the_same_picture_is_the_same_file(spectrum, tmp_path):
    for found in (LINE, spectrum):
        for kind in ("svg", "pdf"):
            first, second = (found.save(tmp_path / f"{n}.{kind}").read_bytes() for n in "ab")
            assert first == second


def test_long_titles_stay_within_the_picture(tmp_path):
    long = Landscape(LINE.coordinates, LINE.losses, ["the line from " + "folder/" * 12 + " to b"])
    (title,) = (t for t in words(long.save(tmp_path / "long.svg")) if t.startswith("Loss along"))
    assert len(title) < 80


@pytest.mark.parametrize("kind", ["png", "svg", "pdf", "html", "json", "PNG"])
def test_everything_is_saved_by_text_or_path_and_its_folder_made(spectrum, tmp_path, kind):
    for name in (f"{tmp_path}/new/deep/x.{kind}", tmp_path / f"other/x.{kind}"):
        save_landscape(LINE, name)
        first = Path(name).read_bytes()
        save_density(spectrum, name)
        assert Path(name).read_bytes() != first
        assert spectrum.save(name) == Path(name) == LINE.save(name)


def test_numbers_are_saved_with_what_they_are_of(spectrum, tmp_path):
    saved = json.loads(spectrum.save(tmp_path / "density.json").read_text())
    assert saved["info"]["kind"] == "hessian"
    assert saved["values"] == spectrum.values.tolist()
    assert json.loads(GAP.save(tmp_path / "gap.json").read_text()) == GAP.as_dict()


def test_another_ending_is_refused_with_all_that_are_known(spectrum, tmp_path):
    for found in (LINE, spectrum):
        with pytest.raises(ValueError, match=r"must end in \.png, \.svg, \.pdf, \.html, \.json$"):
            found.save(tmp_path / "new" / "x.jpg")
    assert not (tmp_path / "new").exists()


def test_a_note_says_how_many_points_have_no_loss_and_why():
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    data = [(torch.ones(2, 1), torch.ones(2, 1))]
    line = {"1.running_var": torch.ones(1)}  # from 1, so that it is negative beyond -1
    found = landscape(model, F.mse_loss, data, line, [-3.0, -2.0, 0.0])
    assert [math.isfinite(loss) for loss in found.losses] == [False, False, True]
    why = "a variance of BatchNorm is negative"
    assert found.note == f"2 of 3 points have no finite loss ({why} there)"
    both = [line, {"1.bias": torch.ones(1)}]
    plane = landscape(model, F.mse_loss, data, both, [[-2.0, 0.0], [0.0, 1e30]])
    assert plane.note == f"3 of 4 points have no finite loss ({why} at 2 of them)"
    far = landscape(model, F.mse_loss, data, both[1], [0.0, 1e30])
    assert far.note == "1 of 2 points has no finite loss"
    assert landscape(model, F.mse_loss, data, line, [0.0]).note == ""
    # The batch's own variances are used in training mode: what the running ones are is no reason.
    own = landscape(model, F.mse_loss, data, both, [[-2.0], [1e30]], mode="train")
    assert own.note == "1 of 1 points has no finite loss"
