"""Search with Optuna: every point of the grid once, then points in between."""

import inspect
import json
import math
import re
import threading
from collections import Counter
from pathlib import Path

import optuna
import pytest
from command import wsam_command
from recorded import recorded
from sweeping import CPU, TINY

from wsam.cli.sweep import _best_line
from wsam.cli.train import train as train_command
from wsam.lab import records
from wsam.lab.run import Run
from wsam.sweep import Grid, InProcess, Job, Outcome, Status, sweep
from wsam.sweep.grid import read_grid
from wsam.sweep.search import Search, sqlite_url

AXES = {"rho": (0.05, 0.1, 0.2), "gamma": (0.5, 0.9)}
GRID = Grid("small", "a small grid", {"digits": TINY.replace(method="wsam")}, AXES)
COMPLETE = optuna.trial.TrialState.COMPLETE


def make(out, grid=GRID, seeds=(0,), **options):
    column = next(iter(grid.bases))
    return Search(grid, column, seeds, lambda run: Job(run, out, CPU), out, **options)


class FakeExecutor:
    """Finishes every job at once; the error is smallest at rho 0.12, gamma 0.8."""

    def __init__(self):
        self.runs = []

    def run(self, jobs):
        for job in jobs:
            self.runs.append(job.run)
            error = 100 * abs(job.run.hyper["rho"] - 0.12) + abs(job.run.hyper["gamma"] - 0.8)
            yield Outcome(job, Status.FINISHED, objective=error)


def run_search(search, executor, trials=0):
    for outcome in sweep(search.jobs(trials), executor):
        search.tell(outcome)


def points_of(search):
    done = search.study.get_trials(states=(COMPLETE,))
    return Counter((trial.params["rho"], trial.params["gamma"]) for trial in done)


ALL = Counter((rho, gamma) for rho in AXES["rho"] for gamma in AXES["gamma"])


def test_every_point_once_then_points_in_between(tmp_path):
    search, executor = make(tmp_path), FakeExecutor()
    run_search(search, executor)
    assert points_of(search) == ALL
    assert search.best() == ({"rho": 0.1, "gamma": 0.9}, pytest.approx(2.1))
    run_search(search, executor, trials=8)
    assert len(executor.runs) == 14
    for run in executor.runs[6:]:
        assert 0.05 <= run.hyper["rho"] <= 0.2
        assert 0.5 <= run.hyper["gamma"] <= 0.9
        assert (run.hyper["rho"], run.hyper["gamma"]) not in ALL
    again = make(tmp_path)
    run_search(again, executor, trials=8)
    assert len(executor.runs) == 14, "a completed search runs nothing"


def test_the_objective_is_the_mean_over_seeds(tmp_path):
    grid = Grid("one", "one point", {"digits": TINY}, {"rho": (0.05,)})
    search = make(tmp_path, grid, seeds=(0, 1))
    run_search(search, InProcess())
    errors = [records.final_error(record) for record in recorded(tmp_path)]
    assert len(errors) == 2
    assert search.best() == ({"rho": 0.05}, pytest.approx(sum(errors) / 2))


def test_trials_of_a_killed_search_are_run_again(tmp_path):
    first = make(tmp_path)
    jobs = first.jobs()
    running = [next(jobs), next(jobs)]
    search = make(tmp_path)
    run_search(search, FakeExecutor())
    started = Counter((job.run.hyper["rho"], job.run.hyper["gamma"]) for job in running)
    assert points_of(search) == ALL - started, "trials of a live search are not taken over"
    first.close()  # as the operating system does when its process is killed
    search = make(tmp_path)
    run_search(search, FakeExecutor())
    assert points_of(search) == ALL
    first.tell(Outcome(running[1], Status.FINISHED, objective=1.0))  # late reports are ignored
    assert points_of(search) == ALL


def test_a_search_killed_before_owning_its_trial(tmp_path):
    first = make(tmp_path)
    first.study.ask()
    first.close()
    search = make(tmp_path)
    run_search(search, FakeExecutor())
    assert points_of(search) == ALL


