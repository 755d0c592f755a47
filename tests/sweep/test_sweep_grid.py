"""Grids over any setting: conditional ones do not multiply the runs."""

import json

import pytest
from command import error_of, wsam_command
from recorded import recorded

from wsam.cli.sweep import parse_axes
from wsam.lab.run import Run
from wsam.lab.settings import OPTIONS, method_defaults
from wsam.sweep import Grid, InProcess
from wsam.sweep.grid import make_grid, read_grid
from wsam.sweep.settings import has_setting, with_value


def runs_of(grid):
    (column,) = grid.bases
    return [grid.run(column, point) for point in grid.points()]


def test_settings_that_a_method_or_base_does_not_have_are_ignored():
    axes = {
        "method": ["vanilla", "sam", "wsam"],
        "base": ["sgd", "adamw"],
        "momentum": [0.5, 0.9],
        "rho": [0.1, 0.2],
        "gamma": [0.8, 0.9],
    }
    runs = runs_of(make_grid("mine", axes))
    assert len(runs) == len(set(runs)) == (1 + 2 + 4) * (2 + 1)
    assert {run.hyper.get("gamma") for run in runs if run.method == "sam"} == {None}
    assert {run.base_args.get("momentum") for run in runs if run.base == "adamw"} == {None}


def test_options_that_a_method_does_not_have_are_ignored():
    axes = {"method": ["sam", "wsam", "looksam"], "every": [2]}
    options = {run.method: dict(run.options) for run in runs_of(make_grid("mine", axes))}
    assert options == {"sam": {"every": 2}, "wsam": {"every": 2}, "looksam": {}}
    bases = {"base": ["sgd", "adamw"], "precondition": [True]}
    options = {run.base: dict(run.options) for run in runs_of(make_grid("mine", bases))}
    assert options == {"sgd": {}, "adamw": {"precondition": True}}


def test_options_of_reuse_are_varied_where_a_run_reuses():
    """In any order of the axes."""
    axes = {"reuse_weight": [0.5, 0.8], "reuse": [False, True], "method": ["wsam"], "every": [2]}
    options = [dict(run.options) for run in runs_of(make_grid("mine", axes))]
    reusing = [{"every": 2, "reuse": True, "reuse_weight": weight} for weight in (0.5, 0.8)]
    assert sorted(options, key=len) == [{"every": 2}, *reusing]


ON = {
    **{"lean": True, "max_norm": 1.0, "every": 2, "reuse": True, "precondition": True},
    **{"start": 0.5, "threshold": 1.0, "gather": True, "ascent_share": 0.5},
    **{"reuse_scaled": True, "reuse_average": 0.5, "reuse_weight": 0.5},
    **{"gamma_warmup": 0.1, "rho_warmup": 0.1, "rho_follows_lr": True},
}
"""Every option with a value that is not off."""


def accepted(run, **options):
    """Return whether a run with these options can be made."""
    try:
        run.replace(options={**run.options, **options})
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("base", ["sgd", "adamw"])
@pytest.mark.parametrize("before", [{}, {"every": 2}, {"every": 2, "reuse": True}])
def test_a_grid_varies_the_options_that_a_run_accepts(base, before):
    """One that excludes another, as threshold does every, is refused rather than ignored."""
    assert ON.keys() == OPTIONS.keys()
    runs = [Run(method=method, base=base) for method in method_defaults()]
    runs = [run.replace(options=before) for run in runs if accepted(run, **before)]
    assert runs
    for run in runs:
        varied = {name for name in ON if has_setting(run, f"options.{name}")}
        excluded = {"threshold"} if before else set()
        assert varied - excluded == {name for name in ON if accepted(run, **{name: ON[name]})}


def forms(runs):
    """Return the base, gamma and the options of each run."""
    return [(run.base, run.hyper.get("gamma"), dict(run.options)) for run in runs]


def test_wsam_over_adaptive_bases_has_the_defaults_of_the_class(tmp_path):
    """Each run of a grid of one's own has them, unless gamma or precondition is given."""
    on = {"precondition": True}
    both = {"method": ["wsam"], "base": ["sgd", "adamw"]}
    assert forms(runs_of(make_grid("mine", both))) == [("sgd", 0.9, {}), ("adamw", 0.5, on)]
    for name in ("gamma", "hyper.gamma"):
        given = forms(runs_of(make_grid("mine", {**both, name: [0.8]})))
        assert given == [("sgd", 0.8, {}), ("adamw", 0.8, on)]
    for name in ("precondition", "options.precondition"):
        either = forms(runs_of(make_grid("mine", {"base": ["adamw"], name: [False, True]})))
        assert either == [("adamw", 0.9, {}), ("adamw", 0.5, on)]
    others = make_grid("mine", {"method": ["vanilla", "sam"], "base": ["adamw"]})
    assert [dict(run.options) for run in runs_of(others)] == [{}, {}]
    path = tmp_path / "g.toml"
    for text, found in (
        ("base = 'adamw'", (0.5, on)),
        ("base = 'adamw'\nhyper = {gamma = 0.9}", (0.9, on)),
        ("base = 'adamw'\noptions = {precondition = false}", (0.9, {})),
    ):
        path.write_text(f"[run]\n{text}\n[grid]\nrho = [0.1]\n")
        assert forms(runs_of(read_grid(path))) == [("adamw", *found)]


