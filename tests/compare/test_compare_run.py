"""Comparisons that train: phases, interruptions, failures."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from comparing import CPU, TINY, tiny_comparison, tiny_request
from training import Stop

import wsam
from wsam.compare.page import page
from wsam.compare.progress import Progress
from wsam.compare.runner import _PAGE_SECONDS
from wsam.compare.sharpness import DISTANCES
from wsam.compare.state import (
    State,
    final_folder,
    open_state,
    read_state,
    search_folder,
    write_state,
)
from wsam.compare.timing import Stopwatch, Timing, measure_time, read_timing
from wsam.sweep import InProcess, Processes

OWN = Path(__file__).parents[1] / "own_problem.py"


class Recorder(Progress):
    """Collects messages and estimates."""

    def __init__(self):
        self.lines, self.left, self.starts = [], [], {}

    def message(self, text):
        self.lines.append(text)

    def update(self, phase, left):
        self.starts.setdefault(phase.name, (phase.done, phase.total))

    def outcome(self, text, phase, left):
        self.lines.append(f"{phase.name} {phase.done}/{phase.total} {text}")
        self.left.append(left)


class StopsAfter(InProcess):
    """Ends like a killed process after some outcomes."""

    def __init__(self, outcomes):
        super().__init__()
        self.outcomes = outcomes

    def run(self, jobs):
        for outcome in super().run(jobs):
            if not self.outcomes:
                raise Stop
            self.outcomes -= 1
            yield outcome


def record_times(out):
    return {
        path: path.stat().st_mtime_ns
        for folder in (search_folder(out), final_folder(out))
        for path in folder.glob("*.json")
    }


@pytest.fixture(autouse=True)
def short_timing(monkeypatch):
    monkeypatch.setattr("wsam.compare.runner._TIMING_SECONDS", (0.1, 0.1))


@pytest.fixture
def methods(monkeypatch):
    """The methods, to which a test may add its own."""
    own = dict(wsam.METHODS)
    for place in ("wsam.METHODS", "wsam.methods.METHODS"):
        monkeypatch.setattr(place, own)
    return own


def test_comparison(tmp_path):
    recorder = Recorder()
    summary = tiny_comparison(tmp_path, "sam", "cheap", progress=recorder).run()
    assert list(summary.rows) == ["base", "sam", "cheap"]
    for row in summary.rows.values():
        assert len(row.trials) == 2
        assert len(row.values) == len(row.sharpness) == len(row.slices) == 2
        assert all(len(losses) == len(DISTANCES) for losses in row.slices)
        best = min(trial.value for trial in row.trials)
        assert next(t.value for t in row.trials if t.point == row.point) == best
        for seed, record in row.records.items():
            assert row.values[seed] == record["final"]["test_error"]
            assert record["settings"]["epochs"] == row.epochs
            assert record["metric"]["split"] == "validation"
    samples = TINY.train_limit - round(TINY.validation * TINY.train_limit)
    found = summary.as_dict()
    assert found["sharpness"]["samples"] == found["slice"]["samples"] == samples
    assert summary.rows["base"].epochs == 2
    assert summary.rows["sam"].cost > 1
    assert len(record_times(tmp_path)) == 6 + 2 * 6
    for name, row in summary.rows.items():
        for trial in row.trials:
            record = json.loads((search_folder(tmp_path) / f"{trial.key}.json").read_text())
            assert record["settings"]["epochs"] == row.epochs, f"{name}: as long as a final run"
            assert trial.value == record["final"]["validation_error"]
    assert sum(line.startswith("search") for line in recorder.lines) == 6
    assert sum(line.startswith("final runs") for line in recorder.lines) == 6
    assert recorder.left[-1] >= _PAGE_SECONDS, "only the page is left"
    assert recorder.left[-1] < min(recorder.left[:-1])
    text = page(summary)
    assert summary.sentence in text
    assert "Training loss around the trained weights" in text


def test_second_call_trains_nothing(tmp_path):
    first = tiny_comparison(tmp_path, "sam", trials=1)
    found = first.run().as_dict()
    times = record_times(tmp_path)
    again = tiny_comparison(tmp_path, "sam", trials=1, executor=StopsAfter(0)).run().as_dict()
    changing = ("spent_seconds", "notes")
    assert {n: v for n, v in again.items() if n not in changing} == {
        n: v for n, v in found.items() if n not in changing
    }
    assert record_times(tmp_path) == times


@pytest.mark.parametrize(
    "outcomes", [4, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 8))]
)
def test_interrupted_comparison_continues(tmp_path, outcomes):
    """During the timing, the search and the final runs; nothing is trained twice."""
    with pytest.raises(Stop):
        tiny_comparison(tmp_path, "sam", executor=StopsAfter(outcomes)).run()
    before, state = record_times(tmp_path), read_state(tmp_path)
    assert state.request.methods == ("base", "sam"), "the plan is written first"
    assert (state.plan is None) == (outcomes < 2)
    recorder = Recorder()
    summary = tiny_comparison(tmp_path, "sam", progress=recorder).run()
    done = sum(path.parent == search_folder(tmp_path) for path in before)
    assert recorder.starts.get("search", (4, 4)) == (done, 4)
    assert all(record_times(tmp_path)[path] == time for path, time in before.items())
    assert [len(row.values) for row in summary.rows.values()] == [2, 2]
    assert summary.state.spent > state.spent


def test_method_that_fails_at_once_is_left_out(tmp_path, methods):
    class TooLarge(wsam.SAM):
        def step(self, *args, **options):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    methods["too_large"] = TooLarge
    recorder = Recorder()
    summary = tiny_comparison(tmp_path, "too_large", "sam", trials=1, progress=recorder).run()
    assert list(summary.rows) == ["base", "sam"]
    (line,) = summary.failures
    assert line.startswith("too_large: left out: ")
    assert "out of memory" in line
    assert "\n" not in line
    assert line in recorder.lines


def test_method_that_fails_later_does_not_stop_the_others(tmp_path, methods):
    """In the search at all settings but the default, then in the final runs of one seed."""

    class Fragile(wsam.SAM):
        def step(self, closure):
            loss = super().step(closure)
            if self.rho != 0.05 or torch.initial_seed() == 1:
                raise ValueError("rho is too large for this model")
            return loss

    class Diverging(wsam.SAM):
        def step(self, closure):
            return super().step(closure) * (float("nan") if self.rho == 0.171 else 1.0)

    methods |= {"fragile": Fragile, "diverging": Diverging}
    recorder = Recorder()
    summary = tiny_comparison(tmp_path, "fragile", "diverging", progress=recorder).run()
    assert [len(row.values) for row in summary.rows.values()] == [2, 1, 2]
    assert summary.rows["fragile"].difference.interval is None
    assert [trial.value is None for trial in summary.rows["diverging"].trials] == [False, True]
    assert "became nan" in summary.rows["diverging"].trials[1].failure
    assert len(summary.failures) == 2, "a trial that diverges is not a failure"
    assert all("rho is too large" in failure for failure in summary.failures)
    assert any("diverging" in line and "became nan" in line for line in recorder.lines)


def test_base_that_cannot_be_trained_is_an_error(tmp_path):
    run = TINY.replace(model="resnet18", data=f"{OWN}:classes")
    with pytest.raises(ValueError, match="the base cannot be trained: named models need tensors"):
        tiny_comparison(tmp_path, "sam", run=run).run()


def test_base_whose_trials_all_fail_is_an_error_with_the_reason(tmp_path):
    run = TINY.replace(base_args={"lr": 1e20})
    with pytest.raises(ValueError, match=r"SGD: no trial finished: the .* became .*; change --lr"):
        tiny_comparison(tmp_path, "sam", trials=1, run=run).run()


def test_small_budget(tmp_path):
    with pytest.raises(ValueError, match=r"a budget of 2s is too small: .*takes about"):
        tiny_comparison(tmp_path, "sam", budget=2.0).run()
    assert read_state(tmp_path).timing, "measured times are kept"


def test_trials_are_reduced_in_the_search(tmp_path, monkeypatch):
    """Every method gets the same number of trials, and the note tells how many."""
    monkeypatch.setattr("wsam.compare.runner.MIN_TRIALS", 1)
    comparison = tiny_comparison(tmp_path, "sam", trials=5)
    rounds = iter([True, False])
    monkeypatch.setattr(comparison, "_round_fits", lambda: next(rounds))
    summary = comparison.run()
    assert [len(row.trials) for row in summary.rows.values()] == [2, 2]
    assert any("2 per method instead of 5" in note for note in summary.notes)


def test_timing(tmp_path):
    run = TINY.replace(method="sam")
    measure_time(run, tmp_path, CPU, [], seconds=0.3)
    timing = read_timing(tmp_path, run)
    assert timing.epoch > 0
    assert timing.evaluation > 0
    assert timing.cost > 0
    assert Timing(1.0, 2.0, 3.0, 2.0).seconds(4) == 21.0


@pytest.mark.parametrize(("period", "cost"), [(1, 1.0), (3, 1.0), (4, 1.2)])
def test_cost_is_that_of_an_undisturbed_epoch(period, cost):
    """The lowest, if all epochs have as many two-pass steps."""
    watch = Stopwatch(1.0, period, torch.device("cpu"))
    watch.steps, watch.warm = 15, watch.start
    watch.epochs = [(2.0, 0.1, used) for used in (9.0, 1.6, 1.0, 1.4, 1.2)]
    assert watch.timing().cost == cost


def test_a_comparison_plans_with_the_workers_of_its_executor(tmp_path):
    executor = Processes(["cpu", "cpu", "cpu"])
    assert tiny_comparison(tmp_path, "sam", executor=executor).parallel == 3


def test_startup_of_a_cluster_is_kept(tmp_path):
    """A new plan with kept times takes it into account, too."""
    request = tiny_request("sam", trials=1)
    times = dict.fromkeys(request.methods, Timing(0.1, 0.5, 0.1, 0.5))
    write_state(tmp_path, State(request, times, startup=40.0))
    cluster = SimpleNamespace(run=InProcess().run)
    comparison = tiny_comparison(tmp_path, "sam", budget=400.0, executor=cluster)
    comparison._measure_times()
    assert comparison.state.startup == 40.0


def test_timing_ends_after_enough_epochs(tmp_path, monkeypatch):
    monkeypatch.setattr("wsam.compare.timing._LEAST_SECONDS", 0.01)
    start = time.monotonic()
    measure_time(TINY, tmp_path, CPU, [], seconds=1000.0)
    assert time.monotonic() - start < 100
    assert read_timing(tmp_path, TINY).cost > 0


def test_timing_within_an_epoch(tmp_path):
    """An epoch that takes longer than the timing run is estimated by its steps."""
    run = TINY.replace(method="wsam", options={"every": 5, "reuse": True}, batch_size=1)
    measure_time(run, tmp_path, CPU, [], seconds=0.05)
    timing = read_timing(tmp_path, run)
    assert timing.epoch > 0.05
    assert timing.evaluation == pytest.approx(0.1 * timing.epoch)


def test_warnings_of_methods_are_notes(tmp_path):
    run = TINY.replace(base="adamax")
    summary = tiny_comparison(tmp_path, "wsam", "cheap", run=run, trials=1).run()
    (note,) = [note for note in summary.notes if note.startswith("WSAM over Adamax")]
    assert "To use WSAM nevertheless" not in note


# A method of the user's own -----------------------------------------------------------------------


def own_method(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN.with_name("own_method.py").read_text())
    return file, f"{file}:BlendSAM"


def test_a_method_of_ones_own(tmp_path):
    _, name = own_method(tmp_path)
    out = tmp_path / "out"
    summary = tiny_comparison(out, name, trials=2).run()
    row = summary.rows[name]
    assert row.method.title == "BlendSAM"
    assert row.method.axes == ("lr", "rho")
    assert row.method.style != summary.rows["base"].method.style
    assert row.point.keys() == {"lr", "rho"}
    assert {record["settings"]["hyper"]["share"] for record in row.records.values()} == {0.5}
    assert "BlendSAM" in page(summary)


def test_reading_a_comparison_executes_no_code(tmp_path):
    file, name = own_method(tmp_path)
    request = tiny_request(name, "sam")
    out = tmp_path / "out"
    write_state(out, State(request))
    file.write_text("raise SystemExit('executed')")
    state = read_state(out)
    assert state.request == request
    assert state.request.contenders[name].at({"lr": 0.1, "rho": 1}).hyper["rho"] == 1.0
    data = json.loads((out / "plan.json").read_text())
    del data["request"]["own"]
    (out / "plan.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="is damaged"):
        read_state(out)


def test_a_changed_method_is_timed_again(tmp_path):
    file, name = own_method(tmp_path)
    out, times = tmp_path / "out", Timing(0.1, 0.5, 0.1, 0.5)
    write_state(out, State(tiny_request(name, "sam"), dict.fromkeys(("base", "sam", name), times)))
    kept = open_state(out, tiny_request(name, "sam", trials=1))
    assert kept.timing.keys() == {"base", "sam", name}
    file.write_text(file.read_text().replace("share=0.5", "share=0.6"))
    kept = open_state(out, tiny_request(name, "sam"))
    assert kept.timing.keys() == {"base", "sam"}


def test_requests_that_a_method_of_ones_own_refuses(tmp_path):
    _, name = own_method(tmp_path)
    with pytest.raises(ValueError, match=r"BlendSAM is not known: use --equal time"):
        tiny_request(name, equal="passes")
    (tmp_path / "other").mkdir()
    _, other = own_method(tmp_path / "other")
    with pytest.raises(ValueError, match="two methods have the title BlendSAM: rename your class"):
        tiny_request(name, other)
    with pytest.raises(ValueError, match=r"must be a subclass of wsam\.SharpnessAware"):
        tiny_request(name.replace("BlendSAM", "function"))


def test_a_weight_of_ones_own_method_is_searched(tmp_path):
    file, name = own_method(tmp_path)
    text = file.read_text()
    for default, searched in (("0.8", ("gamma",)), ("None", ()), ("2.0", ())):
        file.write_text(text.replace("share=0.5, model", f"share=0.5, gamma={default}, model"))
        method = tiny_request(name).contenders[name]
        assert method.axes == ("lr", "rho", *searched)
