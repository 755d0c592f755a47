"""Text, labels and errors of `wsam curvature` and `wsam landscape`."""

import io
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from command import error_of, wsam_command

from wsam.cli._checkpoints import progress
from wsam.cli.landscape import _line_label
from wsam.curvature import Progress
from wsam.lab import records
from wsam.lab.execution import ExecutionConfig
from wsam.lab.loaded_model import read_checkpoint
from wsam.lab.run import Run
from wsam.lab.train import train

RUN = Run(data="digits", model="cnn", method="vanilla", epochs=1, train_limit=60, noise=0.2)
SMALL = ("--samples", 20, "--device", "cpu")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train(RUN, folder, ExecutionConfig(device="cpu", keep_weights=True))
    return records.record_path(folder, RUN)


def doubled_variances(record: Path, path: Path) -> Path:
    """Write the end of a line on which the variances are negative below -1."""
    state, _ = read_checkpoint(record)
    torch.save({n: 2 * t if n.endswith("running_var") else t for n, t in state.items()}, path)
    return path


def test_points_without_a_finite_loss_are_reported(record, tmp_path):
    other = doubled_variances(record, tmp_path / "other.pt")
    options = ("--to", other, "--radius", 2, "--points", 6, "--out", tmp_path / "out", *SMALL)
    output = wsam_command("landscape", record, *options).stdout
    note = "1 of 6 points has no finite loss (a variance of BatchNorm is negative there)"
    assert note in output
    saved = json.loads((tmp_path / "out" / "landscape.json").read_text())
    assert saved["coordinates"] == [[-2.0, -1.0, 0.0, 1.0, 2.0, 3.0]]
    assert [loss is None for loss in saved["losses"]] == [True] + [False] * 5
    assert saved["note"] == note
    assert note in (tmp_path / "out" / "landscape.html").read_text()
    whole = wsam_command("landscape", record, "--to", other, "--radius", 0, *options[4:]).stdout
    assert "no finite loss" not in whole


def test_line_is_named_by_its_ends(record, tmp_path):
    other = doubled_variances(record, tmp_path / "other.pt")
    common = ("--radius", 0, "--points", 2, "--json", "--out", tmp_path / "out", *SMALL)
    line = json.loads(wsam_command("landscape", record, "--to", other, *common).stdout)
    assert line["axes"] == [f"the line from {RUN.title} (0) to other.pt (1)"]
    page = (tmp_path / "out" / "landscape.html").read_text()
    title = f"<title>Loss along the line from {RUN.title} (0) to other.pt (1)</title>"
    assert title in page
    names = (Path("runs/0a1b.json"), Path("runs/2c3d.json"))
    other_run = RUN.replace(seed=RUN.seed + 1)
    label = _line_label(names, (RUN, other_run))
    assert label == f"the line from {RUN.title} (0) to {other_run.title} (1)"
    # All weight files have the same name, so their paths are shown.
    weights = records.weights_path(record.parent, RUN)
    same = json.loads(wsam_command("landscape", weights, "--to", weights, *common).stdout)
    assert same["axes"] == [f"the line from {weights} (0) to {weights} (1)"]


@pytest.mark.parametrize(
    "text",
    [
        '{"layers": 3}',
        "[1]",
        "not JSON",
        '{"key": "a", "status": "finished", "settings": 3,'
        ' "curve": [{"epoch": 1, "train_loss": 1, "test_error": 1}]}',
    ],
)
def test_other_json_files_are_not_records(tmp_path, text):
    (tmp_path / "mine.json").write_text(text)
    for verb in ("curvature", "landscape"):
        error = wsam_command(verb, tmp_path / "mine.json", status=2).stderr
        assert error == f"wsam: {tmp_path / 'mine.json'} is not a record of wsam train\n"


def test_labels_are_reported(record, tmp_path):
    bare = tmp_path / "bare.pt"
    torch.save(read_checkpoint(record)[0], bare)
    source = ("--model", "cnn", "--data", "digits")
    out = ("--points", 2, "--out", tmp_path / "out")
    noisy = "labels with the run's noise, 0.2 of them redrawn (seed 0)\n"
    unknown = "labels as in the data; the labels it was trained on are unknown\n"
    for verb, more in (("curvature", ("--top-products", 2)), ("landscape", out)):
        assert noisy in wsam_command(verb, record, *more, *SMALL).stdout
        assert unknown in wsam_command(verb, bare, *source, *more, *SMALL).stdout
        test = wsam_command(verb, record, "--split", "test", *more, *SMALL).stdout
        assert "labels as in the data\n" in test
    options = ("--top-products", 2, "--json", *SMALL)
    found = json.loads(wsam_command("curvature", record, *options).stdout)
    assert f"labels {found['labels']}\n" == noisy


def test_operators_and_error_bounds_are_named(record):
    options = (record, "--top-products", 2, *SMALL)
    output = wsam_command("curvature", *options).stdout
    assert "\nHessian of " in output
    assert "  error at most " in output
    output = wsam_command("curvature", *options, "--operator", "gauss_newton").stdout
    assert "\nGauss-Newton matrix of " in output


def test_progress_bar_on_a_terminal_but_not_with_json(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with progress(quiet=True) as follow:
        assert follow("trace") is None
    assert terminal.getvalue() == ""
    with progress(quiet=False) as follow:
        report = follow("trace")
        report(Progress(1, 10, math.nan))
        report(Progress(2, 10, 0.5))
    assert "trace" in terminal.getvalue()
    assert "2/10" in terminal.getvalue()
    assert "error 5.0e-01" in terminal.getvalue()


def test_landscape_reports_its_labels(record, tmp_path):
    options = ("--points", 2, "--json", "--out", tmp_path / "out", *SMALL)
    line = json.loads(wsam_command("landscape", record, *options).stdout)
    assert line["labels"].startswith("with the run's noise, ")
    assert line["axes"] == ["filter-normalized direction 1"]
    saved = json.loads((tmp_path / "out" / "landscape.json").read_text())
    assert (saved["labels"], saved["axes"]) == (line["labels"], line["axes"])


def test_along_and_to_are_exclusive(record, tmp_path):
    options = ("--to", record, "--along", "random", "--out", tmp_path / "out", *SMALL)
    assert error_of("landscape", record, *options).startswith("wsam: --to measures the line")
