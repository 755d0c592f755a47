"""`wsam demo`: what it claims is true on its seeds, and it was chosen on others."""

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

from wsam.demo import LOOK_SEEDS, SEEDS, carry_out, choice, contenders, setting, summarise, work
from wsam.demo.display import Display, shown
from wsam.demo.page import page
from wsam.lab import records
from wsam.lab.files import no_op
from wsam.lab.train import train
from wsam.sweep import Job, Outcome, Status

# The claim -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_wsam_errs_less_than_its_base_on_the_seeds_that_are_shown(tmp_path):
    """The demonstration's own runs, whole: this is what it says, and the method must make it true."""
    rows = {name: contenders()[name].runs(SEEDS) for name in (setting.BASE, setting.WSAM)}
    jobs = [Job(run, tmp_path, work.means(keep=False)) for runs in rows.values() for run in runs]
    carry_out(jobs, 2, no_op)
    errors = {
        name: [records.final_error(records.read(tmp_path, run)) for run in runs]
        for name, runs in rows.items()
    }
    means = {name: statistics.fmean(values) for name, values in errors.items()}
    spread = sum(statistics.stdev(values) for values in errors.values())
    assert len(SEEDS) >= 3
    assert means[setting.WSAM] + spread < means[setting.BASE], errors


def test_the_setting_is_what_the_looks_say():
    """No hyperparameter is typed in that the looks, on other seeds, did not give."""
    found = choice.read()
    assert not set(LOOK_SEEDS) & set(SEEDS)
    assert found.facts["seeds"] == list(LOOK_SEEDS)
    rows = contenders()
    assert found.best(setting.SAM).point == dict(rows[setting.SAM].run.hyper)
    assert found.best(setting.WSAM).point == dict(rows[setting.WSAM].run.hyper)
    assert found.best(setting.TUNED).point == {"lr": rows[setting.TUNED].run.base_args["lr"]}


def test_base_has_twice_the_epochs_and_all_else_alike():
    rows = contenders()
    alike = ("data", "model", "batch_size", "noise", "schedule", "precision", "base")
    for row in rows.values():
        double = row.run.method == "vanilla"
        assert row.run.epochs == (2 if double else 1) * setting.EPOCHS
        assert all(getattr(row.run, n) == getattr(rows["WSAM"].run, n) for n in alike)
    shared = [rows[name].run.base_args for name in ("SGD", "SAM", "WSAM")]
    assert shared[0] == shared[1] == shared[2]


# The looks -------------------------------------------------------------------------------------


def test_the_shipped_looks_are_of_the_runs_they_name():
    shipped = json.loads((choice.files("wsam.demo") / choice.NAME).read_text())
    keys = [entry["keys"] for entry in shipped["places"]]
    assert keys == [[run.key for run in runs] for _, _, runs in choice.look_runs()]
    assert shipped["runs"] == sum(map(len, keys))
    assert {"wsam", "torch", "python"} <= shipped["versions"].keys()
    assert all(re.match("[0-9a-f]{40}", commit) for commit in shipped["commit"])
    for entry in shipped["places"]:
        assert all(error is None or 0 < error < 100 for error in entry["errors"])


def test_of_equal_points_the_gentlest_is_taken():
    def place(mean, **point):
        return choice.Place(point, (mean - 1, mean + 1))

    several = (place(9.0, rho=0.1), place(4.4, rho=0.2), place(4.0, rho=0.4), place(4.4, rho=0.8))
    assert choice.Choice({"x": several}, {}).best("x").point == {"rho": 0.2}
    apart = (place(5.0, rho=0.2), place(4.0, rho=0.4))
    assert choice.Choice({"x": apart}, {}).best("x").point == {"rho": 0.4}
    failed = (choice.Place({"rho": 0.1}, (1.0, None)), place(5.0, rho=0.2))
    assert choice.Choice({"x": failed}, {}).best("x").point == {"rho": 0.2}
    assert choice.strength({"gamma": 0.8, "rho": 0.1}) == pytest.approx(0.4)


def test_damaged_looks_are_one_line(tmp_path):
    (tmp_path / choice.NAME).write_text("{")
    error = wsam_command("demo", "--out", tmp_path, status=2).stderr
    assert "map.json is damaged" in error
    assert error.count("\n") == 1


# The whole of it, made small -------------------------------------------------------------------


