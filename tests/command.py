"""Run the `wsam` command in this process and check how it exits."""

import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import typer.main

from wsam.cli import app, run


@dataclass(frozen=True)
class Output:
    stdout: str
    stderr: str


def wsam_command(*words: object, status: int = 0) -> Output:
    """Run `wsam WORDS`, assert its exit status, and return its output."""
    out, err = io.StringIO(), io.StringIO()
    argv = mock.patch.object(sys, "argv", ["wsam", *map(str, words)])
    with argv, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run()
            code = 0
        except SystemExit as error:
            code = int(error.code or 0)
    assert code == status, f"status {code}: {out.getvalue()}{err.getvalue()}"
    return Output(out.getvalue(), err.getvalue())


def error_of(*words: object) -> str:
    """Run a wrong command, assert that it prints one line, and return that line."""
    output = wsam_command(*words, status=2)
    assert output.stdout == ""
    assert output.stderr.startswith("wsam: ")
    assert output.stderr.count("\n") == 1, output.stderr
    assert "Errno" not in output.stderr
    return output.stderr


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the name and object of every command that is not a group."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield " ".join(path), command
        return
    for name, each in inner.items():
        yield from walk(each, (*path, name))


ROOT = typer.main.get_command(app)
COMMANDS = dict(walk(ROOT))
GROUPS = ("", "paper", "bounds")