def test_a_grid_of_runs_uses_them_as_they_are():
    grid = Grid("g", "", {"c": Run(base="adamw")}, {"rho": (0.1,)})
    assert forms(runs_of(grid)) == [("adamw", 0.9, {})]


def test_the_order_of_the_axes_does_not_matter():
    axes = {"gamma": [0.8, 0.9], "geometry.eta": [0.1, 1.0], "geometry": [None, "fisher"]}
    axes |= {"reuse": [True, False], "every": [1, 4], "method": ["sam", "wsam"]}
    found = {run.key for run in runs_of(make_grid("mine", axes))}
    backwards = dict(reversed(axes.items()))
    assert found == {run.key for run in runs_of(make_grid("mine", backwards))}
    # None or two of Fisher; for WSAM with every 4, reuse or not; and two gamma.
    assert len(found) == 3 * 2 + 3 * 3 * 2


@pytest.mark.parametrize(
    ("name", "value", "changed"),
    [
        ("method", "gsam", Run(method="gsam")),
        ("base", "adamax", Run(base="adamax")),
        ("lr", 0.3, Run(base_args={"lr": 0.3})),
        ("hyper.rho", 0.3, Run(hyper={"rho": 0.3})),
        ("base_args.momentum", 0.3, Run(base_args={"momentum": 0.3})),
        ("max_norm", 2.0, Run(options={"max_norm": 2.0})),
        ("options.lean", True, Run(options={"lean": True})),
        ("geometry", "adaptive", Run(geometry={"name": "adaptive"})),
        ("model", "mlp", Run(model="mlp")),
        ("data", "cifar10", Run(data="cifar10")),
        ("validation", 0.1, Run(validation=0.1)),
        ("train_limit", 100, Run(train_limit=100)),
        ("augment", False, Run(augment=False)),
    ],
)
def test_any_setting_can_be_varied(name, value, changed):
    assert with_value(Run(), name, value) == changed
    assert runs_of(make_grid("mine", {name: [value]})) == [changed]


def test_settings_of_other_data_are_dropped(tmp_path):
    table = tmp_path / "t.csv"
    table.write_text("a,b\n1,2\n")
    axes = {"data": ["digits", f"table:{table}"], "image_size": [8]}
    with pytest.raises(ValueError, match="no setting 'image_size'"):
        make_grid("mine", axes)
    digits, tabular = runs_of(make_grid("mine", {"data": axes["data"]}, {"target": "b"}))
    assert (digits.model, digits.target) == ("cnn", None)
    assert (tabular.model, tabular.target) == ("mlp", "b")


def test_arguments_of_the_base_run_apply_to_all_methods_that_have_them(tmp_path):
    path = tmp_path / "g.toml"
    path.write_text(
        "[run]\nhyper = {rho = 0.3, gamma = 0.7}\nbase_args = {lr = 0.2}\n"
        "[grid]\nmethod = ['vanilla', 'sam', 'wsam']\nbase = ['sgd', 'adam']\n"
    )
    runs = runs_of(read_grid(path))
    assert {run.base_args["lr"] for run in runs} == {0.2}
    assert [dict(run.hyper) for run in runs[::2]] == [
        {},
        {"rho": 0.3},
        {"gamma": 0.7, "rho": 0.3},
    ]


def test_a_name_in_two_places_can_be_chosen():
    base = Run(method="gsam", base="rmsprop")
    axes = {"hyper.alpha": (0.3,), "base_args.alpha": (0.9,)}
    (run,) = runs_of(Grid("g", "", {"c": base}, axes))
    assert (run.hyper["alpha"], run.base_args["alpha"]) == (0.3, 0.9)


