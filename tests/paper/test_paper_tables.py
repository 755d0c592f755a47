"""Tables as data: the paper's figures and hyperparameters, and runs shared between tables."""

from functools import cache

import pytest

import wsam.paper
from wsam.lab.run import Run
from wsam.paper import GRIDS, TABLES, Kind, Measure, Profile, find_grid, render
from wsam.paper.cifar import scratch_run
from wsam.paper.grids import grid_table
from wsam.paper.table import format_mean, format_number
from wsam.sweep.grid import Grid

find = cache(wsam.paper.find)  # building a table checks each of its runs

# The paper's tables, typed independently: mean and deviation per column.
CIFAR = {
    "ResNet18": """
        SGDM 4.32 0.07 20.51 0.20
        SAM  3.68 0.06 19.97 0.30
        ESAM 3.83 0.08 20.67 0.24
        GSAM 3.71 0.11 19.84 0.27
        WSAM 3.62 0.10 19.42 0.12""",
    "WRN-28-10": """
        SGDM 3.73 0.09 19.27 0.12
        SAM  2.94 0.08 16.49 0.09
        ESAM 2.99 0.07 16.52 0.21
        GSAM 2.91 0.08 16.36 0.32
        WSAM 2.74 0.07 16.33 0.26""",
}
NOISE = """
    SGDM 88.06 0.48 84.11 0.39 79.15 0.43 69.07 0.95
    SAM  94.99 0.09 93.28 0.16 88.32 0.28 77.57 0.51
    ESAM 94.93 0.18 92.69 0.48 86.42 0.30 32.29 4.67
    GSAM 95.11 0.11 93.25 0.12 89.90 0.18 79.09 0.91
    WSAM 95.18 0.12 93.33 0.11 89.95 0.12 78.30 0.92"""
NOISE_HYPER = """
    SAM  rho=.2 rho=.2 rho=.1 rho=.05
  ESAM rho=.2,beta=.5,gamma=.6 rho=.2,beta=.5,gamma=.6 rho=.1,beta=.6,gamma=.6 rho=.05,beta=.5,gamma=.5
    GSAM rho=.2,alpha=.01 rho=.2,alpha=.02 rho=.1,alpha=.3 rho=.05,alpha=.3
    WSAM rho=.2,gamma=.91 rho=.2,gamma=.91 rho=.1,gamma=.93 rho=.05,gamma=.92"""


def rows_of(text):
    for line in text.strip().splitlines():
        name, *words = line.split()
        yield name, words


def check_quoted(table, row, columns, numbers):
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    for column, (mean, deviation) in zip(columns, pairs, strict=True):
        paper = table.cell(row, column).paper
        assert (paper.mean, paper.deviation) == (float(mean), float(deviation)), (row, column)


def test_cifar_quotes_the_paper():
    table = find("cifar")
    for model, text in CIFAR.items():
        for method, numbers in rows_of(text):
            check_quoted(table, (model, method), ("CIFAR-10", "CIFAR-100"), numbers)
    assert len(table.cells) == 20


@pytest.mark.parametrize(
    ("model", "data", "alpha", "beta", "esam", "wsam"),
    [
        ("ResNet18", "CIFAR-10", 0.02, 0.6, 0.6, 0.88),
        ("ResNet18", "CIFAR-100", 0.03, 0.5, 0.5, 0.82),
        ("WRN-28-10", "CIFAR-10", 0.01, 0.6, 0.6, 0.88),
        ("WRN-28-10", "CIFAR-100", 0.2, 0.5, 0.6, 0.94),
    ],
)
def test_cifar_hyperparameters(model, data, alpha, beta, esam, wsam):
    table = find("cifar")
    run = {method: table.cell((model, method), data).runs[0] for method in CIFAR_METHODS}
    assert all(r.hyper["rho"] == 0.2 for name, r in run.items() if name != "SGDM")
    assert run["GSAM"].hyper["alpha"] == alpha
    assert run["GSAM"].hyper["rho_min"] is None
    assert (run["ESAM"].hyper["beta"], run["ESAM"].hyper["gamma"]) == (beta, esam)
    assert run["WSAM"].hyper["gamma"] == wsam
    for name, one in run.items():
        assert one.epochs == (400 if name == "SGDM" else 200)
        assert one.batch_size == (128 if model == "ResNet18" else 256)
        assert one.base == "sgd"
        args = {"lr": 0.05 if model == "ResNet18" else 0.1, "momentum": 0.9, "weight_decay": 1e-3}
        assert args.items() <= one.base_args.items()
        assert not one.base_args["nesterov"]
        assert (one.schedule, one.augment, one.precision) == ("cosine", True, "bf16")
        assert (one.data, one.model) == (data.lower().replace("-", ""), model.lower())
    coupled = find("ablation").select(f"{model}/Coupled-WSAM, gamma*/{data}").runs[0]
    assert coupled.hyper == run["WSAM"].hyper
    assert coupled.method == "coupled_wsam"


