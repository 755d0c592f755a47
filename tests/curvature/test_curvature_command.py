"""`wsam curvature` and `wsam landscape` on runs of the lab and on plain state dicts."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from command import COMMANDS, wsam_command
from torch.nn import functional as F

from wsam.curvature import hessian, top_eigenvalues
from wsam.lab import data, models, records
from wsam.lab.batches import noisy
from wsam.lab.means import Means
from wsam.lab.run import Run
from wsam.lab.subject import FixedBatches, fill, open_subject, read_checkpoint
from wsam.lab.train import train

RUN = Run(data="digits", model="mlp", method="wsam", epochs=2, train_limit=150, noise=0.2)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    means = Means(device="cpu", keep_weights=True)
    train(RUN, folder, means)
    train(RUN.replace(seed=1), folder, means)
    return folder


@pytest.fixture
def record(out: Path) -> Path:
    return records.record_path(out, RUN)


def measured(*words: object) -> dict:
    return json.loads(wsam_command("curvature", *words, "--device", "cpu", "--json").stdout)


def test_numbers_are_those_of_the_library(record):
    found = measured(record, "--top", 2, "--samples", 100, "--batch-size", 40)
    subject = open_subject(record, Means(device="cpu"), samples=100, batch_size=100)
    H = hessian(subject.model, F.cross_entropy, subject.batches)
    expected = top_eigenvalues(H, 2)
    assert found["eigenvalues"]["values"] == pytest.approx(expected.values.tolist(), rel=1e-3)
    assert found["eigenvalues"]["converged"] == [True, True]
    assert found["info"]["samples"] == 100
    assert found["info"]["batches"] == 3
    assert found["info"]["loss"] == pytest.approx(H.info.loss, rel=1e-5)
    assert found["accuracy"] == pytest.approx(subject.accuracy())
    made_with = records.read(record.parent, RUN)
    for name in ("hardware", "versions", "commit"):
        assert found[name] == made_with[name]
    assert (found["split"], found["seed"]) == ("train", 0)
    assert found["seconds"] > 0


def test_everything_at_once_with_plots_and_a_table(record, tmp_path):
    words = ("--samples", 60, "--top", 1, "--which", "both", "--trace", "--density")
    measures = ("--sharpness", 0.05, "--steps", 2, "--adaptive", "--average", 0.01)
    answer = wsam_command("curvature", record, *words, *measures, "--out", tmp_path / "seen")
    for word in ("eigenvalue 2", "trace", "below zero", "average sharpness", "60 train images"):
        assert word in answer.stdout
    saved = json.loads((tmp_path / "seen" / "curvature.json").read_text())
    assert saved["density"]["mass"] == pytest.approx(1, abs=1e-6)
    assert saved["sharpness"]["measure"] == "worst adaptive"
    for name in ("density.png", "density.html"):
        assert (tmp_path / "seen" / name).stat().st_size > 1000


def test_what_has_not_converged_names_the_options_that_help(record):
    common = (record, "--samples", 60, "--top", 0)
    few = measured(*common, "--trace", "--trace-tol", 1e-9, "--trace-products", 60)["trace"]
    assert (few["products"], few["converged"]) == (60, False)
    assert measured(*common, "--trace", "--trace-tol", 5)["trace"]["converged"]
    assert measured(*common, "--density", "--density-probes", 1)["density"]["probes"] == 1
    words = (
        "--trace",
        "--trace-products",
        2,
        "--density",
        "--density-probes",
        1,
        "--device",
        "cpu",
    )
    shown = wsam_command("curvature", *common, *words).stdout
    assert "standard error unknown, not converged: raise --trace-products or --trace-tol" in shown
    unsure = "1 probe of 60 steps, not converged: raise --density-probes or --density-steps"
    assert shown.count(unsure) == 2
    assert "standard error" in shown
    page = (Path(__file__).parents[2] / "docs" / "curvature.md").read_text()
    for option in (
        "--trace-tol 0.02",
        "--trace-products 300",
        "--density-probes 10",
        "--density-steps 60",
    ):
        name, default = option.split()
        assert f"`{option}`" in page
        (found,) = (o for o in COMMANDS["curvature"].params if name in o.opts)
        assert found.default == float(default)


def test_shares_below_zero_are_shown_between_their_bounds(record):
    common = (record, "--samples", 60, "--top", 0, "--density", "--device", "cpu")
    found = measured(*common, "--density-steps", 30)["density"]
    assert found["steps"] == 30
    low, high = found["below_zero"]["low"], found["below_zero"]["high"]
    assert high - low > 0.1  # pixels that are always dark leave many zeros
    shown = wsam_command("curvature", *common, "--density-steps", 30).stdout
    assert f"below zero  {100 * low:.1f}% to {100 * high:.1f}%" in " ".join(shown.split(" " * 4))
    assert f"below {-found['sigma']:.3g}" in shown
    fisher = wsam_command("curvature", *common, "--operator", "empirical_fisher").stdout
    assert "0.0%  of the eigenvalues: positive semi-definite by definition" in fisher


def test_eigenvalues_that_may_be_missing_are_not_shown_as_converged(record):
    common = (record, "--samples", 20, "--top", 3, "--which", "smallest", "--device", "cpu")
    words = (*common, "--operator", "empirical_fisher")
    whole = measured(*words, "--block", 3)["eigenvalues"]
    assert whole["complete"]
    assert max(map(abs, whole["values"])) < 1e-3
    few = measured(*words, "--top-products", whole["products"] // 2)["eigenvalues"]
    assert few["products"] <= whole["products"] // 2
    assert not few["complete"]
    shown = wsam_command("curvature", *words, "--top-products", whole["products"] // 2).stdout
    assert "not converged: raise --tol or --top-products" in shown
    assert "true to within" in shown


def test_too_few_products_for_all_eigenvalues_show_those_found(record):
    words = (record, "--samples", 32, "--top", 3, "--block", 2, "--top-products", 3)
    found = measured(*words)["eigenvalues"]
    assert (len(found["values"]), found["products"], found["complete"]) == (2, 2, False)
    shown = wsam_command("curvature", *words, "--device", "cpu").stdout
    assert "eigenvalue 2" in shown
    assert "eigenvalue 3" not in shown
    assert shown.count("not converged: raise --tol or --top-products") == 2


def test_every_form_of_checkpoint(out, record, tmp_path):
    expected = measured(record, "--samples", 50)["eigenvalues"]["values"]
    work = records.work_folder(out, RUN)
    for form in (work, work / "weights.pt"):
        assert measured(form, "--samples", 50)["eigenvalues"]["values"] == pytest.approx(expected)
    state, run = read_checkpoint(record)
    assert run == RUN
    # Elsewhere and wrapped: the file alone does not say what it is of, nor its noisy labels.
    wrapped = {"state_dict": {f"module._orig_mod.{name}": t for name, t in state.items()}}
    torch.save(wrapped, tmp_path / "plain.pt")
    said = ("--model", "mlp", "--data", "digits", "--samples", 50, "--split", "test")
    plain = measured(tmp_path / "plain.pt", *said)
    known = measured(record, "--samples", 50, "--split", "test")
    assert plain["eigenvalues"]["values"] == pytest.approx(known["eigenvalues"]["values"])


def test_a_plain_state_dict_may_lie_right_below_the_root():
    state = {"weight": torch.arange(3.0)}
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        for place in (Path(folder), Path("/tmp")):
            with tempfile.NamedTemporaryFile(dir=place, suffix=".pt") as file:
                torch.save(state, file.name)
                found, run = read_checkpoint(Path(file.name))
                assert run is None
                assert torch.equal(found["weight"], state["weight"])


@pytest.mark.parametrize("text", ['{"layers": 3}', "[1]", "not JSON", '{"sha256": "0"}'])
def test_a_json_beside_a_plain_state_dict_is_no_manifest(tmp_path, text):
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.pt")
    (tmp_path / "model.json").write_text(text)
    found, run = read_checkpoint(tmp_path / "model.pt")
    assert (found["weight"].tolist(), run) == ([1.0, 1.0], None)


def test_a_rise_beyond_all_numbers_is_null_in_json_and_words_in_a_table(record):
    words = (record, "--top", 0, "--samples", 20, "--sharpness", 1e19)
    assert measured(*words)["sharpness"]["value"] is None
    assert "not finite" in wsam_command("curvature", *words, "--device", "cpu").stdout


def test_an_interrupted_run_can_be_measured(out, tmp_path):
    from wsam.lab.checkpoint import Checkpoints

    state, _ = read_checkpoint(records.record_path(out, RUN))
    folder = tmp_path / "work" / RUN.key
    Checkpoints(folder / "checkpoints").save(1, {"run": RUN.canonical, "model": state})
    for form in (folder, folder / "checkpoints" / "000001.pt"):
        found, run = read_checkpoint(form)
        assert run == RUN
        assert all(torch.equal(found[name], state[name]) for name in state)


def test_training_images_come_unaugmented_with_the_runs_own_labels(record):
    subject = open_subject(record, Means(device="cpu"), batch_size=64)
    first, again = (list(subject.batches) for _ in range(2))
    assert len(subject.batches) == len(first) == 3
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    labels = torch.cat([labels for _, labels in first])
    clean = data.load("digits", Means().source).train_labels[:150]
    assert torch.equal(labels, noisy(clean, 10, RUN.noise, RUN.noise_seed))
    assert not torch.equal(labels, clean)
    with pytest.raises(ValueError, match="at least 1"):
        FixedBatches(subject.batches.feed, "train", 0, 10)


def test_folders_of_images_are_read_in_a_fixed_order(tmp_path):
    from PIL import Image

    for part in ("train", "val"):
        for number, name in enumerate(("cat", "dog")):
            folder = tmp_path / "pets" / part / name
            folder.mkdir(parents=True)
            for index in range(3):
                Image.new("RGB", (40, 30), (40 * index, 90 * number, 0)).save(
                    folder / f"{index}.png"
                )
    from wsam.lab.folder import FolderFeed

    feed = FolderFeed(tmp_path / "pets", 2, torch.device("cpu"), 0, False, size=8, workers=0)
    for split in ("train", "test"):
        batches = FixedBatches(feed, split, 5, 2)
        first, again = list(batches), list(batches)
        assert [len(labels) for _, labels in first] == [2, 2, 1]
        assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
        assert torch.cat([labels for _, labels in first]).unique().tolist() == [0, 1]


def test_landscapes_of_all_kinds(out, record, tmp_path):
    common = ("--samples", 40, "--points", 5, "--device", "cpu", "--json", "--out", tmp_path)
    line = json.loads(wsam_command("landscape", record, *common).stdout)
    assert line["coordinates"] == [[-1.0, -0.5, 0.0, 0.5, 1.0]]
    assert line["losses"][2] == pytest.approx(line["info"]["loss"], rel=1e-5)
    saved = json.loads((tmp_path / "landscape.json").read_text())
    assert {**saved, "files": line["files"]} == line
    for name in ("hardware", "versions", "commit"):
        assert saved[name] == records.read(out, RUN)[name]
    plane = json.loads(
        wsam_command("landscape", record, "--dimensions", 2, "--along", "eigen", *common).stdout
    )
    assert len(plane["losses"]) == len(plane["losses"][0]) == 5
    assert plane["axes"][0].startswith("eigenvector 1 (eigenvalue")
    other = records.record_path(out, RUN.replace(seed=1))
    path = json.loads(
        wsam_command("landscape", record, "--to", other, "--radius", 0.5, *common).stdout
    )
    assert path["coordinates"] == [[-0.5, 0.0, 0.5, 1.0, 1.5]]
    assert path["losses"][1] == pytest.approx(line["info"]["loss"], rel=1e-5)
    assert path["losses"][3] == pytest.approx(
        measured(other, "--samples", 40)["info"]["loss"], rel=1e-4
    )
    assert all(Path(file).stat().st_size > 100 for file in path["files"])
    shown = wsam_command("landscape", record, *common[:6], "--log", "--out", tmp_path / "new")
    assert "landscape.html" in shown.stdout


def refused(*words: object) -> str:
    answer = wsam_command(*words, "--device", "cpu", status=2)
    assert answer.stdout == ""
    assert answer.stderr.count("\n") == 1
    return answer.stderr


def test_wrong_checkpoints_get_one_clear_line(out, record, tmp_path):
    assert "no checkpoint" in refused("curvature", tmp_path / "nothing.pt")
    (tmp_path / "text.pt").write_text("not tensors")
    assert "not a file of tensors" in refused("curvature", tmp_path / "text.pt")
    (tmp_path / "empty.pt").touch()
    assert "is not a file of tensors: it is empty" in refused("curvature", tmp_path / "empty.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    assert "holds list, not a state dict" in refused("curvature", tmp_path / "list.pt")
    torch.save({"a": 1}, tmp_path / "odd.pt")
    assert "names with their tensors" in refused("curvature", tmp_path / "odd.pt")
    torch.save({"w": torch.ones(1)}, tmp_path / "other.pt")
    assert "both --model and --data" in refused("curvature", tmp_path / "other.pt")
    said = ("--model", "mlp", "--data", "digits")
    assert "does not fit mlp on digits" in refused("curvature", tmp_path / "other.pt", *said)
    state = models.build("mlp", models.Task((1, 8, 8), 7), 0).state_dict()
    torch.save(state, tmp_path / "seven.pt")
    assert "is of shape (7," in refused("curvature", tmp_path / "seven.pt", *said)
    right = read_checkpoint(record)[0]
    torch.save({**right, "extra": torch.ones(1)}, tmp_path / "more.pt")
    assert "the model has no 'extra'" in refused("curvature", tmp_path / "more.pt", *said)
    (tmp_path / "empty").mkdir()
    assert "neither weights nor a checkpoint" in refused("curvature", tmp_path / "empty")
    nan = {name: tensor * torch.nan for name, tensor in right.items()}
    torch.save(nan, tmp_path / "nan.pt")
    assert "loss of batch 0 is nan" in refused("curvature", tmp_path / "nan.pt", *said)
    bare = train(RUN.replace(epochs=1), tmp_path / "bare", Means(device="cpu"))
    assert "kept no weights" in refused("curvature", tmp_path / "bare" / f"{bare['key']}.json")
    weights = records.weights_path(out, RUN)
    damaged = tmp_path / "weights.pt"
    damaged.write_bytes(weights.read_bytes()[:-10])
    damaged.with_suffix(".json").write_bytes(weights.with_suffix(".json").read_bytes())
    assert "is damaged" in refused("curvature", damaged, *said)


def test_of_several_tensors_that_do_not_fit_the_same_one_is_named():
    layers = {f"layer{number}": torch.nn.Linear(1, 1) for number in range(10, 60)}
    model = torch.nn.ModuleDict(layers)
    with pytest.raises(ValueError, match=r"^odd: it has no 'layer10\.bias'$"):
        fill(model, {}, "odd")
    more = {f"more{number}": torch.ones(1) for number in range(10, 60)}
    with pytest.raises(ValueError, match=r"^odd: the model has no 'more10'$"):
        fill(model, {**model.state_dict(), **more}, "odd")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("curvature", "--operator", "kfac"),
            "--operator must be hessian, gauss_newton or empirical_fisher",
        ),
        (("curvature", "--which", "top"), "--which must be largest, smallest or both, not top"),
        (("curvature", "--precision", "bf16"), "--precision must be"),
        (("curvature", "--mode", "half"), "--mode must be eval or train, not half"),
        (("curvature", "--method", "qr"), "--method must be lanczos or power, not qr"),
        (("curvature", "--tol", "2"), "--tol must lie between 0 and 1, not 2.0"),
        (("curvature", "--trace-tol", "0"), "--trace-tol must be above 0, not 0.0"),
        (("curvature", "--trace-tol", "nan"), "--trace-tol must be above 0, not nan"),
        (("curvature", "--trace-products", "1"), "invalid value for '--trace-products'"),
        (("curvature", "--density-probes", "0"), "invalid value for '--density-probes'"),
        (("curvature", "--density-steps", "1"), "invalid value for '--density-steps'"),
        (("curvature", "--top-products", "0"), "invalid value for '--top-products'"),
        (("curvature", "--block", "0"), "invalid value for '--block'"),
        (("curvature", "--adaptive"), "--adaptive needs --sharpness or --average"),
        (("curvature", "--steps", "10"), "--steps needs --sharpness: alone it changes nothing"),
        (("curvature", "--steps", "1"), "--steps needs --sharpness: alone it changes nothing"),
        (("curvature", "--steps", "0", "--sharpness", "1"), "invalid value for '--steps'"),
        (("curvature", "--trace-tol", "0.1"), "--trace-tol needs --trace"),
        (("curvature", "--density-steps", "9"), "--density-steps needs --density"),
        (("curvature", "--split", "dev"), "--split must be train or test, not dev"),
        (("curvature", "--samples", "0"), "invalid value for '--samples'"),
        (("curvature", "--batch-size", "0"), "invalid value for '--batch-size'"),
        (("curvature", "--data", "mnist"), "unknown data 'mnist'"),
        (("curvature", "--model", "vgg"), "unknown model 'vgg'"),
        (("curvature", "--sharpness", "-1"), "--sharpness must be above 0, not -1.0"),
        (("curvature", "--average", "nan"), "--average must be above 0, not nan"),
        (("landscape", "--samples", "0"), "invalid value for '--samples'"),
        (("landscape", "--split", "dev"), "--split must be train or test, not dev"),
        (("landscape", "--dimensions", "3"), "--dimensions must be 1 or 2"),
        (("landscape", "--radius", "0"), "--radius must be above 0"),
        (("landscape", "--radius", "inf"), "--radius must be above 0"),
        (("landscape", "--radius", "nan"), "--radius must be above 0"),
        (("landscape", "--along", "north"), "--along must be random or eigen"),
        (("landscape", "--dimensions", "2", "--to", "x.pt"), "between two checkpoints lies a line"),
    ],
)
def test_wrong_options_get_one_clear_line(record, words, message):
    verb, *rest = words
    assert message in refused(verb, record, *rest, *(["--top", 1] if verb == "curvature" else []))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--top", "-1"), "invalid value for '--top'"),
        (("--top", "0"), "nothing to measure: give one of --top above 0, --trace"),
        (("--top", "0", "--trace", "--which", "both"), "--which needs --top above 0"),
    ],
)
def test_what_would_measure_nothing_is_refused(record, words, message):
    assert message in refused("curvature", record, *words)


def test_pictures_that_cannot_be_drawn_are_refused_before_anything_is_measured(
    record, monkeypatch, tmp_path
):
    from importlib import util

    known = util.find_spec
    monkeypatch.setattr(
        util, "find_spec", lambda name, *rest: None if name == "matplotlib" else known(name, *rest)
    )
    monkeypatch.setattr("wsam.lab.subject.open_subject", lambda *_, **__: pytest.fail("measured"))
    for words in (("curvature", record, "--density"), ("landscape", record)):
        assert "pip install 'wsam[plots]'" in refused(*words, "--out", tmp_path / "seen")
    assert not (tmp_path / "seen").exists()


def test_help_has_an_example():
    for verb in ("curvature", "landscape"):
        assert f"Example: wsam {verb}" in wsam_command(verb, "--help").stdout
