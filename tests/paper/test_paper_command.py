"""The `wsam paper` commands, end to end on the digits data, with the code path of real runs."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from command import error_of, wsam_command
from recorded import as_recorded, recorded

from wsam.lab import records
from wsam.paper import Profile, find, minima, names

SMOKE = ("--device", "cpu", "--smoke", "--seeds", "0")


@pytest.fixture
def few_images(monkeypatch):
    """Train and measure with 128 images."""
    monkeypatch.setattr("wsam.paper.profile.SMOKE_IMAGES", 128)
    monkeypatch.setattr(minima, "_IMAGES", 128)


def test_list_names_everything(tmp_path):
    lines = wsam_command("paper", "list", "--results", tmp_path).stdout.splitlines()
    listed = {line.split()[0]: line.split()[1:] for line in lines}
    assert set(names()) < set(listed)
    assert listed["cifar"][1:4] == ["20", "100", "0"]


@pytest.mark.parametrize(
    ("name", "only", "runs"),
    [
        ("cifar", "ResNet18/*/CIFAR-10", 5),
        ("noise-beta-gamma", "0.5/0.6/40%", 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("ablation", "ResNet18/Coupled-WSAM*", 4),
                ("imagenet", "*", 5),
                ("noise", "80%", 5),
                ("geometry", "ResNet18/WSAM/*", 3),
                ("sensitivity", "0.9*/ResNet18 CIFAR-10", 4),
                ("lr-wd", "*/ResNet18 CIFAR-10", 6),
                ("noise-alpha", "0.3", 4),
                ("noise-gamma", "0.91", 4),
                ("imagenet-alpha", "0.3", 1),
            )
        ),
    ],
)
def test_smoke_runs(tmp_path, few_images, name, only, runs):
    words = ("paper", "run", name, "--only", only, *SMOKE, "--out", tmp_path)
    printed = wsam_command(*words)
    assert f"{runs} finished; records in" in printed.stdout
    assert printed.stderr.count("finished") == runs
    assert len(recorded(tmp_path)) == runs
    again = wsam_command(*words).stdout
    assert f"{runs} skipped" in again
    table = ("paper", "table", name, "--smoke", "--seeds", "0", "--results", tmp_path, "--json")
    cells = json.loads(wsam_command(*table, "--only", only).stdout)
    assert {cell["n"] for cell in cells} == {1}


@pytest.mark.slow
def test_the_largest_smoke_test_takes_less_than_two_minutes(tmp_path):
    """In CPU seconds, because it uses one thread and the machine may be busy.

    The runs of the first seed are measured; the others are the same but for the seed.
    """
    sizes = {name: len(Profile(smoke=True).table(find(name)).runs) for name in names()}
    largest = max(sizes, key=sizes.__getitem__)
    assert sizes[largest] > 40
    count = len(Profile(smoke=True, seeds=(0,)).table(find(largest)).runs)
    words = ("paper", "run", largest, *SMOKE, "--out", tmp_path)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "wsam", *map(str, words)], capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert f"{count} finished" in done.stdout
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent * sizes[largest] / count < 120


@pytest.mark.slow
def test_minima_are_measured(tmp_path, few_images):
    words = ("paper", "run", "minima", "--only", "WSAM", *SMOKE, "--out", tmp_path)
    printed = wsam_command(*words, "--json").stdout
    cells = {cell["column"]: cell for cell in json.loads(printed)["cells"]}
    (run,) = Profile(smoke=True, seeds=(0,), only="WSAM").table(find("minima")).runs
    found = minima.read_measurement(tmp_path, run)
    assert cells["top eigenvalue"]["mean"] == found["top_eigenvalue"] > 0
    assert found["converged"]
    assert found["images"] == 128
    for column, name in (("by batches", minima.TRAIN_MODE), ("test images", minima.TEST_IMAGES)):
        reading = found[name]
        assert cells[column]["mean"] == reading["top_eigenvalue"] > 0
        assert cells[column]["paper_mean"] is None
    assert (found["mode"], found["by_batches"]["mode"]) == ("eval", "train")
    assert found["by_batches"]["batch"] == run.batch_size
    assert found["on_test"]["loss"] != found["loss"]
    record = records.read(tmp_path, run)
    assert cells["loss"]["mean"] == record["final"]["train_loss"]
    assert cells["accuracy"]["mean"] == pytest.approx(1 - record["final"]["test_error"] / 100)
    # The cifar table shares the run and its record.
    table = ("paper", "table", "cifar", "--smoke", "--seeds", "0", "--results", tmp_path, "--json")
    cells = json.loads(wsam_command(*table, "--only", "ResNet18/WSAM/CIFAR-10").stdout)
    assert cells[0]["n"] == 1


@pytest.mark.slow
def test_cifar_keeps_the_weights_that_minima_need(tmp_path, few_images):
    only = ("--only", "ResNet18/*SAM/CIFAR-10", *SMOKE, "--out", tmp_path)
    wsam_command("paper", "run", "cifar", *only)
    kept = {path.parent.name for path in tmp_path.glob("work/*/weights.pt")}
    expected = {run.key for run in Profile(smoke=True, seeds=(0,)).table(find("minima")).runs}
    assert len(kept) == 2
    assert kept < expected
    (tmp_path / "work" / next(iter(kept)) / "weights.pt").unlink()
    words = ("paper", "run", "minima", "--only", "*SAM", *SMOKE, "--out", tmp_path)
    printed = wsam_command(*words, status=1)
    assert "its weights were not kept; remove" in printed.stderr
    assert "1 error" in printed.stdout, "the other run is measured"
    assert len(list(tmp_path.glob("*.minimum.json"))) == 1


def test_a_diverged_run_is_shown_as_failed(tmp_path):
    grid = tmp_path / "wild.toml"
    grid.write_text(
        "[run]\nmethod = 'vanilla'\nepochs = 2\ntrain_limit = 128\n[grid]\nlr = [1e30, 0.05]\n"
    )
    words = ("paper", "run", grid, "--device", "cpu", "--out", tmp_path / "out")
    printed = wsam_command(*words, status=1)
    assert "1 failed, 1 finished" in printed.stdout
    assert "failed SGD lr 1e+30 (" in printed.stderr
    text = wsam_command(
        "paper", "table", grid, "--results", tmp_path / "out", "--format", "markdown"
    )
    assert "| 1e+30 | 1 failed |" in text.stdout


def test_a_smoke_table_does_not_show_the_papers_results(tmp_path):
    words = ("paper", "table", "cifar", "--smoke", "--only", "ResNet18/*", "--results", tmp_path)
    printed = wsam_command(*words, "--format", "markdown").stdout
    assert "not to be compared with the paper" in printed
    assert "| model | method | CIFAR-10 | CIFAR-100 |" in printed
    assert "CIFAR-10 (n)   CIFAR-100 (n)" in wsam_command(*words).stdout
    assert "3.62" not in printed
    assert {cell["paper_mean"] for cell in json.loads(wsam_command(*words, "--json").stdout)} == {
        None
    }
    short = wsam_command(*words[:3], *words[4:], "--epochs", "20").stdout
    assert "3.62" in short, "the setting is the paper's, with fewer epochs"


def test_a_damaged_record_of_a_run_or_table(tmp_path):
    """The message tells to remove it. `run` reports it with the other outcomes."""
    only = ("--only", "ResNet18/WSAM/CIFAR-10", "--smoke", "--seeds", "0")
    (run,) = Profile(smoke=True, seeds=(0,), only=only[1]).table(find("cifar")).runs
    for text in ("[]", "{}", "{"):
        records.record_path(tmp_path, run).write_text(text)
        for verb, folder, status in (("table", "--results", 2), ("run", "--out", 1)):
            words = ("paper", verb, "cifar", *only, folder, tmp_path)
            (line,) = wsam_command(*words, status=status).stderr.splitlines()
            assert line.endswith("; remove it to run again")


def test_list_counts_finished_runs_and_names_a_damaged_record(tmp_path):
    whole, damaged = find("cifar").cell(("ResNet18", "WSAM"), "CIFAR-10").runs[:2]
    row = {"epoch": 200, "train_loss": 0.5, "test_error": 4.0}
    records.write(tmp_path, whole, as_recorded(whole, row))
    words = ("paper", "list", "--results", tmp_path, "--json")
    listed = json.loads(wsam_command(*words).stdout)
    assert next(entry for entry in listed if entry["name"] == "cifar")["finished"] == 1
    path = records.record_path(tmp_path, damaged)
    path.write_text("{")
    assert error_of(*words).startswith(f"wsam: {path}")


def test_formats(tmp_path):
    words = ("paper", "table", "cifar", "--results", tmp_path)
    assert "not run" in wsam_command(*words).stdout
    assert wsam_command(*words, "--format", "csv").stdout.startswith("table,model,method,column")
    assert (
        "| ResNet18 | WSAM | not run | 3.62 ± 0.10 |"
        in wsam_command(*words, "--format", "markdown").stdout
    )


def test_a_grid_of_ones_own_shows_its_own_metric(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = (f"{n % 7},{n % 5},{n % 7 - n % 5}\n" for n in range(60))
    Path("t.csv").write_text("a,b,y\n" + "".join(rows))
    Path("mine.toml").write_text(
        'title = "rho"\n[run]\ndata = "table:t.csv"\ntarget = "y"\ntask = "regression"\n'
        'method = "sam"\nepochs = 1\n[grid]\nrho = [0.05, 0.1]\n'
    )
    shown = wsam_command("paper", "run", "mine.toml", "--out", "runs").stdout
    found = [record["curve"][-1]["test_mse"] for record in recorded(Path("runs"))]
    assert "Test metric by rho" in shown
    assert all(f"{figure:.4f} (1)" in shown for figure in found)
    cells = json.loads(
        wsam_command("paper", "table", "mine.toml", "--results", "runs", "--json").stdout
    )
    assert [cell["measure"] for cell in cells] == ["test metric"] * 2
    assert {cell["mean"] for cell in cells} == {*found}


def test_a_missing_results_folder(tmp_path, monkeypatch):
    """It is an error if given, and a warning if it is the default."""
    missing = tmp_path / "missing"
    for verb in ("list", "table cifar", "page page.md"):
        line = error_of("paper", *verb.split(), "--results", missing)
        assert f"'{missing}' does not exist (see wsam paper" in line
    monkeypatch.chdir(tmp_path)
    for words in (("table", "cifar"), ("table", "cifar", "--smoke")):
        first = wsam_command("paper", *words)
        folder = "smoke" if "--smoke" in words else "results"
        assert first.stderr == f"there is no folder {folder} here\n"
        assert "cifar" in first.stdout.lower()
        (tmp_path / folder).mkdir()
        second = wsam_command("paper", *words)
        assert (second.stderr, second.stdout) == ("", first.stdout)


@pytest.mark.parametrize(
    "how", ["json", *(pytest.param(form, marks=pytest.mark.slow) for form in ("rich", "csv"))]
)
def test_the_path_of_a_plot_is_printed_to_stderr_unless_the_format_is_rich(tmp_path, how):
    plot = tmp_path / "cifar.png"
    form = ("--json",) if how == "json" else ("--format", how)
    words = ("paper", "table", "cifar", "--results", tmp_path)
    alone = wsam_command(*words, *form)
    plotted = wsam_command(*words, *form, "--plot", plot)
    assert plot.read_bytes().startswith(b"\x89PNG")
    line = f"wrote {plot}\n"
    assert alone.stderr == ""
    expected = (alone.stdout + line, "") if how == "rich" else (alone.stdout, line)
    assert (plotted.stdout, plotted.stderr) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("table", "cifer"), "unknown table, figure or search 'cifer'; known: cifar, ablation"),
        (("table", "cifar", "--only", "ADAM"), "no cell of cifar is named by 'ADAM'"),
        (("table", "cifar", "--format", "html"), "'html' is not one of 'rich', 'markdown', 'csv'"),
        (("table", "cifar", "--seeds", "0,0"), "seeds must be distinct non-negative integers"),
        (("table", "cifar", "--seeds", "-1"), "seeds must be distinct non-negative integers"),
        (("table", "cifar", "--epochs", "0"), "invalid value for '--epochs'"),
        (("table", "cifar", "--precision", "fp64"), "'fp64' is not one of 'bf16', 'fp32'"),
        (("table", "missing.toml"), "missing.toml"),
        (("table", "cifar", "--plot", "x.gif"), "a plot is written as .png, .svg, .pdf"),
        (("table", "cifar", "--plot", "."), "invalid value for '--plot'"),
        (("run", "cifar", "--no-download", "--data-dir", "/nonexistent"), "cifar-10-binary.tar.gz"),
    ],
)
def test_wrong_values(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    printed = wsam_command("paper", *words, status=2).stderr
    assert message in printed.splitlines()[-1]
    assert printed.startswith("wsam: ")
