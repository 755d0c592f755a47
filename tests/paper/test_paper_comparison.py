"""Our results next to the paper's: reading records, comparing, testing and printing them."""

import csv
import io
import json
import re
import statistics
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from recorded import as_recorded, recorded, write_record

from wsam._utils.significance import welch_interval, welch_p
from wsam.lab import records
from wsam.paper import Cell, Measure, Quoted, Table, find, gather, minima, render, significance
from wsam.paper.comparison import Entry, Ours
from wsam.paper.grids import grid_table
from wsam.sweep.grid import make_grid

RESNET = ("ResNet18", "WSAM")
DOCUMENT = Path(__file__).parents[2] / "docs" / "paper.md"


def entry_of(entries, row, column):
    return next(e for e in entries if (e.cell.row, e.cell.column) == (row, column))


@pytest.fixture
def results(tmp_path):
    runs = find("cifar").cell(RESNET, "CIFAR-10").runs
    for run, error in zip(runs, (3.60, 3.70, 3.53), strict=False):
        write_record(tmp_path, run, error)
    write_record(tmp_path, runs[3], None, status="failed")
    sgd = find("cifar").cell(("ResNet18", "SGDM"), "CIFAR-10").runs
    write_record(tmp_path, sgd[0], 4.59)
    return tmp_path


def test_mean_deviation_and_n(results):
    entry = entry_of(gather(find("cifar"), results), RESNET, "CIFAR-10")
    assert entry.ours.values == (3.60, 3.70, 3.53)
    assert entry.ours.mean == pytest.approx(3.61)
    assert entry.ours.deviation == pytest.approx(statistics.stdev([3.60, 3.70, 3.53]))
    assert entry.text == "3.61 ± 0.09 (n = 3, 1 failed)"
    assert entry.differs is False


def test_single_run_has_no_deviation(results):
    entry = entry_of(gather(find("cifar"), results), ("ResNet18", "SGDM"), "CIFAR-10")
    assert entry.text == "4.59 (n = 1)"
    assert entry.differs is True
    assert entry.paper_text == "4.32 ± 0.07"


def test_missing_records(tmp_path):
    for entry in gather(find("noise"), tmp_path / "missing"):
        assert entry.text == "not run"
        assert entry.differs is None


def test_tables_share_records(results):
    entry = entry_of(gather(find("ablation"), results), RESNET, "CIFAR-10")
    assert entry.ours.n == 3
    sensitivity = gather(find("sensitivity"), results)
    assert entry_of(sensitivity, ("0.88",), "ResNet18 CIFAR-10").ours.n == 3
    assert entry_of(sensitivity, ("0.9",), "ResNet18 CIFAR-10").text == "not run"


@pytest.mark.parametrize(
    ("ours", "paper", "differs"),
    [
        ((3.72,), Quoted(3.62, 0.10), False),  # equal to the deviation
        ((3.73,), Quoted(3.62, 0.10), True),
        ((3.2, 4.4), Quoted(3.62, 0.10), False),  # within our larger deviation
        ((3.80, 3.81), Quoted(3.62, 0.10), True),
        ((3.51,), Quoted(3.62, 0.10), True),  # lower than the paper's
        ((1.0,), Quoted(3.62), None),  # neither has a deviation
        ((1.0, 1.1), Quoted(3.62), True),
        ((), Quoted(3.62, 0.1), None),
        ((1.0,), None, None),
    ],
)
def test_differs(ours, paper, differs):
    cell = Cell(("r",), "c", (), paper)
    assert Entry(cell, Ours(ours)).differs is differs


@pytest.mark.parametrize(
    ("ours", "paper", "mark"),
    [
        ((3.9, 3.91), Quoted(3.62, 0.1), "†"),
        ((32.0, 33.0), Quoted(22.67), "†"),
        ((4.0,), Quoted(3.62, 0.1), "†"),
        ((6.94,), Quoted(62.58), "‡"),
    ],
)
def test_marks_and_their_footnotes(ours, paper, mark):
    cell = Cell(("r",), "c", (), paper)
    table, entries = Table("t", "t", ("a",), (cell,)), [Entry(cell, Ours(ours))]
    text = render.markdown(table, entries)
    assert f") {mark} |" in text
    assert ("\n- † Ours differs from the paper's by more than every known deviation" in text) == (
        mark == "†"
    )
    assert ("\n- ‡ n = 1, and the paper prints no deviation" in text) == (mark == "‡")
    assert not set("†‡") & set(render.markdown(replace(table, comparable=False), entries))