def test_diverged_and_lost_runs(tmp_path):
    class Mixed:
        def run(self, jobs):
            for number, job in enumerate(jobs):
                yield Outcome(job, [Status.FAILED, Status.LOST, Status.ERROR][number])

    grid = Grid("three", "", {"digits": TINY}, {"rho": (0.05, 0.1, 0.2)})
    search = make(tmp_path, grid)
    requested = search.jobs()
    jobs = [next(requested) for _ in range(3)]
    for outcome in Mixed().run(jobs):
        search.tell(outcome)
    trials = search.study.get_trials()
    assert [str(trial.state.name) for trial in trials] == ["COMPLETE", "FAIL", "FAIL"]
    assert search.best() == ({"rho": 0.05}, 100.0)
    assert not search.running
    search.close()
    again = make(tmp_path, grid)
    assert [job.run.hyper["rho"] for job in again.jobs()] == [0.1, 0.2], (
        "the next search tries them again"
    )


class FailingExecutor:
    """Every job is lost or ends with an error."""

    def __init__(self):
        self.runs = []

    def run(self, jobs):
        for job in jobs:
            self.runs.append(job.run)
            assert len(self.runs) < 50, "the search does not end"
            yield Outcome(job, (Status.LOST, Status.ERROR)[len(self.runs) % 2])


@pytest.mark.slow
def test_a_search_whose_runs_keep_failing_ends(tmp_path):
    search, failing = make(tmp_path), FailingExecutor()
    other = make(tmp_path)  # concurrent
    run_search(search, failing, trials=3)
    tried = [(run.hyper["rho"], run.hyper["gamma"]) for run in failing.runs]
    assert Counter(tried[:6]) == ALL
    assert len(tried) == 9
    idle = FakeExecutor()
    run_search(other, idle)
    assert not idle.runs, "failed points of the grid are not replaced"
    search.close()
    other.close()
    again, executor = make(tmp_path), FakeExecutor()
    run_search(again, executor, trials=3)
    assert points_of(again) & ALL == ALL, "the next search tries them again"
    assert len(executor.runs) == 9


def test_concurrent_searches_share_the_points(tmp_path):
    done: list[FakeExecutor] = []
    errors: list[BaseException] = []

    def work():
        try:
            executor = FakeExecutor()
            done.append(executor)
            run_search(make(tmp_path), executor)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    tried = Counter(run.key for executor in done for run in executor.runs)
    assert len(tried) == 6
    assert points_of(make(tmp_path)) == ALL


def test_other_objectives_have_their_own_study(tmp_path):
    url = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    searches = [
        make(tmp_path, storage=url),
        make(tmp_path, storage=url, seeds=(0, 1)),
        make(tmp_path, GRID.map(lambda run: run.replace(epochs=7)), storage=url),
    ]
    assert len({search.name for search in searches}) == 3
    assert sorted(optuna.get_all_study_names(url)) == sorted(s.name for s in searches)
    assert not (tmp_path / "work" / "optuna.db").exists()
    assert sqlite_url(tmp_path).endswith("work/optuna.db")


@pytest.mark.parametrize("name", ["w d?x", "w d%41", "w{d}", "w#d"])
def test_folder_names_are_escaped_in_the_storage_url(tmp_path, name):
    search = make(tmp_path / name)
    search.close()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name / "work" / "optuna.db").stat().st_size > 0


def test_integer_settings_stay_integers(tmp_path):
    grid = Grid("epochs", "", {"digits": TINY}, {"epochs": (1, 3), "rho": (0, 0.1)})
    search = make(tmp_path, grid)
    runs = [job.run for job in search.jobs(trials=2)]
    assert all(isinstance(run.epochs, int) and 1 <= run.epochs <= 3 for run in runs)
    assert len(make(tmp_path, grid).study.get_trials()) >= 6


def test_options_that_are_integers_stay_integers(tmp_path):
    """Also of a run that does not contain the option, because it is off."""
    grid = Grid(
        "every", "steps between", {"digits": TINY.replace(method="wsam")}, {"every": (1, 4)}
    )
    found = [job.run.options.get("every", 1) for job in make(tmp_path, grid).jobs(trials=3)]
    assert found[:2] == [1, 4]
    assert {*found[2:]} <= {1, 2, 3, 4}


def test_float_settings_may_be_written_as_integers(tmp_path):
    grid = Grid("whole", "", {"digits": TINY}, {"rho": (1, 2)})
    search = make(tmp_path, grid)
    radii = [job.run.hyper["rho"] for job in search.jobs(trials=3)]
    assert radii[:2] == [1.0, 2.0]
    assert all(1 < rho < 2 for rho in radii[2:])
    assert not any(rho.is_integer() for rho in radii[2:])


