"""The `wsam` command in this process: what it prints and how it ends."""

import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import typer.main

from wsam.cli import app, run

WRITES_ONE_FILE = {"report"}  # its --out is no folder


@dataclass(frozen=True)
class Answer:
    stdout: str
    stderr: str


def wsam_command(*words: object, status: int = 0) -> Answer:
    """Run `wsam WORDS`, require its exit status, and return what it printed."""
    out, err = io.StringIO(), io.StringIO()
    argv = mock.patch.object(sys, "argv", ["wsam", *map(str, words)])
    with argv, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run()
            ended = 0
        except SystemExit as stop:
            ended = int(stop.code or 0)
    assert ended == status, f"status {ended}: {out.getvalue()}{err.getvalue()}"
    return Answer(out.getvalue(), err.getvalue())


def error_of(*words: object) -> str:
    """Run a command that the user got wrong; return its one line."""
    answer = wsam_command(*words, status=2)
    assert answer.stdout == ""
    assert answer.stderr.startswith("wsam: ")
    assert answer.stderr.count("\n") == 1, answer.stderr
    assert "Errno" not in answer.stderr
    return answer.stderr


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield every command that can be called, and its words."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield " ".join(path), command
        return
    for name, each in inner.items():
        yield from walk(each, (*path, name))


ROOT = typer.main.get_command(app)
COMMANDS = dict(walk(ROOT))
