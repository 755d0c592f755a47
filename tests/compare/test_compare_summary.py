"""The sentence, the figures and the page, from records with known figures."""

import json
import re
import shlex

import pytest
from command import wsam_command
from comparing import ERROR, TINY, synthetic, tiny_request
from scipy import stats

from wsam._utils.significance import holm, interval, paired_p
from wsam.cli.compare import report
from wsam.compare.command import command
from wsam.compare.formatting import format_number
from wsam.compare.page import page, table_rows
from wsam.compare.summary import USE_THE_BASE

ACCURACY = {"name": "accuracy", "unit": "%", "lower_is_better": False, "split": "validation"}
MSE = {"name": "mse", "unit": "", "lower_is_better": True, "split": "validation"}
BASE = [10.0, 10.6, 9.8]
BETTER = [9.2, 9.7, 9.1]
NOISE = [10.2, 10.1, 10.3]


# Statistics ------------------------------------------------------------------------------------


def test_interval_and_test_equal_scipy():
    low, high = stats.t.interval(0.95, 2, loc=stats.tmean(BASE), scale=stats.sem(BASE))
    assert interval(BASE) == pytest.approx((high - low) / 2)
    differences = [a - b for a, b in zip(BASE, NOISE, strict=True)]
    assert paired_p(differences) == pytest.approx(stats.ttest_rel(BASE, NOISE).pvalue)


def test_holm_is_monotone_and_at_most_one():
    found = holm({"a": 0.02, "b": 0.021, "c": 0.9, "d": 0.6})
    assert found == {"a": 0.08, "b": 0.08, "d": 1.0, "c": 1.0}
    assert holm({}) == {}


def test_equal_differences_have_no_test(tmp_path):
    """Differences of percentages that are equal up to rounding have no variance."""
    base = [100 * n / 597 for n in (63, 58, 66)]
    other = [100 * n / 597 for n in (49, 44, 52)]
    row = synthetic(tmp_path, {"base": base, "sam": other}).rows["sam"]
    assert (row.difference.p, row.difference.interval) == (None, 0.0)


def test_methods_without_a_test_are_counted_in_the_correction(tmp_path):
    """SAM that equals the base on every seed was compared, too."""
    alone = synthetic(tmp_path / "1", {"base": BASE, "wsam": BETTER}).rows["wsam"].difference
    both = synthetic(tmp_path / "2", {"base": BASE, "wsam": BETTER, "sam": BASE}).differences
    assert both["wsam"].p == alone.p == alone.p_holm
    assert both["wsam"].p_holm == pytest.approx(2 * alone.p)
    assert (both["sam"].p, both["sam"].p_holm) == (None, None)


@pytest.mark.parametrize("unit", [1e-12, 1e9])
def test_the_unit_of_the_figures_does_not_matter(tmp_path, unit):
    """A squared error is in the squared unit of the target, which may be tiny."""
    small = {"base": [v * unit for v in BASE], "sam": [v * unit for v in BETTER]}
    found = synthetic(tmp_path, small, MSE)
    assert found.differences["sam"].p == pytest.approx(stats.ttest_rel(BASE, BETTER).pvalue)
    number = "8e-13 ± 2e-13" if unit < 1 else "8e+08 ± 2e+08"
    assert found.sentence.startswith(f"SAM lowers the mse by {number} at equal time")


# The sentence -----------------------------------------------------------------------------------


def test_a_better_method(tmp_path):
    summary = synthetic(tmp_path, {"base": BASE, "wsam": BETTER, "sam": NOISE})
    assert summary.winner == "wsam"
    assert re.fullmatch(
        r"WSAM lowers the error by 0\.8 ± 0\.2 points at equal time \(p = 0\.0\d+\)\.",
        summary.sentence,
    )


def test_p_is_corrected_for_the_number_of_methods(tmp_path):
    """A p-value below 0.05 that Holm's method raises above it does not win."""
    base, close = [10.0, 10.0, 10.0], [9.8, 9.6, 9.7]
    alone = synthetic(tmp_path / "1", {"base": base, "sam": close})
    p = alone.rows["sam"].difference.p
    assert alone.winner == "sam"
    assert 0.02 < p < 0.05
    several = synthetic(
        tmp_path / "2", {"base": base, "sam": close, "wsam": NOISE, "gsam": [10.3, 9.6, 10.2]}
    )
    assert several.rows["sam"].difference.p == p
    assert several.rows["sam"].difference.p_holm == pytest.approx(3 * p)
    assert several.sentence == USE_THE_BASE
    assert "3 methods compared with the base" in " ".join(several.notes)


def test_no_better_method(tmp_path):
    summary = synthetic(tmp_path, {"base": BASE, "wsam": NOISE})
    assert summary.winner is None
    assert summary.sentence == "No method beats the base here beyond noise; use the base."