@pytest.mark.parametrize(
    ("ours", "paper"),
    [
        ((0.00256,), Quoted(0.0026)),
        ((0.0026,), Quoted(0.0026)),
        ((0.00256, 0.00257), Quoted(0.0026)),  # more than our deviation
    ],
)
def test_equal_after_rounding_is_no_difference(ours, paper):
    """The paper's figure is rounded to the decimals that are printed."""
    cell = Cell(("r",), "c", (), paper, Measure.TRAIN_LOSS)
    entry = Entry(cell, Ours(ours))
    text = render.markdown(Table("t", "t", ("a",), (cell,)), [entry])
    assert re.search(r"\| 0\.0026.* \(n = \d\) \| 0\.0026 \|", text)
    assert not set("†‡") & set(text)
    assert "ours," not in text
    assert entry.differs is False


def test_how_often_the_mark_appears_by_chance():
    """As docs/paper.md states: both sides drawn from one normal distribution, the paper's n = 5."""
    stated = re.findall(r"(\d+)%(?: of\s+results)?\s+with\s+n\s=\s(\d)", DOCUMENT.read_text())
    assert [int(n) for _, n in stated] == [1, 2, 3, 5]
    draw = np.random.default_rng(0)
    for percent, n in ((int(percent), int(n)) for percent, n in stated):
        paper, ours = draw.normal(size=(20_000, 5)), draw.normal(size=(20_000, n))
        deviations = paper.std(1, ddof=1)
        if n > 1:
            deviations = np.maximum(deviations, ours.std(1, ddof=1))
        differs = abs(paper.mean(1) - ours.mean(1)) > deviations
        assert 100 * differs.mean() == pytest.approx(percent, abs=1)
        for theirs, mine, expected in zip(paper[:50], ours[:50], differs[:50], strict=True):
            quoted = Quoted(float(theirs.mean()), float(theirs.std(ddof=1)))
            cell = Cell(("r",), "c", (), quoted)
            entry = Entry(cell, Ours(tuple(map(float, mine))))
            assert entry.differs in (expected, False)  # False: equal after rounding


def test_every_measure(tmp_path):
    table = find("minima")
    run = table.runs[0]
    write_record(tmp_path, run, 4.25, loss=0.0026)
    texts = {e.cell.column: e.text for e in gather(table, tmp_path) if e.cell.row == ("SGDM",)}
    assert texts == {
        "loss": "0.0026 (n = 1)",
        "accuracy": "0.9575 (n = 1)",
        "top eigenvalue": "1 not measured",
        "by batches": "1 not measured",
        "test images": "1 not measured",
    }
    found = {"key": run.key, "top_eigenvalue": 62.5}
    minima.measurement_path(tmp_path, run).write_text(json.dumps(found))
    entries = gather(table, tmp_path)
    assert entry_of(entries, ("SGDM",), "top eigenvalue").text == "62.50 (n = 1)"
    noise = find("noise")
    write_record(tmp_path, noise.runs[0], 12.0)
    assert gather(noise, tmp_path)[0].text == "88.00 (n = 1)"
    assert len(recorded(tmp_path)) == 2, "a measurement is no record"


def test_gather_from_another_source():
    table = find("minima")
    row = {"train_loss": 0.5, "test_error": 5.0}

    class Source:
        def record(self, run):
            return {"status": "finished", "curve": [row]} if run.seed < 2 else None

        def minimum(self, run):
            return {"top_eigenvalue": 3.0} if run.seed == 0 else None

    texts = [entry.text for entry in gather(table, Source())][:3]
    assert texts == ["0.5000 ± 0.0000 (n = 2)", "0.9500 ± 0.0000 (n = 2)", "3.00 (n = 1)"]


