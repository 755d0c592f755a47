"""Tables: reading CSV and Parquet files, standardization, categories, mistakes."""

import json
import random
import shlex

import pytest
import torch
from command import error_of, wsam_command
from recorded import recorded
from training import CPU, curve

from wsam.lab.data.tables import make_table, read_columns, read_table
from wsam.lab.problem import make_data_feed
from wsam.lab.run import Run
from wsam.lab.train import train
from wsam.report.commands import command


def houses(path, rows=200, seed=0):
    """Write a table whose price depends on a number and on a category."""
    rng = random.Random(seed)
    lines = ["area,city,price,kind"]
    for _ in range(rows):
        area, city = rng.uniform(20, 200), rng.choice(("Ulm", "Bonn"))
        price = 1000 * (2 * area + (300 if city == "Bonn" else 0))
        lines.append(f"{area:.2f},{city},{price:.1f},{'large' if area > 110 else 'small'}")
    path.write_text("\n".join(lines) + "\n")
    return path


def table_run(path, target="price", **settings):
    return Run(data=f"table:{path}", target=target, **settings)


def test_regression_in_the_unit_of_the_target(tmp_path):
    path = houses(tmp_path / "houses.csv")
    run = table_run(path, epochs=60, batch_size=32, base_args={"lr": 0.05}, validation=0.2)
    assert run.model == "mlp"
    record = train(run, tmp_path / "runs", CPU)
    assert record["metric"]["name"] == "mse"
    feed = make_data_feed(run, CPU)
    _, std = feed.units
    assert feed.counts == {"train": 128, "validation": 32, "test": 40}
    final = record["final"]
    assert final["test_mse"] == pytest.approx(final["test_loss"] * std**2, rel=1e-3)
    assert final["test_loss"] < 0.05  # of a variance of 1


def test_targets_far_from_zero(tmp_path):
    """Such as times in seconds since 1970."""
    lines = [f"{n % 7},{1.7e9 + n % 7}" for n in range(60)]
    path = tmp_path / "times.csv"
    path.write_text("\n".join(["a,price", *lines]))
    run = table_run(path, task="regression", epochs=1, batch_size=16)
    final = train(run, tmp_path / "runs", CPU)["final"]
    _, std = make_data_feed(run, CPU).units
    assert final["test_mse"] == pytest.approx(final["test_loss"] * std**2, rel=1e-3)


def test_numbers_are_standardized_by_the_training_rows(tmp_path):
    path = houses(tmp_path / "houses.csv")
    feed = make_data_feed(table_run(path, validation=0.25), CPU)
    inputs, targets = feed.splits["train"]
    numbers = inputs[:, 0]
    assert numbers.mean().abs() < 1e-5
    assert numbers.std(correction=0) == pytest.approx(1)
    assert targets.std(correction=0) == pytest.approx(1)
    others = feed.splits["test"][0][:, 0]
    assert others.mean().abs() > 1e-4
    assert feed.task.categories == (3, 3)  # two cities, two kinds, and the unknown one
    assert set(inputs[:, 1].tolist()) == {1, 2}


def test_classes_and_their_override(tmp_path):
    path = houses(tmp_path / "houses.csv")
    feed = make_data_feed(table_run(path, "kind"), CPU)
    assert feed.task.outputs == 2
    assert feed.metric.name == "error"
    record = train(table_run(path, "kind", epochs=20, batch_size=32), tmp_path / "runs", CPU)
    assert record["final"]["test_error"] < 10
    (tmp_path / "few.csv").write_text("x,y\n" + "".join(f"{n},{n % 3}\n" for n in range(30)))
    counts = table_run(tmp_path / "few.csv", "y")
    assert make_data_feed(counts, CPU).task.outputs == 3
    assert make_data_feed(counts.replace(task="regression"), CPU).task.outputs == 1
    numbers = table_run(tmp_path / "few.csv", "x")  # 30 different ones
    assert make_data_feed(numbers, CPU).metric.name == "mse"
    assert make_data_feed(numbers.replace(task="classification"), CPU).task.outputs == 30
    held_out = counts.replace(validation=0.25)
    noisy = make_data_feed(held_out.replace(noise=1.0), CPU)
    clean = make_data_feed(held_out, CPU)
    assert not torch.equal(noisy.splits["train"][1], clean.splits["train"][1])
    for split in ("validation", "test"):
        assert torch.equal(noisy.splits[split][1], clean.splits[split][1]), split
    with pytest.raises(ValueError, match="--noise needs images or a table with classes"):
        make_data_feed(counts.replace(task="regression", noise=0.5), CPU)


def test_a_folder_with_training_and_test_rows(tmp_path):
    houses(tmp_path / "train.csv", rows=50)
    (tmp_path / "test.csv").write_text(
        "price,city,area,kind\n1.0,Rome,50,small\n2.0,Ulm,60,small\n"
    )
    feed = make_data_feed(table_run(tmp_path), CPU)
    assert feed.counts == {"train": 50, "test": 2}
    assert feed.splits["test"][0][:, 1].tolist()[0] == 0  # a city that no training row has
    (tmp_path / "test.csv").write_text("price,area\n1.0,50\n")
    with pytest.raises(ValueError, match="different columns: city, kind"):
        make_data_feed(table_run(tmp_path), CPU)


def test_a_constant_column_and_few_real_targets(tmp_path):
    rows = [f"7,{('x', 'y')[n % 2]},{0.5 + n % 3}" for n in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(["a|b,kind,price", *rows]))
    feed = make_data_feed(table_run(tmp_path / "t.csv"), CPU)
    assert feed.metric.name == "mse"
    inputs, targets = feed.splits["train"]
    assert inputs[:, 0].tolist() == [0.0] * 16
    mean, std = feed.units
    assert {round(v, 3) for v in (targets * std + mean).tolist()} == {0.5, 1.5, 2.5}


