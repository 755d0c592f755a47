"""Our figures beside the paper's: what is read from records, what is said of it, how it is printed."""

import csv
import io
import json
import random
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from recorded import as_recorded, recorded

from wsam.lab import records
from wsam.paper import Cell, Measure, Quoted, Table, find, gather, minimum, render
from wsam.paper.outcome import Entry, Ours

RESNET = ("ResNet18", "WSAM")
DOCUMENT = Path(__file__).parents[2] / "docs" / "paper.md"


def fake_record(out, run, error, loss=0.01, status="finished"):
    """Write what a run would have left, without running it."""
    row = {"epoch": run.epochs, "train_loss": loss, "test_error": error}
    records.write(out, run, as_recorded(run, row, status=status))


def entry_of(entries, row, column):
    return next(e for e in entries if (e.cell.row, e.cell.column) == (row, column))


@pytest.fixture
def results(tmp_path):
    runs = find("cifar").cell(RESNET, "CIFAR-10").runs
    for run, error in zip(runs, (3.60, 3.70, 3.53), strict=False):
        fake_record(tmp_path, run, error)
    fake_record(tmp_path, runs[3], None, status="failed")
    sgd = find("cifar").cell(("ResNet18", "SGDM"), "CIFAR-10").runs
    fake_record(tmp_path, sgd[0], 4.59)
    return tmp_path


def test_mean_deviation_and_n(results):
    entry = entry_of(gather(find("cifar"), results), RESNET, "CIFAR-10")
    assert entry.ours.values == (3.60, 3.70, 3.53)
    assert entry.ours.mean == pytest.approx(3.61)
    assert entry.ours.deviation == pytest.approx(statistics.stdev([3.60, 3.70, 3.53]))
    assert entry.text == "3.61 ± 0.09 (n = 3, 1 failed)"
    assert entry.differs is False


def test_one_run_has_no_deviation_and_may_still_differ(results):
    entry = entry_of(gather(find("cifar"), results), ("ResNet18", "SGDM"), "CIFAR-10")
    assert entry.text == "4.59 (n = 1)"
    assert entry.differs is True
    assert entry.difference == (
        "ResNet18/SGDM/CIFAR-10: ours, 4.59 (n = 1), is above the paper's, 4.32 ± 0.07"
    )


def test_nothing_run(tmp_path):
    for entry in gather(find("noise"), tmp_path / "missing"):
        assert entry.text == "not run"
        assert entry.differs is None


def test_records_of_one_table_count_in_another(results):
    entry = entry_of(gather(find("ablation"), results), RESNET, "CIFAR-10")
    assert entry.ours.n == 3
    sensitivity = gather(find("sensitivity"), results)
    assert entry_of(sensitivity, ("0.88",), "ResNet18 CIFAR-10").ours.n == 3
    assert entry_of(sensitivity, ("0.9",), "ResNet18 CIFAR-10").text == "not run"


@pytest.mark.parametrize(
    ("ours", "paper", "differs"),
    [
        ((3.72,), Quoted(3.62, 0.10), False),  # exactly a deviation
        ((3.73,), Quoted(3.62, 0.10), True),
        ((3.2, 4.4), Quoted(3.62, 0.10), False),  # within ours, which is wider
        ((3.80, 3.81), Quoted(3.62, 0.10), True),
        ((3.51,), Quoted(3.62, 0.10), True),  # better than the paper's differs too
        ((1.0,), Quoted(3.62), None),  # neither has a deviation
        ((1.0, 1.1), Quoted(3.62), True),
        ((), Quoted(3.62, 0.1), None),
        ((1.0,), None, None),
    ],
)
def test_differs_is_more_than_both_deviations(ours, paper, differs):
    cell = Cell(("r",), "c", (), paper)
    assert Entry(cell, Ours(ours)).differs is differs


@pytest.mark.parametrize(
    ("ours", "paper", "mark", "said"),
    [
        ((3.9, 3.91), Quoted(3.62, 0.1), "†", "by more than both deviations:"),
        ((32.0, 33.0), Quoted(22.67), "†", "by more than our deviation; the paper prints none:"),
        ((4.0,), Quoted(3.62, 0.1), "†", "by more than the paper's deviation; ours, n = 1, has"),
        ((6.94,), Quoted(62.58), "‡", "n = 1, and the paper prints no deviation: there is none"),
    ],
)
def test_a_mark_names_the_deviations_there_are(ours, paper, mark, said):
    cell = Cell(("r",), "c", (), paper)
    table, entries = Table("t", "t", ("a",), (cell,)), [Entry(cell, Ours(ours))]
    text = render.markdown(table, entries)
    assert f") {mark} |" in text
    assert said in text
    assert ("both deviations" in text) == (len(ours) > 1 and paper.deviation is not None)
    assert ("ignores n" in text) == (mark == "†")
    assert not set("†‡") & set(render.markdown(replace(table, comparable=False), entries))