def test_best_epoch_skips_untested_epochs(tmp_path):
    table = find("noise-best")
    run = table.runs[0]
    write_curve(tmp_path, run, (30.0, None, 12.0, 20.0))
    assert "88.00 (n = 1)" in [entry.text for entry in gather(table, tmp_path)]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"key": "0", "top_eigenvalue": 1.0}',
        "{}",
        "[" * 100_000,
        '{"key": "KEY", "top_eigenvalue": NaN}',
        '{"key": "KEY", "top_eigenvalue": 1e400}',
        '{"key": "KEY", "top_eigenvalue": 1.0, "seconds": Infinity}',
        '{"key": "KEY", "top_eigenvalue": 1.0, "on_test": {"top_eigenvalue": "nan"}}',
        '{"key": "KEY", "top_eigenvalue": 1.0, "format": 99}',
    ],
    ids=lambda text: text[:60],
)
def test_damaged_measurement(tmp_path, text):
    run = find("minima").runs[0]
    minima.measurement_path(tmp_path, run).write_text(text.replace("KEY", run.key))
    with pytest.raises(ValueError, match=r"minimum\.json .*remove it to measure again"):
        minima.read_measurement(tmp_path, run)


def test_only_failed_runs(tmp_path):
    run = find("cifar").runs[0]
    write_record(tmp_path, run, None, status="failed")
    assert gather(find("cifar"), tmp_path)[0].text == "1 failed"


def test_markdown(results):
    table = find("cifar").select("*/CIFAR-10").select("ResNet18")
    text = render.markdown(table, gather(table, results))
    assert text.splitlines()[2:6] == [
        "| model | method | CIFAR-10, last epoch | CIFAR-10, best epoch | CIFAR-10, paper |",
        "| --- | --- | --- | --- | --- |",
        "| ResNet18 | SGDM | 4.59 (n = 1) † | 4.59 (n = 1) † | 4.32 ± 0.07 |",
        "| ResNet18 | SAM | not run | not run | 3.68 ± 0.06 |",
    ]
    assert "\n- † Ours differs from the paper's" in text
    assert "\n- GSAM's rho is constant" in text
    alone = find("cifar").select("ResNet18/WSAM/*")
    assert "GSAM" not in render.markdown(alone, gather(alone, results)), (
        "a note about a missing row"
    )
    coupled = find("ablation").select("Coupled-WSAM*")
    assert "\n- Coupled-WSAM uses" in render.markdown(coupled, gather(coupled, results))


def write_curve(out, run, errors):
    rows = [
        {"epoch": number, "train_loss": 0.5, "test_error": error}
        for number, error in enumerate(errors, 1)
    ]
    records.write(out, run, as_recorded(run, *rows))


def test_best_epoch_next_to_last_epoch(tmp_path):
    table = find("cifar").select("ResNet18/WSAM/CIFAR-10")
    for run, errors in zip(table.runs, ([9.0, 3.5, 3.7], [3.3, 3.4, 3.9]), strict=False):
        write_curve(tmp_path, run, errors)
    (entry,) = gather(table, tmp_path)
    assert entry.ours.values == (3.7, 3.9)
    assert entry.best.ours.values == (3.5, 3.3)
    (row,) = render.body(table, [entry])
    assert row[2:] == ["3.80 ± 0.14 (n = 2) †", "3.40 ± 0.14 (n = 2) †", "3.62 ± 0.10"]
    (cell,) = render.cell_dicts(table, [entry])
    assert (cell["mean"], cell["best_mean"]) == pytest.approx((3.8, 3.4))
    assert cell["keys"] == [run.key for run in table.runs[:2]], "of runs with a record"


def test_welch_tests_each_pair_of_methods(tmp_path):
    table = find("cifar").select("ResNet18/*/CIFAR-10*")
    samples = {
        ("SGDM", "CIFAR-10"): [(5.0, 4.29), (5.0, 4.58), (4.2, 4.28)],
        ("SAM", "CIFAR-10"): [(5.0, 3.73), (3.7, 3.86), (5.0, 3.67)],
        ("WSAM", "CIFAR-10"): [(5.0, 3.62), (5.0, 3.65), (5.0, 3.61)],
        ("GSAM", "CIFAR-10"): [(5.0, 3.87)],
        ("WSAM", "CIFAR-100"): [(30.0, 19.0), (30.0, 20.0)],
    }
    for (method, data), curves in samples.items():
        runs = table.cell(("ResNet18", method), data).runs
        for run, errors in zip(runs, curves, strict=False):
            write_curve(tmp_path, run, errors)
    entries = gather(table, tmp_path)
    tests = {test.methods: test for test in significance.welch_tests(table, entries)}
    assert set(tests) == {("SGDM", "SAM"), ("SGDM", "WSAM"), ("SAM", "WSAM")}
    test = tests["SAM", "WSAM"]
    # t = 2.229 with 2.19 degrees of freedom, computed by hand.
    assert (test.setting, test.n) == ("ResNet18, CIFAR-10", (3, 3))
    assert test.p_last == pytest.approx(0.1471, abs=1e-4)
    assert test.p_best == pytest.approx(0.0306, abs=1e-4)
    text = significance.markdown(table, entries)
    assert test.difference == pytest.approx(-0.1267, abs=1e-4)
    # 0.1267 ± 3.974 (the 97.5% quantile) * 0.05735, computed by hand.
    assert test.interval == pytest.approx((-0.3546, 0.1013), abs=1e-3)
    row = "| ResNet18, CIFAR-10 | WSAM | SAM | 3 | -0.13 (-0.35 to +0.10) | 0.15 | "
    assert row in text.replace("\u00a0", " ")
    only_sgd = significance.welch_tests(replace(table, baselines=("SGDM",)), entries)
    assert {one.methods for one in only_sgd} == {("SGDM", "SAM"), ("SGDM", "WSAM")}
    assert "No test, because n = 1: ResNet18/GSAM/CIFAR-10." in text
    assert significance.as_dicts(table, entries)[0]["methods"] == ("SGDM", "SAM")