def test_values_of_the_option():
    items = [
        "method=sam, wsam",
        "lr=0.1,1e-3",
        "betas=[0.9,0.99],[0.8,0.9]",
        "geometry=none,fisher",
        "rho=.1,.2",
        "amsgrad=True,False",
    ]
    assert parse_axes([*items, "augment=true,false"]) == {
        "method": ["sam", "wsam"],
        "lr": [0.1, 0.001],
        "betas": [[0.9, 0.99], [0.8, 0.9]],
        "geometry": [None, "fisher"],
        "augment": [True, False],
        "rho": [0.1, 0.2],
        "amsgrad": [True, False],
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give the NAME of a table or grid, or vary settings with --grid"),
        (("--grid", "lr"), "--grid expects NAME=VALUE,VALUE,..., got 'lr'"),
        (("--grid", "lr=1", "--grid", "lr=2"), "--grid lr is given twice"),
        (("--grid", "lr=1,1"), "lr has a value twice: 1, 1"),
        (("--grid", "gama=1"), "a wsam run has no setting 'gama'; it has: gamma"),
        (("--grid", "method=sam,swam"), "unknown method 'swam'"),
        (("--grid", "epochs=x"), "epochs must be a whole number"),
        (("--grid", "seed=1,2"), "a grid cannot set seed: use --seeds"),
        (("--grid", "digests=a"), "has no setting 'digests'"),
        (("cifar", "--grid", "lr=1"), "cifar is not a grid"),
        (("rho", "--grid", "lr=1"), "rho has several columns"),
    ],
)
def test_wrong_options(tmp_path, words, message):
    assert message in error_of("sweep", *words, "--out", tmp_path)


QUICK = ("--grid", "model=mlp", "--grid", "train_limit=64", "--epochs", "1", "--device", "cpu")


@pytest.fixture
def _in_process(monkeypatch):
    monkeypatch.setattr("wsam.sweep.Processes", lambda devices, retries: InProcess(list))


@pytest.mark.usefixtures("_in_process")
def test_a_sweep_over_methods_and_bases(tmp_path):
    words = ("sweep", "--grid", "method=vanilla,sam,wsam", "--grid", "base=sgd,adamw", *QUICK)
    words += ("--grid", "gamma=0.8,0.9", "--grid", "lr=0.01", "--out", tmp_path)
    done = wsam_command(*words, "--grid", "validation=0.25", "--seeds", "0,1")
    assert done.stderr.splitlines()[0].startswith("[1/16] finished validation error ")
    assert len(recorded(tmp_path)) == 2 * 2 * (1 + 1 + 2)
    head, *rows = done.stdout.splitlines()[1:]
    assert head.split("  ")[0] == "run"
    assert "validation error (%)" in head
    assert "test error (%)" in head
    names = {row.split("  ")[0] for row in rows[:-1]}
    assert {"AdamW", "SGD", "SAM (SGD) ρ 0.05", "WSAM (AdamW) γ 0.8, ρ 0.05, precondition"} < names
    assert len(names) == 8
    best = rows[0].split("  ")[0]
    assert rows[-1].startswith(f"lowest validation error: {best}, ")
    for record in recorded(tmp_path):
        assert record["key"] not in done.stdout + done.stderr


@pytest.mark.usefixtures("_in_process")
def test_the_figures_of_a_sweep_as_json(tmp_path):
    words = ("sweep", "--grid", "method=sam,wsam", *QUICK, "--out", tmp_path, "--json")
    found = json.loads(wsam_command(*words, "--grid", "metric=accuracy").stdout)
    assert found["objective"] == "test accuracy"
    figures = [float(row["figures"]["test"]) for row in found["rows"]]
    assert figures == sorted(figures, reverse=True), "the best first"
    text = wsam_command(*words[:-1], "--grid", "metric=accuracy").stdout
    assert f"highest test accuracy: {found['rows'][0]['name']}, {figures[0]:.2f}%" in text
    assert "The test set made this choice" in text


@pytest.mark.usefixtures("_in_process")
def test_a_search_over_methods(tmp_path):
    words = ("sweep", "--grid", "method=vanilla,wsam", "--grid", "gamma=0.8,0.9", *QUICK)
    words += ("--grid", "validation=0.25", "--optuna", "--trials", "2", "--out", tmp_path)
    done = wsam_command(*words)
    assert len(done.stderr.splitlines()) == 5, "one of SGD, two of WSAM, two others"
    assert "mlp: lowest validation error, " in done.stdout
    (found,) = json.loads(wsam_command(*words, "--json").stdout)
    errors = [record["curve"][-1]["validation_error"] for record in recorded(tmp_path)]
    assert found["objective"] == "validation error"
    assert found["validation_error"] == min(errors)
    assert found["best"]["method"] in ("vanilla", "wsam")
