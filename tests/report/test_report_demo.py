"""`wsam demo`: its result holds on its seeds, and its hyperparameters were tuned on others."""

import contextlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from browsing import PHONE, needs_browser, opened, running
from command import wsam_command

from wsam.demo import SEEDS, TUNING_SEEDS, config, contenders, jobs, run_jobs, summarise, tuning
from wsam.demo.page import page
from wsam.demo.progress import ProgressTable, show_progress
from wsam.lab import records
from wsam.lab.files import no_op
from wsam.lab.train import train
from wsam.sweep import Job, Outcome, Status

# ---- the result ----


@pytest.mark.slow
def test_wsam_has_a_smaller_error_than_its_base(tmp_path):
    """With the full runs of the demonstration."""
    rows = {name: contenders()[name].runs(SEEDS) for name in (config.BASE, config.WSAM)}
    all_jobs = [
        Job(run, tmp_path, jobs.execution_config(keep=False))
        for runs in rows.values()
        for run in runs
    ]
    run_jobs(all_jobs, 2, no_op)
    errors = {
        name: [records.final_error(records.read(tmp_path, run)) for run in runs]
        for name, runs in rows.items()
    }
    means = {name: statistics.fmean(values) for name, values in errors.items()}
    spread = sum(statistics.stdev(values) for values in errors.values())
    assert len(SEEDS) >= 3
    assert means[config.WSAM] + spread < means[config.BASE], errors


def test_hyperparameters_are_the_best_of_the_tuning():
    """Which used other seeds."""
    found = tuning.read()
    assert not set(TUNING_SEEDS) & set(SEEDS)
    assert found.metadata["seeds"] == list(TUNING_SEEDS)
    rows = contenders()
    assert found.best(config.SAM).hyper == dict(rows[config.SAM].run.hyper)
    assert found.best(config.WSAM).hyper == dict(rows[config.WSAM].run.hyper)
    assert found.best(config.TUNED).hyper == {"lr": rows[config.TUNED].run.base_args["lr"]}


def test_base_differs_only_in_its_epochs():
    rows = contenders()
    alike = ("data", "model", "batch_size", "noise", "schedule", "precision", "base")
    for row in rows.values():
        double = row.run.method == "vanilla"
        assert row.run.epochs == (2 if double else 1) * config.EPOCHS
        assert all(getattr(row.run, n) == getattr(rows["WSAM"].run, n) for n in alike)
    shared = [rows[name].run.base_args for name in ("SGD", "SAM", "WSAM")]
    assert shared[0] == shared[1] == shared[2]


# ---- tuning ----


def test_the_shipped_tuning_results_belong_to_the_grids():
    shipped = json.loads((tuning.files("wsam.demo") / tuning.FILE_NAME).read_text())
    keys = [entry["keys"] for entry in shipped["places"]]
    assert keys == [[run.key for run in runs] for _, _, runs in tuning.tuning_runs()]
    assert shipped["runs"] == sum(map(len, keys))
    assert {"wsam", "torch", "python"} <= shipped["versions"].keys()
    assert all(re.match("[0-9a-f]{40}", commit) for commit in shipped["commit"])
    for entry in shipped["places"]:
        assert all(error is None or 0 < error < 100 for error in entry["errors"])


def test_of_equal_points_the_weakest_is_chosen():
    def point(mean, **point):
        return tuning.GridPoint(point, (mean - 1, mean + 1))

    several = (point(9.0, rho=0.1), point(4.4, rho=0.2), point(4.0, rho=0.4), point(4.4, rho=0.8))
    assert tuning.TuningResults({"x": several}, {}).best("x").hyper == {"rho": 0.2}
    distinct = (point(5.0, rho=0.2), point(4.0, rho=0.4))
    assert tuning.TuningResults({"x": distinct}, {}).best("x").hyper == {"rho": 0.4}
    failed = (tuning.GridPoint({"rho": 0.1}, (1.0, None)), point(5.0, rho=0.2))
    assert tuning.TuningResults({"x": failed}, {}).best("x").hyper == {"rho": 0.2}
    assert tuning.strength({"gamma": 0.8, "rho": 0.1}) == pytest.approx(0.4)