def test_welch_tests_rows_of_a_grid_that_differ_in_one_setting():
    """A method without the other setting is compared at each of its values."""
    grid = make_grid("mine", {"method": ["vanilla", "sam", "gsam"], "rho": [0.05, 0.2]})
    table = grid_table(grid)
    entries = [Entry(cell, Ours((1.0, 2.0 + n))) for n, cell in enumerate(table.cells)]
    tests = significance.welch_tests(table, entries)
    found = {(test.setting.removesuffix(", digits cnn"), *test.methods) for test in tests}
    small = [("rho 0.05", *pair) for pair in combinations(("vanilla", "sam", "gsam"), 2)]
    large = [("rho 0.2", *pair) for pair in combinations(("vanilla", "sam", "gsam"), 2)]
    radii = [(method, "rho 0.05", "rho 0.2") for method in ("sam", "gsam")]
    assert found == {*small, *large, *radii}
    assert len(tests) == len(found)
    assert "| rho 0.2, digits cnn | sam | vanilla | 2 |" in significance.markdown(table, entries)


@pytest.mark.parametrize("samples", [([1.0], [2.0, 3.0]), ([1.0, 1.0], [2.0, 2.0])])
def test_welch_without_variance_is_undefined(samples):
    assert welch_p(*samples) is None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "samples", [([5.0, 5.0, 5.0], [6.0, 7.0, 6.5]), ([1e-9, 3e-9], [5.0, 5.0])]
)
def test_welch_with_one_variance(samples):
    """Two runs on a small test set often have the same error."""
    first, second = samples
    varied = np.array(first if len({*first}) > 1 else second)
    error = varied.std(ddof=1) / len(varied) ** 0.5
    difference = np.mean(second) - np.mean(first)
    degrees = len(varied) - 1
    p = 2 * scipy.stats.t.sf(abs(difference) / error, degrees)
    assert welch_p(*samples) == pytest.approx(p, rel=1e-9)
    half = scipy.stats.t.ppf(0.975, degrees) * error
    expected = (difference - half, difference + half)
    assert welch_interval(*samples) == pytest.approx(expected, rel=1e-9)


def test_no_test_is_stated_for_single_runs_but_not_for_costs():
    run = find("cifar").runs[0]
    cells = [
        Cell(("SAM, long",), "digits", (run,)),
        Cell(("WSAM",), "digits", (run,)),
        Cell(("WSAM",), "cost", (run,), measure=Measure.COST),
    ]
    entries = [Entry(cell, Ours((1.0,))) for cell in cells]
    text = significance.markdown(Table("mine", "Mine", ("method",), tuple(cells)), entries)
    assert "- No test, because n = 1: SAM, long/digits; WSAM/digits.\n" in text


def test_page_folds_away_what_was_not_run(results):
    table = find("cifar")
    text = render.page_markdown(table, gather(table, results)).replace("\u00a0", " ")
    main, _, folded = text.partition("<details><summary>")
    assert "| ResNet18 | SGDM | 4.59 (n = 1) † | 4.59 (n = 1) † | 4.32 ± 0.07 |" in main
    for absent in ("not run", "CIFAR-100", "WRN-28-10", "GSAM"):
        assert absent not in main
    assert folded.startswith("Not run: 18 of 20 cells; the paper's figures</summary>")
    assert "| WRN-28-10 | WSAM | 2.74 ± 0.07 | 16.33 ± 0.26 |" in folded
    assert "| ResNet18 | WSAM |  | 19.42 ± 0.12 |" in folded
    assert folded.endswith("</details>\n")