@pytest.mark.parametrize(
    ("ours", "paper"),
    [
        ((0.00256,), Quoted(0.0026)),  # below the paper's, were its digits all there are
        ((0.0026,), Quoted(0.0026)),
        ((0.00256, 0.00257), Quoted(0.0026)),  # by more than our deviation
    ],
)
def test_figures_that_read_alike_get_no_mark(ours, paper):
    """The paper's is rounded: that ours is above or below it would not be known, and not be seen."""
    cell = Cell(("r",), "c", (), paper, Measure.TRAIN_LOSS)
    entry = Entry(cell, Ours(ours))
    text = render.markdown(Table("t", "t", ("a",), (cell,)), [entry])
    assert re.search(r"\| 0\.0026.* \(n = \d\) \| 0\.0026 \|", text)
    assert not set("†‡") & set(text)
    assert "ours," not in text
    assert entry.differs is False


def test_how_often_the_mark_appears_by_chance():
    """What the documentation says of it: both drawn from one normal, the paper's five times."""
    told = re.findall(r"(\d+)%(?: of\s+figures)?\s+with\s+n\s=\s(\d)", DOCUMENT.read_text())
    assert [int(n) for _, n in told] == [1, 2, 3, 5]
    draw = random.Random(0)

    def marked(n):
        paper = [draw.gauss() for _ in range(5)]
        quoted = Quoted(statistics.fmean(paper), statistics.stdev(paper))
        return Entry(
            Cell(("r",), "c", (), quoted), Ours(tuple(draw.gauss() for _ in range(n)))
        ).differs

    for percent, n in told:
        found = statistics.fmean(marked(int(n)) for _ in range(4000))
        assert 100 * found == pytest.approx(int(percent), abs=2.5)


def test_every_measure(tmp_path):
    table = find("minima")
    run = table.runs[0]
    fake_record(tmp_path, run, 4.25, loss=0.0026)
    texts = {e.cell.column: e.text for e in gather(table, tmp_path) if e.cell.row == ("SGDM",)}
    assert texts == {
        "loss": "0.0026 (n = 1)",
        "accuracy": "0.9575 (n = 1)",
        "top eigenvalue": "1 not measured",
        "by batches": "1 not measured",
        "test images": "1 not measured",
    }
    found = {"key": run.key, "top_eigenvalue": 62.5}
    minimum.path_of(tmp_path, run).write_text(json.dumps(found))
    entries = gather(table, tmp_path)
    assert entry_of(entries, ("SGDM",), "top eigenvalue").text == "62.50 (n = 1)"
    noise = find("noise")
    fake_record(tmp_path, noise.runs[0], 12.0)
    assert gather(noise, tmp_path)[0].text == "88.00 (n = 1)"
    assert len(recorded(tmp_path)) == 2, "a measurement is no record"


def test_figures_may_come_from_elsewhere_than_a_folder():
    table = find("minima")
    row = {"train_loss": 0.5, "test_error": 5.0}

    class Known:
        def record(self, run):
            return {"status": "finished", "curve": [row]} if run.seed < 2 else None

        def minimum(self, run):
            return {"top_eigenvalue": 3.0} if run.seed == 0 else None

    texts = [entry.text for entry in gather(table, Known())][:3]
    assert texts == ["0.5000 ± 0.0000 (n = 2)", "0.9500 ± 0.0000 (n = 2)", "3.00 (n = 1)"]


def test_the_best_epoch_is_one_that_was_tested(tmp_path):
    table = find("noise-best")
    run = table.runs[0]
    rows = [
        {"epoch": number, "train_loss": 0.5, "test_error": error}
        for number, error in enumerate((30.0, None, 12.0, 20.0), 1)
    ]
    records.write(tmp_path, run, as_recorded(run, *rows))
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
def test_a_damaged_measurement_is_named(tmp_path, text):
    run = find("minima").runs[0]
    minimum.path_of(tmp_path, run).write_text(text.replace("KEY", run.key))
    with pytest.raises(ValueError, match=r"minimum\.json .*remove it to measure again"):
        minimum.read(tmp_path, run)


def test_all_failed(tmp_path):
    run = find("cifar").runs[0]
    fake_record(tmp_path, run, None, status="failed")
    assert gather(find("cifar"), tmp_path)[0].text == "1 failed"


