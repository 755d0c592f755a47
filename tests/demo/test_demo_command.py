"""`wsam demo`: a preset of `wsam compare` with its own page; interrupted, it continues."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from browsing import PHONE, needs_browser, opened, running
from command import error_of, wsam_command

from wsam.compare.request import VALIDATION
from wsam.demo import SEEDS, demo_request, preset
from wsam.demo.page import OWN_DATA
from wsam.lab import records
from wsam.lab.run import Run
from wsam.sweep import InProcess, Processes

OWN_LINE = f"now your own data, with your own settings: {OWN_DATA}"


# The preset -------------------------------------------------------------------------------------


def test_preset_tunes_every_method_on_a_validation_split():
    request = demo_request()
    assert request.methods == ("base", "sam", "wsam")
    assert request.run.validation == VALIDATION
    assert request.run.noise == 0.4
    assert request.trials == 6
    assert request.equal == "passes", "figures do not depend on the load of the machine"
    assert len(request.seeds) == len(SEEDS) >= 8
    assert demo_request([3, 4]).seeds == (3, 4)


# A tiny demonstration ---------------------------------------------------------------------------


@contextlib.contextmanager
def tiny():
    """Reduce the preset, and train in this process: workers take longer to start than to train."""
    with pytest.MonkeyPatch.context() as patch:
        small = preset.PROBLEM.replace(epochs=2, train_limit=250, test_limit=100)
        patch.setattr(preset, "PROBLEM", small)
        patch.setattr(preset, "TRIALS", 2)
        patch.setattr(Processes, "run", lambda executor, jobs: InProcess().run(jobs))
        patch.setattr("wsam.compare.runner._TIMING_SECONDS", (0.1, 0.1))
        yield patch


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """Run `wsam demo` once with two seeds; return its folder and output."""
    out = tmp_path_factory.mktemp("demo") / "here"
    with tiny():
        return out, wsam_command("demo", "--out", out, "--seeds", "2")


def test_everything_is_written(output):
    out, _ = output
    names = {path.name for path in out.iterdir()}
    assert names == {"compare.html", "compare.json", "plan.json", "runs", "search", "work"}
    assert len(list((out / "search").glob("*.json"))) == 3 * 2
    assert not [*out.rglob("*.tmp"), *out.rglob(".unfinished*")]


def test_output_states_result_effort_and_next_command(output):
    out, printed = output
    found = json.loads((out / "compare.json").read_text())
    assert list(found["methods"]) == ["base", "sam", "wsam"]
    for words in (
        found["sentence"],
        "test error (%)",
        "2 trials for every method, SGD included",
        "chosen by the validation error",
        "paired t-test over 2 seeds",
        f"open {out / 'compare.html'}",
    ):
        assert words in printed.stdout, words
    assert printed.stdout.splitlines()[-1] == OWN_LINE
    assert "left" in printed.stderr


def test_next_command_has_the_settings_of_the_documentation():
    page = (Path(__file__).parents[2] / "docs" / "compare.md").read_text()
    assert f"$ {OWN_DATA} " in re.sub(r" \\\n +", " ", page)


def test_page(output):
    out, _ = output
    found, page = json.loads((out / "compare.json").read_text()), (out / "compare.html").read_text()
    assert not re.search(r"https?://(?!www\.w3)|<link|<script|<img|@import|url\((?!#)", page)
    for words in (
        "<h1>Digits with wrong labels</h1>",
        found["sentence"],
        "40% of its training labels are redrawn at random",
        "Every method, SGD included, was tuned with the same effort: 2 settings each",
        "(n = 2)",
        "Now your own data",
        OWN_DATA,
        "Training loss around the trained weights",
    ):
        assert words in page, words
    assert page.index("Now your own data") > page.index("Reproduce")
    for row in found["methods"].values():
        assert f"{row['title']} {row['mean']:.0f}"[:6] in page
        assert len(row["slices"]) == 2


def test_second_call_trains_nothing(output):
    out, first = output
    times = {path: path.stat().st_mtime_ns for path in (*out.glob("search/*"), *out.glob("runs/*"))}
    with tiny() as patch:
        patch.setattr(Processes, "run", lambda executor, jobs: pytest.fail("it trains"))
        printed = wsam_command("demo", "--out", out, "--seeds", "2", "--json").stdout
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert json.loads(printed)["sentence"] in first.stdout


def test_interrupted_demo_continues(tmp_path):
    """After two runs of the search; they are not repeated."""

    def interrupted(executor, jobs):
        for outcome in InProcess().run(jobs):
            yield outcome
            if len(list(tmp_path.glob("search/*.json"))) == 2:
                raise KeyboardInterrupt

    with tiny() as patch, patch.context() as inner:
        inner.setattr(Processes, "run", interrupted)
        error = wsam_command("demo", "--out", tmp_path, "--seeds", "2", status=130).stderr
        assert error.splitlines()[-1] == "wsam: interrupted; run the same command again to resume"
        inner.undo()
        before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("search/*.json")}
        assert len(before) == 2
        assert wsam_command("demo", "--out", tmp_path, "--seeds", "2").stdout.endswith(
            f"{OWN_LINE}\n"
        )
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())


@needs_browser
@pytest.mark.browser
def test_page_on_a_phone(output):
    out, _ = output
    with running() as browser, opened(browser, out / "compare.html", **PHONE) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.locator("svg.chart").count() >= 6


# Mistakes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--seeds", "a"), "seeds must be"),
        (("--workers", "0"), "workers"),
        (("--nonsense",), "--nonsense"),
    ],
)
def test_user_errors_are_one_line(tmp_path, words, message):
    assert message in error_of("demo", "--out", tmp_path / "x", *words)
    assert not (tmp_path / "x").exists()


def test_missing_libraries_are_reported_first(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    error = error_of("demo", "--out", tmp_path / "x")
    assert "sklearn" in error
    assert "pip install" in error
    assert not (tmp_path / "x").exists()


def test_another_problem_in_the_folder_is_an_error(output):
    out, _ = output
    with tiny() as patch:
        patch.setattr(preset, "PROBLEM", Run(method="vanilla", validation=0.2))
        assert "another problem" in error_of("demo", "--out", out)


def test_help_has_an_example():
    assert "Example: wsam demo --out demo" in wsam_command("demo", "--help").stdout


# Ctrl-C -----------------------------------------------------------------------------------------


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
def test_ctrl_c_leaves_no_partial_files_and_no_workers(tmp_path):
    """With the whole preset, in its search."""
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "wsam", "demo", "--out", str(out), "--workers", "2"]
    demo = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        # A shell lets background processes ignore Ctrl-C, and their children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )  # fmt: skip
    limit = time.monotonic() + 200  # a few seconds on an idle machine
    while not list((out / "search").glob("*.json")):
        assert time.monotonic() < limit
        assert demo.poll() is None, demo.stderr.read()
        time.sleep(0.1)
    os.killpg(demo.pid, signal.SIGINT)
    stdout, stderr = demo.communicate(timeout=90)
    assert demo.returncode == 130
    assert stdout == ""
    message = "wsam: interrupted; run the same command again to resume"
    assert stderr.splitlines()[-1] == message
    assert "Traceback" not in stderr
    assert not [path for path in out.rglob("*") if path.name.endswith(".tmp")]
    assert not (out / "compare.html").exists()
    for path in (out / "search").glob("*.json"):
        assert records.is_finished(json.loads(path.read_text()))
    assert ends(demo.pid), "all workers have ended"
