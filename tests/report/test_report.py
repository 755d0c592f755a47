"""`wsam report`: what it says of a folder equals the records in it, whatever lies there."""

import json
import re
import shutil
import statistics
from dataclasses import replace

import pytest
from command import wsam_command
from reporting import METHODS, RESULTS, make_folder, small

from wsam.lab import records
from wsam.lab.checkpoint import save_state
from wsam.lab.execution import ExecutionConfig
from wsam.lab.run import Run
from wsam.lab.train import train
from wsam.paper import minima
from wsam.plot_style import METHOD_STYLES
from wsam.report import gather, page, write
from wsam.report.charts import curves, errors, some
from wsam.report.commands import command, commands
from wsam.report.labels import MOST_LINES, MOST_OF_ONE, Experiment, Line, dashed, toned
from wsam.report.svg import Look, swatch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def text(folder):
    return page(gather(folder))


def test_page_stands_alone(text):
    assert not re.search(
        r"https?:|<link|<script|<img|<iframe|@import|url\(|<!--|/\*[A-Z]+\*/", text
    )
    assert "default-src 'none'" in text
    assert text.count("<svg") > 8


def test_names_are_escaped(text):
    assert "&lt;script&gt;alert(1)" in text
    assert "&lt;script&gt;alert(3)" in text
    assert "onerror=alert(2)>" not in text
    assert "my &lt;b&gt;results&lt;/b&gt;" in text


def test_figures_are_those_of_the_records(folder, text):
    for method in METHODS:
        found = [records.read(folder, small(method, seed=seed)) for seed in (0, 1)]
        errors = [record["curve"][-1]["test_error"] for record in found]
        mean, deviation = statistics.fmean(errors), statistics.stdev(errors)
        assert f"{mean:.2f} ± {deviation:.2f}" in text
    top = minima.read_measurement(folder, small("wsam"))["top_eigenvalue"]
    assert f">{top:.1f}<" in text


def test_troubles_are_listed(folder, text):
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


def test_an_epoch_that_is_damaged_is_told_of(tmp_path):
    run = small(epochs=1)
    record = train(run, tmp_path, ExecutionConfig(device="cpu"))
    for curve in ([], [{"epoch": 1}], [{**record["curve"][0], "test_error": "<b>"}], ["x"]):
        path = tmp_path / f"{run.key}.json"
        path.write_text(json.dumps({**record, "curve": curve}))
        (trouble,) = gather(tmp_path).troubles
        assert (trouble.what, trouble.kind) == (path.name, "damaged")
        assert "epoch" in trouble.why
        assert path.name in page(gather(tmp_path))


def test_an_epoch_that_was_not_tested_stops_no_report(tmp_path):
    """Not even where the paper's table tells the best epoch."""
    path = tmp_path / "035028161f34.json"
    record = json.loads((RESULTS / path.name).read_text())
    record["curve"][3]["test_error"] = None
    path.write_text(json.dumps(record))
    found = gather(tmp_path)
    assert not found.troubles
    assert "best epoch" in page(found)


@pytest.mark.parametrize("figure", ["9" * 400, "NaN", "[" * 100_000])
def test_what_is_no_figure_stops_no_report(results, figure):
    path = results / "baa03fb27915.json"
    record = json.loads(path.read_text())
    record["curve"][3]["test_error"] = "spoilt"
    path.write_text(json.dumps(record).replace('"spoilt"', figure))
    shown = wsam_command("report", results).stdout
    assert "2 finished runs in 2 groups" in shown
    assert f"damaged: {path.name}: {path} " in shown
    troubles = json.loads(wsam_command("report", results, "--json").stdout)["troubles"]
    assert [trouble["what"] for trouble in troubles] == [path.name]


def test_a_checkpoint_without_its_curve_stops_no_report(results):
    work = results / "work" / "ab0123456789" / "checkpoints"
    save_state(work / "000001.pt", {"run": small().canonical})
    shown = wsam_command("report", results).stdout
    assert "damaged: ab0123456789: its checkpoint cannot be read" in shown


def test_one_run_alone_has_no_deviation(tmp_path):
    record = train(small(), tmp_path, ExecutionConfig(device="cpu"))
    made = page(gather(tmp_path))
    assert f">{record['final']['test_error']:.2f}<" in made
    assert "1 finished run " in made
    assert "one deviation" not in made


