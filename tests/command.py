"""The `wsam` command in this process: what it prints and how it ends."""

import contextlib
import io
import sys
from dataclasses import dataclass
from unittest import mock

from wsam.cli import run


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
