"""`wsam report`: its figures equal the records, and no file of the folder stops it."""

import json
import os
import re
import shutil
import statistics
from contextlib import suppress
from dataclasses import replace

import pytest
from command import wsam_command
from recorded import as_recorded
from reporting import METHODS, RESULTS, make_folder, small

import wsam
from wsam._utils.plot_style import METHOD_STYLES
from wsam.lab import attempts, records
from wsam.lab.checkpoint import save_state
from wsam.lab.execution import ExecutionConfig
from wsam.lab.run import Run
from wsam.lab.train import train
from wsam.paper import minima
from wsam.report import gather, page, write
from wsam.report.charts import LineStyle
from wsam.report.commands import command, commands
from wsam.report.experiment import experiment_section, selection_note
from wsam.report.labels import (
    MAX_LINES,
    MAX_LINES_PER_METHOD,
    Experiment,
    LabeledGroup,
    assign_dashes,
    assign_shades,
    experiments,
)
from wsam.report.sections import reproduce_section
from wsam.sweep.jobs import Job, Status, run_job

ALL_METHODS = ["vanilla", *wsam.METHODS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def text(folder):
    return page(gather(folder))


def test_page_is_self_contained(text):
    assert not re.search(r"https?:|<link|<script|<img|<iframe|@import|url\((?!#)|<!--|{[{%#]", text)
    assert "default-src 'none'" in text
    assert text.count("<svg") > 8


def test_names_are_escaped(text):
    assert "&lt;script&gt;alert(1)" in text
    assert "&lt;script&gt;alert(3)" in text
    assert "onerror=alert(2)>" not in text
    assert "my &lt;b&gt;results&lt;/b&gt;" in text


def test_figures_equal_the_records(folder, text):
    for method in METHODS:
        found = [records.read(folder, small(method, seed=seed)) for seed in (0, 1)]
        errors = [record["curve"][-1]["test_error"] for record in found]
        mean, deviation = statistics.fmean(errors), statistics.stdev(errors)
        assert f"{mean:.2f} ± {deviation:.2f}" in text
    top = minima.read_measurement(folder, small("wsam"))["top_eigenvalue"]
    assert f">{top:.1f}<" in text


def test_problems_are_listed(folder, text):
    found = gather(folder)
    kinds = {trouble.kind: trouble for trouble in found.troubles}
    assert "1 of 3 epochs" in kinds["unfinished"].why
    assert "loss became" in kinds["failed"].why
    damaged = [trouble.what for trouble in found.troubles if trouble.kind == "damaged"]
    bad = f"{small('sam').key}.minimum.json"
    assert sorted(damaged) == sorted(["0123456789ab.json", "ba9876543210.json", bad])
    for what in (*damaged, "unfinished", "1 failed"):
        assert what in text
    assert "7 finished runs · 1 failed · 1 unfinished · 3 damaged" in text


def test_a_damaged_epoch_is_listed(tmp_path):
    run = small(epochs=1)
    record = train(run, tmp_path, ExecutionConfig(device="cpu"))
    for curve in ([], [{"epoch": 1}], [{**record["curve"][0], "test_error": "<b>"}], ["x"]):
        path = tmp_path / f"{run.key}.json"
        path.write_text(json.dumps({**record, "curve": curve}))
        (trouble,) = gather(tmp_path).troubles
        assert (trouble.what, trouble.kind) == (path.name, "damaged")
        assert "epoch" in trouble.why
        assert path.name in page(gather(tmp_path))


@pytest.mark.parametrize(
    "damage", [{"execution": "cpu"}, {"execution": {"processes": "two"}}, {"versions": ["2.9"]}]
)
def test_a_damaged_entry_does_not_stop_the_report(tmp_path, damage):
    row = {"epoch": 1, "train_loss": 0.1, "test_error": 7.0}
    records.write(tmp_path, small(), as_recorded(small(), row) | damage)
    assert small().key in page(gather(tmp_path))


def test_an_epoch_without_a_test_is_accepted(tmp_path):
    """Even though a table of the paper shows the best epoch."""
    path = tmp_path / "035028161f34.json"
    record = json.loads((RESULTS / path.name).read_text())
    record["curve"][3]["test_error"] = None
    path.write_text(json.dumps(record))
    found = gather(tmp_path)
    assert not found.troubles
    assert "best epoch" in page(found)


@pytest.mark.parametrize(
    "figure",
    ["NaN", *(pytest.param(text, marks=pytest.mark.slow) for text in ("9" * 400, "[" * 100_000))],
)
def test_an_invalid_number_is_listed_as_damage(results, figure):
    path = results / "baa03fb27915.json"
    record = json.loads(path.read_text())
    record["curve"][3]["test_error"] = "spoilt"
    path.write_text(json.dumps(record).replace('"spoilt"', figure))
    shown = wsam_command("report", results).stdout
    assert "2 finished runs in 2 groups" in shown
    assert f"damaged: {path.name}: {path} " in shown
    troubles = json.loads(wsam_command("report", results, "--json").stdout)["troubles"]
    assert [trouble["what"] for trouble in troubles] == [path.name]


@pytest.mark.parametrize("figure", [5e-324, 1e-310, 1.7e308])
def test_extreme_numbers_are_shown(tmp_path, figure):
    """Errors of a grid, in charts and a heat map, and of two seeds."""
    runs = [small("wsam", hyper={"rho": r, "gamma": g}) for r in (0.1, 0.2) for g in (0.5, 0.8)]
    for run in (*runs, runs[0].replace(seed=1)):
        row = {"epoch": 1, "train_loss": figure, "test_error": figure, "sharpness": -figure}
        records.write(tmp_path, run, as_recorded(run, row))
    assert "5 finished runs in 4 groups" in wsam_command("report", tmp_path).stdout


def test_text_of_files_cannot_control_the_terminal(results):
    record = as_recorded(small(), {"epoch": 1, "train_loss": None}, status="failed")
    records.write(results, small(), record | {"failure": "\x1b]0;title\x07 loss"})
    work = results / "work" / "ab0123456789" / "checkpoints"
    save_state(work / "000001.pt", {"run": '{"\\u001b[2J": 1}', "curve": []})
    shown = wsam_command("report", results).stdout
    assert r"\x1b]0;title\x07 loss" in shown
    assert r"\x1b[2J" in shown
    assert shown.isascii()
    assert not set(shown) & set(map(chr, range(9)))
    assert "\x1b" not in shown


def test_a_nested_run_in_a_checkpoint_is_listed_as_damage(results):
    work = results / "work" / "ab0123456789" / "checkpoints"
    save_state(work / "000001.pt", {"run": "[" * 100_000, "curve": []})
    shown = wsam_command("report", results).stdout
    assert "damaged: ab0123456789: its checkpoint cannot be read: is not valid JSON" in shown


def test_pipes_and_devices_are_listed_as_damage(results):
    os.mkfifo(results / "0123456789ab.json")
    (results / "ba9876543210.json").symlink_to("/dev/zero")
    shown = wsam_command("report", results).stdout
    assert shown.count("is not a regular file") == 2


def test_a_checkpoint_without_a_curve_is_listed_as_damage(results):
    work = results / "work" / "ab0123456789" / "checkpoints"
    save_state(work / "000001.pt", {"run": small().canonical})
    shown = wsam_command("report", results).stdout
    assert "damaged: ab0123456789: its checkpoint cannot be read" in shown


def test_a_single_run_has_no_deviation(tmp_path):
    record = train(small(), tmp_path, ExecutionConfig(device="cpu"))
    text = page(gather(tmp_path))
    assert f">{record['final']['test_error']:.2f}<" in text
    assert "1 finished run " in text
    assert "standard deviation." not in text


@pytest.mark.parametrize(
    "run",
    [
        Run(),
        small("wsam", seed=3, noise=0.4, noise_seed=5, schedule="constant"),
        Run(method="gsam", hyper={"rho": 0.1, "alpha": 0.3, "rho_min": 0.01}, precision="bf16"),
        Run(method="esam", hyper={"beta": 0.5, "gamma": 0.7}, augment=False, test_limit=9),
        Run(method="asam", hyper={"eta": 0.2, "weights_only": True}, options={"max_norm": 1.0}),
        Run(method="wsam", geometry={"name": "fisher", "eta": 0.5}, options={"lean": True}),
        Run(method="wsam", options={"every": 5, "reuse": True}),
        Run(method="wsam", base="adamw", options={"precondition": True}),
        Run(method="wsam", base="adamw"),
        Run(method="vanilla", base="adamw", base_args={"lr": 0.01, "betas": (0.8, 0.99)}),
        Run(base_args={"nesterov": True, "momentum": 0.5, "dampening": 0.0, "lr": 1e-5}),
        Run(data="folder:my pictures; rm -rf", model="timm:some 'net'", pretrained="a b"),
    ],
    ids=lambda run: run.title,
)
def test_commands_reproduce_the_run(run, monkeypatch):
    import shlex

    from wsam.cli import train as verb

    trained = []
    monkeypatch.setattr(verb, "_train", lambda run, *rest: trained.append((run, rest[1])))
    words = shlex.split(command(run, device="cpu", keep=True))
    wsam_command(*words[1:])
    ((again, execution),) = trained
    assert again == run
    assert again.key == run.key
    assert execution.device == "cpu"
    assert execution.keep_weights


def test_commands_leave_out_hyperparameters_without_a_value(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from wsam import SAM\n"
        "class Mine(SAM):\n"
        "    def __init__(self, base, *, rho=0.1, beta=None, model=None):\n"
        "        super().__init__(base, rho=rho, model=model)\n"
    )
    run = Run(method=f"{file}:Mine")
    assert run.hyper == {"beta": None, "rho": 0.1}
    assert "--beta" not in command(run), "None is not a number"


def test_commands_include_measurements(folder):
    by_key = {result.run.key: result for result in gather(folder).results}
    trained, measured = commands(by_key[small("wsam").key])
    assert trained.endswith("--device cpu --keep-checkpoint --out again")
    assert measured == f"wsam curvature again/{small('wsam').key}.json --top 1 --samples 128"
    several = by_key[small("wsam", seed=1).key]
    several.record["execution"]["processes"] = 4
    assert commands(several)[0].startswith(
        "torchrun --nproc_per_node 4 -m wsam train --data digits"
    )


def test_bit_identical_results_are_promised_only_for_one_thread(tmp_path, results):
    on_gpu = str(reproduce_section(experiments(gather(results).groups)).body)
    assert ", not bit-identical: on a GPU" in on_gpu
    assert "are bit-identical" not in on_gpu
    runs = [small(seed=seed, epochs=1) for seed in (0, 1)]
    written = [train(run, tmp_path, ExecutionConfig(device="cpu")) for run in runs]
    for run, record in zip(runs, written, strict=True):
        records.write(tmp_path, run, record | {"hardware": {"threads": 1}})
    text = page(gather(tmp_path))
    assert "These ran on one CPU thread: on the same kind of processor" in text
    assert "not bit-identical" not in text
    assert "runs/KEY" not in text
    records.write(tmp_path, runs[0], written[0] | {"hardware": {"threads": 2}})
    assert "1 of 2 ran on one CPU thread: " in page(gather(tmp_path))


@pytest.fixture
def results(tmp_path):
    """Three real records of the paper's setting: SGDM, SAM, WSAM, a seed each."""
    folder = tmp_path / "results"
    folder.mkdir()
    for key in ("baa03fb27915", "64f7cafec4f7", "c073e9a6c700"):
        for path in RESULTS.glob(f"{key}*.json"):
            shutil.copy(path, folder)
    return folder


def test_damaged_files_are_listed(results):
    """Also the measurement of a run in the table of minima."""
    bad = "baa03fb27915.minimum.json"
    for damage in ("{}", "[", '{"key": "baa03fb27915", "top_eigenvalue": null}'):
        (results / bad).write_text(damage)
        assert f"damaged: {bad}" in wsam_command("report", results).stdout
    (results / bad).unlink()
    for name in (bad, "0123456789ab.json"):
        (results / name).mkdir()
    work = results / "work" / "ab0123456789" / "checkpoints"
    save_state(work / "000001.pt", {"run": "{", "curve": []})
    shown = wsam_command("report", results).stdout
    assert "3 finished runs in 3 groups" in shown
    assert "0123456789ab.json is a folder, not a record" in shown
    assert "damaged: ab0123456789: its checkpoint cannot be read" in shown
    text = (results / "report.html").read_text()
    minima = text.partition("Minima of ResNet18")[2].partition("</table>")[0]
    assert "1 not measured" in minima
    assert minima.count("(n = ") == 12, "five figures of two rows, two of the damaged one's"


def test_the_runs_of_a_demonstration_are_found(tmp_path):
    train(small(), tmp_path / "demo" / "runs", ExecutionConfig(device="cpu"))
    own = tmp_path / "demo" / "report.html"
    own.write_text("its own")
    failed_timing = records.work_folder(tmp_path / "demo", small("sam"))
    failed_timing.mkdir(parents=True)
    shown = wsam_command("report", tmp_path / "demo").stdout
    assert f"using those in {tmp_path / 'demo' / 'runs'}\n" in shown
    assert f"wrote {tmp_path / 'demo' / 'runs' / 'report.html'}" in shown
    assert own.read_text() == "its own"
    text = (tmp_path / "demo" / "runs" / "report.html").read_text()
    assert "<h1>digits, mlp: 1 run</h1>" in text
    assert "1 group · folder demo/runs<" in text
    train(small("sam"), tmp_path / "demo", ExecutionConfig(device="cpu"))
    assert gather(tmp_path / "demo").path == tmp_path / "demo", "records of its own come first"


def test_tables_are_compared_with_the_paper(results):
    """Only rows, columns and notes for which there are results are shown."""
    text = page(gather(results))
    assert "Comparison with the paper" in text
    table = text.partition("Top-1 error (%) on CIFAR, trained from scratch")[2].partition(
        "</table>"
    )
    assert "3.62 ± 0.10" in table[0]
    assert "WRN-28-10" not in table[0]
    assert "Minima of ResNet18" in text
    assert "GSAM&#39;s rho" not in text
    assert "Coupled-WSAM" not in text
    assert "SGDM trains for twice as many epochs" in text
    assert "† Ours differs from the paper&#39;s" in text
    assert "6.94</span> <span>(n = 1) ‡" in text, "no deviation on either side"
    assert ">by batches<" in text
    for path in results.glob("*.minimum.json"):
        minimum = json.loads(path.read_text())
        kept = {k: v for k, v in minimum.items() if k not in ("by_batches", "on_test")}
        path.write_text(json.dumps(kept))
    assert ">by batches<" not in page(gather(results))
    (results / "c073e9a6c700.json").write_text("{")
    assert "Comparison with the paper" in page(gather(results)), "despite the damaged record"


@pytest.mark.slow
def test_smoke_tables_are_not_compared(tmp_path):
    run = ("paper", "run", "cifar", "--smoke", "--only", "ResNet18/*AM/CIFAR-10", "--seeds", "0")
    wsam_command(*run, "--device", "cpu", "--out", tmp_path)
    text = page(gather(tmp_path))
    assert "not to be compared with the paper" in text
    assert "†" not in text
    assert "CIFAR-10, paper" not in text


def test_a_refused_run_is_not_listed_as_unfinished(tmp_path):
    out = ("--out", tmp_path, "--device", "cpu")
    wsam_command("train", "--epochs", 1, "--model", "mlp", "--train-limit", 50, *out)
    missing = ("--data", "cifar10", "--no-download", "--data-dir", tmp_path / "nothing")
    wsam_command("train", *missing, *out, status=2)
    wsam_command("train", "--capture", *out, status=2)
    shown = wsam_command("report", tmp_path).stdout
    assert "1 finished run in 1 group\n" in shown
    assert "unfinished" not in shown


def test_a_run_that_raised_is_listed_with_its_title_and_reason(tmp_path):
    code = (
        "from torch import nn\n\n\nclass Net(nn.Linear):\n    def __init__(self):\n"
        "        super().__init__(64, 10)\n\n    def forward(self, x):\n"
        "        if len(x) > 9:\n            raise KeyError('price \\x1b[2J')\n"
        "        return super().forward(x.flatten(1))\n"
    )
    (tmp_path / "net.py").write_text(code)
    run = small("sam").replace(model=f"{tmp_path}/net.py:Net")
    for start in (train, lambda run, out: run_job(Job(run, out, ExecutionConfig()))):
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        with suppress(ValueError):
            start(run, out)
        (trouble,) = gather(out).troubles
        assert trouble.kind == "failed"
        assert trouble.what == run.title
        assert "raised KeyError: " in trouble.why
        assert "net.py, line 10)" in trouble.why
        assert "\x1b" not in trouble.why
        assert trouble.what in page(gather(out))


def test_a_run_that_was_killed_early_is_listed_with_its_title(tmp_path):
    run = small("sam")
    attempts.write(tmp_path, run)
    (trouble,) = gather(tmp_path).troubles
    assert (trouble.what, trouble.kind) == (run.title, "unfinished")
    assert trouble.why == "started; no checkpoint yet"
    (records.work_folder(tmp_path, run) / attempts.FILE_NAME).write_text("[]")
    (trouble,) = gather(tmp_path).troubles
    assert trouble.kind == "damaged"
    train(run, tmp_path, ExecutionConfig(device="cpu"))
    assert not (records.work_folder(tmp_path, run) / attempts.FILE_NAME).exists()


def test_a_sweep_lists_runs_that_could_not_begin(tmp_path):
    (tmp_path / "net.py").write_text("def net():\n    return {}['a']\n")
    run = small("sam").replace(model=f"{tmp_path}/net.py:net")
    out = tmp_path / "out"
    assert run_job(Job(run, out, ExecutionConfig(device="cpu"))).status is Status.ERROR
    (trouble,) = gather(out).troubles
    assert trouble.what == run.title
    assert "net raised KeyError: 'a'" in trouble.why


def test_a_grid_gets_a_heat_map(tmp_path):
    for rho in (0.05, 0.1):
        for gamma in (0.5, 0.8):
            run = small("wsam", hyper={"rho": rho, "gamma": gamma}, epochs=1)
            train(run, tmp_path, ExecutionConfig(device="cpu"))
    text = page(gather(tmp_path))
    assert "Test error (%) of WSAM by rho and gamma" in text


def test_command(folder, tmp_path):
    out = tmp_path / "page.html"
    shown = wsam_command("report", folder, "--out", out).stdout
    assert "7 finished runs in 5 groups" in shown
    assert f"wrote {out}" in shown
    assert out.read_text().startswith("<!DOCTYPE html>")
    printed = json.loads(wsam_command("report", folder, "--out", out, "--json").stdout)
    names = [group["name"] for one in printed["experiments"] for group in one["groups"]]
    assert "WSAM γ 0.8, ρ 0.1, lr 0.05" in names
    assert len(printed["troubles"]) == 5
    assert not list(folder.glob("*.tmp"))
    assert not (folder / "report.html").exists()
    assert write(folder)[0] == folder / "report.html"


@pytest.mark.parametrize("name", ["empty", "none"])
def test_a_folder_without_records_is_an_error(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.json").write_text("{}")
    error = wsam_command("report", tmp_path / name, status=2).stderr
    assert f"{name} holds no records" in error
    assert error.count("\n") == 1
    assert list((tmp_path / "empty").iterdir()) == [tmp_path / "empty" / "notes.json"]


def test_out_must_be_a_file(folder, tmp_path):
    assert "is a directory" in wsam_command("report", folder, "--out", tmp_path, status=2).stderr


def test_out_must_be_a_page(folder, tmp_path):
    """Elsewhere --out is a folder; here a slip would replace the user's own file."""
    own = tmp_path / "net.py"
    own.write_text("x = 1")
    message = wsam_command("report", folder, "--out", own, status=2).stderr
    assert "does not end in .html" in message
    assert own.read_text() == "x = 1"


def test_help_has_an_example():
    assert "Example: wsam report results" in wsam_command("report", "--help").stdout


def labeled(folder, *methods):
    """Return groups of several methods with the same results."""
    group = gather(folder).groups[0]
    runs = (
        group.run.replace(method=method, hyper={}, epochs=number)
        for number, method in enumerate(methods, 1)
    )
    groups = [replace(group, run=run) for run in runs]
    items = [LabeledGroup(g, str(n), LineStyle(g.run.method)) for n, g in enumerate(groups)]
    return assign_dashes(items)


def dash_patterns(html):
    """Return the dashes of all lines in the color of a method, in SVG attributes or in CSS."""
    found = []
    for tag in re.findall(r"<path [^>]*>", html):
        color = re.search(r"stroke: var\(--(\w+)\)", tag)
        if color and color[1].split("_")[0] not in {"soft", "grid"} and "-opacity" not in tag:
            dashes = re.search(r'stroke-dasharray(?:="|: )([\d., ]*)', tag)
            found.append(tuple(map(float, re.findall(r"[\d.]+", dashes[1] if dashes else ""))))
    return found


def test_lines_are_limited_to_distinguishable_ones(folder):
    groups = labeled(folder, *["wsam"] * 9, "sam", "sam")
    experiment = Experiment("t", tuple(groups))
    assert [item.style.color for item in experiment.plotted] == ["wsam"] * 4 + ["sam"] * 2
    assert "6 of 11 groups" in selection_note(experiment, experiment.plotted)
    assert selection_note(experiment, groups) == ""
    many = Experiment("t", tuple(labeled(folder, *ALL_METHODS * 2))).plotted
    assert len(many) == MAX_LINES


@pytest.mark.parametrize(
    "methods",
    [
        pytest.param(["vanilla", "sam", "wsam"], marks=pytest.mark.slow),
        pytest.param(ALL_METHODS, marks=pytest.mark.slow),
        ["sam", "sam", "vanilla", "wsam", "wsam"],
    ],
)
def test_lines_are_distinguishable_without_color(folder, methods):
    """By unique dashes, those of the method for its first line, in charts and legend alike."""
    groups = labeled(folder, *methods)
    dashes = [item.style.dashes for item in groups]
    assert len(set(dashes)) == len(groups)
    for method in set(methods):
        assert dashes[methods.index(method)] == METHOD_STYLES[method].dashes
    html = str(experiment_section(Experiment("t", tuple(groups))).body)
    legend, _, charts = html.partition('<ul class="legend">')[2].partition("</ul>")
    for shown in (legend, *re.findall("<figure>.*?</figure>", charts, re.DOTALL)):
        assert sorted(dash_patterns(shown)) == sorted(dashes)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_lines_of_one_method_have_different_shades(folder, count):
    groups = assign_shades(labeled(folder, *["wsam"] * count, "sam"))
    experiment = Experiment("t", tuple(groups))
    names = [item.style.css_name for item in experiment.plotted]
    assert len(set(names)) == len(names) == min(count, MAX_LINES_PER_METHOD) + 1
    assert names[-1] == "sam", "a single line has the color of the method"
    shades = [item.style.shade for item in experiment.plotted[:-1]]
    assert shades == [None] if count == 1 else shades == sorted(shades)
    body = str(experiment_section(experiment).body)
    _, _, charts = body.partition("</table>")
    assert {name for name in re.findall(r"var\(--(\w+)\)", charts) if "sam" in name} == set(names)


def test_every_color_is_in_the_style_sheet(text):
    for name in set(re.findall(r"var\(--(\w+)\)", text)):
        assert len(re.findall(rf"--{name}: [#r][^;]+;", text)) == 2, "light and dark"


def test_a_group_without_a_line_is_a_dot(folder):
    experiment = Experiment("t", tuple(labeled(folder, *["wsam"] * 9)))
    body = str(experiment_section(experiment).body)
    table = body.partition("</table>")[0]
    assert table.count('<path d="M1 5H41"') == MAX_LINES_PER_METHOD
    assert table.count("<circle") == 9 - MAX_LINES_PER_METHOD


def test_the_report_shows_the_runs_own_metric(tmp_path):
    rows = [{"epoch": 1, "train_loss": 0.5, "validation_r2": 0.25}, {"epoch": 2, "train_loss": 0.4}]
    rows[1] |= {"validation_r2": 0.5, "test_r2": 0.75}
    metric = {"name": "r2", "unit": "", "lower_is_better": False, "split": "validation"}
    digests = {"data": "0" * 12, "model": "1" * 12}
    for name in ("object:Data", "mine.py:data"):
        run = Run(data=name, model="mine.py:net", validation=0.5, digests=digests)
        records.write(tmp_path, run, as_recorded(run, *rows) | {"metric": metric})
    path, folder = write(tmp_path, tmp_path / "report.html")
    page = path.read_text()
    assert not folder.troubles
    for text in ("test r2", "Validation r2 after each epoch", "0.75", "seed 0: test r2 0.75"):
        assert text in page, text
    assert "test error" not in page
    assert page.count("wsam train --data") == 1  # objects cannot be named on a command line
    assert "--data mine.py:data --model mine.py:net" in page
