"""Error over training time and accuracy over label noise: which records are used, and how."""

import pytest
from figures.error_over_time import MARKERS, draw_times, front, message, read_times
from figures.label_noise import draw_noise, read_noise
from figures.minima import PANELS, draw_eigenvalues
from figures.over_adamw import read_curves
from recorded import as_recorded

from wsam.lab import records
from wsam.paper import find
from wsam.paper.comparison import Entry, Ours


def write(out, run, error, *seconds):
    """Write a record; `seconds` are the times of an epoch, one for each half of the run."""
    half = run.epochs // 2
    times = [
        *([5.0] + [(*seconds, 1.0)[0]] * (half - 1)),
        *([seconds[-1] if seconds else 1.0] * half),
    ]
    rows = [
        {"epoch": number, "train_loss": 0.1, "test_error": error, "seconds": time}
        for number, time in enumerate(times, 1)
    ]
    gpu = {"hardware": {"gpu": "one", "cpu": "any"}}
    records.write(out, run, {**as_recorded(run, *rows), **gpu})


def runs_of(method, table="cifar"):
    name = f"ResNet18/{method}/CIFAR-10" if table == "cifar" else f"{method}/80%"
    return find(table).select(name).runs


def row_of(label):
    return find("cheap").cell((label,), "CIFAR-10")


def test_error_over_time_reads_the_rows_of_the_study(tmp_path):
    sam, wsam, sgd = (runs_of(method) for method in ("SAM", "WSAM", "SGDM"))
    write(tmp_path, sgd[0], 4.3, 0.9)
    for run, error in zip(sam, (3.6, 3.8), strict=False):
        write(tmp_path, run, error, 1.8)
    late = row_of("WSAM reuse 4, last half, paper's gamma").runs[0]
    write(tmp_path, late, 3.7, 0.9, 1.2)
    others = (
        sam[0].replace(epochs=80),
        sam[0].replace(noise=0.4),
        wsam[0].replace(hyper={"rho": 0.2, "gamma": 0.5}),
        wsam[0].replace(options={"every": 3, "reuse": True}),
    )
    for run in others:
        write(tmp_path, run, 1.0)
    found = {one.method: one for one in read_times(tmp_path)}
    assert list(found) == ["vanilla", "sam", "wsam_reuse"]
    assert found["vanilla"].minutes == found["sam"].minutes[:1] == pytest.approx((6.0,))
    assert found["wsam_reuse"].minutes == pytest.approx((100 * (0.9 + 1.2) / 60,)), "two phases"
    assert found["sam"].label == "SAM: 3.70 ± 0.14 (n = 2)"
    assert found["wsam_reuse"].keys == (late.key,)
    assert found["sam"].cost == pytest.approx(2.0)
    assert found["wsam_reuse"].cost == pytest.approx((0.9 + 1.2) / 1.8)
    write(tmp_path, sgd[0].replace(epochs=200), 4.5, 0.9)
    assert [one.title for one in read_times(tmp_path)][:2] == [
        "SGD",
        "SGD, twice the epochs",
    ]


def test_points_have_a_legend_and_a_front(tmp_path):
    cells = find("cheap").select("*/CIFAR-10").cells
    for number, cell in enumerate(cells):
        write(tmp_path, cell.runs[0], 4.0 - 0.01 * number, 1.0 + 0.02 * (number % 5))
    results = read_times(tmp_path)
    assert len(results) == len(cells) - 1 > 20, "all but the control, SGD with a late decay"
    best = front(results)
    assert best[0].minutes == min(one.minutes for one in results)
    assert best[-1].mean_error == min(one.mean_error for one in results)
    assert len(best) < len(results)
    figure = draw_times(results)
    (legend,) = figure.legends
    labels = {one.label for one in results if not one.tried}
    assert {text.get_text() for text in legend.get_texts()[:-1]} == labels
    assert legend.get_texts()[-1].get_text().startswith("other settings")
    lines = [line.get_xydata() for line in figure.axes[0].lines]
    minutes = {one.mean_minutes for one in results if one.tried}
    assert any({float(x) for x, _ in points} == minutes for points in lines)
    assert legend.get_texts()[0].get_text() == best[0].label, "from left to right"
    assert not figure.axes[0].texts
    figure.draw_without_rendering()
    assert legend.get_window_extent().x1 < figure.bbox.x1