CIFAR_METHODS = ("SGDM", "SAM", "ESAM", "GSAM", "WSAM")


def test_noise_quotes_the_paper():
    table = find("noise")
    columns = ("20%", "40%", "60%", "80%")
    for method, numbers in rows_of(NOISE):
        check_quoted(table, (method,), columns, numbers)
    for method, words in rows_of(NOISE_HYPER):
        for column, word in zip(columns, words, strict=True):
            cell = table.cell((method,), column)
            hyper = {name: float(v) for name, v in (pair.split("=") for pair in word.split(","))}
            assert hyper.items() <= cell.runs[0].hyper.items()
            assert cell.measure is Measure.TEST_ACCURACY
    for cell in table.cells:
        run = cell.runs[3]
        assert run.noise == int(cell.column[:-1]) / 100
        assert run.noise_seed == run.seed == 3
        assert (run.model, run.data, run.epochs, run.base_args["lr"]) == (
            "resnet18",
            "cifar10",
            200,
            0.05,
        )


def test_geometry_imagenet_and_minima():
    geometry = find("geometry")
    wide = "WRN-28-10"
    check_quoted(geometry, (wide, "SAM"), geometry.columns, (2.94, 0.08, 2.84, 0.04, 3.00, 0.13))
    check_quoted(geometry, (wide, "WSAM"), geometry.columns, (2.74, 0.07, 2.90, 0.08, 3.45, 0.35))
    for column, name in (("+Adaptive", "adaptive"), ("+Fisher", "fisher")):
        for model in (wide, "ResNet18"):
            run = geometry.cell((model, "WSAM"), column).runs[0]
            assert (run.geometry["name"], run.model) == (name, model.lower())
            assert run.hyper == {"rho": 5.0, "gamma": 0.88}
    imagenet = find("imagenet")
    assert imagenet.cell(("Initial",), "top-1 error").paper.mean == 18.2
    for method, words in rows_of(
        "SGDM 18.17 .005\nSAM 18.01 .007\nGSAM 18.01 .005\nWSAM 18.01 .003"
    ):
        check_quoted(imagenet, (method,), ("top-1 error",), words)
        run = imagenet.cell((method,), "top-1 error").runs[0]
        assert (run.epochs, run.batch_size, run.model, run.data) == (
            3,
            256,
            "deit-base",
            "imagenet",
        )
        assert {"lr": 1e-5, "weight_decay": 1e-4, "momentum": 0.9}.items() <= run.base_args.items()
        assert run.method == "vanilla" or run.hyper["rho"] == 5.5
    minima = find("minima")
    for row, words in rows_of(
        "SGDM .0026 .9575 62.58\nSAM .0339 .9622 22.67\nWSAM .0089 .9654 23.97"
    ):
        cells = [minima.cell((row,), column) for column in minima.columns]
        assert [cell.paper.mean for cell in cells[:3]] == [float(word) for word in words]
        assert [cell.paper for cell in cells[3:]] == [None, None]  # not in the paper


def test_tables_share_runs():
    cifar = {run.key for run in find("cifar").runs}
    assert {run.key for run in find("minima").runs} <= cifar
    ball = find("geometry").select("Vanilla")
    assert {run.key for run in ball.runs} <= cifar
    ablation = find("ablation")
    coupled = {run.key for run in ablation.select("Coupled-WSAM, gamma*").runs}
    equal = {run.key for run in ablation.select("Coupled-WSAM, equal*").runs}
    assert {run.key for run in ablation.runs} - cifar == coupled | equal
    assert not coupled & equal
    assert {run.key for run in find("gamma").runs} <= {run.key for run in find("sensitivity").runs}
    for name in ("ablation", "sensitivity"):
        keys = [run.key for run in find(name).runs]
        assert len(keys) == len(set(keys))


def test_coupled_wsam_at_equal_weight():
    """Its k is WSAM's k (1 - momentum): momentum accumulates only the coupled term."""
    for cell in find("ablation").select("Coupled-WSAM, equal*").cells:
        assert cell.paper is None
        (gamma,) = {run.hyper["gamma"] for run in cell.runs}
        wsam_gamma = scratch_run(cell.row[0], cell.column, "WSAM").hyper["gamma"]
        k = wsam_gamma / (1 - wsam_gamma)
        assert gamma / (1 - gamma) == pytest.approx(0.1 * k, rel=5e-3)


