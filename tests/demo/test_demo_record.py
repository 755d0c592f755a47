"""The figures of the demonstration in README and docs equal its record in results/demo."""

import json
import re
import statistics
from pathlib import Path

import pytest

from wsam.compare.formatting import format_number, format_p, format_point
from wsam.demo import SEEDS, demo_request

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "results" / "demo" / "compare.json").read_text())
PAGE = (ROOT / "docs" / "demo.md").read_text()


def table_row(row):
    """Return a row of the table of docs/demo.md."""
    gain = row["improvement"]
    cells = [
        row["title"],
        format_number(row["mean"], "%", row["interval"]),
        "" if gain is None else format_number(gain["mean"], "%", gain["interval"]),
        "" if gain is None else format_p(gain["p_holm"]).removeprefix("p ").removeprefix("= "),
        f"{row['cost']:.2f}",
        str(row["epochs"]),
        format_point(row["settings"]),
    ]
    return f"| {' | '.join(cells)} |"


def test_record_is_of_the_preset():
    request = demo_request()
    assert RECORD["problem"] == request.run.to_dict()
    assert RECORD["trials"] == request.trials
    assert RECORD["search_epochs"] == RECORD["methods"]["base"]["epochs"] == request.run.epochs
    assert RECORD["seeds"] == list(SEEDS)
    assert list(RECORD["methods"]) == list(request.methods)
    assert RECORD["failures"] == []
    for row in RECORD["methods"].values():
        assert len(row["trials"]) == request.trials, "the same effort"
        assert len(row["values"]) == len(row["slices"]) == len(SEEDS)


def test_sam_and_wsam_beat_tuned_sgd():
    """As the pages state."""
    base, *others = RECORD["methods"].values()
    for row in others:
        assert row["improvement"]["p_holm"] < 0.05
        assert row["mean"] < base["mean"]
        ends = [[losses[0] - losses[5], losses[-1] - losses[5]] for losses in row["slices"]]
        of_base = [[losses[0] - losses[5], losses[-1] - losses[5]] for losses in base["slices"]]
        assert max(map(max, ends)) < min(map(max, of_base)), "the loss rises less"


def test_table():
    assert RECORD["methods"]
    for row in RECORD["methods"].values():
        assert table_row(row) in PAGE
    assert f"tried at {RECORD['trials']} settings" in PAGE
    assert f"SGD trains for {RECORD['methods']['base']['epochs']} epochs" in PAGE


def test_sharpness():
    text = " ".join(PAGE.split())
    means = {name: statistics.fmean(row["sharpness"]) for name, row in RECORD["methods"].items()}
    assert RECORD["sharpness"]["radius"] == 0.1
    assert (
        f"within a radius of 0.1 the loss increases by {means['base']:.3f} around the weights of SGD, "
        f"by {means['sam']:.3f} around those of SAM and by {means['wsam']:.3f} around those of WSAM"
    ) in text


def test_readme():
    text = " ".join((ROOT / "README.md").read_text().split())
    errors = [f"{row['title']} {row['mean']:.1f}%" for row in RECORD["methods"].values()]
    assert f"test error: {', '.join(errors)} (n = {len(SEEDS)})" in text


@pytest.mark.parametrize("name", ["demo_errors", "demo_landscape"])
def test_figures_are_of_the_record(name):
    """`python docs/make_figures.py demo_errors demo_landscape` draws them."""
    figure = (ROOT / "docs" / "_static" / f"{name}.svg").read_text()
    keys = {key for row in RECORD["methods"].values() for key in row["keys"]}
    assert set(re.findall(r"\b[0-9a-f]{12}\b", figure)) >= keys
    if name == "demo_errors":
        for row in RECORD["methods"].values():
            assert f"{row['mean']:.1f} ± {row['interval']:.1f}" in figure


def test_example_output_of_the_comparison():
    """docs/compare.md shows the output of this comparison."""
    text = (ROOT / "docs" / "compare.md").read_text()
    assert RECORD["sentence"] in text
    for row in RECORD["methods"].values():
        assert f"\n{row['title']}: {format_point(row['settings'])}\n" in text
        assert format_number(row["mean"], "%", row["interval"]) in text
    for note in RECORD["notes"][:3]:
        assert note in text
