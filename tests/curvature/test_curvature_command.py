"""The `wsam curvature` and `wsam landscape` commands, on runs and on state dicts."""

import json
import sys
from pathlib import Path

import pytest
import torch
from command import COMMANDS, error_of, wsam_command
from torch.nn import functional as F

from wsam.curvature import hessian, top_eigenvalues
from wsam.lab import models, records
from wsam.lab.data import datasets
from wsam.lab.data.feed import add_label_noise
from wsam.lab.execution import ExecutionConfig
from wsam.lab.loaded_model import FixedBatches, load_model, load_weights, read_checkpoint
from wsam.lab.run import Run
from wsam.lab.train import train

RUN = Run(data="digits", model="mlp", method="wsam", epochs=2, train_limit=150, noise=0.2)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    means = ExecutionConfig(device="cpu", keep_weights=True)
    train(RUN, folder, means)
    train(RUN.replace(seed=1), folder, means)
    return folder


@pytest.fixture
def record(out: Path) -> Path:
    return records.record_path(out, RUN)


def measured(*words: object) -> dict:
    return json.loads(wsam_command("curvature", *words, "--device", "cpu", "--json").stdout)


def test_values_equal_those_of_the_library(record):
    found = measured(record, "--top", 2, "--samples", 100, "--batch-size", 40)
    subject = load_model(record, ExecutionConfig(device="cpu"), samples=100, batch_size=100)
    H = hessian(subject.model, F.cross_entropy, subject.batches)
    expected = top_eigenvalues(H, 2)
    assert found["eigenvalues"]["values"] == pytest.approx(expected.values.tolist(), rel=1e-3)
    assert found["eigenvalues"]["converged"] == [True, True]
    assert found["info"]["samples"] == 100
    assert found["info"]["batches"] == 3
    assert found["info"]["loss"] == pytest.approx(H.info.loss, rel=1e-5)
    assert found["accuracy"] == pytest.approx(subject.accuracy())
    written = records.read(record.parent, RUN)
    for name in ("hardware", "versions", "commit"):
        assert found[name] == written[name]
    assert (found["split"], found["seed"]) == ("train", 0)
    assert found["seconds"] > 0


def test_all_measurements_with_plots_and_a_table(record, tmp_path):
    words = ("--samples", 60, "--top", 1, "--which", "both", "--trace", "--trace-tol", 0.2)
    words += ("--density", "--density-probes", 2, "--density-steps", 30)
    measures = ("--sharpness", 0.05, "--steps", 2, "--adaptive", "--average", 0.01)
    output = wsam_command("curvature", record, *words, *measures, "--out", tmp_path / "figures")
    for word in ("eigenvalue 2", "trace", "below zero", "average sharpness", "60 train samples"):
        assert word in output.stdout
    saved = json.loads((tmp_path / "figures" / "curvature.json").read_text())
    assert saved["density"]["mass"] == pytest.approx(1, abs=1e-6)
    assert saved["sharpness"]["measure"] == "worst adaptive"
    for name in ("density.png", "density.html"):
        assert (tmp_path / "figures" / name).stat().st_size > 1000


def test_unconverged_values_name_the_options_to_raise(record):
    common = (record, "--samples", 60, "--top", 0)
    few = measured(*common, "--trace", "--trace-tol", 1e-9, "--trace-products", 60)["trace"]
    assert (few["products"], few["converged"]) == (60, False)
    assert measured(*common, "--trace", "--trace-tol", 5)["trace"]["converged"]
    assert measured(*common, "--density", "--density-probes", 1)["density"]["probes"] == 1
    words = ("--trace", "--trace-products", 2, "--density", "--density-probes", 1)
    printed = wsam_command("curvature", *common, *words, "--device", "cpu").stdout
    assert "standard error unknown, not converged: raise --trace-products or --trace-tol" in printed
    note = "1 probe of 60 steps, not converged: raise --density-probes or --density-steps"
    assert printed.count(note) == 2
    assert "standard error" in printed
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


@pytest.mark.slow
def test_fractions_below_zero_are_shown_with_their_bounds(record):
    common = (record, "--samples", 60, "--top", 0, "--density", "--density-probes", 3)
    common += ("--device", "cpu")
    found = measured(*common, "--density-steps", 30)["density"]
    assert found["steps"] == 30
    low, high = found["below_zero"]["low"], found["below_zero"]["high"]
    assert high - low > 0.1  # constant pixels give many zero eigenvalues
    printed = wsam_command("curvature", *common, "--density-steps", 30).stdout
    assert f"below zero  {100 * low:.1f}% to {100 * high:.1f}%" in " ".join(printed.split(" " * 4))
    assert f"below {-found['sigma']:.3g}" in printed
    fisher = wsam_command("curvature", *common, "--operator", "empirical_fisher").stdout
    assert "0.0%  of the eigenvalues: positive semi-definite by definition" in fisher


