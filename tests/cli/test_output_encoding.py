"""A terminal that lacks a letter gets a question mark in its place, not the end of the command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("encoding", "words", "shown"),
    [
        ("cp1252", ("toy", "--gamma", "0.6"), "sharp minimum"),
        ("ascii", ("paper", "table", "cifar"), "WSAM"),
    ],
)
def test_letters_that_a_terminal_lacks(tmp_path, encoding, words, shown):
    said = subprocess.run(
        [sys.executable, "-m", "wsam", *words],
        env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"},
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr.decode(encoding)
    text = said.stdout.decode(encoding)
    assert shown in text
    assert "?" in text, "else the test shows nothing: there was no such letter"


QUICK = ("--model", "mlp", "--epochs", "1", "--train-limit", "64", "--device", "cpu")


def in_shell(folder, *words, **environment):
    """Run a command in a process of its own, in a folder."""
    return subprocess.run(
        [sys.executable, "-m", "wsam", *words],
        env={**os.environ, **environment},
        cwd=folder,
        capture_output=True,
        check=False,
    )


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="names of files are text there")
@pytest.mark.parametrize(
    ("name", "shown", "locale"),
    [
        (b"b\xfc", "b\ufffd", {}),
        (
            "uü".encode(),
            "uü",
            {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        ),
    ],
    ids=["no UTF-8", "another locale"],
)
def test_a_folder_whose_name_is_no_text(tmp_path, name, shown, locale):
    pytest.importorskip("tensorboard")
    folder = os.fsencode(tmp_path) + b"/" + name
    for words in (("train", *QUICK, "--tensorboard", "--out"), ("report",)):
        done = in_shell(tmp_path, *words, name, **locale)
        assert done.returncode == 0, done.stderr
    names = [file for _, _, files in os.walk(folder) for file in files]
    assert sum(file.startswith(b"events.out") for file in names) == 1
    page = Path(os.fsdecode(folder)) / "report.html"
    assert f"Results in {shown}" in page.read_text(encoding="utf-8")


@pytest.mark.skipif(os.name == "nt", reason="the shell's way to close stderr")
def test_a_closed_stderr_ends_nothing(tmp_path):
    """Nor does what would go there go to stdout."""
    words = ("train", *QUICK, "--no-tensorboard", "--keep-checkpoint", "--out", "runs")
    shell = ["sh", "-c", 'exec "$0" -m wsam "$@" 2>&-', sys.executable]
    done = subprocess.run([*shell, *words], cwd=tmp_path, stdout=subprocess.PIPE, check=False)
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 2, done.stdout
    (record,) = (tmp_path / "runs").glob("*.json")
    words = ("curvature", str(record), "--samples", "20", "--device", "cpu")
    done = subprocess.run([*shell, *words], cwd=tmp_path, stdout=subprocess.PIPE, check=False)
    assert done.returncode == 0
    assert b"eigenvalue 1" in done.stdout