def test_ablation_states_the_gamma_of_coupled_wsam():
    note = find("ablation").notes[0]
    assert note.startswith("Coupled-WSAM uses WSAM's gamma")
    for cell in find("ablation").select("Coupled-WSAM, gamma*").cells:
        assert f"{cell.runs[0].hyper['gamma']:g}" in note
    for cell in find("ablation").select("Coupled-WSAM*").cells:
        assert f"{cell.runs[0].hyper['gamma']:g}" in cell.row[1], "the label has it, too"
    last = find("ablation").select("WRN-28-10/*/CIFAR-100")
    figures = {cell.row[1]: cell.paper for cell in last.cells}
    assert figures["Coupled-WSAM, gamma 0.88 and 0.94"] == figures["SAM"], "as the second note says"


def test_cifar_searches_contain_the_selected_point():
    """Each search contains the hyperparameters of the paper's table, with its figure."""
    expected = {
        "lr-wd": {("0.05", "0.001"): "ResNet18", ("0.1", "0.001"): "WRN-28-10"},
        "rho": {("0.2",): ""},
    }
    for name, places in expected.items():
        quoted_at = {(c.row, c.column) for c in find(name).cells if c.paper}
        columns = find(name).columns
        assert quoted_at == {
            (row, column) for row, model in places.items() for column in columns if model in column
        }
    for name in ("alpha", "beta-gamma", "gamma"):
        table = find(name)
        for column in table.columns:
            model, data = column.split()
            found = [c for c in table.cells if c.paper and c.column == column]
            method = {"alpha": "GSAM", "beta-gamma": "ESAM", "gamma": "WSAM"}[name]
            (cell,) = found
            assert cell.paper == find("cifar").cell((model, method), data).paper


@pytest.mark.parametrize(
    ("name", "table", "rows"),
    [
        ("noise-rho", "noise", "SAM/*"),
        ("noise-alpha", "noise", "GSAM/*"),
        ("noise-beta-gamma", "noise", "ESAM/*"),
        ("noise-gamma", "noise", "WSAM/*"),
        ("geometry-rho", "geometry", "WRN-28-10/SAM/+*"),
        ("geometry-gamma", "geometry", "WRN-28-10/WSAM/+*"),
        ("imagenet-rho", "imagenet", "SAM/*"),
        ("imagenet-alpha", "imagenet", "GSAM/*"),
        ("imagenet-gamma", "imagenet", "WSAM/*"),
    ],
)
def test_other_searches_contain_the_selected_runs(name, table, rows):
    """In every column, each contains the run of the table it belongs to."""
    search, selected = find(name), find(table).select(rows).seeded((0,))
    assert len(search.columns) == len(selected.cells)
    for cell, column in zip(selected.cells, search.columns, strict=True):
        runs = {c.runs[0].key for c in search.cells if c.column == column}
        assert cell.runs[0].key in runs, column


def test_noise_searches_use_the_rho_of_sam():
    """Values are those of CIFAR from scratch and, for WSAM, the values that the paper selected."""
    more_gammas = {0.91, 0.93}
    for name, plain, more in (
        ("noise-alpha", "alpha", set()),
        ("noise-beta-gamma", "beta-gamma", set()),
        ("noise-gamma", "gamma", more_gammas),
    ):
        grid = find_grid(name)
        for axis, values in find_grid(plain).axes.items():
            assert grid.axes[axis] == tuple(sorted({*values, *more}))
        assert {level: run.hyper["rho"] for level, run in grid.bases.items()} == {
            "20%": 0.2,
            "40%": 0.2,
            "60%": 0.1,
            "80%": 0.05,
        }
        assert [run.noise for run in grid.bases.values()] == [0.2, 0.4, 0.6, 0.8]
        assert "names no values" in grid.notes[0]
    assert not more_gammas & set(find_grid("gamma").axes["gamma"])


def test_search_sizes():
    sizes = {name: len(list(find_grid(name).points())) for name in GRIDS}
    assert sizes == {
        "lr-wd": 6,
        "rho": 6,
        "alpha": 6,
        "beta-gamma": 9,
        "gamma": 12,
        "noise-rho": 6,
        "noise-alpha": 6,
        "noise-beta-gamma": 9,
        "noise-gamma": 14,
        "geometry-rho": 13,
        "geometry-gamma": 8,
        "imagenet-rho": 14,
        "imagenet-alpha": 6,
        "imagenet-gamma": 10,
        "rho-gamma": 9,
    }
    assert all(find(name).kind is Kind.SEARCH for name in GRIDS)


def test_runs_are_ordered_by_seed():
    runs = find("cifar").seeded((2, 0)).runs
    assert [run.seed for run in runs] == [2] * 20 + [0] * 20


