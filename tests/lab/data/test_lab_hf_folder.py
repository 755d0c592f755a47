"""Folders written by Hugging Face's datasets."""

import sys

import pytest
from training import CPU

from wsam.lab.data.image_feed import MemoryFeed
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
    with pytest.raises(ValueError, match="differ in size, from 8 x 8 to 9 x 8; give --image-size"):
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
    with pytest.raises(ValueError, match="--noise needs images or a table with classes, not lists"):
        make_data_feed(run.replace(noise=0.5), CPU)
    with pytest.raises(ValueError, match="give --target, one of vector, label"):
        make_data_feed(run.replace(target="class"), CPU)


def test_a_missing_library_and_other_folders(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="was not written by save_to_disk"):
        Run(data=f"hf:{tmp_path}")
    with pytest.raises(FileNotFoundError, match=r"^there is no folder .*nosuch$"):
        Run(data=f"hf:{tmp_path}/nosuch")
    (tmp_path / "state.json").write_text("{}")
    run = Run(data=f"hf:{tmp_path}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'wsam\[data\]'"):
        make_data_feed(run, CPU)
