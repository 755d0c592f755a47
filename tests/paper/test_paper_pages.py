"""Pages with tables generated from records, and plots of tables."""

import re
from pathlib import Path

import pytest
from command import wsam_command
from recorded import write_record

from wsam.lab.run import Run
from wsam.paper import find, gather
from wsam.paper.grids import grid_table
from wsam.paper.plot import draw, save
from wsam.paper.significance import welch_tests
from wsam.sweep.grid import Grid

PAGE = """# Results

<!-- wsam paper table cifar --only "ResNet18/*/CIFAR-10" -->
stale
<!-- end -->

between

<!-- wsam paper table minima -->
<!-- end -->
after
"""
ROOT = Path(__file__).parents[2]


def text_of(page):
    """Return a page with ordinary spaces for no-break spaces."""
    return page.read_text().replace("\u00a0", " ")


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def test_page_tables_come_from_records(tmp_path, page):
    results = tmp_path / "results"
    results.mkdir()
    words = ("paper", "page", page, "--results", results)
    assert "page.md is out of date" in wsam_command(*words, "--check", status=1).stdout
    assert page.read_text() == PAGE
    assert "has new tables" in wsam_command(*words).stdout
    text = text_of(page)
    assert "trained from scratch. Not run." in text
    assert "| ResNet18 | WSAM | 3.62 ± 0.10 |" in text
    assert "| SAM | 0.0339 |" in text
    assert "stale" not in text
    assert "WRN" not in text
    for kept in ("# Results", "\nbetween\n", "\nafter\n"):
        assert kept in text
    assert wsam_command(*words, "--check").stdout == ""
    write_record(results, find("cifar").cell(("ResNet18", "WSAM"), "CIFAR-10").runs[0], 3.61)
    wsam_command(*words, "--check", status=1)
    wsam_command(*words)
    assert "| ResNet18 | WSAM | 3.61 (n = 1) | 3.61 (n = 1) | 3.62 ± 0.10 |" in text_of(page)


def test_page_with_welch_tests(tmp_path):
    cells = find("cifar").select("ResNet18/*/CIFAR-10")
    for method in ("SAM", "WSAM"):
        for run in cells.cell(("ResNet18", method), "CIFAR-10").runs[:3]:
            write_record(tmp_path, run, 3.5 + 0.1 * run.seed)
    page = tmp_path / "page.md"
    words = 'cifar --only "ResNet18/*/CIFAR-10" --welch'
    page.write_text(f"<!-- wsam paper table {words} -->\n<!-- end -->\n")
    wsam_command("paper", "page", page, "--results", tmp_path)
    row = "| WSAM | SAM | 3 | +0.00 (-0.23 to +0.23) | 1 | 1 |"
    assert f"| ResNet18, CIFAR-10 {row}" in text_of(page)
    table = ("paper", "table", "cifar", "--results", tmp_path, "--welch")
    assert row in wsam_command(*table).stdout.replace("\u00a0", " ")
    assert '"methods": ["SAM", "WSAM"]' in wsam_command(*table, "--json").stdout


def test_invalid_pages(tmp_path, page):
    page.write_text("no table")
    assert "has no line" in wsam_command("paper", "page", page, status=2).stderr
    page.write_text("<!-- wsam paper table cifar --nope -->\n<!-- end -->\n")
    assert "no such option: --nope" in wsam_command("paper", "page", page, status=2).stderr
    page.write_text("<!-- wsam paper table cifar --epochs x -->\n<!-- end -->\n")
    assert "invalid value for '--epochs'" in wsam_command("paper", "page", page, status=2).stderr


def test_documentation_is_up_to_date(monkeypatch):
    """`wsam paper page docs/paper.md README.md` updates it."""
    monkeypatch.chdir(ROOT)
    pages = [
        path
        for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
        if "\n<!-- wsam paper table" in path.read_text(encoding="utf-8")
    ]
    assert ROOT / "docs" / "paper.md" in pages
    wsam_command("paper", "page", *pages, "--check")


