"""Files written for landscapes and densities: figures, pages, JSON."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from browsing import needs_browser, running
from torch import nn
from torch.nn import functional as F

from wsam._utils.plot_style import MUTED_COLOR
from wsam.curvature import (
    Density,
    Landscape,
    density,
    hessian,
    landscape,
    random_direction,
    save_density,
    save_landscape,
)

LINE = Landscape([[-1.0, 0.0, 1.0]], [2.0, 1.0, 2.0], ["north"])
GAP = Landscape([[-1.0, 0.0, 1.0]], [math.nan, 1.0, 2.0], ["north"], note="1 point is lost")
PLANE = Landscape([[0.0, 1.0, 2.0]] * 2, [[1.0, 2.0, 3.0]] * 2 + [[3.0, 4.0, math.inf]], ["a", "b"])
FIGURES = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.fixture(scope="module")
def spectrum() -> Density:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    data = [(torch.randn(20, 6), torch.arange(20) % 3)]
    return density(hessian(model, F.cross_entropy, data), steps=8, max_probes=3)


def svg_texts(path: Path) -> list[str]:
    """Return the texts of a figure, which are written as text."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def test_line_has_style_title_and_legend(tmp_path):
    texts = svg_texts(LINE.save(tmp_path / "line.svg"))
    assert {"Loss along north", "north", "loss", "origin"} <= set(texts)
    assert "no finite loss" not in texts
    assert MUTED_COLOR in (tmp_path / "line.svg").read_text()  # labels are not matplotlib's black
    texts = svg_texts(GAP.save(tmp_path / "gap.svg"))
    assert {"no finite loss", "1 point is lost"} <= set(texts)


def test_line_between_two_checkpoints_has_both_ends_marked(tmp_path):
    def marks(figure: Path) -> int:
        return figure.read_text().count("stroke-dasharray")  # dotted lines and their legend

    origin, ends = LINE.save(tmp_path / "origin.svg"), LINE.save(tmp_path / "ends.svg", ends=True)
    assert (marks(origin), marks(ends)) == (2, 3)
    assert svg_texts(ends).count("the two checkpoints") == 1
    assert "origin" not in svg_texts(ends)
    page = LINE.save(tmp_path / "ends.html", ends=True).read_text()
    assert '"marks": [0.0, 1.0]' in page
    assert "Dotted: the two checkpoints." in page


@pytest.mark.parametrize("log", [False, True])
def test_surface_has_a_legend(log, tmp_path):
    texts = svg_texts(PLANE.save(tmp_path / "plane.svg", log=log))
    assert {"Loss along a and b", "a", "b", "origin", "no finite loss"} <= set(texts)


def test_density_has_a_legend_for_band_and_marks(spectrum, tmp_path):
    texts = svg_texts(spectrum.save(tmp_path / "density.svg", marks=[0.5, 0.25]))
    assert "Density of the eigenvalues of the Hessian" in texts
    assert {"within two standard errors", "eigenvalues 0.5, 0.25"} <= set(texts)
    for marks, label in (
        (torch.tensor([0.5]), "eigenvalue 0.5"),
        ([5.0, 4.0, 3.0, 2.0, 1.0], "5 eigenvalues from 1 to 5"),
    ):
        page = spectrum.save(tmp_path / "density.html", marks=marks).read_text()
        assert f"Band: within two standard errors. Dotted: {label}." in page


def test_a_path_without_a_suffix(spectrum, tmp_path):
    for found in (LINE, spectrum):
        with pytest.raises(ValueError, match="Format '' is not supported"):
            found.save(tmp_path / "figure")


def test_equal_figures_are_equal_files(spectrum, tmp_path):
    for found, suffix in ((LINE, "svg"), (spectrum, "pdf")):
        first, second = (found.save(tmp_path / f"{n}.{suffix}").read_bytes() for n in "ab")
        assert first == second


def test_long_titles_are_wrapped(tmp_path):
    long = Landscape(LINE.coordinates, LINE.losses, ["the line from " + "folder/" * 12 + " to b"])
    texts = svg_texts(long.save(tmp_path / "long.svg"))
    (title,) = (text for text in texts if text.startswith("Loss along"))
    assert len(title) < 80