def test_damaged_tuning_results_are_an_error(tmp_path):
    (tmp_path / tuning.FILE_NAME).write_text("{")
    error = wsam_command("demo", "--out", tmp_path, status=2).stderr
    assert "map.json is damaged" in error
    assert error.count("\n") == 1


# ---- the whole command, with tiny runs ----


@contextlib.contextmanager
def tiny_runs():
    """Replace every run of the demonstration by a tiny one."""
    patch, whole = pytest.MonkeyPatch(), config.demo_run

    def tiny(*arguments, **hyper):
        run = whole(*arguments, **hyper)
        return run.replace(model="mlp", epochs=run.epochs // 15, train_limit=128, test_limit=100)

    patch.setattr(config, "demo_run", tiny)
    for name, values in (("GAMMAS", (0.8, 0.92)), ("RHOS", (0.1, 0.4)), ("SAM_RHOS", (0.4,))):
        patch.setattr(config, name, values)
    patch.setattr(config, "LEARNING_RATES", (0.005, 0.05))
    try:
        yield
    finally:
        patch.undo()


@pytest.fixture
def small():
    """For a single test: others use the full runs."""
    with tiny_runs():
        yield


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """Run `wsam demo --map` once; return its folder and its JSON output."""
    out = tmp_path_factory.mktemp("demo") / "here"
    words = ("demo", "--out", out, "--map", "--seeds", "0,1", "--workers", "1", "--json")
    with tiny_runs():
        answer = wsam_command(*words)
    assert answer.stderr == ""
    return out, json.loads(answer.stdout)


@pytest.mark.slow
class TestWhole:
    def test_figures_equal_the_records(self, output, small):
        out, printed = output
        for name, row in contenders().items():
            row_figures = printed["rows"][name]
            found = [records.read(out / "runs", run) for run in row.runs((0, 1))]
            errors = [record["final"]["test_error"] for record in found]
            assert row_figures["test_error"]["mean"] == pytest.approx(statistics.fmean(errors))
            assert row_figures["test_error"]["deviation"] == pytest.approx(statistics.stdev(errors))
            assert row_figures["keys"] == [record["key"] for record in found]
            for figure in ("train_loss", "top_eigenvalue", "seconds"):
                assert row_figures[figure]["mean"] > 0
            assert row_figures["sharpness"]["deviation"] is not None
        assert json.loads((out / "demo.json").read_text())["rows"] == printed["rows"]

    def test_everything_is_written(self, output):
        out, printed = output
        pictures = ["curves", "errors", "landscape", "map", "tuning"]
        names = [f"{name}.{kind}" for name in pictures for kind in ("png", "svg")]
        assert {*names, "demo.json", "report.html", "map.json", "runs", "map"} == {
            path.name for path in out.iterdir()
        }
        assert {str(out / name) for name in (*names, "report.html")} <= set(printed["files"])
        for name in names:
            assert (out / name).stat().st_size > 5_000
        assert not [*out.rglob("*.tmp"), *out.rglob(".unfinished*")]

    def test_page_has_setup_and_heat_map(self, output):
        out, _ = output
        page = (out / "report.html").read_text()
        assert not re.search(r"https?:|<link|<script|<img|@import|url\((?!#)", page)
        for words in ("Setup</h2>", "How gamma and rho were chosen", "seeds 100 and 101",
                      "wsam demo --map", "Reproduce", "around each minimum"):  # fmt: skip
            assert words in page
        assert "WSAM&#39;s test error (%) by gamma and rho" in page

    def test_second_call_runs_nothing(self, output, small):
        out, printed = output
        before = {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*.json")}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(multiprocessing.process.BaseProcess, "start", pytest.fail)
            answer = wsam_command("demo", "--out", out, "--seeds", "0,1")
        assert {path: path.stat().st_mtime_ns for path in before} == before
        assert "test error (%)" in answer.stdout
        assert f"open {out / 'report.html'}" in answer.stdout
        mean = printed["rows"]["WSAM"]["test_error"]["mean"]
        assert f"{mean:.2f} ± " in answer.stdout
        for sentence in printed["claims"]:
            assert sentence in " ".join(answer.stdout.split())

    def test_the_heat_map_shows_the_tuning_of_the_folder(self, output):
        out, _ = output
        found = tuning.read(out / tuning.FILE_NAME)
        assert {len(points) for points in found.points.values()} == {1, 2, 4}
        assert found.metadata["runs"] == 14
        mean = found.points["WSAM"][0].mean
        assert f">{mean:.1f}</text>" in (out / "report.html").read_text()

    def test_a_record_without_weights_is_removed_if_it_was_not_measured(
        self, output, small, tmp_path
    ):
        out = shutil.copytree(output[0] / "runs", tmp_path / "runs")
        job = jobs.demo_jobs(out, (1,))[-1]
        jobs.remove_unmeasurable(job)
        assert jobs.is_done(job)
        jobs.sharpness_path(job.out, job.run).unlink()
        records.weights_path(job.out, job.run).unlink()
        assert not jobs.is_done(job)
        jobs.remove_unmeasurable(job)
        assert not list(out.glob(f"{job.run.key}*.json")), "so that it is trained again"

    def test_comparisons_agree_with_the_figures(self, output, small):
        out, _ = output
        summary = summarise(out / "runs", (0, 1))
        for other, sentence in zip(("SGD", "SGD, own lr", "SAM"), summary.comparisons, strict=True):
            gap, spread = summary.error_gap("WSAM", other)
            word = "no difference" if abs(gap) <= spread else "lower" if gap > 0 else "higher"
            assert sentence.startswith(f"WSAM against {other}: ")
            assert word in sentence

    def test_one_seed_allows_no_comparison(self, output, small):
        """It has no deviation to compare a difference with."""
        out, _ = output
        summary = summarise(out / "runs", (1,))
        assert summary.error_gap("WSAM", "SGD")[1] is None
        for sentence in summary.comparisons:
            assert "one seed has no deviation, so the difference cannot be judged" in sentence
            assert not re.search("lower|higher|no difference|sum of", sentence)
        text = page(summary, tuning.read())
        lead = text.partition('<p class="lead">')[2].partition("</p>")[0]
        assert "one seed has no deviation" in lead
        assert "One run each, of seed 1, so without deviations, after the last epoch" in text
        assert not re.search(
            "Mean ± sample standard deviation over seeds|within their deviations", text
        )

    @needs_browser
    @pytest.mark.browser
    def test_page_on_a_phone(self, output):
        out, _ = output
        with running() as browser, opened(browser, out / "report.html", **PHONE) as page:
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            assert page.locator("svg.chart").count() >= 7


# ---- progress, user errors, Ctrl-C ----


def drawn(display):
    from io import StringIO

    from rich.console import Console

    text = StringIO()
    Console(file=text, width=120).print(display)
    return text.getvalue()


def test_progress_follows_a_run(small, tmp_path):
    (job,) = jobs.demo_jobs(tmp_path, (0,))[:1]
    display = ProgressTable([job], "Digits")
    assert "Digits: 0 of 1 runs" in drawn(display)
    assert "waiting" in drawn(display)
    folder = records.work_folder(job.out, job.run) / "checkpoints"
    folder.mkdir(parents=True)
    assert "started" in drawn(display)
    (folder / "000002.json").write_text("{}")
    assert "epoch 2 of 4" in drawn(display)
    assert "SGD, seed 0" in drawn(display)
    record = train(job.run, job.out, job.execution)
    assert "measuring its minimum" in drawn(display)
    found = jobs.measure(job.run, job.out, job.execution)
    assert found["info"]["samples"] == job.run.train_limit
    assert f"{record['final']['test_error']:.2f}% test error" in drawn(display)
    assert "1 of 1 runs" in drawn(display)


def test_progress_is_silent_with_json(small, tmp_path, capsys):
    all_jobs = jobs.demo_jobs(tmp_path, (0,))
    with show_progress(all_jobs, "Digits", quiet=True) as callbacks:
        callbacks.message("nothing")
        callbacks.finished(Outcome(all_jobs[0], Status.FINISHED, error=12.345))
    assert capsys.readouterr().err == ""
    with show_progress(all_jobs, "Digits", quiet=False) as callbacks:
        callbacks.message("something")
    assert capsys.readouterr().err == "Digits: 4 runs\nsomething\n"


def test_a_pipe_gets_one_line_per_finished_run(small, tmp_path, capsys, monkeypatch):
    first, second, *rest = all_jobs = jobs.demo_jobs(tmp_path, (0,))
    printed_before = []

    def ending(processes, left):
        assert left == [second, *rest]
        yield Outcome(second, Status.FINISHED, error=12.345, seconds=4.0)
        printed_before.append(capsys.readouterr().err)  # before the next one has ended
        yield Outcome(rest[0], Status.FAILED, "the loss became nan")

    monkeypatch.setattr(jobs, "is_done", lambda job: job == first)
    monkeypatch.setattr("wsam.demo.progress.is_done", lambda job: job == first)
    monkeypatch.setattr(jobs.Processes, "run", ending)
    with (
        show_progress(all_jobs, "Digits", quiet=False) as callbacks,
        pytest.raises(ValueError, match="nan"),
    ):
        run_jobs(all_jobs, 1, callbacks.message, callbacks.finished)
    assert printed_before == [
        "Digits: 4 runs, 1 of them done before\n[2/4] SGD, own lr, seed 0: 12.35% test error (4.0 s)\n"
    ]
    last = "[3/4] SAM, seed 0: failed: the loss became nan (0.0 s)\n"
    assert capsys.readouterr().err == last


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--seeds", "a"), "seeds must be"),
        (("--workers", "0"), "workers"),
        (("--nonsense",), "--nonsense"),
    ],
)
def test_user_errors_are_one_line(tmp_path, words, message):
    error = wsam_command("demo", "--out", tmp_path / "x", *words, status=2).stderr
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_missing_libraries_are_reported_first(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    error = wsam_command("demo", "--out", tmp_path / "x", status=2).stderr
    assert "matplotlib" in error
    assert "pip install" in error
    assert not (tmp_path / "x").exists()


def test_a_damaged_measurement_is_an_error(small, tmp_path):
    (job,) = jobs.demo_jobs(tmp_path, (0,))[:1]
    path = jobs.sharpness_path(job.out, job.run)
    for text in ("{", "{}", '{"key": "other", "value": 1.0}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="remove it to measure again"):
            jobs.read_sharpness(job.out, job.run)


def test_help_has_an_example():
    assert "Example: wsam demo --out demo" in wsam_command("demo", "--help").stdout


def alive(group):
    """Return whether a process group has a running process; zombies do not count."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    states = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            states += [state] if int(its_group) == group else []
    return set(states) != {"Z"}


def ends(group):
    """Wait until a process group has ended; return whether it has."""
    limit = time.monotonic() + 60
    while alive(group):
        if time.monotonic() > limit:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.slow
def test_an_interruption_leaves_no_partial_files(tmp_path):
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "wsam", "demo", "--out", str(out), "--workers", "1"]
    demo = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        # A shell lets background processes ignore Ctrl-C, and their children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )  # fmt: skip
    limit = time.monotonic() + 200  # one or two seconds on an idle machine
    while not list((out / "runs" / "work").glob("*/checkpoints/*.json")):
        assert time.monotonic() < limit
        assert demo.poll() is None, demo.stderr.read()
        time.sleep(0.1)
    os.killpg(demo.pid, signal.SIGINT)
    stdout, stderr = demo.communicate(timeout=90)
    assert demo.returncode == 130
    assert stdout == ""
    message = "wsam: interrupted; run the same command again to resume"
    assert stderr.splitlines()[1:] == [message]
    left = [path.relative_to(out) for path in out.rglob("*") if path.is_file()]
    assert not [path for path in left if path.name.endswith(".tmp")]
    assert all(path.parts[:2] == ("runs", "work") for path in left), left
    assert ends(demo.pid), "all workers have ended"