@contextlib.contextmanager
def tiny_runs():
    """Make every run of the demonstration a tiny one; the runs themselves go to the workers."""
    patch, whole = pytest.MonkeyPatch(), setting.base_run

    def tiny(*arguments, **hyper):
        run = whole(*arguments, **hyper)
        return run.replace(epochs=run.epochs // 15, train_limit=192, test_limit=100)

    patch.setattr(setting, "base_run", tiny)
    for name, values in (("GAMMAS", (0.8, 0.92)), ("RADII", (0.1, 0.4)), ("WIDE_RADII", (0.4,))):
        patch.setattr(setting, name, values)
    patch.setattr(setting, "LEARNING_RATES", (0.005, 0.05))
    try:
        yield
    finally:
        patch.undo()


@pytest.fixture
def small():
    """For one test alone: others look at the whole runs, whichever comes first."""
    with tiny_runs():
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Run `wsam demo --map` once; return its folder and what it printed."""
    out = tmp_path_factory.mktemp("demo") / "here"
    words = ("demo", "--out", out, "--map", "--seeds", "0,1", "--workers", "1", "--json")
    with tiny_runs():
        answer = wsam_command(*words)
    assert answer.stderr == ""
    return out, json.loads(answer.stdout)


@pytest.mark.slow
class TestWhole:
    def test_figures_are_those_of_the_records(self, made, small):
        out, printed = made
        for name, row in contenders().items():
            told = printed["rows"][name]
            found = [records.read(out / "runs", run) for run in row.runs((0, 1))]
            errors = [record["final"]["test_error"] for record in found]
            assert told["test_error"]["mean"] == pytest.approx(statistics.fmean(errors))
            assert told["test_error"]["deviation"] == pytest.approx(statistics.stdev(errors))
            assert told["keys"] == [record["key"] for record in found]
            for figure in ("train_loss", "top_eigenvalue", "seconds"):
                assert told[figure]["mean"] > 0
            assert told["sharpness"]["deviation"] is not None
        assert json.loads((out / "demo.json").read_text())["rows"] == printed["rows"]

    def test_everything_is_written(self, made):
        out, printed = made
        pictures = ["curves", "errors", "landscape", "map"]
        names = [f"{name}.{kind}" for name in pictures for kind in ("png", "svg")]
        assert {*names, "demo.json", "report.html", "map.json", "runs", "map"} == {
            path.name for path in out.iterdir()
        }
        assert {str(out / name) for name in (*names, "report.html")} <= set(printed["files"])
        for name in names:
            assert (out / name).stat().st_size > 5_000
        assert not [*out.rglob("*.tmp"), *out.rglob(".unfinished*")]

    def test_page_says_setting_and_map(self, made):
        out, _ = made
        page = (out / "report.html").read_text()
        assert not re.search(r"https?:|<link|<script|<img|@import|url\(", page)
        for words in ("The setting", "How gamma and rho were chosen", "seeds 100 and 101",
                      "wsam demo --map", "Reproduce", "around each minimum"):  # fmt: skip
            assert words in page
        assert page.count("<rect") >= 4

    def test_second_call_runs_nothing_again(self, made, small):
        out, printed = made
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

    def test_the_map_of_the_folder_is_the_one_drawn(self, made):
        out, _ = made
        found = choice.read(out / choice.NAME)
        assert {len(places) for places in found.places.values()} == {1, 2, 4}
        assert found.facts["runs"] == 14
        mean = found.places["WSAM"][0].mean
        assert f">{mean:.1f}".rstrip("0").rstrip(".") in (out / "report.html").read_text()

    def test_what_cannot_be_measured_any_more_is_made_again(self, made, small, tmp_path):
        out = shutil.copytree(made[0] / "runs", tmp_path / "runs")
        job = work.demo_jobs(out, (1,))[-1]
        work.forget_unmeasurable(job)
        assert work.is_done(job)
        work.sharpness_path(job.out, job.run).unlink()
        records.weights_path(job.out, job.run).unlink()
        assert not work.is_done(job)
        work.forget_unmeasurable(job)
        assert not list(out.glob(f"{job.run.key}*.json")), "so that it is trained once more"

    def test_claims_say_what_the_figures_say(self, made, small):
        out, _ = made
        summary = summarise(out / "runs", (0, 1))
        for other, sentence in zip(("SGD", "SGD, own lr", "SAM"), summary.claims, strict=True):
            gap, spread = summary.lower("WSAM", other)
            word = "no difference" if abs(gap) <= spread else "lower" if gap > 0 else "higher"
            assert sentence.startswith(f"WSAM against {other}: ")
            assert word in sentence

    def test_one_seed_says_nothing_of_a_difference(self, made, small):
        """It has no deviation that a difference could be more than."""
        out, _ = made
        summary = summarise(out / "runs", (1,))
        assert summary.lower("WSAM", "SGD")[1] is None
        for sentence in summary.claims:
            assert "one seed has no deviation, so nothing can be said" in sentence
            assert not re.search("lower|higher|no difference|sum of", sentence)
        text = page(summary, choice.read())
        lead = text.partition('<p class="lead">')[2].partition("</p>")[0]
        assert "one seed has no deviation" in lead
        assert "One run each, of seed 1, so without deviations, after the last epoch" in text
        assert not re.search("Mean ± sample deviation over|within their deviations", text)

    @needs_browser
    @pytest.mark.browser
    def test_page_on_a_phone(self, made):
        out, _ = made
        with running() as browser, opened(browser, out / "report.html", **PHONE) as page:
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            assert page.locator("svg.chart").count() >= 7


# The display, mistakes, Ctrl-C -----------------------------------------------------------------


def drawn(display):
    from io import StringIO

    from rich.console import Console

    text = StringIO()
    Console(file=text, width=120).print(display)
    return text.getvalue()


def test_display_follows_a_run(small, tmp_path):
    (job,) = work.demo_jobs(tmp_path, (0,))[:1]
    display = Display([job], "Digits")
    assert "Digits: 0 of 1 runs" in drawn(display)
    assert "waiting" in drawn(display)
    folder = records.work_folder(job.out, job.run) / "checkpoints"
    folder.mkdir(parents=True)
    assert "begun" in drawn(display)
    (folder / "000002.json").write_text("{}")
    assert "epoch 2 of 4" in drawn(display)
    assert "SGD, seed 0" in drawn(display)
    record = train(job.run, job.out, job.execution)
    assert "measuring its minimum" in drawn(display)
    found = work.measure(job.run, job.out, job.execution)
    assert found["info"]["samples"] == job.run.train_limit
    assert f"{record['final']['test_error']:.2f}% test error" in drawn(display)
    assert "1 of 1 runs" in drawn(display)


def test_display_is_quiet_for_programs(small, tmp_path, capsys):
    jobs = work.demo_jobs(tmp_path, (0,))
    with shown(jobs, "Digits", quiet=True) as ears:
        ears.say("nothing")
        ears.ended(Outcome(jobs[0], Status.FINISHED, error=12.345))
    assert capsys.readouterr().err == ""
    with shown(jobs, "Digits", quiet=False) as ears:
        ears.say("something")
    assert capsys.readouterr().err == "Digits: 4 runs\nsomething\n"


def test_a_pipe_gets_a_line_as_each_run_ends(small, tmp_path, capsys, monkeypatch):
    first, second, *rest = jobs = work.demo_jobs(tmp_path, (0,))
    heard = []

    def ending(processes, left):
        assert left == [second, *rest]
        yield Outcome(second, Status.FINISHED, error=12.345, seconds=4.0)
        heard.append(capsys.readouterr().err)  # before the next one has ended
        yield Outcome(rest[0], Status.FAILED, "the loss became nan")

    monkeypatch.setattr(work, "is_done", lambda job: job == first)
    monkeypatch.setattr("wsam.demo.display.is_done", lambda job: job == first)
    monkeypatch.setattr(work.Processes, "run", ending)
    with shown(jobs, "Digits", quiet=False) as ears, pytest.raises(ValueError, match="nan"):
        carry_out(jobs, 1, ears.say, ears.ended)
    assert heard == [
        "Digits: 4 runs, 1 of them done before\n[2/4] SGD, own lr, seed 0: 12.35% test error (4.0 s)\n"
    ]
    last = "[3/4] SAM, seed 0: failed: the loss became nan (0.0 s)\n"
    assert capsys.readouterr().err == last


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--seeds", "a"), "seeds must be"),
        (("--workers", "0"), "workers"),
        (("--nonsense",), "--nonsense"),
    ],
)
def test_mistakes_are_one_line(tmp_path, words, said):
    error = wsam_command("demo", "--out", tmp_path / "x", *words, status=2).stderr
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_missing_libraries_are_told_of_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    error = wsam_command("demo", "--out", tmp_path / "x", status=2).stderr
    assert "matplotlib" in error
    assert "pip install" in error
    assert not (tmp_path / "x").exists()


def test_damaged_measurement_is_one_line(small, tmp_path):
    (job,) = work.demo_jobs(tmp_path, (0,))[:1]
    path = work.sharpness_path(job.out, job.run)
    for text in ("{", "{}", '{"key": "other", "value": 1.0}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="remove it to measure again"):
            work.read_sharpness(job.out, job.run)


def test_help_has_an_example():
    assert "Example: wsam demo --out demo" in wsam_command("demo", "--help").stdout


def alive(group):
    """Whether a group has a process; one that has ended counts no more, though nobody waits for it."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    states = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has gone meanwhile
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            states += [state] if int(its_group) == group else []
    return set(states) != {"Z"}


def ends(group):
    """Wait until no process of a group is left."""
    limit = time.monotonic() + 60
    while alive(group):
        if time.monotonic() > limit:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.slow
def test_interrupted_leaves_nothing_half_written(tmp_path):
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "wsam", "demo", "--out", str(out), "--workers", "1"]
    demo = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        # Tests that a shell runs in the background ignore Ctrl-C, and so would what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )  # fmt: skip
    limit = time.monotonic() + 200  # a second or two where nothing else runs
    while not list((out / "runs" / "work").glob("*/checkpoints/*.json")):
        assert time.monotonic() < limit
        assert demo.poll() is None, demo.stderr.read()
        time.sleep(0.1)
    os.killpg(demo.pid, signal.SIGINT)
    stdout, stderr = demo.communicate(timeout=90)
    assert demo.returncode == 130
    assert stdout == ""
    said = "wsam: interrupted; work is kept: the same command goes on from there"
    assert stderr.splitlines()[1:] == [said]
    left = [path.relative_to(out) for path in out.rglob("*") if path.is_file()]
    assert not [path for path in left if path.name.endswith(".tmp")]
    assert all(path.parts[:2] == ("runs", "work") for path in left), left
    assert ends(demo.pid), "no worker may live on"
