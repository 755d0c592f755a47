"""How a verb ends: a user's mistake is one line and status 2, Ctrl-C one line and status 130."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer

from wsam.lab.files import sentence

# The parser's own errors. It is a part of typer in some versions and a library beside it in others;
# this name leads to the class in both.
UsageError: Any = typer.BadParameter.__base__
INTERRUPTED = 130
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
        stop(f"{_plain(error.format_message())} (see {_path(error)} --help)")
    except OSError as error:
        stop(sentence(error))
    except ModuleNotFoundError as error:
        stop(missing(error))
    except (ValueError, TypeError) as error:
        stop(str(error))
    except Paused:
        stop("interrupted; work is kept: the same command goes on from there", INTERRUPTED)
    except (KeyboardInterrupt, typer.Abort):
        stop("interrupted", INTERRUPTED)
    if status == INTERRUPTED:
        stop("interrupted", INTERRUPTED)
    sys.exit(status if isinstance(status, int) else 0)


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


def _plain(message: str) -> str:
    return (message[:1].lower() + message[1:]).rstrip(".")


def _path(error: Any) -> str:
    return error.ctx.command_path if error.ctx is not None else "wsam"