MIXED = {
    "method": ("vanilla", "sam", "wsam"),
    "base": ("sgd", "adamw"),
    "lr": (0.001, 0.1),
    "gamma": (0.8, 0.9),
    "betas": ((0.9, 0.99), (0.8, 0.9)),
    "nesterov": (True, False),
}


@pytest.mark.slow
def test_a_search_over_methods_and_bases(tmp_path):
    """Settings that a method or base does not have are not asked for."""
    grid = Grid("mixed", "", {"digits": TINY}, MIXED)
    points = list(grid.points())
    # For each of 4 methods with arguments: 2 lr, and 2 betas or 2 values of nesterov.
    assert len(points) == 4 * 2 * 2 * 2
    search = make(tmp_path, grid)
    runs = [job.run for job in search.jobs(trials=10)]
    assert {run.key for run in runs[: len(points)]} == {run.key for run in grid_runs(grid)}
    assert len(set(runs[: len(points)])) == len(points)
    for trial, run in zip(search.study.get_trials(), runs, strict=True):
        assert ("gamma" in trial.params) == (run.method == "wsam")
        assert ("betas" in trial.params) == (run.base == "adamw")
        assert ("nesterov" in trial.params) == (run.base == "sgd")
        assert run.base_args["lr"] == trial.params["lr"]
        if run.base == "adamw":
            assert run.base_args["betas"] in MIXED["betas"]
    between = {run.base_args["lr"] for run in runs[len(points) :]}
    assert all(0.001 < lr < 0.1 for lr in between)


def test_other_choices_have_their_own_study(tmp_path):
    one = make(tmp_path, Grid("g", "", {"digits": TINY}, {"method": ("sam", "wsam")}))
    other = make(tmp_path, Grid("g", "", {"digits": TINY}, {"method": ("sam", "gsam")}))
    assert len(list(one.jobs(trials=1))) == 3
    assert len(list(other.jobs(trials=1))) == 3


def test_one_value_fixes_a_setting(tmp_path):
    """It keeps its type, and runs with another value are not candidates for the best."""
    searches = []
    for noise in (0.0, 0.5):
        axes = {"rho": (0.1, 0.2), "noise": (noise,), "validation": (50,)}
        search = make(tmp_path, Grid("g", "", {"digits": TINY}, axes))
        for number, job in enumerate(search.jobs()):
            assert (job.run.noise, job.run.validation) == (noise, 50)
            search.tell(Outcome(job, Status.FINISHED, objective=100 * noise + number))
        searches.append(search)
    assert [search.best()[1] for search in searches] == [0.0, 50.0]


def test_the_best_of_a_metric_of_ones_own_is_not_in_percent():
    for figure, text in {"test relative_error": "0.0513", "test macro-f1": "91.30%"}.items():
        value = float(text.rstrip("%"))
        assert f"{figure}, {text}, at" in _best_line("mine", {"lr": 0.1}, value, figure, True)


def test_a_diverged_run_is_worse_than_any_figure(tmp_path):
    grid = Grid("two", "", {"digits": TINY}, {"rho": (0.05, 0.1)})
    search = make(tmp_path, grid)
    first, second = search.jobs()
    search.tell(Outcome(first, Status.FAILED, objective_name="test mse"))
    assert search.study.get_trials()[0].value == math.inf
    assert search.best() is None
    search.tell(Outcome(second, Status.FINISHED, objective=1e9, objective_name="test mse"))
    assert search.best() == ({"rho": 0.1}, 1e9)


def test_the_objective_is_the_validation_metric(tmp_path):
    """Negative if higher values are better; `best` has the metric itself."""
    base = TINY.replace(validation=0.25, metric="accuracy")
    grid = Grid("lr", "", {"digits": base}, {"base_args.lr": (0.001, 0.1)})
    search = make(tmp_path, grid)
    assert search.objective == ("test error", True), "before the first run"
    run_search(search, InProcess())
    found = [record["curve"][-1] for record in recorded(tmp_path)]
    assert search.objective == ("validation accuracy", False)
    assert search.best()[1] == max(row["validation_accuracy"] for row in found)
    search.close()
    assert make(tmp_path, grid).objective == ("validation accuracy", False), "also later"