WORSE = [11.0, 11.5, 10.9]


def test_worse_methods_are_named(tmp_path):
    summary = synthetic(tmp_path / "1", {"base": BASE, "wsam": NOISE, "sam": WORSE})
    assert summary.winner is None
    p = summary.differences["sam"].p_holm
    assert p == pytest.approx(2 * stats.ttest_rel(BASE, WORSE).pvalue)
    worse = f"SAM is worse than the base by 1.0 ± 0.2 points (p = {p:.2g}, corrected)."
    assert summary.sentence == f"{USE_THE_BASE} {worse}"
    mixed = synthetic(tmp_path / "2", {"base": BASE, "wsam": BETTER, "sam": WORSE, "gsam": WORSE})
    assert re.fullmatch(
        r"WSAM lowers the error by 0\.8 ± 0\.2 points at equal time \(p = 0\.0\d+\)\. "
        r"SAM is worse .* "
        r"GSAM is worse than the base by 1\.0 ± 0\.2 points \(p = 0\.0\d+, corrected\)\.",
        mixed.sentence,
    )
    lower = synthetic(tmp_path / "3", {"base": BASE, "sam": BETTER}, ACCURACY)
    assert "SAM is worse than the base by 0.8 ± 0.2 points (p = " in lower.sentence


def test_other_metrics(tmp_path):
    raised = synthetic(tmp_path / "1", {"base": BETTER, "sam": BASE}, ACCURACY)
    assert raised.sentence.startswith("SAM raises the accuracy by 0.8 ± 0.2 points")
    assert synthetic(tmp_path / "2", {"base": BASE, "sam": BETTER}, ACCURACY).winner is None
    small = {"base": [v / 1000 for v in BASE], "sam": [v / 1000 for v in BETTER]}
    lowered = synthetic(tmp_path / "3", small, MSE)
    assert lowered.sentence.startswith("SAM lowers the mse by 0.0008 ± 0.0002 at equal time")


def test_unequal_time_is_stated(tmp_path):
    """One epoch of a method that costs 30 epochs of the base takes more than its time."""
    summary = synthetic(tmp_path, {"base": BASE, "sam": BETTER}, costs={"sam": 30.0})
    assert "in 1.50 times the base's time" in summary.sentence
    assert any("epochs are whole" in note for note in summary.notes)


def test_equal_passes_are_stated(tmp_path):
    """The measured times change neither epochs nor texts."""
    values = {"base": BASE, "sam": BETTER}
    slow = synthetic(tmp_path, values, costs={"sam": 30.0}, equal="passes")
    assert [row.epochs for row in slow.rows.values()] == [20, 10]
    assert [row.cost for row in slow.rows.values()] == [1.0, 2.0]
    assert "at equal passes (p = " in slow.sentence
    assert "as many as take the same number of passes, counted from the settings" in slow.notes[1]
    assert not any("epochs are whole" in note or "other programs" in note for note in slow.notes)
    assert "--equal passes" in page(slow)
    assert "Cost: number of passes per epoch" in page(slow)


def test_measured_times_are_compared_with_the_planned_ones(tmp_path):
    """The synthetic runs all take the same time."""
    values = {"base": BASE, "sam": BETTER}
    as_planned = synthetic(tmp_path / "1", values).notes
    assert not any("other programs" in note for note in as_planned)
    faster = synthetic(tmp_path / "2", values, costs={"sam": 30.0}).notes
    assert any("took 0.67 to 1.00 times as long as planned" in note for note in faster)


def test_one_seed_and_failed_runs(tmp_path):
    one = synthetic(tmp_path / "1", {"base": [10.0], "sam": [2.0]})
    assert one.sentence == "One seed cannot separate a difference from noise; use more --seeds."
    assert "1 method compared with the base." in one.notes
    lost = synthetic(tmp_path / "2", {"base": [None] * 2, "sam": [1.0, 2.0]})
    assert lost.sentence == "The base did not finish, so nothing can be compared with it."
    none = synthetic(tmp_path / "3", {"base": [1.0, 2.0], "sam": [None] * 2})
    assert none.sentence == "No other method finished, so nothing can be compared with the base."
    page(none), page(lost)


def test_pairs_use_the_seeds_that_both_finished(tmp_path):
    summary = synthetic(tmp_path, {"base": [*BASE, None], "sam": [None, 9.0, 8.0, 1.0]})
    difference = summary.rows["sam"].difference
    assert difference.mean == pytest.approx((1.6 + 1.8) / 2)
    assert table_rows(summary)[1][0] == "SAM (3 of 4 runs)"
    assert summary.rows["sam"].failures


