"""`python -m wsam` and the `wsam` command."""

import io
import os
import sys


def main() -> None:
    """Run the command line, or say what to install where its libraries are missing."""
    if sys.stderr is None:
        _open_stderr()
    for stream in (sys.stdout, sys.stderr):
        _forgive(stream)
    try:
        from wsam.cli import run

        run()
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        sys.exit(f"wsam: the command line needs {error.name}: pip install 'wsam[lab,plots]'")
    except KeyboardInterrupt:  # while modules are imported; `run` handles it afterwards
        print("wsam: interrupted", file=sys.stderr)
        sys.exit(130)


def _open_stderr() -> None:
    """Let a stderr that was closed lead nowhere: else `print` takes stdout, or the next file opened."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != 2:
        os.dup2(nowhere, 2)
        os.close(nowhere)
    os.set_inheritable(2, True)  # for workers
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)


def _forgive(stream: object) -> None:
    """Print '?' for characters the stream's encoding lacks, as gamma in cp1252, and go on."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        stream.reconfigure(errors="replace")


if __name__ == "__main__":
    main()