@pytest.mark.parametrize(
    ("storage", "reason"),
    [
        ("nonsense", "Could not parse"),
        ("sqlite:////nonexistent/folder/x.db", "unable to open database file"),
        ("oracle://me:secret@127.0.0.1/x", "import"),
    ],
)
def test_an_unusable_storage_gives_a_one_line_error(tmp_path, storage, reason):
    with pytest.raises(ValueError, match=f"Optuna cannot use this storage: .*{reason}") as refused:
        make(tmp_path, storage=storage)
    assert "\n" not in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run", "is not a TOML file"),
        ("[runs]\n", "unknown entry 'runs'; known: title, run, grid"),
        ("grid = 3", "run and grid must be tables"),
        ("[grid]\nrho = 0.1", "grid.rho must be a list of values, got 0.1"),
        ("[grid]\nrho = []", "grid.rho must be a list of values"),
        ("[grid]\nrho = [0.1, 0.1]", "has a value twice"),
        ("[grid]\nmethod = ['sam', 'gsam']\ngamma = [0.9]", "a sam run has no setting 'gamma'"),
        ("[run]\nepochs = 'x'\n[grid]\nrho = [1]", "epochs must be a whole number"),
        ("[grid]\nseed = [1]", "a grid cannot set seed: use --seeds"),
        ("[run]\nseed = 5\n[grid]\nrho = [1]", "a grid cannot set seed: use --seeds"),
        ("[run]\nnoise_seed = 5\n[grid]\nrho = [1]", "a grid cannot set noise_seed"),
        ("[grid]\nsteps = [1]", "a wsam run has no setting 'steps'"),
        ("[grid]\nrho = ['a']", "rho of wsam must be a number in .*, got 'a'"),
        ("[run]\nmethod = 'swam'\n[grid]\nrho = [1]", "unknown method 'swam'"),
        ("[run]\nepoch = 3\n[grid]\nrho = [1]", "unknown setting 'epoch'"),
    ],
)
def test_invalid_grid_files(tmp_path, text, message):
    path = tmp_path / "grid.toml"
    path.write_text(text)
    with pytest.raises((ValueError, TypeError), match=message.replace("[", r"\[")):
        read_grid(path)


def test_the_grid_file_in_the_documentation(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "sweep.md").read_text()
    (text,) = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    path = tmp_path / "digits.toml"
    path.write_text(text)
    grid = read_grid(path)
    assert (grid.name, grid.title) == ("digits", "radius and weight on digits")
    assert dict(grid.bases) == {"digits cnn": Run(method="wsam", epochs=20)}
    points = [(run.hyper["rho"], run.hyper["gamma"]) for run in grid_runs(grid)]
    assert points == [(rho, gamma) for rho in (0.05, 0.1, 0.2) for gamma in (0.8, 0.88)]
    words = re.findall(r"^\$ (wsam .* digits\.toml .*)$", page, re.MULTILINE)
    assert [line.split()[1] for line in words] == ["sweep", "paper", "paper"]
    defaults = inspect.signature(train_command).parameters
    for name in ("data", "base", "batch_size", "noise", "schedule", "augment"):
        assert getattr(Run(), name) == defaults[name].default, "defaults as in `wsam train`"


def grid_runs(grid):
    (column,) = grid.bases
    return [grid.run(column, point) for point in grid.points()]


def test_a_search_minimizes_the_validation_error(tmp_path, monkeypatch):
    monkeypatch.setattr("wsam.sweep.Processes", lambda devices, retries: InProcess(list))
    path = tmp_path / "grid.toml"
    run = "model = 'mlp'\nepochs = 1\ntrain_limit = 200\nvalidation = 0.25"
    path.write_text(f"[run]\n{run}\n[grid]\nrho = [0.1, 0.2]\n")
    words = ("--optuna", "--device", "cpu", "--workers", 1, "--out", tmp_path / "runs", "--json")
    done = wsam_command("sweep", path, *words)
    (best,) = json.loads(done.stdout)
    found = {r["settings"]["hyper"]["rho"]: r["final"] for r in recorded(tmp_path / "runs")}
    errors = {rho: final["validation_error"] for rho, final in found.items()}
    assert best["validation_error"] == min(errors.values()) == errors[best["best"]["rho"]]
    assert done.stderr.count("validation error") == 2
    assert "test error" not in done.stderr