def test_the_result_is_printed_even_if_it_cannot_be_written(tmp_path, monkeypatch, capsys):
    summary = synthetic(tmp_path, {"base": BASE, "sam": BETTER})

    def full_disk(folder):
        raise OSError("no space left")

    monkeypatch.setattr("wsam.cli.compare.staged", full_disk)
    with pytest.raises(OSError, match="no space left"):
        report(summary, tmp_path, "page", as_json=False)
    assert summary.sentence in capsys.readouterr().out


# JSON and page ----------------------------------------------------------------------------------


def test_json(tmp_path):
    summary = synthetic(tmp_path, {"base": BASE, "cheap": BETTER})
    found = json.loads(json.dumps(summary.as_dict(), allow_nan=False))
    assert set(found) == {
        *("format", "sentence", "winner", "metric", "problem", "seeds", "equal", "budget_seconds"),
        *("spent_seconds", "trials", "search_epochs", "compared", "confidence_level", "test"),
        *("sharpness", "slice", "methods", "notes", "failures", "environment"),
    }
    assert found["metric"] == ERROR
    row = found["methods"]["cheap"]
    assert set(row) == {
        *("title", "settings", "options", "epochs", "epoch_seconds", "cost", "planned_time"),
        *("training_seconds", "values", "mean", "interval", "improvement", "sharpness", "keys"),
        *("trials", "failures", "slices"),
    }
    assert row["options"] == {"every": 2, "reuse": True}
    assert row["values"] == {"0": 9.2, "1": 9.7, "2": 9.1}
    assert set(row["improvement"]) == {"mean", "interval", "p", "p_holm"}
    assert found["methods"]["base"]["improvement"] is None
    assert [trial["value"] for trial in row["trials"]] == [10.0, 9.0]


def test_page(tmp_path):
    summary = synthetic(tmp_path, {"base": BASE, "wsam": BETTER, "cheap": NOISE})
    summary.state.failures["x"] = "<script>alert(1)</script>"
    text = page(summary)
    assert summary.sentence in text
    assert "2 methods compared with the base" in text
    assert "by one ascent step on 1,480 training samples" in text
    assert "On 480 training samples, with the same direction" in text
    assert "&lt;script&gt;" in text
    assert "<script" not in text
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org", "")
    assert text.count('<svg class="chart"') == 6
    assert "tried at 2 settings, its defaults first" in text
    summary.state.trials = 1
    assert "tried at 1 setting, its defaults first" in page(summary)


def test_percentages_of_which_higher_is_better_are_drawn_from_100(tmp_path):
    """As in the report: from 0, the differences between good models would be too small to see."""
    values = {"base": [98.1, 98.3, 98.2], "sam": [98.5, 98.4, 98.8]}
    assert ">99.0<" in page(synthetic(tmp_path, values, ACCURACY))


@pytest.mark.parametrize(
    "request_",
    [
        tiny_request("wsam", seeds=(0,), budget=2e6),
        tiny_request("sam", "cheap", seeds=(3, 5), equal="passes"),
        tiny_request(
            "sam", run=TINY.replace(base="adamw", base_args={"lr": 0.01, "betas": (0.8, 0.9)})
        ),
        tiny_request("sam", run=TINY.replace(noise=0.4, augment=False, metric="accuracy")),
        tiny_request("sam", run=TINY.replace(model_args={"width": 32})),
    ],
)
def test_command_gives_the_same_request(tmp_path, monkeypatch, request_):
    """Its words, parsed by the command line, describe the same comparison."""
    requests = []

    class Stop(ValueError):
        pass

    def capture(request, *_):
        requests.append(request)
        raise Stop("stop")

    monkeypatch.setattr("wsam.compare.Comparison", capture)
    words = shlex.split(command(request_))[1:]
    wsam_command(*words, "--out", tmp_path / "new", "--device", "cpu", status=2)
    assert requests == [request_]


@pytest.mark.parametrize(
    ("value", "unit", "width", "text"),
    [
        (12.345, "%", 1.2, "12.3 ± 1.2"),
        (12.345, "%", 0.034, "12.35 ± 0.03"),
        (0.5, "%", 0.0, "0.5 ± 0.0"),
        (12.345, "%", None, "12.35"),
        (0.0, "", None, "0.000"),
        (-0.004, "", 0.2, "0.0 ± 0.2"),
        (100969.4, "", 22625.0, "100969 ± 22625"),
        (1681800842.0, "", 9399120198.0, "1.7e+09 ± 9e+09"),
        (1681800842.0, "", 9399120.0, "1.682e+09 ± 9e+06"),
        (0.0, "", 9399120198.0, "0 ± 9e+09"),
    ],
)
def test_numbers(value, unit, width, text):
    assert format_number(value, unit, width) == text