@pytest.mark.parametrize(
    "run",
    [
        Run(),
        small("wsam", seed=3, noise=0.4, noise_seed=5, schedule="constant"),
        Run(method="gsam", hyper={"rho": 0.1, "alpha": 0.3, "rho_min": 0.01}, precision="bf16"),
        Run(method="esam", hyper={"beta": 0.5, "gamma": 0.7}, augment=False, test_limit=9),
        Run(method="asam", hyper={"eta": 0.2, "weights_only": True}, options={"max_norm": 1.0}),
        Run(method="wsam", geometry={"name": "fisher", "eta": 0.5}, options={"lean": True}),
        Run(method="vanilla", base="adamw", base_args={"lr": 0.01, "betas": (0.8, 0.99)}),
        Run(base_args={"nesterov": True, "momentum": 0.5, "dampening": 0.0, "lr": 1e-5}),
        Run(data="folder:my pictures; rm -rf", model="timm:some 'net'", pretrained="a b"),
    ],
    ids=lambda run: run.title,
)
def test_commands_make_the_same_run(run, monkeypatch):
    import shlex

    from wsam.cli import train as verb

    made = []
    monkeypatch.setattr(verb, "_train", lambda run, *rest: made.append((run, rest[1])))
    words = shlex.split(command(run, device="cpu", keep=True))
    wsam_command(*words[1:])
    ((again, means),) = made
    assert again == run
    assert again.key == run.key
    assert means.device == "cpu"
    assert means.keep_weights


def test_commands_name_what_was_measured(folder):
    by_key = {result.run.key: result for result in gather(folder).results}
    trained, measured = commands(by_key[small("wsam").key])
    assert trained.endswith("--device cpu --keep-checkpoint --out again")
    assert measured == f"wsam curvature again/{small('wsam').key}.json --top 1 --samples 128"
    team = by_key[small("wsam", seed=1).key]
    team.record["execution"]["processes"] = 4
    assert commands(team)[0].startswith("torchrun --nproc_per_node 4 -m wsam train --data digits")


def test_a_second_run_is_promised_no_more_than_is_true(tmp_path):
    """The same bits on one CPU thread alone, and a folder where it is trained at all."""
    assert "bit for bit" not in page(gather(RESULTS)), "these ran on a GPU"
    runs = [small(seed=seed, epochs=1) for seed in (0, 1)]
    made = [train(run, tmp_path, ExecutionConfig(device="cpu")) for run in runs]
    for run, record in zip(runs, made, strict=True):
        records.write(tmp_path, run, record | {"hardware": {"threads": 1}})
    text = page(gather(tmp_path))
    assert "These ran on one CPU thread: on such a processor" in text
    assert "drift" not in text
    assert "runs/KEY" not in text
    records.write(tmp_path, runs[0], made[0] | {"hardware": {"threads": 2}})
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


def test_damaged_files_stop_no_report(results):
    """Not even one of a run that stands in the table of minima."""
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


def test_the_demonstrations_runs_are_found(tmp_path):
    train(small(), tmp_path / "demo" / "runs", ExecutionConfig(device="cpu"))
    own = tmp_path / "demo" / "report.html"
    own.write_text("its own")
    shown = wsam_command("report", tmp_path / "demo").stdout
    assert f"using those in {tmp_path / 'demo' / 'runs'}\n" in shown
    assert f"wrote {tmp_path / 'demo' / 'runs' / 'report.html'}" in shown
    assert own.read_text() == "its own"
    assert "Results in demo/runs" in (tmp_path / "demo" / "runs" / "report.html").read_text()
    train(small("sam"), tmp_path / "demo", ExecutionConfig(device="cpu"))
    assert gather(tmp_path / "demo").path == tmp_path / "demo", "records of its own come first"


def test_tables_stand_beside_the_paper(results):
    """Ours, theirs, and only the rows and columns and notes there is something for."""
    text = page(gather(results))
    assert "Beside the paper" in text
    table = text.partition("Top-1 error (%) on CIFAR, trained from scratch")[2].partition(
        "</table>"
    )
    assert "3.62 ± 0.10" in table[0]
    assert "WRN-28-10" not in table[0]
    assert "Minima of ResNet18" in text
    assert "GSAM&#x27;s radius" not in text
    assert "Coupled-WSAM" not in text
    assert "SGDM trains for twice as many epochs" in text
    assert "ours, n = 1, has none:<ul><li>ResNet18/SAM/CIFAR-10: ours" in text
    assert "6.94</i> <i>(n = 1) ‡" in text, "no deviation on either side"
    assert ">by batches<" in text
    for path in results.glob("*.minimum.json"):
        minimum = json.loads(path.read_text())
        kept = {k: v for k, v in minimum.items() if k not in ("by_batches", "on_test")}
        path.write_text(json.dumps(kept))
    assert ">by batches<" not in page(gather(results))
    (results / "c073e9a6c700.json").write_text("{")
    assert "Beside the paper" in page(gather(results)), "a damaged record spoils no table"


def test_smoke_tables_are_shown_but_not_compared(tmp_path):
    run = ("paper", "run", "cifar", "--smoke", "--only", "ResNet18/*AM/CIFAR-10", "--seeds", "0")
    wsam_command(*run, "--device", "cpu", "--out", tmp_path)
    text = page(gather(tmp_path))
    assert "not to be compared with the paper" in text
    assert "†" not in text
    assert "CIFAR-10, paper" not in text


def test_a_refused_run_is_not_called_unfinished(tmp_path):
    out = ("--out", tmp_path, "--device", "cpu")
    wsam_command("train", "--epochs", 1, "--model", "mlp", "--train-limit", 50, *out)
    missing = ("--data", "cifar10", "--no-download", "--data-dir", tmp_path / "nothing")
    wsam_command("train", *missing, *out, status=2)
    wsam_command("train", "--capture", *out, status=2)
    shown = wsam_command("report", tmp_path).stdout
    assert "1 finished run in 1 group\n" in shown
    assert "unfinished" not in shown


