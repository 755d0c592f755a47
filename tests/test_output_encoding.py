"""A terminal that lacks a letter gets a question mark in its place, not the end of the command."""

import os
import subprocess
import sys

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