def test_a_table_of_texts_only(tmp_path):
    (tmp_path / "t.csv").write_text("a,price\n" + "x,low\ny,high\n" * 5)
    feed = make_data_feed(table_run(tmp_path / "t.csv"), CPU)
    assert feed.counts == {"train": 8, "test": 2}
    inputs, targets = feed.splits["train"]
    assert (inputs[:, 0] - 1).tolist() == (1 - targets).tolist()  # x is category 1, low is class 1


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "t.csv").write_bytes("a,price\nMünchen,1\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"t\.csv is not a CSV file in UTF-8: .* 0xfc"):
        read_columns(tmp_path / "t.csv")


def test_parquet_equals_csv(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = houses(tmp_path / "houses.csv")
    parquet.write_table(pyarrow.table(read_columns(path)), tmp_path / "houses.parquet")
    csv_feed = make_data_feed(table_run(path), CPU)
    other = make_data_feed(table_run(tmp_path / "houses.parquet"), CPU)
    for one, two in zip(csv_feed.splits["train"], other.splits["train"], strict=True):
        assert torch.equal(one, two)
    (tmp_path / "not.parquet").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="not a parquet file"):
        read_table(tmp_path / "not.parquet", "t")


def test_texts_with_underscores_are_no_numbers(tmp_path):
    """Python reads 1_2 as 12."""
    (tmp_path / "t.csv").write_text("cell,price\n1_2,3\n1_3,4\n")
    assert read_columns(tmp_path / "t.csv") == {"cell": ["1_2", "1_3"], "price": [3, 4]}


def test_the_key_depends_on_the_contents(tmp_path):
    run = table_run(houses(tmp_path / "houses.csv"))
    assert Run.from_dict(json.loads(json.dumps(run.to_dict()))) == run
    assert table_run(houses(tmp_path / "houses.csv", seed=1)).key != run.key
    with pytest.raises(ValueError, match="have changed"):
        train(run, tmp_path / "runs", CPU)


def test_command_and_its_reproduction(tmp_path, monkeypatch):
    houses(tmp_path / "houses.csv")
    monkeypatch.chdir(tmp_path)
    words = ("--data", "table:houses.csv", "--target", "price", "--epochs", 2, "--device", "cpu")
    done = wsam_command("train", *words, "--out", "runs")
    assert "table:houses.csv target=price mlp wsam" in done.stdout
    assert "test mse" in done.stdout
    (record,) = recorded(tmp_path / "runs")
    again = command(Run.from_dict(record["settings"]), device="cpu", out="again")
    wsam_command(*shlex.split(again)[1:])
    (repeated,) = recorded(tmp_path / "again")
    assert repeated["key"] == record["key"]
    assert curve(repeated) == curve(record)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,price\n1,2\n,3\n", r"column 'a' of t\.csv has no value in line 3: fill in"),
        ("a,price\n1,2\nNaN,3\n", "column 'a' .* has no value in line 3"),
        ("a,price\n1,2\ninf,3\n", "column 'a' .* has the value inf in line 3"),
        ("a,price\nx,2\n,3\n", "column 'a' .* has no value in line 3"),
        ("a,price\n1,2\n3\n", "line 3 of t.csv has 1 values, expected 2"),
        ("a,b\n1,2\n3,4\n", "no column 'price'; give --target, one of a, b"),
        ("price\n1\n3\n", "no column besides the target 'price'"),
        ("b,a,a,price\n1,2,3,4\n", "two columns 'a'"),
        ("a,price\n", "at least one row"),
        ("a,price\n1,2\n", "has 1 samples, too few"),
        ("a,price\n" + "1,2\n" * 20 + "12x,3\n", "column 'a' .*the text '12x' in line 22"),
        ("a,price\n" + "1,2\n" * 30 + ",2\n12x,3\n", "column 'a' .*the text '12x' in line 33"),
        ('a,price\n"1,2\n', "is not a CSV file"),
        ("a;price\n1,5;2\n3;4\n", "columns of t.csv are separated by ';': separate them by commas"),
        ("a,price\n\n1,2\n\n,3\n", "column 'a' .* has no value in line 5"),
        (
            "note,price\n" + "".join(f"text {n},{n}\n" for n in range(40)),
            "column 'note' of table:t.csv has 40 different texts in 40 rows, too many for categories",
        ),
        (
            "a,price\n" + "".join(f"{n},cost {n}\n" for n in range(40)),
            "the target 'price' of table:t.csv has 40 different texts in 40 rows, too many for class",
        ),
    ],
)
def test_mistakes_name_column_and_row(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        make_data_feed(table_run("t.csv"), CPU)


def test_other_mistakes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("train", "--device", "cpu", "--out", "out", "--data")
    assert "is neither a file, nor a folder" in error_of(*words, "table:none.csv", "--target", "y")
    houses(tmp_path / "t.csv")
    line = error_of(*words, "table:t.csv")
    assert "no target column is given; give --target, one of area" in line
    line = error_of(*words, "table:t.csv", "--target", "price", "--model", "resnet18")
    assert "resnet18 does not fit the inputs of table:t.csv: gpt needs a text, mlp numbers" in line
    line = error_of(*words, "table:t.csv", "--target", "kind", "--task", "regression")
    assert "the target 'kind' of table:t.csv is a text" in line
    assert "target applies to data table:, hf: only" in error_of(*words, "digits", "--target", "y")
    with pytest.raises(ValueError, match="column 'a' of t has no value in row 2"):
        make_table({"a": [1, None]}, "t")
    with pytest.raises(ValueError, match="column 'when' of t has values of type list"):
        make_table({"when": [[1], [2]]}, "t")