def test_markdown(results):
    table = find("cifar").select("*/CIFAR-10").select("ResNet18")
    text = render.markdown(table, gather(table, results))
    assert text.splitlines()[2:6] == [
        "| model | method | CIFAR-10, ours | CIFAR-10, paper |",
        "| --- | --- | --- | --- |",
        "| ResNet18 | SGDM | 4.59 (n = 1) † | 4.32 ± 0.07 |",
        "| ResNet18 | SAM | not run | 3.68 ± 0.06 |",
    ]
    assert (
        "- † Ours differs from the paper's by more than the paper's deviation; "
        "ours, n = 1, has none:\n"
        "  - ResNet18/SGDM/CIFAR-10: ours, 4.59 (n = 1), is above"
    ) in text
    assert "\n- † ignores n: with few seeds" in text
    assert "\n- GSAM's radius is constant" in text
    alone = find("cifar").select("ResNet18/WSAM/*")
    assert "GSAM" not in render.markdown(alone, gather(alone, results)), "a note without its row"
    coupled = find("ablation").select("Coupled-WSAM")
    assert "\n- Coupled-WSAM uses" in render.markdown(coupled, gather(coupled, results))


def test_columns_without_any_figure_are_left_out(tmp_path):
    """For people: neither measured by us nor printed by the paper. Data keeps them."""
    table = find("minima")
    first = table.cell(("SGDM",), "loss").runs[0]
    fake_record(tmp_path, first, 4.25)
    entries = gather(table, tmp_path)
    text = render.markdown(table, entries)
    assert text.splitlines()[2].endswith("top eigenvalue, ours | top eigenvalue, paper |")
    row = "| SGDM | 0.0100 (n = 1) ‡ | 0.0026 | 0.9575 (n = 1) | 0.9575 | 1 not measured |"
    assert row in text
    assert (
        "\n- Left out, for neither we nor the paper have a figure there: by batches, test images.\n"
        in text
    )
    assert "by batches" in {cell["column"] for cell in render.data(table, entries)}
    assert "test images" in render.comma_separated(table, entries)
    reading = {"top_eigenvalue": 2.0}
    found = {"key": first.key, "top_eigenvalue": 62.5, "on_test": reading}
    minimum.path_of(tmp_path, first).write_text(json.dumps(found))
    assert render.header(table, gather(table, tmp_path))[-1] == "test images"
    noise = find("noise-rho")
    fake_record(tmp_path, noise.cells[1].runs[0], None, status="failed")
    kept = render.columns(noise, gather(noise, tmp_path))
    assert kept == [noise.cells[1].column], "a failure is worth telling"


def test_a_table_that_must_not_be_compared_is_not(results):
    table = replace(find("cifar"), comparable=False)
    text = render.markdown(table, gather(table, results))
    assert "†" not in text
    assert all(cell["differs"] is None for cell in render.data(table, gather(table, results)))


def test_csv_reads_back(results):
    table = find("cifar")
    rows = list(csv.DictReader(io.StringIO(render.comma_separated(table, gather(table, results)))))
    assert len(rows) == 20
    row = next(r for r in rows if (r["model"], r["method"], r["column"]) == (*RESNET, "CIFAR-10"))
    assert float(row["mean"]) == pytest.approx(3.61)
    assert (row["n"], row["failed"], row["planned"]) == ("3", "1", "5")
    assert (row["paper_mean"], row["paper_deviation"], row["differs"]) == ("3.62", "0.1", "False")
    empty = next(r for r in rows if r["method"] == "GSAM")
    assert (empty["mean"], empty["n"], empty["differs"]) == ("", "0", "")


def test_columns_that_the_paper_leaves_empty_have_no_place_for_it(tmp_path):
    table = find("noise-rho")
    heads = render.header(table, gather(table, tmp_path))
    assert heads == ["rho", "20%", "40%", "60%", "80%"]
    gap = Table("t", "t", ("a",), (*table.cells[:1], Cell(("x",), "20%", table.cells[0].runs)))
    assert render.lines(gap, gather(gap, tmp_path)) == [["0.01", "not run"], ["x", "not run"]]


def test_the_terminal_gets_everything(results, capsys):
    table = find("cifar")
    render.show(table, gather(table, results))
    shown = capsys.readouterr().out
    for words in ("3.61 ± 0.09 (3, 1 failed)", "4.59 (1) †", "not run", "19.42 ± 0.12", "above"):
        assert words in shown


def test_labels_with_bars_stay_in_their_cell(tmp_path):
    run = find("cifar").runs[0]
    table = Table("t", "t", ("a",), (Cell(("x|y",), "c", (run,)),))
    assert "| x\\|y | not run |" in render.markdown(table, gather(table, tmp_path))
    assert Measure.TRAIN_LOSS.decimals == 4