def test_a_single_run_is_open(tmp_path):
    for method, error in (("SGDM", 4.0), ("GSAM", 3.901), ("ESAM", 3.9)):
        write(tmp_path, runs_of(method)[0], error)
    for run, error in zip(runs_of("SAM"), (3.89, 3.9), strict=False):
        write(tmp_path, run, error)
    figure = draw_times(read_times(tmp_path))
    (axes,) = figure.axes
    points = [line for line in axes.lines if line.get_marker() in MARKERS]
    assert [line.get_markerfacecolor() == "none" for line in points].count(True) == 3
    assert len(points) == 4


def test_the_title_names_methods_that_differ_from_sgd(tmp_path):
    """With as much time, by Welch's test; a single run has no test."""
    for run, error in zip(runs_of("SGDM"), (4.3, 4.4, 4.5), strict=False):
        write(tmp_path, run, error)
    write(tmp_path, runs_of("GSAM")[0], 2.0, 2.0)
    assert message(read_times(tmp_path)) == "GSAM has the lowest mean error"
    for method, errors in (("SAM", (4.2, 4.3, 4.5)), ("WSAM", (3.7, 3.8, 3.9))):
        for run, error in zip(runs_of(method), errors, strict=False):
            write(tmp_path, run, error, 2.0)
    assert message(read_times(tmp_path)) == "WSAM has a lower error than SGD at equal time"
    for run, error in zip(runs_of("SAM"), (3.6, 3.8, 3.9), strict=False):
        write(tmp_path, run, error, 2.0)
    expected = "SAM and WSAM have lower errors than SGD at equal time"
    assert message(read_times(tmp_path)) == expected
    for run, error in zip(runs_of("SAM"), (3.6, 3.8, 3.9), strict=False):
        write(tmp_path, run, error, 4.0)
    assert message(read_times(tmp_path)).startswith("WSAM has"), "SAM took twice the time"


@pytest.mark.parametrize("noisy", [True, False])
def test_accuracy_over_noise(noisy, tmp_path):
    write(tmp_path, runs_of("SAM")[0], 4.0)
    for run, error in zip(runs_of("WSAM"), (3.0, 5.0), strict=False):
        write(tmp_path, run, error)
    if not noisy:
        assert read_noise(tmp_path) == []
        return
    write(tmp_path, runs_of("WSAM", "noise")[0], 20.0)
    (wsam,) = read_noise(tmp_path)
    assert wsam.method == "wsam"
    assert {level: ours.values for level, ours in wsam.by_level.items()} == {
        0: (97.0, 95.0),
        80: (80.0,),
    }
    assert len(wsam.keys) == 3
    (axes,) = draw_noise([wsam]).axes
    assert [text.get_text() for text in axes.texts] == ["WSAM 80.0%"]
    write(tmp_path, runs_of("SGDM", "noise")[0], 70.0, 0.5)
    (axes,) = draw_noise(read_noise(tmp_path)).axes
    labels = [text.get_text() for text in axes.texts]
    assert labels == ["SGD 30.0%\n(half the time)", "WSAM 80.0%"]


def test_eigenvalues_are_relative_to_those_of_sgd():
    table = find("minima")
    values = {"SGDM": (2.0,), "SAM": (8.0, 12.0), "WSAM": (1.0,)}
    entries = [
        Entry(cell, Ours(values[cell.row[0]]))
        for cell in table.cells
        if cell.measure in PANELS and cell.row[0] in values
    ]
    (axes,) = draw_eigenvalues(entries).axes
    labels = [text.get_text() for text in axes.texts]
    assert labels.count("SAM 5.0") == labels.count("WSAM 0.50") == len(PANELS)
    faces = [line.get_markerfacecolor() for line in axes.lines if line.get_marker() == "o"]
    assert faces.count("white") == len(PANELS), "WSAM has one run"
    assert len([line for line in axes.lines if line.get_marker() == "D"]) == 2, "of the paper"


def test_loss_curves_are_those_of_finished_runs(tmp_path):
    finished, failed, _ = find("adam").cell(("GPT, dropout 0", "AdamW"), "Shakespeare, loss").runs
    rows = [
        {"epoch": epoch, "train_loss": 1.0, "test_loss": 2.0, "test_error": 50.0, "seconds": 1.0}
        for epoch in range(1, finished.epochs + 1)
    ]
    records.write(tmp_path, finished, as_recorded(finished, *rows))
    records.write(tmp_path, failed, as_recorded(failed, *rows[:3], status="failed"))
    (curves,) = read_curves(tmp_path)
    assert curves.keys == (finished.key,)
    assert curves.mean == [2.0] * finished.epochs