def test_possibly_missed_eigenvalues_are_not_shown_as_converged(record):
    common = (record, "--samples", 20, "--top", 3, "--which", "smallest", "--device", "cpu")
    words = (*common, "--operator", "empirical_fisher")
    whole = measured(*words, "--block", 3)["eigenvalues"]
    assert whole["complete"]
    assert max(map(abs, whole["values"])) < 1e-3
    few = measured(*words, "--top-products", whole["products"] // 2)["eigenvalues"]
    assert few["products"] <= whole["products"] // 2
    assert not few["complete"]
    printed = wsam_command("curvature", *words, "--top-products", whole["products"] // 2).stdout
    assert "not converged: raise --tol or --top-products" in printed
    assert "error at most" in printed


def test_eigenvalues_found_with_too_few_products_are_shown(record):
    words = (record, "--samples", 32, "--top", 3, "--block", 2, "--top-products", 3)
    found = measured(*words)["eigenvalues"]
    assert (len(found["values"]), found["products"], found["complete"]) == (2, 2, False)
    printed = wsam_command("curvature", *words, "--device", "cpu").stdout
    assert "eigenvalue 2" in printed
    assert "eigenvalue 3" not in printed
    assert printed.count("not converged: raise --tol or --top-products") == 2


def test_every_form_of_checkpoint(out, record, tmp_path):
    expected = measured(record, "--samples", 50)["eigenvalues"]["values"]
    work = records.work_folder(out, RUN)
    for form in (work, work / "weights.pt"):
        assert measured(form, "--samples", 50)["eigenvalues"]["values"] == pytest.approx(expected)
    state, run = read_checkpoint(record)
    assert run == RUN
    # A copy elsewhere: neither the model nor the label noise is known.
    wrapped = {"state_dict": {f"module._orig_mod.{name}": t for name, t in state.items()}}
    torch.save(wrapped, tmp_path / "plain.pt")
    options = ("--model", "mlp", "--data", "digits", "--samples", 50, "--split", "test")
    plain = measured(tmp_path / "plain.pt", *options)
    known = measured(record, "--samples", 50, "--split", "test")
    assert plain["eigenvalues"]["values"] == pytest.approx(known["eigenvalues"]["values"])


def test_a_json_file_next_to_a_state_dict_is_not_a_manifest(tmp_path):
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.pt")
    for text in ('{"layers": 3}', "[1]", "not JSON", '{"sha256": "0"}'):
        (tmp_path / "model.json").write_text(text)
        found, run = read_checkpoint(tmp_path / "model.pt")
        assert (found["weight"].tolist(), run) == ([1.0, 1.0], None)


def test_an_infinite_sharpness_is_null_in_json(record):
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


def test_training_images_are_not_augmented_and_keep_the_noisy_labels(record):
    subject = load_model(record, ExecutionConfig(device="cpu"), batch_size=64)
    first, again = (list(subject.batches) for _ in range(2))
    assert len(subject.batches) == len(first) == 3
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    labels = torch.cat([labels for _, labels in first])
    clean = datasets.load("digits", ExecutionConfig().source).train.labels[:150]
    assert torch.equal(labels, add_label_noise(clean, 10, RUN.noise, RUN.noise_seed))
    assert not torch.equal(labels, clean)


def test_image_folders_are_read_in_a_fixed_order(tmp_path):
    from PIL import Image

    for part in ("train", "val"):
        for number, name in enumerate(("cat", "dog")):
            folder = tmp_path / "pets" / part / name
            folder.mkdir(parents=True)
            for index in range(3):
                Image.new("RGB", (40, 30), (40 * index, 90 * number, 0)).save(
                    folder / f"{index}.png"
                )
    from wsam.lab.data.image_folder import FolderFeed

    run = Run(data=f"folder:{tmp_path / 'pets'}", image_size=8, batch_size=2, augment=False)
    feed = FolderFeed(tmp_path / "pets", run, torch.device("cpu"), workers=0)
    for split in ("train", "test"):
        batches = FixedBatches(feed, split, 5, 2)
        first, again = list(batches), list(batches)
        assert [len(labels) for _, labels in first] == [2, 2, 1]
        assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
        assert torch.cat([labels for _, labels in first]).unique().tolist() == [0, 1]


@pytest.mark.slow
def test_landscapes(out, record, tmp_path):
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
    assert "Dotted: the two checkpoints." in (tmp_path / "landscape.html").read_text()
    small = ("--radius", 0.03, "--points", 31, *common[:2], *common[4:])
    (axis,) = json.loads(wsam_command("landscape", record, *small).stdout)["coordinates"]
    assert (axis[0], axis[15]) == (-0.03, 0.0)
    printed = wsam_command("landscape", record, *common[:6], "--log", "--out", tmp_path / "new")
    assert "landscape.html" in printed.stdout


def refused(*words: object) -> str:
    return error_of(*words, "--device", "cpu")


def test_wrong_checkpoints(out, record, tmp_path):
    assert "does not exist" in refused("curvature", tmp_path / "nothing.pt")
    (tmp_path / "text.pt").write_text("not tensors")
    assert "not a file of tensors" in refused("curvature", tmp_path / "text.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    assert "a state dict of named real tensors" in refused("curvature", tmp_path / "list.pt")
    torch.save({"a": 1}, tmp_path / "odd.pt")
    assert "a state dict of named real tensors" in refused("curvature", tmp_path / "odd.pt")
    torch.save({"w": torch.ones(1)}, tmp_path / "other.pt")
    assert "give --model and --data" in refused("curvature", tmp_path / "other.pt")
    options = ("--model", "mlp", "--data", "digits")
    assert "does not fit mlp on digits" in refused("curvature", tmp_path / "other.pt", *options)
    state = models.build_model("mlp", models.Task((1, 8, 8), 7), 0).state_dict()
    torch.save(state, tmp_path / "seven.pt")
    assert "with shape torch.Size([7" in refused("curvature", tmp_path / "seven.pt", *options)
    right = read_checkpoint(record)[0]
    torch.save({**right, "extra": torch.ones(1)}, tmp_path / "more.pt")
    assert 'Unexpected key(s) in state_dict: "extra"' in refused(
        "curvature", tmp_path / "more.pt", *options
    )
    (tmp_path / "empty").mkdir()
    assert "neither weights nor a checkpoint" in refused("curvature", tmp_path / "empty")
    nan = {name: tensor * torch.nan for name, tensor in right.items()}
    torch.save(nan, tmp_path / "nan.pt")
    assert "loss of batch 0 is nan" in refused("curvature", tmp_path / "nan.pt", *options)
    bare = train(RUN.replace(epochs=1), tmp_path / "bare", ExecutionConfig(device="cpu"))
    assert "there are no weights in" in refused(
        "curvature", tmp_path / "bare" / f"{bare['key']}.json"
    )
    weights = records.weights_path(out, RUN)
    damaged = tmp_path / "weights.pt"
    damaged.write_bytes(weights.read_bytes()[:-10])
    damaged.with_suffix(".json").write_bytes(weights.with_suffix(".json").read_bytes())
    assert "is damaged" in refused("curvature", damaged, *options)


def test_the_first_tensor_that_does_not_fit_is_named():
    layers = {f"layer{number}": torch.nn.Linear(1, 1) for number in range(10, 60)}
    model = torch.nn.ModuleDict(layers)
    with pytest.raises(ValueError, match=r'^odd: .* Missing .*"layer10\.weight", .{,150}$'):
        load_weights(model, {}, "odd")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("curvature --operator kfac", "'kfac' is not one of 'hessian', 'gauss_newton'"),
        ("curvature --which top", "'top' is not one of 'largest', 'smallest', 'both'"),
        ("curvature --precision bf16", "'bf16' is not one of 'float32', 'float64', 'tf32'"),
        ("curvature --mode half", "'half' is not one of 'eval', 'train'"),
        ("curvature --split dev", "'dev' is not one of 'train', 'test'"),
        ("curvature --method qr", "'qr' is not one of 'lanczos', 'power'"),
        ("curvature --tol 2", "tol must be in (0, 1), got 2.0"),
        ("curvature --trace --trace-tol 0", "tol must be in (0, inf), got 0.0"),
        ("curvature --sharpness -1", "rho must be in (0, inf), got -1.0"),
        ("curvature --average nan", "sigma must be in (0, inf), got nan"),
        ("curvature --trace-products 1", "invalid value for '--trace-products'"),
        ("curvature --density-steps 1", "invalid value for '--density-steps'"),
        ("curvature --samples 0", "invalid value for '--samples'"),
        ("curvature --top -1", "invalid value for '--top'"),
        ("curvature --data mnist", "unknown data 'mnist'"),
        ("curvature --model vgg", "unknown model 'vgg'"),
        ("landscape --dimensions 3", "invalid value for '--dimensions'"),
        ("landscape --points 1", "invalid value for '--points'"),
        ("landscape --radius 0", "--radius must be above 0, got 0"),
        ("landscape --radius nan", "no loss of this landscape is finite"),
        ("landscape --along north", "'north' is not one of 'random', 'eigen'"),
        ("landscape --dimensions 2 --to x.pt", "remove --along and --dimensions"),
        ("landscape --along eigen --to x.pt", "remove --along and --dimensions"),
    ],
)
def test_wrong_options(record, words, message):
    verb, *rest = words.split()
    assert message in refused(verb, record, *rest)


def test_missing_matplotlib_is_reported_before_anything_is_measured(record, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(
        "wsam.lab.loaded_model.load_model", lambda *_, **__: pytest.fail("measured")
    )
    for words in (("curvature", record, "--density"), ("landscape", record)):
        assert "pip install 'wsam[plots]'" in refused(*words, "--out", tmp_path / "figures")
    assert not (tmp_path / "figures").exists()