def test_page_numbers_do_not_break(results):
    table = find("cifar")
    text = render.page_markdown(table, gather(table, results))
    assert "3.61\u00a0±\u00a00.09 (n\u00a0=\u00a03,\u00a01\u00a0failed)" in text


def test_page_of_a_table_without_runs(tmp_path):
    table = find("geometry")
    text = render.page_markdown(table, gather(table, tmp_path)).replace("\u00a0", " ")
    assert "of the neighborhood. Not run." in text
    assert "\n- The paper does not state eta." in text
    assert "| WSAM | 2.74 ± 0.07 | 2.90 ± 0.08 | 3.45 ± 0.35 |" in text.partition("<details>")[2]


def test_empty_columns_are_left_out(tmp_path):
    """Of the printed table; JSON and CSV keep them."""
    table = find("minima")
    first = table.cell(("SGDM",), "loss").runs[0]
    write_record(tmp_path, first, 4.25)
    entries = gather(table, tmp_path)
    text = render.markdown(table, entries)
    assert text.splitlines()[2].endswith("top eigenvalue, ours | top eigenvalue, paper |")
    row = "| SGDM | 0.0100 (n = 1) ‡ | 0.0026 | 0.9575 (n = 1) | 0.9575 | 1 not measured |"
    assert row in text
    assert "\n- Columns without any figure, ours or the paper's: by batches, test images.\n" in text
    assert "by batches" in {cell["column"] for cell in render.cell_dicts(table, entries)}
    assert "test images" in render.csv_text(table, entries)
    found = {"key": first.key, "top_eigenvalue": 62.5, "on_test": {"top_eigenvalue": 2.0}}
    minima.measurement_path(tmp_path, first).write_text(json.dumps(found))
    assert render.header(table, gather(table, tmp_path))[-1] == "test images"
    noise = find("noise-rho")
    write_record(tmp_path, noise.cells[1].runs[0], None, status="failed")
    visible = render.visible_columns(noise, gather(noise, tmp_path))
    assert visible == [noise.cells[1].column], "a failed run is shown"


def test_table_that_is_not_comparable(results):
    table = replace(find("cifar"), comparable=False)
    text = render.markdown(table, gather(table, results))
    assert "†" not in text
    assert all(cell["differs"] is None for cell in render.cell_dicts(table, gather(table, results)))


def test_csv(results):
    table = find("cifar")
    rows = list(csv.DictReader(io.StringIO(render.csv_text(table, gather(table, results)))))
    assert len(rows) == 20
    row = next(r for r in rows if (r["model"], r["method"], r["column"]) == (*RESNET, "CIFAR-10"))
    assert float(row["mean"]) == pytest.approx(3.61)
    assert (row["n"], row["failed"], row["planned"]) == ("3", "1", "5")
    assert (row["paper_mean"], row["paper_deviation"], row["differs"]) == ("3.62", "0.1", "False")
    empty = next(r for r in rows if r["method"] == "GSAM")
    assert (empty["mean"], empty["n"], empty["differs"]) == ("", "0", "")


def test_columns_without_paper_figures(tmp_path):
    table = find("noise-rho")
    heads = render.header(table, gather(table, tmp_path))
    assert heads == ["rho", "20%", "40%", "60%", "80%"]
    gap = Table("t", "t", ("a",), (*table.cells[:1], Cell(("x",), "20%", table.cells[0].runs)))
    assert render.body(gap, gather(gap, tmp_path)) == [["0.01", "not run"], ["x", "not run"]]


def test_terminal_output(results, capsys):
    table = find("cifar")
    render.print_table(table, gather(table, results))
    printed = capsys.readouterr().out
    for words in ("3.61 ± 0.09 (3, 1 failed)", "4.59 (1) †", "not run", "19.42 ± 0.12", "† Ours"):
        assert words in printed


def test_markdown_escapes_bars(tmp_path):
    run = find("cifar").runs[0]
    table = Table("t", "t", ("a",), (Cell(("x|y",), "c", (run,)),))
    assert "| x\\|y | not run |" in render.markdown(table, gather(table, tmp_path))
