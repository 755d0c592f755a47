"""How a verb ends: a user's mistake is one line and status 2, Ctrl-C one line and status 130."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NoReturn

import typer

from wsam.lab.files import sentence

# The parser's own errors. It is a part of typer in some versions and a library beside it in others;
# this name leads to the class in both.
UsageError: Any = typer.BadParameter.__base__
INTERRUPTED = 130
_UNPACKED = "Overflow when unpacking"  # torch's, of a whole number beyond 64 bits
_LARGE, _SHOWN = 2.0**63, 30
_NUMBERS = {"float_parsing": "number", "int_parsing": "whole number"}  # pydantic's names of errors
EXTRAS = {  # the extra that brings a library
    "accelerate": "accelerate",
    "matplotlib": "plots",
    "numpy": "lab",
    "optuna": "optuna",
    "plotly": "plots",
    "ray": "ray",
    "rich": "lab",
    "scipy": "lab",
    "sklearn": "lab",
    "submitit": "slurm",
    "tensorboard": "lab",
    "transformers": "transformers",
}


class Paused(Exception):  # noqa: N818 (no error)
    """Ctrl-C where work is kept; an exception of its own, for typer keeps Ctrl-C's to itself."""


@contextmanager
def pausing(kept: Callable[[], bool]) -> Iterator[None]:
    """Let Ctrl-C say that the same command goes on, if there is something to go on from by then."""
    try:
        yield
    except KeyboardInterrupt as error:
        if kept():
            raise Paused from error
        raise


def carry_out(app: Callable[..., Any]) -> None:
    """Run the command line; end by `SystemExit` with one line where it did not go well."""
    try:
        status = app(prog_name="wsam", standalone_mode=False)
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # not a mistake: its message is the help
            error.show()
            sys.exit(error.exit_code)
        stop(f"{_plain(_repeating(error).format_message())} (see {_path(error)} --help)")
    except OSError as error:
        stop(sentence(error))
    except ModuleNotFoundError as error:
        stop(missing(error))
    except (ValueError, TypeError, OverflowError) as error:
        stop(_mistake(error))
    except Paused:
        stop("interrupted; work is kept: the same command goes on from there", INTERRUPTED)
    except (KeyboardInterrupt, typer.Abort):
        stop("interrupted", INTERRUPTED)
    if status == INTERRUPTED:
        stop("interrupted", INTERRUPTED)
    sys.exit(status if isinstance(status, int) else 0)


def _mistake(error: Exception) -> str:
    """Say what the user got wrong; a number that overflows though none was extreme is our defect."""
    if not (isinstance(error, OverflowError) or _UNPACKED in str(error)):
        return str(error)
    given = extremes(sys.argv[1:])
    if not given:
        raise error
    return f"{' and '.join(given)}: too large or too close to zero to be computed with"


def extremes(words: Sequence[str]) -> list[str]:
    """Return the options with numbers that torch's integers, or squares of floats, may not hold.

    Example:
        >>> extremes(["bounds", "convex", "--rho", "1e200", "-T", "9", "--lr=1e-200"])
        ['--rho 1e200', '--lr 1e-200']
    """
    found = []
    for before, word in pairwise(["", *words]):
        option, equals, value = word.partition("=")
        if not equals:
            option, value = before, word
        try:
            size = abs(float(value))
        except ValueError:
            continue
        if option.startswith("-") and (size >= _LARGE or 0 < size < 1 / _LARGE):
            found.append(f"{option} {_shortened(value)}")
    return found


def stop(line: str, status: int = 2) -> NoReturn:
    """Print one line and leave."""
    print("wsam:", " ".join(line.split()), file=sys.stderr)
    sys.exit(status)


def missing(error: ModuleNotFoundError) -> str:
    """Say what to install for a library that is not there; what is no extra of ours is a defect."""
    library = (error.name or "").split(".")[0]
    if not library or "pip install" in str(error):  # our own words
        return str(error)
    if library not in EXTRAS:
        raise error
    return f"this needs {library}: pip install 'wsam[{EXTRAS[library]}]'"


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _repeating(error: Any) -> Any:
    """Let a parser's error repeat the word that is no number: where pydantic parses, it does not."""
    tell = getattr(error.__cause__, "errors", None)
    for found in tell() if callable(tell) else ():
        kind = _NUMBERS.get(str(found["type"]))
        if kind is not None:
            error.message = f"{found['input']!r} is not a {kind}"
    return error


def _plain(message: str) -> str:
    return (message[:1].lower() + message[1:]).rstrip(".")


def _path(error: Any) -> str:
    return error.ctx.command_path if error.ctx is not None else "wsam"