def test_a_grid_gets_a_map(tmp_path):
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
    told = json.loads(wsam_command("report", folder, "--out", out, "--json").stdout)
    names = [group["name"] for one in told["experiments"] for group in one["groups"]]
    assert "WSAM γ 0.8, ρ 0.1, lr 0.05" in names
    assert len(told["troubles"]) == 5
    assert not list(folder.glob("*.tmp"))
    assert not (folder / "report.html").exists()
    assert write(folder)[0] == folder / "report.html"


@pytest.mark.parametrize(("name", "said"), [("empty", "holds no records"), ("none", "no folder")])
def test_a_folder_without_records_is_one_line(tmp_path, name, said):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.json").write_text("{}")
    error = wsam_command("report", tmp_path / name, status=2).stderr
    assert said in error
    assert error.count("\n") == 1
    assert list((tmp_path / "empty").iterdir()) == [tmp_path / "empty" / "notes.json"]


def test_out_must_be_a_file(folder, tmp_path):
    assert "is a directory" in wsam_command("report", folder, "--out", tmp_path, status=2).stderr


def test_help_has_an_example():
    assert "Example: wsam report results" in wsam_command("report", "--help").stdout


def lines_of(folder, *methods):
    """Return lines of methods that have all the same figures."""
    group = gather(folder).groups[0]
    groups = [replace(group, run=group.run.replace(method=method, hyper={})) for method in methods]
    return dashed([Line(g, str(n), Look(g.run.method)) for n, g in enumerate(groups)])


def test_no_more_lines_than_can_be_told_apart(folder):
    lines = lines_of(folder, *["wsam"] * 9, "sam", "sam")
    drawn = Experiment("t", tuple(lines)).drawn
    assert [line.look.color for line in drawn] == ["wsam"] * 4 + ["sam"] * 2
    assert "6 of 11 groups" in some(lines, drawn)
    assert some(drawn, drawn) == ""
    many = Experiment("t", tuple(lines_of(folder, *[*METHOD_STYLES][1:] * 2))).drawn
    assert len(many) == MOST_LINES


@pytest.mark.parametrize(
    "methods",
    [["vanilla", "sam", "wsam"], [*METHOD_STYLES][1:], ["sam", "sam", "vanilla", "wsam", "wsam"]],
)
def test_lines_are_told_apart_without_colours(folder, methods):
    """By dashes: a method's own for its first line, and none twice, in charts and legend alike."""
    lines = lines_of(folder, *methods)
    dashes = [line.look.dashes for line in lines]
    assert len(set(dashes)) == len(lines)
    for method in set(methods):
        assert dashes[methods.index(method)] == METHOD_STYLES[method].dashes
    html = curves(Experiment("t", tuple(lines)))
    for shown in (html.partition("</ul>")[0], *re.findall("<figure>.*?</figure>", html)):
        found = re.findall(r'class="c-\w+"(?: stroke-dasharray="([\d ]+)")?', shown)
        assert sorted(found) == sorted(" ".join(map(str, one)) for one in dashes)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_lines_of_one_method_have_tones_of_their_own(folder, count):
    lines = toned(lines_of(folder, *["wsam"] * count, "sam"))
    drawn = Experiment("t", tuple(lines)).drawn
    paints = [line.look.paint for line in drawn]
    assert len(set(paints)) == len(paints) == min(count, MOST_OF_ONE) + 1
    assert paints[-1] == "sam", "one alone has the method's own colour"
    shades = [line.look.tone for line in drawn[:-1]]
    assert shades == [None] if count == 1 else shades == sorted(shades)
    for html in (curves(Experiment("t", tuple(lines))), errors(Experiment("t", tuple(lines)))):
        painted = {name for name in re.findall(r"[cf]-(\w+)", html) if name in paints}
        assert painted == set(paints)


def test_every_paint_is_in_the_style_sheet(folder):
    text = page(gather(folder))
    for name in ("wsam", *(f"wsam_{tone}" for tone in range(MOST_OF_ONE))):
        assert f".c-{name} {{ stroke: var(--{name}); }}" in text
        assert len(re.findall(rf"--{name}: #[0-9a-f]{{6}};", text)) == 2, "light and dark"


def test_what_is_not_drawn_is_a_dot(folder):
    assert "<circle" in swatch(lines_of(folder, *["wsam"] * 9)[-1].look)
    assert "<path" in swatch(lines_of(folder, "wsam")[0].look)


def test_epochs_below_the_curves_are_whole(folder):
    html = curves(Experiment("t", tuple(lines_of(folder, "wsam"))))
    for shown in re.findall("<figure>.*?</figure>", html):
        marks = re.findall(r'y="256" class="mid">([^<]*)<', shown)
        assert marks == ["1", "2", "3"]
