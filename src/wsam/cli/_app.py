"""The typer application, its entry point, and how a command reports errors.

A verb raises `ValueError`, `TypeError` or `OSError` for a mistake of the user. `run` prints it as
one line and exits with status 2. Any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from wsam._utils.text import printable
from wsam.lab.files import format_os_error

VERBS = (
    *("demo", "compare", "train", "report", "curvature", "landscape"),
    *("sweep", "paper", "bench"),
    *("toy", "directions", "bounds"),
)
"""The verbs in the order of `wsam --help`: first steps, experiments, theory."""

INTERRUPTED = 130
"""Exit status after Ctrl-C, as in a shell."""

EXTRAS = {
    "accelerate": "accelerate",
    "datasets": "data",
    "filelock": "lab",
    "jinja2": "lab",
    "matplotlib": "plots",
    "numpy": "lab",
    "optuna": "optuna",
    "pyarrow": "data",
    "ray": "ray",
    "rich": "lab",
    "scipy": "lab",
    "sklearn": "lab",
    "submitit": "slurm",
    "tensorboard": "lab",
    "transformers": "transformers",
}
"""The extra of this package that installs each optional library."""

# The base class of parse errors. Some versions of typer vendor click, so it is not imported by name.
UsageError: Any = typer.BadParameter.__base__


class OrderedGroup(TyperGroup):
    """Lists verbs in the order of `VERBS`; typer lists groups of commands last."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all verbs."""
        return sorted(super().list_commands(ctx), key=VERBS.index)


app = typer.Typer(
    name="wsam",
    cls=OrderedGroup,
    help="Sharpness-aware training: train, measure and plot flat minima.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: wsam demo",
)


def _print_version(value: bool) -> None:
    if value:
        from wsam import __version__

        print(f"wsam {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Sharpness-aware training: train, measure and plot flat minima."""


class Interrupted(Exception):  # noqa: N818 (not an error)
    """Ctrl-C in a command that can be resumed. typer swallows `KeyboardInterrupt` itself."""


@contextmanager
def resumable(has_progress: Callable[[], bool]) -> Iterator[None]:
    """Turn Ctrl-C into `Interrupted` if there is saved progress to resume from.

    Args:
        has_progress: Called after Ctrl-C; returns whether a record or checkpoint exists.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        if has_progress():
            raise Interrupted from error
        raise


def run() -> None:
    """Run the command line and exit; print an error of the user as one line."""
    try:
        status = app(prog_name="wsam", standalone_mode=False)
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help text
            error.show()
            sys.exit(error.exit_code)
        message = error.format_message().rstrip(".").replace("Value error, ", "")
        command = error.ctx.command_path if error.ctx is not None else "wsam"
        if command == "wsam sweep" and type(error).__name__ == "NoSuchOption":
            message += "; settings of a run are values of the grid, as --grid model=mlp"
        _exit(f"{message[:1].lower()}{message[1:]} (see {command} --help)")
    except OSError as error:
        _exit(format_os_error(error))
    except ModuleNotFoundError as error:
        _exit(_install_hint(error))
    except OverflowError:
        _exit("a number is too large or too close to zero to compute with")
    except (ValueError, TypeError) as error:
        _exit(str(error))
    except Interrupted:
        _exit("interrupted; run the same command again to resume", INTERRUPTED)
    except (KeyboardInterrupt, typer.Abort):
        _exit("interrupted", INTERRUPTED)
    if status == INTERRUPTED:
        _exit("interrupted", INTERRUPTED)
    sys.exit(status if isinstance(status, int) else 0)


def _exit(message: str, status: int = 2) -> NoReturn:
    """Print a message as one line to stderr and exit."""
    if sys.stderr is not None:  # it was not closed; print would write to stdout
        print("wsam:", printable(" ".join(message.split())), file=sys.stderr)
    sys.exit(status)


def _install_hint(error: ModuleNotFoundError) -> str:
    """Return which extra to install. A missing module that is in no extra is a bug: raise it."""
    library = (error.name or "").split(".")[0]
    if not library or "pip install" in str(error):  # the message is ours
        return str(error)
    if library not in EXTRAS:
        raise error
    return f"this needs {library}: pip install 'wsam[{EXTRAS[library]}]'"
