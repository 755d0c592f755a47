"""The commands of a report are run: they write the same records again."""

import html
import json
import os
import re
import shlex
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command import wsam_command
from PIL import Image

from wsam.lab.data import datasets
from wsam.lab.files import file_sha256
from wsam.sweep import InProcess

QUICK = ("--epochs", "1", "--batch-size", "16", "--device", "cpu", "--no-tensorboard")
CODE = """
import torch

def net(classes=2, **shape):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(10))
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WSAM_DATA", raising=False)


def commands_of(folder):
    """Return the lines of the report's section Reproduce."""
    wsam_command("report", folder)
    text = (Path(folder) / "report.html").read_text()
    blocks = re.findall("<pre>(.*?)</pre>", text.partition("<h2>Reproduce</h2>")[2], re.DOTALL)
    return [line for block in blocks for line in html.unescape(block).splitlines()]


def curves(folder):
    """Return the curves of all records by their names, without times."""
    found = {}
    for path in Path(folder).glob("????????????.json"):
        rows = json.loads(path.read_text())["curve"]
        kept = [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]
        found[path.name] = kept
    return found


def reproduce(folder):
    """Run all commands and assert that the records are the same."""
    lines = commands_of(folder)
    for line in lines:
        words = shlex.split(line)
        assert words[0] == "wsam"
        wsam_command(*words[1:])
    assert curves("again") == curves(folder)
    return lines


def write_cifar(folder, monkeypatch):
    """Write small files in the format of CIFAR-10 and let the loader accept their size."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    counts = {"data_batch_1.bin": 48, "test_batch.bin": 16}
    for name, count in counts.items():
        rows = rng.integers(0, 256, (count, 3073), dtype=np.uint8)
        rows[:, 0] %= 10
        (folder / name).write_bytes(rows.tobytes())
    known = datasets.LOADERS["cifar10"]
    train, test = ({name: file_sha256(folder / name)} for name in counts)
    small = replace(known, train=train, test=test, counts=(48, 16))
    monkeypatch.setitem(datasets.LOADERS, "cifar10", small)


def write_images(folder):
    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in ("a", "b"):
            (folder / part / name).mkdir(parents=True)
            for number in range(8):
                pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{number}.png")


def test_a_data_set_in_a_data_folder(monkeypatch):
    write_cifar(Path("my data"), monkeypatch)
    words = ("train", "--data", "cifar10", "--model", "mlp", "--method", "sam", *QUICK)
    wsam_command(*words, "--data-dir", "my data", "--out", "my runs")
    (line,) = reproduce("my runs")
    assert "--data-dir 'my data'" in line


@pytest.mark.slow
def test_measurements_in_a_data_folder(monkeypatch):
    """The measurement needs the data folder too."""
    from wsam.lab.execution import ExecutionConfig
    from wsam.lab.run import Run
    from wsam.lab.train import train
    from wsam.paper import minima

    write_cifar(Path("my data"), monkeypatch)
    source = datasets.DataSource(Path("my data"))
    execution = ExecutionConfig(source=source, device="cpu", keep_weights=True)
    run = Run(data="cifar10", model="mlp", epochs=1, batch_size=16)
    train(run, Path("runs"), execution)
    minima.measure(run, Path("runs"), execution)
    lines = reproduce("runs")
    assert [shlex.split(line)[1] for line in lines] == ["train", "curvature"]


@pytest.mark.parametrize("options", [(), ("--image-size", "6")], ids=["own size", "resized"])
def test_an_image_folder(options):
    write_images(Path("my images"))
    words = ("train", "--data", "folder:my images", "--model", "mlp", *QUICK, *options)
    wsam_command(*words, "--out", "runs")
    reproduce("runs")


def test_an_image_folder_in_a_data_folder():
    write_images(Path("all data") / "pets")
    words = ("train", "--data", "folder:pets", "--model", "mlp", *QUICK)
    wsam_command(*words, "--data-dir", "all data", "--out", "runs")
    (line,) = reproduce("runs")
    assert "--data-dir 'all data'" in line


def test_a_model_of_the_users_own():
    Path("my models").mkdir()
    Path("my models", "nets.py").write_text(CODE)
    words = ("train", "--model", "my models/nets.py:net", "--train-limit", "64", *QUICK)
    wsam_command(*words, "--validation", "0.25", "--out", "runs")
    reproduce("runs")


def test_a_table():
    rows = "\n".join(f"{n % 7},{'xyz'[n % 3]},{n % 2}" for n in range(60))
    Path("my table.csv").write_text(f"size,kind,good\n{rows}\n")
    words = ("train", "--data", "table:my table.csv", "--target", "good", *QUICK)
    wsam_command(*words, "--out", "runs")
    reproduce("runs")


def test_a_sweep(monkeypatch):
    monkeypatch.setattr("wsam.sweep.Processes", lambda devices, retries: InProcess(list))
    grid = ("method=vanilla,sam,wsam", "base=sgd,adamw", "gamma=0.8", "model=mlp", "train_limit=64")
    axes = [word for axis in grid for word in ("--grid", axis)]
    wsam_command("sweep", *axes, "--epochs", "1", "--device", "cpu", "--out", "runs")
    assert len(reproduce("runs")) == 6


@pytest.mark.slow
def test_a_shell_runs_the_command(tmp_path):
    """As a user pastes it, with a command `wsam` on the path."""
    write_images(Path("my $images' & more"))
    words = ("train", "--data", "folder:my $images' & more", "--model", "mlp", *QUICK)
    wsam_command(*words, "--out", "runs")
    (line,) = commands_of("runs")
    script = tmp_path / "bin" / "wsam"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m wsam "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    path = f"{script.parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(line, shell=True, check=True, env={**os.environ, "PATH": path})
    assert curves("again") == curves("runs")