@pytest.mark.parametrize("page", ["README.md", "docs/paper.md", "docs/when.md"])
def test_documentation_states_the_test_of_wsam_and_sam(page):
    """In words, with the p-value of the records; and that the best epochs agree with the paper."""
    table = find("cifar").select("ResNet18/*/CIFAR-10")
    entries = gather(table, ROOT / "results")
    (test,) = [t for t in welch_tests(table, entries) if t.methods == ("SAM", "WSAM")]
    assert test.n == (4, 4)
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert re.search(r"WSAM and SAM do not differ significantly|cannot be told apart", text)
    assert "four seeds" in text
    assert f"p = {test.p_last:.2g}" in text
    assert not any(entry.best.differs for entry in entries)


def test_plots(tmp_path):
    cifar = find("cifar")
    for run in cifar.cell(("ResNet18", "WSAM"), "CIFAR-10").runs[:3]:
        write_record(tmp_path, run, 3.5 + 0.1 * run.seed)
    for name in ("minima", "sensitivity", "lr-wd"):
        table = find(name)
        drawn = draw(table, gather(table, tmp_path))
        panels = [panel for panel in drawn.axes if panel.get_visible()]
        assert [panel.get_title(loc="left") for panel in panels] == list(table.columns)
    entries = gather(cifar, tmp_path)
    panel = draw(cifar, entries).axes[0]
    centers = {round(float(x), 3) for line in panel.lines for x in line.get_xdata(orig=False)}
    assert {3.6, 4.32, 2.74} <= centers, "our mean and the paper's means"
    (ours,) = [line for line in panel.lines if line.get_marker() == "o"]
    assert ours.get_markerfacecolor() != "white", "several runs are a full circle"
    for suffix in (".png", ".svg"):
        save(cifar, entries, tmp_path / "plots" / f"cifar{suffix}")
    drawn = (tmp_path / "plots" / "cifar.svg").read_bytes()
    save(cifar, entries, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == drawn, "files are reproducible"
    assert b"WRN-28-10 WSAM" in drawn


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["adam-small-search", "cheap"])
def test_long_labels_leave_space_for_the_panels(tmp_path, name):
    table = find(name)
    drawn = draw(table, gather(table, tmp_path))
    drawn.draw_without_rendering()
    for panel in drawn.axes:
        assert panel.get_position().width > 0.2, "of the width of the figure"
    titles = [panel.get_tightbbox(for_layout_only=False) for panel in drawn.axes[:2]]
    assert titles[0].x1 <= titles[1].x0 + 2, "titles and labels do not overlap"
    assert titles[1].x1 <= drawn.bbox.x1 + 2, "or end outside"


def legend_of(drawn):
    (legend,) = drawn.legends
    return [text.get_text() for text in legend.get_texts()]


def test_points_of_a_grid_are_connected_in_order(tmp_path):
    radii = (0.2, 0.01, 0.1, 0.05)
    table = grid_table(Grid("mine", "rho", {"digits": Run(method="sam")}, {"rho": radii}))
    for cell in table.cells:
        write_record(tmp_path, cell.runs[0], 100 * float(cell.row[0]))
    drawn = draw(table, gather(table, tmp_path))
    joined = max(drawn.axes[0].lines, key=lambda line: len(line.get_xdata()))
    assert list(joined.get_xdata()) == sorted(radii)
    (point, *_) = [line for line in drawn.axes[0].lines if line.get_marker() == "o"]
    assert point.get_markerfacecolor() == "white", "a single run is an open circle"
    assert list(joined.get_ydata()) == pytest.approx([100 * rho for rho in sorted(radii)])
    assert legend_of(drawn) == ["ours (n = 1)"], "not in the paper"
    cifar = find("cifar")
    assert legend_of(draw(cifar, gather(cifar, tmp_path))) == ["ours: not run", "the paper's"]
