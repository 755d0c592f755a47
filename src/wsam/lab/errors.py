"""Errors of a run, and one-line descriptions of what the user's own code raises."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OWN_PACKAGE = Path(__file__).parents[1]
_LIBRARIES = tuple(map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))
USER_EXCEPTIONS = (Exception, SystemExit)
"""What the user's own code may raise: everything but KeyboardInterrupt."""


class RunError(ValueError):
    """This run cannot be trained; others are not affected."""


class UserCodeError(RunError):
    """The user's model, data, loss, metric or method raised an exception or does not fit the others."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that the device or the host has too little memory."""
    import torch

    # The allocator of the CPU raises a plain RuntimeError, whose text depends on the build of torch.
    on_host = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return on_host or isinstance(error, torch.OutOfMemoryError | MemoryError)


@contextmanager
def explain(what: str, path: Path | None = None) -> Iterator[None]:
    """Convert an exception of the user's code into a `UserCodeError` of one line.

    Args:
        what: The subject of the message, such as ``my.py:net``.
        path: The file whose line is named; None for the innermost frame.
    """
    try:
        yield
    except RunError:
        raise
    except USER_EXCEPTIONS as error:
        if is_out_of_memory(error):
            raise
        raise UserCodeError(f"{what} raised {describe_error(error, path)}") from error


def describe_error(error: BaseException, path: Path | None = None) -> str:
    """Return type, message, file and line of an exception in one line.

    Args:
        error: The exception.
        path: The file whose line is named; None for the innermost one outside of libraries.
    """
    message = str(error).strip().partition("\n")[0]
    return type(error).__name__ + (f": {message}" if message else "") + _location(error, path)


def one_line(error: BaseException) -> str:
    """Return an exception in one line: a `RunError` as its message, others by `describe_error`."""
    return " ".join(str(error).split()) if isinstance(error, RunError) else describe_error(error)


def _location(error: BaseException, path: Path | None) -> str:
    """Return file and line where an exception was raised, `` (my.py, line 3)``.

    Lines of this package are left out: they do not show what to correct.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_wsam(f.filename)]
    own = [f for f in frames if path is not None and Path(f.filename).resolve() == path.resolve()]
    found = own or [f for f in frames if not _is_library(f.filename)] or frames
    return f" ({found[-1].filename}, line {found[-1].lineno})" if found else ""


def is_from_user_code(error: BaseException) -> bool:
    """Return whether a file outside of libraries raised an exception or called what did."""
    names = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return any(not (_is_wsam(name) or _is_library(name)) for name in names)


def _is_wsam(file: str) -> bool:
    return Path(file).is_relative_to(_OWN_PACKAGE)


def _is_library(file: str) -> bool:
    return file.startswith((*_LIBRARIES, "<"))