@pytest.mark.parametrize(
    "suffix",
    ["svg", "json", *(pytest.param(one, marks=pytest.mark.slow) for one in ("PNG", "pdf", "html"))],
)
def test_every_suffix_and_new_folders(spectrum, tmp_path, suffix):
    as_text, as_path = f"{tmp_path}/new/deep/x.{suffix}", tmp_path / f"other/x.{suffix}"
    assert LINE.save(as_text) == Path(as_text)
    assert spectrum.save(as_path) == as_path
    assert Path(as_text).read_bytes() != as_path.read_bytes()
    if suffix in ("html", "json"):
        save_landscape(LINE, as_path)
        assert Path(as_text).read_bytes() == as_path.read_bytes()
    else:
        assert as_path.read_bytes().startswith(FIGURES[suffix.lower()])


def test_numbers_are_saved_with_their_info(spectrum, tmp_path):
    saved = json.loads(spectrum.save(tmp_path / "density.json").read_text())
    assert saved["info"]["kind"] == "hessian"
    assert saved["values"] == spectrum.values.tolist()
    saved = json.loads(GAP.save(tmp_path / "gap.json").read_text())
    assert saved == GAP.as_dict()
    assert saved["losses"][0] is None


def test_losses_that_cannot_be_drawn(tmp_path):
    lost = Landscape([[0.0, 1.0]], [math.nan, math.inf], ["x"])
    with pytest.raises(ValueError, match="no loss of this landscape is finite"):
        lost.save(tmp_path / "new" / "x.html")
    assert not (tmp_path / "new").exists()
    negative = Landscape([[0.0, 1.0]], [-1.0, 1.0], ["x"])
    assert '"log": false' in negative.save(tmp_path / "x.html", log=True).read_text()


def test_pages_need_no_network_and_escape_labels(tmp_path):
    line = Landscape(LINE.coordinates, LINE.losses, ["</script><b>x</b>"], note="<i>")
    page = line.save(tmp_path / "line.html").read_text()
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert "<b>x</b>" not in page
    assert "<i>" not in page
    assert page.count("</script>") == 2
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page).group(1)
    assert json.loads(data)["labels"] == ["</script><b>x</b>"]


def surfaces() -> tuple[Landscape, Landscape, Density]:
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 3))
    data = [(torch.randn(10, 1, 3, 3), torch.arange(10) % 3)]
    a, b = random_direction(model, seed=1), random_direction(model, seed=2)
    line = landscape(model, F.cross_entropy, data, a, labels=["</script><b>x</b>"])
    axes = [[-1.0, 0.0, 1.0], [-1.0, -0.5, 0.5, 1.0]]
    plane = landscape(model, F.cross_entropy, data, [a, b], axes)
    return line, plane, density(hessian(model, F.cross_entropy, data), steps=10, max_probes=3)


@needs_browser
@pytest.mark.browser
def test_pages_in_a_browser(tmp_path):
    line, plane, spectrum = surfaces()
    line.save(tmp_path / "line.html")
    plane.save(tmp_path / "plane.html")
    save_density(spectrum, tmp_path / "density.html", marks=[0.5])
    with running() as browser:
        page = browser.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text))
        for name in ("line", "density"):
            page.goto((tmp_path / f"{name}.html").as_uri())
            curve = page.locator("path.line")
            before = curve.get_attribute("d")
            assert before.count("L") >= 40
            page.locator("#log").click()
            assert curve.get_attribute("d") != before
            page.locator("svg").hover(position={"x": 300, "y": 100})
            assert page.locator("#readout").text_content()
        assert page.locator("#scale").text_content().startswith("Band: within two standard errors.")
        lost = Landscape([[0.0, 1.0, 2.0]], [1.0, 2.0, math.nan], ["x"], note="1 is lost")
        page.goto(lost.save(tmp_path / "lost.html").as_uri())
        assert page.locator("text.gap").count() == 1
        assert "A cross: no finite loss" in page.locator("#scale").text_content()
        assert page.locator("#note").text_content() == "1 is lost"
        page.goto((tmp_path / "plane.html").as_uri())
        canvas_image = "i => document.querySelectorAll('canvas')[i].toDataURL()"
        map_before, surface_before = (page.evaluate(canvas_image, i) for i in (0, 1))
        page.locator("canvas").nth(1).press("ArrowLeft")
        assert page.evaluate(canvas_image, 1) != surface_before
        assert page.evaluate(canvas_image, 0) == map_before
        page.locator("canvas").nth(0).hover(position={"x": 1, "y": 1})
        assert "direction 1 -1, direction 2 1: loss" in page.locator("#readout").text_content()
    assert problems == []