@pytest.mark.parametrize("name", ["cifar", "imagenet", "noise", "geometry", "lr-wd"])
def test_smoke_profile_makes_runs_small(name):
    small = Profile(smoke=True).table(find(name))
    assert len(small.cells) == len(find(name).cells)
    for cell, full in zip(small.cells, find(name).cells, strict=True):
        run, original = cell.runs[0], full.runs[0]
        assert (run.data, run.model, run.precision) == ("digits", "cnn", "fp32")
        assert run.epochs <= 4
        assert run.pretrained is None
        for same in ("method", "hyper", "geometry", "base_args", "noise", "schedule"):
            assert getattr(run, same) == getattr(original, same)
    assert not {run.key for run in small.runs} & {run.key for run in find(name).runs}
    assert "smoke test: small models" in small.title
    assert small.notes[0].endswith("Here every run trains a small CNN on digits.")


def test_smoke_runs_of_a_grid_on_a_table():
    """Digits have neither a target nor the metric of a regression."""
    given = {"target": "y", "task": "regression", "metric": "mse", "digests": {"data": "0" * 12}}
    grid = Grid("mine", "mine", {"t": Run(data="table:t.csv", **given)}, {"rho": (0.1, 0.2)})
    first, second = Profile(smoke=True, seeds=(0,)).table(grid_table(grid)).runs
    assert (first.data, first.model, first.target, first.metric) == ("digits", "mlp", None, None)
    assert first.key != second.key


def test_smoke_table_names_its_own_models():
    small = Profile(smoke=True).table(find("adam"))
    (note,) = (note.text for note in render.footnotes(small, []) if "full table" in note.text)
    assert "a tiny GPT on a file of this library" in note
    assert "a tiny ViT on digits" in note


def test_fewer_epochs_scale_all_runs():
    table = Profile(epochs=50).table(find("cifar"))
    epochs = {cell.row[1]: cell.runs[0].epochs for cell in table.cells}
    assert epochs == {"SGDM": 100, "SAM": 50, "ESAM": 50, "GSAM": 50, "WSAM": 50}
    assert table.title.endswith("(50 epochs instead of 200)")
    assert not table.comparable
    assert Profile(epochs=100).table(find("lr-wd")).runs[0].epochs == 200
    assert (
        Profile(epochs=1).table(find("imagenet")).cell(("SAM",), "top-1 error").runs[0].epochs == 1
    )


def test_epochs_of_the_paper_change_nothing():
    assert Profile(epochs=200).table(find("cifar")) == find("cifar")
    assert Profile(epochs=3).table(find("imagenet")) == find("imagenet")
    assert not Profile(epochs=3).table(find("cifar")).comparable
    assert not Profile(epochs=200).table(find("imagenet")).comparable
    assert not Profile(smoke=True, epochs=200).table(find("cifar")).comparable


def test_other_precision_stays_comparable():
    table = Profile(precision="fp32").table(find("cifar"))
    assert table.comparable
    assert table.title.endswith("(fp32)")


def test_precision_and_pretrained():
    table = Profile(precision="fp32", pretrained="/weights").table(find("imagenet"))
    assert all((r.precision, r.pretrained) == ("fp32", "/weights") for r in table.runs)
    assert all(
        r.pretrained is None for r in Profile(pretrained="/weights").table(find("cifar")).runs
    )


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("WSAM", 4),
        ("wsam", 4),
        ("ResNet18/*/CIFAR-10", 5),
        ("resnet18/*", 10),
        ("*SAM", 16),
        ("WRN-28-10/GSAM/CIFAR-100", 1),
    ],
)
def test_select(pattern, count):
    assert len(find("cifar").select(pattern).cells) == count


def test_select_without_match():
    with pytest.raises(ValueError, match=r"'ADAM'; its first is ResNet18/SGDM/CIFAR-10"):
        find("cifar").select("ADAM")


def test_unknown_name():
    with pytest.raises(ValueError, match=r"'cifer'; known: cifar, ablation, .*FILE.toml"):
        find("cifer")
    with pytest.raises(ValueError, match=r"noise is not a grid .* lr-wd, rho"):
        find_grid("noise")
    assert set(TABLES).isdisjoint(GRIDS)


@pytest.mark.parametrize(
    ("mean", "deviation", "decimals", "text"),
    [
        (3.616, 0.1, 2, "3.62 ± 0.10"),
        (18.17, 0.005, 2, "18.17 ± 0.005"),
        (20.51, 0.2, 2, "20.51 ± 0.20"),
        (0.0026, None, 4, "0.0026"),
        (5.0, 0.0, 2, "5.00 ± 0.00"),
    ],
)
def test_format_mean(mean, deviation, decimals, text):
    assert format_mean(mean, deviation, decimals) == text
    assert format_number(0.00031, 2) == "0.0003"
