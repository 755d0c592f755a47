"""Pages whose tables come from records, and plots."""

from pathlib import Path

import pytest
from command import wsam_command
from test_paper_outcome import fake_record

from wsam.lab.run import Run
from wsam.paper import find, gather
from wsam.paper.plot import draw, save
from wsam.paper.searches import grid_table
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


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def test_tables_are_made_from_records(tmp_path, page):
    results = tmp_path / "results"
    results.mkdir()
    words = ("paper", "page", page, "--results", results)
    assert "page.md is out of date" in wsam_command(*words, "--check", status=1).stdout
    assert page.read_text() == PAGE
    assert "has new tables" in wsam_command(*words).stdout
    text = page.read_text()
    assert "| ResNet18 | WSAM | not run | 3.62 ± 0.10 |" in text
    assert "| SAM | not run | 0.0339 |" in text
    assert "stale" not in text
    assert "WRN" not in text
    for kept in ("# Results", "\nbetween\n", "\nafter\n"):
        assert kept in text
    assert wsam_command(*words, "--check").stdout == ""
    fake_record(results, find("cifar").cell(("ResNet18", "WSAM"), "CIFAR-10").runs[0], 3.61)
    wsam_command(*words, "--check", status=1)
    wsam_command(*words)
    assert "| ResNet18 | WSAM | 3.61 (n = 1) | 3.62 ± 0.10 |" in page.read_text()


def test_mistakes_in_a_page_are_named(tmp_path, page):
    page.write_text("no table")
    assert "has no line" in wsam_command("paper", "page", page, status=2).stderr
    page.write_text("<!-- wsam paper table cifar --nope -->\n<!-- end -->\n")
    assert "does not take '--nope'" in wsam_command("paper", "page", page, status=2).stderr
    page.write_text("<!-- wsam paper table cifar --epochs x -->\n<!-- end -->\n")
    assert "invalid int value: 'x'" in wsam_command("paper", "page", page, status=2).stderr


def test_the_projects_own_pages_are_up_to_date(monkeypatch):
    """No figure in the documentation is typed by hand."""
    monkeypatch.chdir(ROOT)
    pages = [
        path
        for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
        if "\n<!-- wsam paper table" in path.read_text(encoding="utf-8")
    ]
    assert ROOT / "docs" / "paper.md" in pages
    wsam_command("paper", "page", *pages, "--check")


def test_every_table_can_be_drawn(tmp_path):
    cifar = find("cifar")
    for run in cifar.cell(("ResNet18", "WSAM"), "CIFAR-10").runs[:3]:
        fake_record(tmp_path, run, 3.5 + 0.1 * run.seed)
    for name in ("cifar", "noise", "minima", "sensitivity", "lr-wd"):
        table = find(name)
        drawn = draw(table, gather(table, tmp_path))
        panels = [panel for panel in drawn.axes if panel.get_visible()]
        assert [panel.get_title(loc="left") for panel in panels] == list(table.columns)
    entries = gather(cifar, tmp_path)
    panel = draw(cifar, entries).axes[0]
    centres = {round(float(x), 3) for line in panel.lines for x in line.get_xdata(orig=False)}
    assert {3.6, 4.32, 2.74} <= centres, "our mean and the paper's"
    for suffix in (".png", ".svg"):
        save(cifar, entries, tmp_path / "plots" / f"cifar{suffix}")
    drawn = (tmp_path / "plots" / "cifar.svg").read_bytes()
    save(cifar, entries, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == drawn, "the same figure is the same file"
    assert b"WRN-28-10 WSAM" in drawn


def legend_of(drawn):
    (legend,) = drawn.legends
    return [text.get_text() for text in legend.get_texts()]


def test_a_grid_of_ones_own_is_joined_from_left_to_right(tmp_path):
    radii = (0.2, 0.01, 0.1, 0.05)
    table = grid_table(Grid("mine", "rho", {"digits": Run(method="sam")}, {"rho": radii}))
    for cell in table.cells:
        fake_record(tmp_path, cell.runs[0], 100 * float(cell.row[0]))
    drawn = draw(table, gather(table, tmp_path))
    joined = max(drawn.axes[0].lines, key=lambda line: len(line.get_xdata()))
    assert list(joined.get_xdata()) == sorted(radii)
    assert list(joined.get_ydata()) == pytest.approx([100 * rho for rho in sorted(radii)])
    assert legend_of(drawn) == ["ours (n = 1)"], "the paper says nothing of it"
    cifar = find("cifar")
    assert legend_of(draw(cifar, gather(cifar, tmp_path))) == ["ours: not run", "the paper's"]
