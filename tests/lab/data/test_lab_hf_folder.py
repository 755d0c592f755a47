"""Folders written by Hugging Face's datasets."""

import sys

import pytest
from command import error_of
from training import CPU

from wsam.lab.data.image_feed import MemoryFeed
from wsam.lab.models import TOKENS
from wsam.lab.problem import make_data_feed
from wsam.lab.run import Run
from wsam.lab.train import train


@pytest.fixture
def datasets():
    return pytest.importorskip("datasets")


def save(datasets, path, columns, features=None, test=True):
    whole = datasets.Dataset.from_dict(columns, features=features)
    if test:
        whole = whole.train_test_split(test_size=0.25, shuffle=False)
    whole.save_to_disk(str(path))
    return Run(data=f"hf:{path}", model="mlp", epochs=2, batch_size=8)


def test_images(datasets, tmp_path):
    image = pytest.importorskip("PIL.Image")
    pictures = [image.new("RGB", (8, 8), (100 * (n % 2),) * 3) for n in range(40)]
    labels = [n % 2 for n in range(40)]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["dark", "light"])}
    )
    run = save(datasets, tmp_path / "data", {"image": pictures, "label": labels}, features)
    feed = make_data_feed(run.replace(validation=0.2), CPU)
    assert isinstance(feed, MemoryFeed)
    assert feed.task.shape == (3, 8, 8)
    assert feed.counts == {"train": 24, "validation": 6, "test": 10}
    assert make_data_feed(run.replace(image_size=4), CPU).task.shape == (3, 4, 4)
    assert train(run, tmp_path / "runs", CPU)["status"] == "finished"
    pictures[3] = image.new("RGB", (9, 8))
    run = save(datasets, tmp_path / "uneven", {"image": pictures, "label": labels}, features)
    with pytest.raises(ValueError, match="differ in size; give --image-size"):
        make_data_feed(run, CPU)


def test_tables_and_lists(datasets, tmp_path):
    numbers = [float(n) for n in range(40)]
    columns = {"x": numbers, "city": ["a", "b"] * 20, "price": [3 * n for n in numbers]}
    run = save(datasets, tmp_path / "table", columns, test=False).replace(target="price")
    record = train(run, tmp_path / "runs", CPU)
    assert record["metric"]["name"] == "mse"
    assert record["data"]["test"] == 8
    lists = {"vector": [[n, -n] for n in numbers], "label": [int(n > 20) for n in numbers]}
    run = save(datasets, tmp_path / "lists", lists)
    assert train(run, tmp_path / "runs", CPU)["metric"]["name"] == "error"
    with pytest.raises(ValueError, match="--noise needs images or a table with classes, not hf:"):
        make_data_feed(run.replace(noise=0.5), CPU)
    with pytest.raises(ValueError, match="give --target, one of vector, label"):
        make_data_feed(run.replace(target="class"), CPU)


def test_lists_of_tokens(datasets, tmp_path):
    columns = {"ids": [[n % 5, 1] for n in range(40)], "label": [n % 3 for n in range(40)]}
    run = save(datasets, tmp_path / "tokens", columns)
    feed = make_data_feed(run, CPU)
    assert (feed.task.kind, feed.task.shape, feed.task.outputs) == (TOKENS, (2,), 3)
    inputs, targets = feed.splits["test"]
    assert inputs.tolist() == columns["ids"][30:]
    assert targets.tolist() == columns["label"][30:]
    real = make_data_feed(run.replace(task="regression"), CPU)
    assert (real.metric.name, real.task.outputs) == ("mse", 1)
    assert real.splits["train"][1].is_floating_point()
    uneven = {**columns, "ids": [[1], *columns["ids"][1:]]}
    with pytest.raises(ValueError, match=r"^hf:.*: expected sequence of length 1"):
        make_data_feed(save(datasets, tmp_path / "uneven", uneven), CPU)
    texts = {**columns, "label": ["good", "bad"] * 20}
    with pytest.raises(ValueError, match=r"are texts: use class_encode_column of datasets"):
        make_data_feed(save(datasets, tmp_path / "texts", texts), CPU)


def test_classes_of_a_table(datasets, tmp_path):
    """A ClassLabel is a class, also if there are many; the task overrides it."""
    columns = {"x": [float(n) for n in range(80)], "label": [n % 40 for n in range(80)]}
    classes = datasets.ClassLabel(num_classes=40)
    features = datasets.Features({"x": datasets.Value("float32"), "label": classes})
    run = save(datasets, tmp_path / "classes", columns, features)
    assert make_data_feed(run, CPU).task.outputs == 40
    assert make_data_feed(run.replace(task="regression"), CPU).task.outputs == 1
    numbers = save(datasets, tmp_path / "numbers", columns)
    assert make_data_feed(numbers, CPU).task.outputs == 1


@pytest.mark.parametrize("missing", [-1, None])
def test_a_split_without_labels_is_refused(datasets, tmp_path, missing):
    """Test sets of competitions have none; as a class of its own, -1 would never be predicted."""
    columns = {"x": [float(n) for n in range(8)], "label": [0, 1, 0, 1, 0, 1, missing, missing]}
    classes = datasets.ClassLabel(num_classes=2)
    features = datasets.Features({"x": datasets.Value("float32"), "label": classes})
    run = save(datasets, tmp_path / "data", columns, features)
    with pytest.raises(ValueError, match=r"the test split of hf:.* has samples without a label"):
        make_data_feed(run, CPU)


def test_splits_and_columns(datasets, tmp_path):
    rows = datasets.Dataset.from_dict({"x": [1.0, 2.0], "label": [0, 1]})
    parts = datasets.DatasetDict({"train": rows, "validation": rows.select([0])})
    parts.save_to_disk(str(tmp_path / "parts"))
    feed = make_data_feed(Run(data=f"hf:{tmp_path / 'parts'}", model="mlp"), CPU)
    assert feed.counts == {"train": 2, "test": 1}
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "one"))
    with pytest.raises(ValueError, match="needs the splits train and test, it has train"):
        make_data_feed(Run(data=f"hf:{tmp_path / 'one'}"), CPU)
    image = pytest.importorskip("PIL.Image").new("RGB", (8, 8))
    columns = {"image": [image] * 4, "note": ["a"] * 4, "label": [0, 1, 0, 1]}
    kinds = {
        "image": datasets.Image(),
        **dict.fromkeys(("note", "label"), datasets.Value("string")),
    }
    run = save(datasets, tmp_path / "more", columns, datasets.Features(kinds))
    with pytest.raises(ValueError, match=r"column 'image' .* numbers or texts are needed"):
        make_data_feed(run, CPU)


def test_a_missing_library_and_other_folders(tmp_path, monkeypatch):
    for folder in (tmp_path, tmp_path / "nosuch"):
        with pytest.raises(
            FileNotFoundError, match="was not written by save_to_disk of Hugging Face's datasets"
        ):
            Run(data=f"hf:{folder}")
    (tmp_path / "state.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    line = error_of("train", "--data", f"hf:{tmp_path}", "--out", tmp_path, "--device", "cpu")
    assert line == "wsam: this needs datasets: pip install 'wsam[data]'\n"
